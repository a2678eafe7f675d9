"""Log probabilities in the forms of the API. They are of the model's own distribution, before any penalty or mask."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.core.messages import TokenLogprobs
from headrace.text.tokenizer import Tokenizer


class TokenTexts:
    """How a token is written in JSON: its text, or `bytes:\\xf0\\x9f` if its bytes are no whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # grows to the size of the vocabulary at most

    def bytes_of(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            raw = self.bytes_of(token_id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token_id] = text
        return text


def chat_entries(entries: Iterable[TokenLogprobs], texts: TokenTexts, count: int) -> list[dict[str, Any]]:
    """One object a token, as chat completions have them."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text_of(token_id), "logprob": logprob, "bytes": list(texts.bytes_of(token_id))}

    return [{**item(entry.token_id, entry.logprob), "top_logprobs": [item(*pair) for pair in entry.top[:count]]} for entry in entries]


def prompt_entries(entries: Sequence[TokenLogprobs], prompt_length: int, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: one object a prompt token, by token id; null for the first, which nothing predicts."""
    result: list[dict[str, Any] | None] = [None] * (prompt_length - len(entries))
    for entry in entries:
        ranked = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": texts.text_of(token_id)}
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        ranked.setdefault(str(entry.token_id), {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": texts.text_of(entry.token_id)})
        result.append(ranked)
    return result


class CompletionLogprobs:
    """The four lists of one completion choice, made piece by piece; `text_offset` goes on from piece to piece."""

    def __init__(self, texts: TokenTexts, *, count: int, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._count = count
        self._skip_special = skip_special_tokens
        self._offset = 0  # characters that are complete before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], text: str) -> dict[str, list[Any]]:
        """Of the echoed prompt; a control token that the tokenizer added is not in the text and takes no room in it."""
        lists = new_lists()
        if self._texts.tokenizer.strips_leading_space and not text.startswith(" "):
            self._offset = -1  # the first word's own space is not in the text
        scored = [None] * (len(token_ids) - len(entries)) + list(entries)
        for token_id, entry in zip(token_ids, scored, strict=True):
            hidden = token_id in self._texts.tokenizer.skipped_ids and not text.startswith(self._texts.text_of(token_id), max(0, self._offset))
            self._append(lists, token_id, entry, hidden)
        self._decoder.reset()  # what comes next is decoded apart from the prompt
        self._offset = len(text)
        return lists

    def generated(self, entries: Iterable[TokenLogprobs]) -> dict[str, list[Any]]:
        lists = new_lists()
        for entry in entries:
            self._append(lists, entry.token_id, entry, self._skip_special and entry.token_id in self._texts.tokenizer.skipped_ids)
        return lists

    def _append(self, lists: dict[str, list[Any]], token_id: int, entry: TokenLogprobs | None, hidden: bool) -> None:
        lists["tokens"].append(self._texts.text_of(token_id))
        lists["text_offset"].append(max(0, self._offset))
        lists["token_logprobs"].append(None if entry is None else entry.logprob)
        lists["top_logprobs"].append(None if entry is None else self._top(entry))
        if not hidden:
            self._offset += len(self._decoder.decode(self._texts.bytes_of(token_id)))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._texts.text_of(token_id): logprob for token_id, logprob in entry.top[: self._count]}
        top[self._texts.text_of(entry.token_id)] = entry.logprob  # the token itself, also where it is not among them
        return top


def new_lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def extend_lists(lists: dict[str, list[Any]], more: dict[str, list[Any]]) -> None:
    for name, values in more.items():
        lists[name].extend(values)
