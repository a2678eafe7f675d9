"""The command as a person meets it: words, exit status, and never a traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli import main as main_module
from headrace.cli.main import VERBS, build_parser, main
from headrace.errors import ConfigError, ModelLoadError, QueueFull
from tests.patience import LIMIT_S


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **environment},
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"headrace {headrace.__version__}")


@pytest.mark.parametrize("verb", ["serve", "chat", "generate", "batch", "models"])
def test_help_teaches(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"headrace {verb}" in text


def test_help_needs_no_torch() -> None:
    code = """
import sys
from headrace.cli.main import build_parser
build_parser().format_help()
heavy = {"torch", "numpy", "starlette", "pydantic", "tokenizers", "huggingface_hub"} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    assert run("--help").returncode == 0
    assert spent() - before < 1.0  # seconds of a core; 0.15 s on an idle machine


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--no-such-option"], "--no-such-option"),
        (["serve", "--max-model-len", "minus"], "--max-model-len"),
        (["serve", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--scheduling-policy", "lifo"], "--scheduling-policy"),
        (["serve", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens"),
        (["serve", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization"),
        (["serve", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["serve", "--ssl-keyfile", "/no/such.pem"], "--ssl-certfile"),
        (["generate", "/no/such.txt"], "/no/such.txt"),
        (["generate", "--resume"], "--output"),
        (["polish"], "polish"),
        ([], "VERB"),
    ],
)
def test_bad_command_lines(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as exit:
        status = exit.code
    output = capsys.readouterr()
    assert status == 2
    assert named in output.err
    assert "Traceback" not in output.err
    assert not output.out


def test_missing_model_ends_with_1() -> None:
    done = run("serve", "/no/such/model.gguf")
    assert done.returncode == 1
    assert "/no/such/model.gguf" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("error", "status"), [(ConfigError("x"), 2), (ModelLoadError("x"), 1), (QueueFull("x"), 1), (KeyboardInterrupt(), 130)])
def test_exit_status_of_errors(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: object) -> int:
        raise error

    parser = build_parser()
    monkeypatch.setattr(parser, "parse_args", lambda arguments: type("Args", (), {"run": staticmethod(fail)}))
    monkeypatch.setattr(main_module, "build_parser", lambda verb: parser)
    assert main(["serve"]) == status
    assert capsys.readouterr().err.startswith("headrace: ")


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("headrace.cli.models.run_list", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["models", "list"])


def test_one_file_a_verb() -> None:
    folder = Path(main_module.__file__).parent
    for verb in VERBS:
        assert (folder / f"{verb}.py").is_file()


def test_the_parser_of_one_verb_is_the_same_as_that_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    helps = []
    for parser in (build_parser(), build_parser("models")):
        with pytest.raises(SystemExit):
            parser.parse_args(["models", "--help"])
        helps.append(capsys.readouterr().out)
    assert helps[0] == helps[1] != ""
