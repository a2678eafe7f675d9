"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from headrace.core.messages import TokenLogprobs
from headrace.server.answer import Piece, Scorer
from headrace.server.body import decode_object
from headrace.server.choices import ChoicesDialect
from headrace.server.generation_route import GenerationRoute
from headrace.server.logprobs import CompletionLogprobs, extend_lists, new_lists
from headrace.server.parse import ParsedRequest, Prompt, parse_completion
from headrace.server.schema import CompletionBody, validate
from headrace.server.service import LoadedModel, Service


class CompletionForm:
    """Choices as OpenAI's completions have them, with vLLM's additions."""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, request: ParsedRequest) -> None:
        self._request = request

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        if not (piece.text or piece.token_ids or piece.finish_reason or (piece.logprobs and piece.logprobs["tokens"]) or piece.opens):
            return []
        return [self._fields(piece, piece.text, piece.logprobs, piece.finish_reason, piece.stop_reason, piece.token_ids)]

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = new_lists()
            for piece in pieces:
                extend_lists(logprobs, piece.logprobs)
        last = pieces[-1]
        text = "".join(piece.text for piece in pieces)
        ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
        choice = self._fields(pieces[0], text, logprobs, last.finish_reason, last.stop_reason, ids)
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = pieces[0].prompt_logprobs
        return choice

    def _fields(
        self, first: Piece, text: str, logprobs: Any, finish_reason: str | None, stop_reason: int | str | None, token_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        choice = {"index": first.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, "stop_reason": stop_reason}
        if self._request.return_token_ids:
            choice["token_ids"] = token_ids
            if first.prompt_token_ids is not None:
                choice["prompt_token_ids"] = first.prompt_token_ids
        return choice


def new_scorers(request: ParsedRequest, model: LoadedModel) -> Callable[[Prompt], Scorer] | None:
    count = request.logprobs
    if count is None:
        return None

    def new_scorer(prompt: Prompt) -> Scorer:
        lists = CompletionLogprobs(model.token_texts, count=count, skip_special_tokens=prompt.params.skip_special_tokens)

        def score(new: tuple[TokenLogprobs, ...], prompt_scores: tuple[TokenLogprobs, ...] | None) -> dict[str, list[Any]]:
            scored = new_lists()
            if prompt_scores is not None and request.echo:
                scored = lists.prompt(prompt.token_ids, prompt_scores, prompt.echo_text)
            extend_lists(scored, lists.generated(new))
            return scored

        return score

    return new_scorer


def parse(body: bytes, service: Service, model: LoadedModel) -> ParsedRequest:
    checked = validate(CompletionBody, decode_object(body))
    return parse_completion(checked, model, service.check_model_name(checked.model))


def routes(service: Service) -> list[Route]:
    endpoint = GenerationRoute(service, ChoicesDialect(CompletionForm, parse=parse, new_scorers=new_scorers))
    return [Route("/v1/completions", endpoint, methods=["POST"])]
