"""What a tokenizer is made of, whichever file it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Control tokens that end a turn. Where a chat template writes one of these the model was taught to end with it, even if its files
# name another end token only.
END_OF_TURN_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|EOT|>", "<｜end▁of▁sentence｜>"}
)


@dataclass(slots=True, kw_only=True)
class TokenizerSpec:
    """Everything `Tokenizer` needs; made by `tokenizer_hf.read_directory` and `tokenizer_gguf.read_metadata`."""

    source: str  # names the file in errors
    definition: dict[str, Any]  # in the form of tokenizer.json
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    add_bos: bool | None = None  # None: as the post-processor of the definition does
    add_eos: bool | None = None
    stop_token_ids: frozenset[int] = frozenset()  # all end tokens that the files name
    chat_template: str | None = None
    named_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... -> text, for the template
