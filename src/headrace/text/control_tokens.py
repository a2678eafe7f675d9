"""Control tokens are found by us, never by the tokenizer library, so that their text in user input can stay text.

A control token such as `<|im_end|>` steers the model. Whoever may write its text into a prompt may forge turns. So the library is given
tokenizers in which the *texts* of all control tokens are replaced by marks that nobody outside this process can know. The text
`<|im_end|>` is then as ordinary as any other; where it is meant as a control token we write the mark instead.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any


def looks_like_control(text: str) -> bool:
    """Whether a token that its file calls ordinary is written as control tokens are (`<|user|>`, `<｜User｜>`)."""
    return len(text) > 4 and text[:2] in ("<|", "<｜") and text[-2:] in ("|>", "｜>")


def literal_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the leftmost longest of many literal texts, or None if there are none.

    The texts are folded into a prefix tree: models have thousands of control tokens, and trying each of them at every `<` of a long
    text would take seconds.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        if node is not tree:
            node[""] = {}
    return re.compile(_fold(tree)) if tree else None


def _fold(root: dict[str, Any]) -> str:
    """The prefix tree as a regular expression. Runs without a branch are taken in a loop, so that long texts need no deep recursion."""
    branches = []
    for char, child in root.items():
        if char == "":
            continue
        run, node = char, child
        while len(node) == 1 and "" not in node:
            ((step, node),) = node.items()
            run += step
        rest = _fold(node) if node.keys() - {""} else ""
        branches.append(re.escape(run) + (f"(?:{rest})?" if rest and "" in node else rest))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _without(merges: Sequence[Any], texts: Set[str]) -> Sequence[tuple[str, str]]:
    """Pairs that neither are made of these texts nor make one."""

    def pairs() -> Iterator[tuple[str, str]]:
        return (tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges)  # type: ignore[misc]

    def touches(pair: tuple[str, str]) -> bool:
        return not texts.isdisjoint((*pair, "".join(pair)))

    if isinstance(next(iter(merges), None), tuple) and not any(map(touches, pairs())):
        return merges  # not copied: they may be made while they are read
    return [pair for pair in pairs() if not touches(pair)]


def hide_control_tokens(definition: dict[str, Any], control: Mapping[str, int]) -> dict[str, str]:
    """Rename the control tokens of a tokenizer.json in place and return text -> mark.

    Ids stay as they are. A merge that would build a control token's text out of ordinary pieces goes away, as SentencePiece never
    makes control pieces from text either.
    """
    nonce = secrets.token_hex(16)
    marks = {text: f"[{nonce}.{token_id}]" for text, token_id in control.items()}
    model = definition["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {marks.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:  # Unigram: [text, score] in the order of ids
        model["vocab"] = [[marks.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    if "merges" in model:
        model["merges"] = _without(model["merges"], marks.keys())
    for token in definition["added_tokens"]:
        if token["content"] in marks:
            token.update(content=marks[token["content"]], normalized=False, single_word=False, special=True)
    return marks
