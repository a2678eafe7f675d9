"""Documents say what is true: links lead somewhere, flags, fields, metrics and errors exist and are all there."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from headrace import errors
from headrace.cli.main import build_parser
from headrace.cli.options import SERVE_GROUPS
from headrace.observe.metrics import Metrics
from headrace.server import app, routes_batches, routes_files, schema
from headrace.server.unsupported import UNSUPPORTED
from tests.docs.markdown import PAGES, ROOT, blocks, commands

API = (ROOT / "docs/api.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
OTHER_TOOLS_FLAGS = {
    "duration",
    "pairs",
    "batch",
    "steps",
    "clients",
    "url",
    "pid",
    "requests",
    "long-prompts",
}  # of scripts, which have tests of their own


def identifier(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_commands_can_be_typed(page: Path) -> None:
    parser = build_parser()
    for command in commands(page):
        for part in command.split(" | "):
            words = shlex.split(part)
            if words[0] == "headrace":
                parser.parse_args(words[1:])
            elif words[0].startswith("scripts/"):
                assert (ROOT / words[0]).exists(), command
                if words[0] == "scripts/serve":
                    parser.parse_args(["serve", *words[1:]])
            else:
                assert words[0] in ("curl", "echo", "python", "llm"), command


def parser_of(*words: str) -> argparse.ArgumentParser:
    parser = build_parser()
    for word in words:
        parser = _choices(parser)[word]
    return parser


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (verbs,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return verbs.choices


def actions_of(verb: str) -> list[str]:
    return list(_choices(parser_of(verb)))


def flags_of(*words: str) -> set[str]:
    """The flags of a verb, without their dashes."""
    parser = parser_of(*words)
    return {name.removeprefix("--") for action in parser._actions for name in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_flags_exist(page: Path) -> None:
    known = (
        {name for _, group in SERVE_GROUPS for option in group for name in option.names}
        | {flag for action in actions_of("bench") for flag in flags_of("bench", action)}
        | flags_of("doctor")
        | flags_of("plan")
        | flags_of("tune")
    )
    known |= {"config", "resume", "output", "chat", "help"} | OTHER_TOOLS_FLAGS
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for flag in re.findall(r"`[^`]*?--([a-z][a-z-]+)", prose):
        assert flag.removeprefix("no-") in known, flag


def test_config_files_can_be_read(tmp_path: Path) -> None:
    from headrace.cli.key_file import api_keys_file
    from headrace.cli.settings import read_config_file

    for page in PAGES:
        for block in blocks(page, "yaml"):
            read = api_keys_file if block.startswith("- name:") else read_config_file
            (tmp_path / "serve.yaml").write_text(block)
            assert read(str(tmp_path / "serve.yaml"))


def test_both_readmes_hold_the_same_commands() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    for language in ("bash", "python", "json", "yaml"):
        assert blocks(english, language) == blocks(chinese, language)
    assert blocks(english, "bash")
    headings = [len(re.findall(r"^#+ ", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in (english, chinese)]
    assert headings[0] == headings[1]


def test_every_field_is_in_the_reference() -> None:
    for body in (schema.ChatBody, schema.CompletionBody, schema.TokenizeBody, schema.DetokenizeBody, schema.ExplainBody):
        for field in body.model_fields:
            assert f"`{field}`" in API, field


def test_every_refused_field_is_in_the_reference() -> None:
    section = API.split("## Refused")[1].split("## Errors")[0].split(":\n")[-1]
    assert set(re.findall(r"`(\w+)`", section)) == set(UNSUPPORTED)


def test_every_route_is_in_the_reference() -> None:
    from types import SimpleNamespace
    from typing import Any

    service: Any = SimpleNamespace()
    documented = set(re.findall(r"`(?:GET|POST) (/[^`]*)`", API))
    routes = [route for family in app.FAMILIES for route in family.routes(service)]
    routes += [*routes_files.routes(service, service), *routes_batches.routes(service, service)]
    assert {route.path for route in routes} | {"/openapi.json"} == documented


def test_every_error_is_in_the_reference() -> None:
    def leaves(kind: type[errors.RequestError]) -> set[type[errors.RequestError]]:
        return {kind} | {leaf for child in kind.__subclasses__() for leaf in leaves(child) if leaf.__module__ == errors.__name__}

    rows = {int(row[0]): row[1] for row in re.findall(r"^\| (\d{3}) \| (.*?) \|", API, re.MULTILINE)}
    for leaf in leaves(errors.RequestError) - {errors.RequestError}:
        assert f"`{leaf.code}`" in rows[leaf.status], leaf


def test_metrics_of_the_operations_page_are_all_there_are() -> None:
    text = Metrics(model_name="m").render(None, state="ready")[0].decode()
    there = set(re.findall(r"^# TYPE (headrace_\w+) ", text, re.MULTILINE))
    documented = set(re.findall(r"^\| `(headrace_\w+)`(?:, `(headrace_\w+)`)?", OPERATIONS, re.MULTILINE))
    assert {name for pair in documented for name in pair if name} == there


def test_files_of_the_architecture_page_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src/headrace"
    names = {str(file.relative_to(package)) for file in package.rglob("*.py")}
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert any(there == name or there.endswith(f"/{name}") for there in names), name
    for room in re.findall(r"`(\w+/)`", page):
        assert (package / room).is_dir(), room
