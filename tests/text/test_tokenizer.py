import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from headrace.errors import ModelLoadError
from headrace.text.tokenizer import Tokenizer
from tests.patience import until
from tests.text.tiny_tokenizers import CONTROL, add_to_vocabulary, byte_level_definition, varied_lines, write_directory


def test_ids_are_those_of_the_library(byte_level: Tokenizer) -> None:
    library = Library.from_str(json.dumps(byte_level_definition()))
    for line in [*varied_lines(300), *CONTROL, "a<s>b</s>c<|im_end|>!<think>d"]:
        assert byte_level.encode(line) == library.encode(line).ids
        assert byte_level.encode("", parse_special=False) == []


def test_round_trip(byte_level: Tokenizer) -> None:
    for line in varied_lines(300):
        ids = byte_level.encode(line)
        assert byte_level.decode(ids) == line
        assert b"".join(byte_level.token_bytes(token_id) for token_id in ids) == line.encode()


@pytest.mark.parametrize("text", [*CONTROL, "a<|im_end|>b", "<|im_end|>!!", "<s><s>"])
def test_control_token_text_as_plain_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, parse_special=False)
    assert not set(ids) & set(byte_level.special_tokens.values())
    assert byte_level.decode(ids) == text
    assert set(byte_level.encode(text)) & set(byte_level.special_tokens.values())


def test_longest_control_token_wins(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_end|>!") == [CONTROL.index("<|im_end|>!")]


def test_plain_text_joins_its_neighbours(byte_level: Tokenizer) -> None:
    whole = byte_level.encode("the quick brown", parse_special=False)
    assert byte_level.encode_segments([("the qu", True), ("ick br", False), ("own", True)]) == whole


def test_merges_never_build_a_control_token(tmp_path: Path) -> None:
    definition = byte_level_definition()
    vocab = definition["model"]["vocab"]
    add_to_vocabulary(definition, "<s")
    definition["pre_tokenizer"]["use_regex"] = False
    definition["model"]["merges"] = [["<", "s"], ["<s", ">"]]
    tokenizer = Tokenizer.load(write_directory(tmp_path, definition))
    assert tokenizer.encode("<s>", parse_special=False) == [vocab["<s"], vocab[">"]]
    assert tokenizer.encode("<s>") == [0]


def test_whole_word_is_not_a_control_token(tmp_path: Path) -> None:
    definition = byte_level_definition()
    definition["model"]["ignore_merges"] = True
    token_id = add_to_vocabulary(definition, "STOP")
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": token_id, "content": "STOP"})
    tokenizer = Tokenizer.load(write_directory(tmp_path, definition))
    assert tokenizer.encode("STOP") == [token_id]
    assert token_id not in tokenizer.encode("STOP", parse_special=False)


def test_token_that_only_looks_like_control(tmp_path: Path) -> None:
    """<｜User｜> is listed as ordinary by its file. It is control all the same, but decode shows it."""
    definition = byte_level_definition()
    token_id = max(definition["model"]["vocab"].values()) + 2
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": token_id, "content": "<｜User｜>", "special": False})
    tokenizer = Tokenizer.load(write_directory(tmp_path, definition))
    assert tokenizer.special_tokens["<｜User｜>"] == token_id
    assert tokenizer.decode(tokenizer.encode("a<｜User｜>b<s>")) == "a<｜User｜>b"
    assert token_id not in tokenizer.encode("<｜User｜>", parse_special=False)


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<s>b<think>")
    assert byte_level.decode(ids) == "ab<think>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<s>b<think>"


def test_ids_without_a_token_are_empty(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(byte_level.vocab_size) == byte_level.token_bytes(-1) == b""
    assert byte_level.decode([byte_level.vocab_size + 5]) == ""


@pytest.mark.parametrize(("text", "read"), [("\ud83d", "\ufffd"), ("x \ude00 y", "x \ufffd y"), ("é\ud83d<s>", "é\ufffd<s>")])
def test_half_a_surrogate_pair_becomes_a_replacement_character(byte_level: Tokenizer, text: str, read: str) -> None:
    assert byte_level.encode(text) == byte_level.encode(read)


@pytest.mark.parametrize(
    ("adds", "config", "ids"),
    [
        (False, {}, []),
        (True, {}, [0]),
        (True, {"add_bos_token": False}, []),
        (False, {"add_bos_token": True}, [0]),
        (True, {"add_bos_token": None}, [0]),
        (True, {"add_eos_token": True}, [0, 1]),
    ],
)
def test_start_and_end_tokens(tmp_path: Path, adds: bool, config: dict[str, Any], ids: list[int]) -> None:
    tokenizer = Tokenizer.load(write_directory(tmp_path, byte_level_definition(bos=adds), config))
    assert tokenizer.encode("") == ids
    assert len(tokenizer.encode("x")) == len(ids) + 1
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[len(ids[:1]) :][:1]


def test_named_tokens_may_be_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
    tokenizer = Tokenizer.load(write_directory(tmp_path, byte_level_definition(), config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 3)
    assert tokenizer.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_end_tokens_are_a_union(tmp_path: Path) -> None:
    definition = byte_level_definition()
    files = {"generation_config": {"eos_token_id": [1, 3]}, "config": {"eos_token_id": 4, "vocab_size": 500}}
    assert Tokenizer.load(write_directory(tmp_path / "all", definition, **files)).stop_token_ids == {1, 3, 4}
    assert Tokenizer.load(write_directory(tmp_path / "tokenizer", definition)).stop_token_ids == {1}
    assert Tokenizer.load(write_directory(tmp_path / "none", definition, {"eos_token": None}, config={"eos_token_id": 3})).stop_token_ids == {3}


def test_end_of_turn_of_the_template_ends(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_directory(tmp_path, byte_level_definition(), {"chat_template": "{{ messages }}<|im_end|>"}))
    assert tokenizer.stop_token_ids == {1, 3}


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"eos_token": "<no such token>"}, {}),
        ({"bos_token": "<no such token>"}, {}),
        ({}, {"generation_config": {"eos_token_id": 100_000}}),
        ({}, {"config": {"eos_token_id": -1}}),
    ],
)
def test_special_token_beyond_the_vocabulary(tmp_path: Path, settings: dict[str, Any], files: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="vocabulary"):
        Tokenizer.load(write_directory(tmp_path, byte_level_definition(), settings, **files))


