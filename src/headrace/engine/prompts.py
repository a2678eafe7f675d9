"""The forms a prompt may take in the offline interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from headrace.errors import InvalidRequest
from headrace.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt = str | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedPrompt:
    text: str | None  # None where token ids were given
    token_ids: tuple[int, ...]


def is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str | Mapping)


def parse_prompt(prompt: object, tokenizer: Tokenizer) -> ParsedPrompt:
    """Tokenises where needed. Raises `InvalidRequest` for any other form."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt, token_ids=tuple(tokenizer.encode(prompt)))
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            return parse_prompt(prompt["prompt"], tokenizer)
        if keys in ({"prompt_token_ids"}, {"prompt", "prompt_token_ids"}):
            ids = prompt["prompt_token_ids"]
            try:
                token_ids = tuple(int(token) for token in ids)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"prompt_token_ids must be a list of whole numbers: {error}.", param="prompt_token_ids") from error
            return ParsedPrompt(text=prompt.get("prompt"), token_ids=token_ids)
    raise InvalidRequest(
        'A prompt must be a text, {"prompt": text} or {"prompt_token_ids": [...]}, not ' + f"{type(prompt).__name__}: {str(prompt)[:80]!r}.",
        param="prompts",
    )
