"""`headrace chat`: talk to a model in the terminal, served somewhere or started here."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from headrace.cli import values
from headrace.cli.chat_client import ChatClient, ChatError, Message
from headrace.cli.options import reader

COMMANDS = """\
/exit           leave (also Ctrl-D)
/clear          forget the conversation
/system TEXT    set the system message and forget the conversation; without TEXT: none
/help           this list
Ctrl-C stops an answer, not the program."""

EPILOG = f"""\
examples:
  headrace chat                                   the default model, started here
  headrace chat owner/model --temperature 0
  headrace chat --url http://127.0.0.1:8000       a server that runs already

inside:
{COMMANDS}
"""


def add_parser(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "chat", help="talk to a model in the terminal", description="Talk to a model in the terminal.", epilog=EPILOG
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model to start here, or the name to ask for with --url; default: the first one")
    parser.add_argument("--url", metavar="URL", help="talk to this OpenAI-compatible server instead of starting one")
    parser.add_argument("--api-key", metavar="KEY", help="key for --url (default: $HEADRACE_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser)
    parser.add_argument("--seed", type=reader(values.integer), metavar="N", help="the same answers each time (default: a fresh seed)")
    parser.set_defaults(run=run)


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None = None) -> None:
    group = parser.add_argument_group("sampling")
    shown = max_tokens or "what the context holds"
    group.add_argument(
        "--max-tokens", type=reader(values.count), metavar="N", default=max_tokens, help=f"most tokens of an answer (default: {shown})"
    )
    group.add_argument("--temperature", type=reader(values.number), metavar="T", help="0: always the likeliest token (default: 1)")
    group.add_argument("--top-p", type=reader(values.number), metavar="P", help="share of probability to choose from (default: 1)")


def run(args: argparse.Namespace) -> int:
    options = {name: value for name in ("max_tokens", "temperature", "top_p", "seed") if (value := getattr(args, name)) is not None}
    with _client(args) as client:
        model = args.model if args.url and args.model else client.model()
        conversation = Conversation(client, model=model, options=options, system=args.system, out=sys.stdout)
        with _history():
            if sys.stdin.isatty():
                print(f"{model}. /help lists the commands.")
            talk(conversation, prompt="> " if sys.stdin.isatty() else "")
    return 0


@contextlib.contextmanager
def _client(args: argparse.Namespace) -> Iterator[ChatClient]:
    if args.url:
        yield ChatClient(args.url, api_key=args.api_key or os.environ.get("HEADRACE_API_KEY"))
        return
    from headrace.cli.local_server import local_server
    from headrace.models import store

    path = store.resolve_model(args.model)
    print(f"Starting {path.name} ...", file=sys.stderr)
    with local_server(path) as client:
        yield client


class Conversation:
    """The messages so far, and one turn at a time."""

    def __init__(self, client: ChatClient, *, model: str, options: dict[str, Any], system: str | None, out: TextIO) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._out = out
        self.messages: list[Message] = []
        self.clear(system)

    def clear(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """One turn. A turn without an answer leaves no trace; one that is stopped keeps what was said."""
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        stream = self._client.stream(self.messages, model=self._model, options=self._options)
        try:
            with contextlib.closing(stream):  # type: ignore[type-var]  # a generator closes
                for piece in stream:
                    answer.append(piece)
                    self._write(piece)
        except KeyboardInterrupt:
            self._write(" [stopped]")
        except ChatError as error:
            self._write(f"[{error}]")
        self._write("\n")
        if answer:
            self.messages.append({"role": "assistant", "content": "".join(answer)})
        else:
            self.messages.pop()  # many templates refuse two user messages in a row

    def command(self, line: str) -> bool:
        """Carry out a line that starts with a slash; False: leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/clear":
                self.clear(self.system)
            case "/system":
                self.clear(rest.strip() or None)
            case "/help":
                self._write(f"{COMMANDS}\n")
            case _:
                self._write(f"There is no command {name}; /help lists them.\n")
        return True

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def talk(conversation: Conversation, *, prompt: str, read: Callable[[str], str] = input) -> None:
    """Read lines until /exit or the end of the input."""
    while True:
        try:
            line = read(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        if line.startswith("/"):
            if not conversation.command(line):
                return
        elif line:
            conversation.say(line)


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Lines of earlier chats under the arrow keys, where the terminal can do it."""
    try:
        import readline
    except ImportError:  # Python built without it: chat works all the same
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    from headrace.models.store import cache_root

    file = cache_root() / "chat_history"
    with contextlib.suppress(FileNotFoundError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        file.parent.mkdir(parents=True, exist_ok=True)
        readline.write_history_file(file)
