"""The page at `/` for browsers, and the files it is made of. It holds no data: what it shows it asks the API for, with the user's key."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath
from typing import ClassVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag: a new version shows at once
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    body: bytes
    headers: dict[str, str]


def load_assets() -> dict[str, Asset]:
    """Every file of `server/web`, by the path it is served under."""
    assets = {}
    for file in (files("headrace.server") / "web").iterdir():
        content_type = CONTENT_TYPES.get(PurePosixPath(file.name).suffix)
        if content_type is not None:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            path = "/" if file.name == "index.html" else f"/web/{file.name}"
            assets[path] = Asset(body=body, headers={**HEADERS, "Content-Type": content_type, "ETag": etag})
    assets["/"].headers["Vary"] = "Accept"
    return assets


class WebPage:
    """Answers GET and HEAD for the page's files, and lets everything else through; `/` is the page only for who asks for HTML."""

    PATHS: ClassVar = {"/": re.compile("/"), "/web/{name}": re.compile("/web/[^/]+$")}  # labels of metrics

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._assets = load_assets()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asset = None
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            asset = self._assets.get(scope["path"])
        if asset is None or (scope["path"] == "/" and not wants_html(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        if matches(Headers(scope=scope).get("if-none-match", ""), asset.headers["ETag"]):
            response = Response(status_code=304, headers=asset.headers)
        else:
            response = Response(asset.body, headers=asset.headers)
        await response(scope, receive, send)


def wants_html(headers: Headers) -> bool:
    """Browsers name HTML; clients that take anything get what the API has."""
    kinds = (part.partition(";") for value in headers.getlist("accept") for part in value.split(","))
    return any(kind.strip().lower() == "text/html" and not re.search(r"\bq=0(\.0*)?\s*(;|$)", rest) for kind, _, rest in kinds)


def matches(if_none_match: str, etag: str) -> bool:
    """RFC 9110, 13.1.2: compared weakly, `*` matches all."""
    given = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return etag in given or "*" in given
