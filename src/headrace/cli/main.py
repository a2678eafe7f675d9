"""The `headrace` command: finds the verb, runs it, and turns errors into a message and an exit status.

Exit status: 0 done, 1 it could not be done, 2 the command line or config file is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

import headrace
from headrace.errors import HeadraceError, StartError

VERBS = ("serve", "chat", "generate", "batch", "compile", "models", "top", "bench", "doctor", "plan", "tune")  # modules beside this one

EPILOG = """\
examples:
  headrace serve                                    serve the default model on http://127.0.0.1:8000
  headrace serve owner/model --port 9000            a model of the hub, another port
  headrace chat                                     talk to the default model in the terminal
  headrace generate prompts.txt --output out.jsonl  one answer for each line
  headrace batch run requests.jsonl                 many requests to a server, when it has time
  headrace compile -o compiled                      prepare steps for machines without a compiler
  headrace models list                              what is on this machine
  headrace bench serve --request-rate 4             load on a server, measured from outside
  headrace doctor                                   what keeps this machine, or a server, from its speed
  headrace top                                      what a running server does, and what its time goes into

`headrace VERB --help` explains the flags of a verb.
"""


class Parser(argparse.ArgumentParser):
    """Flags are exact (no guessing from their beginnings), and a misspelt one is told what it may have been."""

    def __init__(self, **rest: object) -> None:
        rest.setdefault("allow_abbrev", False)
        rest.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**rest)  # type: ignore[arg-type]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        namespace, unknown = super().parse_known_args(args, namespace)
        known = [name for action in self._actions for name in action.option_strings]
        for word in unknown:
            if word.startswith("-") and (near := difflib.get_close_matches(word.split("=")[0], known, n=1)):
                self.error(f"unrecognized arguments: {' '.join(unknown)} (did you mean {near[0]}?)")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """Of all verbs, or of one: the server holds for good what is imported here, and a quarter of its start would go into verbs it is not."""
    parser = Parser(prog="headrace", description=headrace.__doc__.splitlines()[0] if headrace.__doc__ else None, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name in VERBS if verb is None else (verb,):
        importlib.import_module(f"headrace.cli.{name}").add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    verb = arguments[0] if arguments and arguments[0] in VERBS else None
    args = build_parser(verb).parse_args(arguments)
    try:
        return int(args.run(args))
    except StartError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return error.exit_code
    except HeadraceError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return 130
