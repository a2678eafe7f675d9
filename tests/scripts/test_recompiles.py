"""The waves' arithmetic, and a short run against a server of a tiny model."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from headrace.kernels import cpu
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.runner.tiny_model import save_tiny_llama
from tests.scripts.load_script import ROOT, load_script


@pytest.fixture(scope="module")
def recompiles() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))  # where python looks first when it runs the script
        return load_script("recompiles")


def test_arguments(recompiles: ModuleType) -> None:
    args, serve = recompiles.parse_arguments(["--duration", "3", "--", "some.gguf", "--max-num-seqs", "2"])
    assert (args.duration, args.clients, serve) == (3.0, 24, ["some.gguf", "--max-num-seqs", "2"])
    assert recompiles.parse_arguments([])[1] == ["--compile", "full", "--max-seq-len-to-capture", "1024"]


def test_sizes_are_spread_over_their_orders(recompiles: ModuleType) -> None:
    waves = recompiles.Waves(None, random.Random(0), most=24, longest=1500, max_token=9)
    seen = Counter(waves._between(1, 1500) for _ in range(4000))
    assert (min(seen), max(seen)) == (1, pytest.approx(1500, abs=30))
    assert sum(count for size, count in seen.items() if size <= 38) == pytest.approx(2000, abs=200), "as many below the root as above"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_run(recompiles: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if cpu.load() is None:
        pytest.skip(f"no kernels: {cpu.reason()}")
    write_byte_tokenizer(tmp_path)
    save_tiny_llama(tmp_path, vocab_size=320, eos_token_id=257)
    flags = ["--max-num-seqs=1", "--max-num-batched-tokens=32", "--kv-memory=16MiB", "--block-size=4", "--threads=1", "--max-seq-len-to-capture=32"]
    cache = ["--compile=full", f"--compile-cache={tmp_path / 'cache'}"]
    status = recompiles.main(["--duration", "5", "--clients", "6", "--max-prompt", "60", "--max-token", "255", "--", str(tmp_path), *flags, *cache])
    report = json.loads(capsys.readouterr().out)
    assert report["verdicts"] == dict.fromkeys(report["verdicts"], True)
    assert status == 0
    assert report["graph breaks"] == {"decode": 0, "mixed": 0}
    assert report["paths"] == {"decode-1": "compiled", "mixed-32": "compiled"}
