"""POST /v1/responses, and what can be done with a stored response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.core.messages import TokenLogprobs
from headrace.errors import InvalidRequest, ResourceNotFound
from headrace.server.answer import Answer, Header, Scorer, Usage
from headrace.server.generation_route import GenerationRoute
from headrace.server.logprobs import chat_entries
from headrace.server.parse import Prompt
from headrace.server.responses.background import BackgroundResponses
from headrace.server.responses.builder import ResponseBuilder
from headrace.server.responses.parse import ParsedResponse, count_input_tokens, new_response, parse_response
from headrace.server.responses.schema import Include
from headrace.server.responses.store import Key, ResponseStore, StoredResponse
from headrace.server.responses.wire import ResponseWire
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import Send, Wire, send_json
from headrace.server.text_route import TextRoute

MAX_PAGE = 100
DEFAULT_PAGE = 20


class ResponseDialect:
    """`generation_route.Dialect` for responses."""

    id_prefix = "resp_"

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def parse(self, body: bytes, service: Service, model: LoadedModel, tenant: str) -> ParsedResponse:
        return parse_response(body, service, model, self._store, tenant)

    def new_scorers(self, request: ParsedResponse, model: LoadedModel) -> Callable[[Prompt], Scorer] | None:
        count = request.logprobs
        if count is None:
            return None

        def score(new: tuple[TokenLogprobs, ...], prompt_scores: tuple[TokenLogprobs, ...] | None) -> list[dict[str, Any]]:
            return chat_entries(new, model.token_texts, count)

        return lambda prompt: score

    def new_wire(self, request: ParsedResponse, header: Header, usage: Usage) -> ResponseWire:
        def keep(response: dict[str, Any]) -> None:
            if request.store:
                self._store.put(request.tenant, response, request.input_items)

        return ResponseWire(ResponseBuilder(new_response(request, header), usage), keep)


class ResponseRoute(GenerationRoute[ParsedResponse]):
    """Answers at once where the response is made in the background."""

    def __init__(self, service: Service, dialect: ResponseDialect, background: BackgroundResponses) -> None:
        super().__init__(service, dialect)
        self._background = background

    async def respond(self, request: ParsedResponse, answer: Answer, wire: Wire, send: Send, rest: Send) -> None:
        assert isinstance(wire, ResponseWire)
        if not request.background:
            await super().respond(request, answer, wire, send, rest)
            return
        response = wire.builder.response
        self._background.start((request.tenant, response["id"]), answer, wire.builder, wire.keep)
        await send_json(send, response)


class StoredRoutes:
    """What can be done with a stored response."""

    def __init__(self, store: ResponseStore, background: BackgroundResponses) -> None:
        self._store = store
        self._background = background

    async def resource(self, request: Request) -> Response:
        return await (self.delete(request) if request.method == "DELETE" else self.retrieve(request))

    async def retrieve(self, request: Request) -> Response:
        check_query(request, "stream", "starting_after", "include_obfuscation")
        if request.query_params.get("stream", "false") != "false" or "starting_after" in request.query_params:
            raise InvalidRequest("stream is not supported for a stored response; fetch it whole.", param="stream", code="unsupported_value")
        return Response(self._find(request).response_json, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        check_query(request)
        self._find(request)
        tenant, response_id = key = key_of(request)
        await self._background.cancel(key)
        self._store.delete(tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        check_query(request)
        await self._background.cancel(key_of(request))
        response = self._find(request).response
        if not response["background"]:
            raise InvalidRequest("Only a response made with background: true can be cancelled; to end another one, hang up.", param="response_id")
        if response["status"] != "cancelled":
            raise InvalidRequest(f"The response is {response['status']} already and cannot be cancelled.", param="response_id")
        return JSONResponse(response)

    async def input_items(self, request: Request) -> Response:
        check_query(request, "after", "limit", "order")
        query = request.query_params
        limit = query.get("limit", str(DEFAULT_PAGE))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
            raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_PAGE}.", param="limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc.", param="order")
        items = self._find(request).input_items
        if order == "desc":
            items.reverse()
        if "after" in query:
            places = [index for index, item in enumerate(items) if item["id"] == query["after"]]
            if not places:
                raise InvalidRequest("after is no id of an item of this response.", param="after")
            items = items[places[0] + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})

    def _find(self, request: Request) -> StoredResponse:
        tenant, response_id = key_of(request)
        stored = self._store.get(tenant, response_id)
        if stored is None:
            raise ResourceNotFound(f"There is no response {response_id[:100]!r} here.", param="response_id")
        return stored


def key_of(request: Request) -> Key:
    return request.state.tenant, request.path_params["response_id"]


def check_query(request: Request, *names: str) -> None:
    """Refuse what is unknown. What `include` asks for is there in any case, or never made."""
    for name, value in request.query_params.multi_items():
        if name in ("include", "include[]"):
            if value not in get_args(Include):
                raise InvalidRequest(f"include: {value[:100]!r} is not known; use one of {', '.join(get_args(Include))}.", param="include")
        elif name not in names:
            raise InvalidRequest(f"Unknown query parameter {name[:100]!r}.", param=name[:100])


def routes(service: Service) -> list[Route]:
    store = ResponseStore()
    background = BackgroundResponses(service)
    stored = StoredRoutes(store, background)
    one = "/v1/responses/{response_id}"

    def input_tokens(body: bytes, service: Service, model: LoadedModel, tenant: str) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": count_input_tokens(body, service, model, store, tenant)}

    return [
        Route("/v1/responses", ResponseRoute(service, ResponseDialect(store), background), methods=["POST"]),
        Route("/v1/responses/input_tokens", TextRoute(service, input_tokens), methods=["POST"]),
        Route(one, stored.resource, methods=["GET", "DELETE"]),
        Route(one + "/cancel", stored.cancel, methods=["POST"]),
        Route(one + "/input_items", stored.input_items, methods=["GET"]),
    ]
