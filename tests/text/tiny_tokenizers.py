"""Tiny tokenizers made on the spot: a byte-level BPE as a Hugging Face directory or as GGUF metadata, and a SentencePiece BPE."""

from __future__ import annotations

import io
import json
import random
import warnings
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headrace.text import tokenizer_gguf, tokenizer_hf
from headrace.text.tokenizer import Tokenizer as HeadraceTokenizer
from headrace.text.tokenizer_gguf import TokenType

CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>!"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b",
    "  Café déjà vu, naïve façade — 12345 3.14",
    "日本語のテキスト 한국어 텍스트 नमस्ते",
    "😀 🫠 🥹 龜",
    "I'll say it's what they've said, don't I?",
    "<|im_start|>user Hi <s>x</s> <|im_end|>",
] * 3
_FRAGMENTS = [
    *("The", "hello", " world", "Straße", "naïve", "cafe\u0301", "café", "I'll", "IT'S", "they've", "1234567", " 3.14", "²½", "Ⅷ", "٣"),
    *(
        "日本語",
        "한국어",
        "नमस्ते",
        "ไทย",
        "🫠",
        "👩‍👩‍👧",
        "é",
        "http://a.example/b?c=d&e=f#g",
        "x_y",
        "camelCase",
        "!!",
        "...",
        "—",
        "«»",
        "->",
        "==",
        "&&",
    ),
    *(
        " ",
        "  ",
        "    ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        "\u00a0",
        "\u3000",
        "\x00",
        "\ufeffx",
        "def f(x):\n    return x",
        "<div class='a'>",
        '{"k": [1, 2]}',
        "'",
        "s",
    ),
]


def varied_lines(count: int, seed: int = 0) -> list[str]:
    """Lines of code, digits, white space, signs, composed and decomposed letters, scripts without spaces, emoji, URLs."""
    rng = random.Random(seed)
    return ["".join(rng.choices(_FRAGMENTS, k=rng.randint(1, 12))) for _ in range(count)]


def byte_level_definition(*, vocab_size: int = 400, bos: bool = False) -> dict[str, Any]:
    """A trained byte-level BPE in the form of tokenizer.json. Ids 0 ... 4 are `CONTROL`; `bos`: its post-processor adds <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    return json.loads(tokenizer.to_str())


def write_directory(directory: Path, definition: dict[str, Any], settings: dict[str, Any] | None = None, **files: dict[str, Any]) -> Path:
    """tokenizer.json, tokenizer_config.json and further JSON files by their stem."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | (settings or {})
    for stem, content in {"tokenizer": definition, "tokenizer_config": settings, **files}.items():
        (directory / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def add_to_vocabulary(definition: dict[str, Any], text: str) -> int:
    """Give the model itself one more token; returns its id. Added tokens that follow the vocabulary go."""
    vocab = definition["model"]["vocab"]
    token_id = vocab[text] = len(vocab)
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["id"] < token_id]
    return token_id


def byte_level(directory: Path, **config: Any) -> HeadraceTokenizer:
    return HeadraceTokenizer(tokenizer_hf.read_directory(write_directory(directory, byte_level_definition(), config)))


def byte_level_metadata() -> dict[str, Any]:
    """The same tokenizer as `byte_level_definition` as the metadata of a GGUF file."""
    definition = byte_level_definition()
    vocab = definition["model"]["vocab"] | {token["content"]: token["id"] for token in definition["added_tokens"]}
    special = {token["content"]: token["special"] for token in definition["added_tokens"]}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    texts = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [int(kinds[special.get(text)]) for text in texts],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in definition["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece_model() -> Any:
    """A trained `SentencePieceProcessor`: BPE, byte fallback, user-defined and control pieces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its generated bindings warn on import
        import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<turn>"],
        user_defined_symbols=["<think>"],
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def sentencepiece_metadata(model: Any) -> dict[str, Any]:
    def kind(token_id: int) -> TokenType:
        if model.is_unknown(token_id):
            return TokenType.UNKNOWN
        if model.is_control(token_id):
            return TokenType.CONTROL
        if model.is_byte(token_id):
            return TokenType.BYTE
        return TokenType.USER_DEFINED if model.id_to_piece(token_id) == "<think>" else TokenType.NORMAL

    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(token_id) for token_id in ids],
        "tokenizer.ggml.scores": [model.get_score(token_id) for token_id in ids],
        "tokenizer.ggml.token_type": [int(kind(token_id)) for token_id in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def from_metadata(metadata: dict[str, Any]) -> HeadraceTokenizer:
    return HeadraceTokenizer(tokenizer_gguf.read_metadata(metadata, "tiny.gguf"))
