"""The page at /: what its files say, and how they are served."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from tests.server.fakes import World, refused

FILES = {file.name: file.read_text(encoding="utf-8") for file in (files("headrace.server") / "web").iterdir()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
secured = pytest.mark.parametrize("world", [{"api_keys": ("sk-1",)}], indirect=True)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(FILES["index.html"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get(name)) is not None]


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in FILES.items():
        text = text.replace("http://www.w3.org/2000/svg", "")  # a name, fetched by nobody
        assert not re.search(r"https?:|\bsrc=[\"']?//|url\(|@import|\bdata:", text.replace("^data: ", "")), name
    for url in (*Page().values("src"), *(value for tag, found in Page().tags if tag == "link" and (value := found["href"]))):
        assert url.removeprefix("web/") in FILES, url
    for name, text in SCRIPTS.items():
        for module in re.findall(r"^import .* from \"(.*)\";$", text, re.MULTILINE):
            assert module.removeprefix("./") in SCRIPTS, (name, module)


def test_no_script_or_style_stands_in_the_page() -> None:
    for tag, attributes in Page().tags:
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert not any(name == "style" or name.startswith("on") for name in attributes), attributes


def test_text_never_becomes_markup() -> None:
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|srcdoc|\beval\b|new Function", text), name


def test_every_id_that_scripts_and_labels_name_is_there() -> None:
    page = Page()
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    named = {name for text in SCRIPTS.values() for name in re.findall(r"find\(\"([\w-]+)\"\)", text)}
    assert len(named) > 30
    named |= {word for attribute in ("for", "aria-labelledby", "aria-describedby") for value in page.values(attribute) for word in value.split()}
    named |= {name for style in ("style.css", "wheel.css") for name in re.findall(r"#([a-z][\w-]*)(?=[^;{}]*\{)", FILES[style])}
    named |= {"temperature", "top-p", "top-k", "max-tokens", "seed"}
    assert named - set(ids) == set()


def test_files_are_short() -> None:
    assert max(len(text.splitlines()) for text in FILES.values()) < 400


async def test_the_page_and_its_files(world: World):
    page = await world.http.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert page.text == FILES["index.html"]
    assert page.headers["vary"] == "Accept"
    kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml", "html": "text/html; charset=utf-8"}
    for name in FILES:
        path = "/" if name == "index.html" else f"/web/{name}"
        response = await world.http.get(path, headers=BROWSER)
        assert response.status_code == 200, name
        assert response.headers["content-type"] == kinds[name.rpartition(".")[2]]
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {value for key, value in policy.items()} == {"'none'", "'self'"}
        assert {"base-uri", "form-action", "frame-ancestors"} <= policy.keys()


async def test_browsers_keep_files_until_they_change(world: World):
    for path in ("/", "/web/main.js"):
        first = await world.http.get(path, headers=BROWSER)
        assert first.headers["cache-control"] == "no-cache"
        for tag in (first.headers["etag"], "W/" + first.headers["etag"], f'"x", {first.headers["etag"]}', "*"):
            again = await world.http.get(path, headers={**BROWSER, "If-None-Match": tag})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == first.headers["etag"]
        assert (await world.http.get(path, headers={**BROWSER, "If-None-Match": '"x"'})).status_code == 200


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "application/json, */*", "text/html;q=0, */*", "text/plain"])
async def test_clients_that_want_no_html_find_what_the_api_has(world: World, accept):
    world.http.headers.pop("accept")
    refused(await world.http.get("/", headers={} if accept is None else {"Accept": accept}), 404, code="not_found")


async def test_other_names_and_methods_are_not_there(world: World):
    for path in ("/web/nope.js", "/web/", "/web/__init__.py", "/web/../app.py", "/web/index.html", "/index.html"):
        refused(await world.http.get(f"http://test{path}", headers=BROWSER), 404)
    refused(await world.http.post("/", headers=BROWSER), 404)
    assert (await world.http.head("/", headers=BROWSER)).status_code == 200


@secured
async def test_the_page_needs_no_key_and_what_it_asks_for_does(world: World):
    assert (await world.http.get("/", headers=BROWSER)).status_code == 200
    assert (await world.http.get("/web/api.js")).status_code == 200
    for path in ("/v1/status", "/v1/models", "/web/nope.js"):
        refused(await world.http.get(path, headers=BROWSER), 401)
    assert (await world.http.get("/v1/status", headers={"x-api-key": "sk-1"})).status_code == 200


@pytest.mark.parametrize("world", [{"web": False}], indirect=True)
async def test_the_page_can_be_left_out(world: World):
    for path in ("/", "/web/main.js"):
        refused(await world.http.get(path, headers=BROWSER), 404)
    assert (await world.http.get("/v1/status")).status_code == 200


async def test_the_page_counts_as_itself(world: World):
    await world.http.get("/", headers=BROWSER)
    await world.http.get("/web/main.js")
    text = (await world.http.get("/metrics")).text
    for path in ("/", "/web/{name}"):
        assert f'headrace_http_requests_total{{outcome="2xx",path="{path}"}} 1.0' in text


def test_the_wheel_holds_the_files() -> None:
    import tomllib
    from pathlib import Path

    settings: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/headrace"]}, "all files of the package, whatever their kind"


def test_no_id_is_the_name_of_a_view() -> None:
    """The browser would scroll to it."""
    views = {value.removeprefix("#") for tag, attributes in Page().tags if tag == "a" and (value := attributes["href"])} - {"content"}
    assert views == {"chat", "wheel"}
    assert not views & set(Page().values("id"))
