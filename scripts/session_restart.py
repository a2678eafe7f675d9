#!/usr/bin/env python3
"""Time to the first token of a conversation's next turn: cold, warm, and after a restart with sessions on disk.

    python scripts/session_restart.py --tokens 2000 --conversations 5

Several conversations with a `session_id` each: the first turn brings about --tokens new tokens (cold), the second turn a short question
(warm); then the server ends by SIGTERM, another one starts with the same --session-dir, and each conversation goes on with another short
question (restarted), and one more (warm again). What stands after `--` goes to `headrace serve`. Prints medians in milliseconds. Exit status
1 unless restarted <= 1.3 x warm and < 0.4 x cold. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

from own_server import own_server
from plain_http import call, connect

MOST_OF_WARM, MOST_OF_COLD = 1.3, 0.4
WORDS = ("water", "wheel", "mill", "stream", "stone", "grain", "flour", "river", "gate", "flow", "turn", "power", "dam", "pond", "race", "gear")
QUESTIONS = ("And which of these words came first?", "Which one is the longest?", "Say one of them again.")


class Conversation:
    def __init__(self, number: int, words: int) -> None:
        draw = random.Random(number)
        self._name = f"conversation-{number}"
        self._messages = [{"role": "user", "content": f"Number {number}: " + " ".join(draw.choices(WORDS, k=words))}]

    def tokens(self, url: str) -> int:
        count: int = call(url, "/tokenize", {"messages": self._messages})["count"]
        return count

    def ask(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})

    def turn(self, url: str) -> float:
        """Seconds to the first token of the answer, which becomes part of the conversation."""
        body = {"messages": self._messages, "session_id": self._name, "max_tokens": 12, "temperature": 0, "stream": True}
        connection = connect(url)
        begin = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {response.read(500)!r}")
        first, text = 0.0, ""
        while line := response.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
                if piece:
                    first = first or time.monotonic() - begin
                    text += piece
        connection.close()
        if not first:
            raise SystemExit("an answer without a token")
        self._messages.append({"role": "assistant", "content": text})
        return first


def round_of(conversations: list[Conversation], url: str, question: str | None = None) -> float:
    """The median time to first token of a turn of each, in milliseconds."""
    times = []
    for conversation in conversations:
        if question is not None:
            conversation.ask(question)
        times.append(1000 * conversation.turn(url))
    return statistics.median(times)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--conversations", type=int, default=5)
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    args, serve = parser.parse_args(arguments[:at]), list(arguments[at + 1 :])
    conversations = [Conversation(number, args.tokens) for number in range(args.conversations)]  # a word is a token, or a little more
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--session-dir", folder, *serve]
        with own_server(flags) as server:
            Conversation(-1, 20).turn(server.url)  # what only the first request pays
            count = conversations[0].tokens(server.url)
            cold = round_of(conversations, server.url)
            warm = round_of(conversations, server.url, QUESTIONS[0])
            stopping = time.monotonic()
            if server.stop():
                raise SystemExit("the server did not end in good order: " + server.log_text()[-2000:])
            stopped = time.monotonic() - stopping
        starting = time.monotonic()
        with own_server(flags) as server:
            started = time.monotonic() - starting
            Conversation(-2, 20).turn(server.url)
            restarted = round_of(conversations, server.url, QUESTIONS[1])
            again = round_of(conversations, server.url, QUESTIONS[2])
    print(
        f"{args.conversations} conversations of {count} tokens; stop {stopped:.1f} s, start {started:.1f} s; time to first token, medians: "
        f"cold {cold:.1f} ms, warm {warm:.1f} ms, restarted {restarted:.1f} ms, warm again {again:.1f} ms; "
        f"restarted is {restarted / warm:.2f} x warm, {restarted / cold:.3f} x cold"
    )
    return int(restarted > MOST_OF_WARM * warm or restarted >= MOST_OF_COLD * cold)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
