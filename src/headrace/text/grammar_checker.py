"""Finding out whether the form of an answer can be held by a grammar, at a price that the engine can pay.

A grammar from outside may make the library work for minutes, take gigabytes, or end its process. So each one is first tried out in a process
of its own, which is killed when it takes too long and started again with the next one. Verdicts are remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, cast

import msgspec

from headrace.errors import EngineUnavailable, InvalidRequest, RequestFailed
from headrace.sampling_params import StructuredOutputs
from headrace.text.grammar import CANNOT, check_size, grammar_of, refusal
from headrace.text.grammar_vocabulary import GrammarVocabulary
from headrace.text.grammar_worker import read_frame, write_frame
from headrace.text.tokenizer import Tokenizer

NICE = 10  # running answers come first
TRY_S = 6.0  # a form that takes longer is refused
START_S = 60.0  # for a new process, on a machine that is busy
MAX_VERDICTS = 1024


class GrammarChecker:
    """One per process that takes requests. `close()` ends the process it started.

    The process is started for the first form and stays: most servers are never asked for one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._verdicts: OrderedDict[tuple[str, bytes, str], str | None] = OrderedDict()
        self._worker: _Worker | None = None
        self._turn = threading.Lock()  # one form is tried out at a time
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-checker")
        self._vocabulary: GrammarVocabulary | None = None
        self._closed = False

    @property
    def vocabulary(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary.of(self._tokenizer)
        return self._vocabulary

    async def check(self, structured: StructuredOutputs) -> None:
        """Returns when the form may go to the engine. Raises `InvalidRequest`, which names the field."""
        if not self._recall(structured):
            await asyncio.get_running_loop().run_in_executor(self._thread, self.check_now, structured)

    def check_now(self, structured: StructuredOutputs) -> None:
        """The same, in the caller's thread, which may have to wait for seconds."""
        with self._turn:
            if self._recall(structured):
                return
            check_size(structured)
            if structured.kind != "grammar":
                grammar_of(structured)  # what is wrong at first sight needs no other process
            self._remember(structured, self._try(structured))
        self._recall(structured)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        worker = self._worker
        if worker is not None:
            worker.stop()  # whoever waits for it goes on
        with self._turn:
            if self._worker is not None:
                self._worker.kill()
                self._worker = None

    def _recall(self, structured: StructuredOutputs) -> bool:
        """Whether the form is known to be good. Raises `InvalidRequest` where it is known to be bad."""
        key = _key(structured)
        if key not in self._verdicts:
            return False
        reason = self._verdicts[key]
        if reason is not None:
            raise InvalidRequest(reason, param=reason.partition(CANNOT)[0])
        return True

    def _remember(self, structured: StructuredOutputs, reason: str | None) -> None:
        self._verdicts[_key(structured)] = reason
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _start_worker(self) -> _Worker:
        """The one there is, or a new one."""
        if self._worker is None:
            self._worker = _Worker.start(self.vocabulary)
        return self._worker

    def _try(self, structured: StructuredOutputs) -> str | None:
        """Why the form is refused."""
        worker = self._start_worker()
        try:
            return worker.ask(structured, TRY_S)
        except (TimeoutError, EOFError) as error:
            worker.kill()
            self._worker = None
            if self._closed:
                raise EngineUnavailable("The server is shutting down.") from None
            why = "it takes too long to compile" if isinstance(error, TimeoutError) else "the grammar library cannot compile it"
            return refusal(structured, why + "; make it simpler").message


def _key(structured: StructuredOutputs) -> tuple[str, bytes, str]:
    return structured.kind, hashlib.blake2b(structured.source.encode("utf-8", "replace"), digest_size=16).digest(), structured.param


class _Worker:
    """The other process: see `grammar_worker`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, vocabulary: GrammarVocabulary) -> _Worker:
        """Returns when it is ready. Raises `RequestFailed`."""
        command = [sys.executable, "-m", "headrace.text.grammar_worker"]
        worker = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        with contextlib.suppress(ProcessLookupError):  # it has ended; asking it tells
            pid = worker._process.pid
            os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, pid) + NICE))  # before it imports anything
        with contextlib.suppress(OSError):  # it has ended; asking it tells
            worker._send(vocabulary)
        try:
            worker.ask(StructuredOutputs(kind="json_object"), START_S)
        except (TimeoutError, EOFError):
            worker.kill()
            raise RequestFailed("The process that checks grammars could not be started; its last words are on the server's stderr.") from None
        return worker

    def ask(self, structured: StructuredOutputs, seconds: float) -> str | None:
        """Why the form is refused. Raises `TimeoutError` where the answer takes longer, `EOFError` where the process has ended."""
        with contextlib.suppress(OSError):
            self._send(structured)
        source = cast(BinaryIO, self._process.stdout)
        ready, _, _ = select.select([source], [], [], seconds)
        if not ready:
            raise TimeoutError
        answer = read_frame(source)
        if answer is None:
            raise EOFError
        return msgspec.msgpack.decode(answer, type=str | None)

    def stop(self) -> None:
        self._process.kill()

    def kill(self) -> None:
        """Ends it, if it has not ended, and forgets it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent is lost
                    pipe.close()

    def _send(self, message: object) -> None:
        write_frame(cast(BinaryIO, self._process.stdin), message)
