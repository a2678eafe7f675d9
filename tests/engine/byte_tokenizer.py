"""A tokenizer of one token a byte, which goes with the fake runner's vocabulary: id 0..255 are the bytes, 257 ends an answer."""

import json
from pathlib import Path

from headrace.text.tokenizer import Tokenizer

START, END = 256, 257
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def write_byte_tokenizer(directory: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json and returns their directory."""
    special = {"<s>": START, "</s>": END, "<unused>": 258}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for text, token in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {char: byte for byte, char in enumerate(byte_characters())} | special,
            "merges": [],
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(definition))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(directory))