def test_added_token_that_leaves_a_hole(tmp_path: Path) -> None:
    definition = byte_level_definition()
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 9_999, "content": "<far>"})
    with pytest.raises(ModelLoadError, match="'<far>' has id 9999"):
        Tokenizer.load(write_directory(tmp_path, definition))


def test_missing_and_torn_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json has no model"):
        Tokenizer.load(tmp_path)


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="decoder WordPiece"):
        Tokenizer.load(write_directory(tmp_path, byte_level_definition() | {"decoder": {"type": "WordPiece"}}))


def test_chat_template_of_each_place(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    directory = write_directory(tmp_path, byte_level_definition(), {"chat_template": named})
    assert Tokenizer.load(directory).chat_template == "D"
    (directory / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(directory).chat_template == "J"


def test_threads_share_a_tokenizer(byte_level: Tokenizer) -> None:
    lines = varied_lines(200, seed=1)
    alone = [byte_level.encode(line) for line in lines]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(byte_level.encode, lines)) == alone


def test_other_threads_run_while_a_long_text_is_encoded(byte_level: Tokenizer) -> None:
    text = "The quick brown fox 123 " * 40_000
    done = threading.Event()
    turns = 0

    def watch() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    until(lambda: turns)
    before = turns
    byte_level.encode(text)
    during = turns - before
    done.set()
    watcher.join()
    assert during > 5


def test_longest_token_bounds_the_count(byte_level: Tokenizer) -> None:
    for line in varied_lines(200, seed=2):
        assert len(byte_level.encode(line)) >= len(line.encode()) / byte_level.max_token_bytes
