"""Guessing tokens before the model gives them (prompt lookup), and when that pays.

Where the last few tokens of a request stood before, in its prompt or its answer, the tokens that followed them there are guessed to follow
again. A step computes them behind the token it computes anyway, and the runner keeps what it would have sampled in their places without
them: guesses that are right are tokens for the price of some rows in a step, wrong ones cost that price. Answers never change.

Guesses are taken likeliest first, as long as that gives more tokens a second: their chance is the request's own moving acceptance rate, the
price comes from the step-time model. So nothing is guessed where the machine is busy with many rows, and a request whose guesses are wrong
pauses, longer each time. Until the price has been measured in a few steps, all guesses are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.config import SpeculativeConfig
from headrace.core.request import Request
from headrace.core.step_time import StepTimeModel
from headrace.core.step_work import StepWork

FIRST_ACCEPTANCE = 0.7  # assumed of a request that nothing is known of
FOLLOW = 0.15  # how fast the acceptance rate follows
MIN_GAIN = 1.03  # tokens a second must rise by so much: a step that guesses is not planned while the one before it runs
TRIALS = 8  # steps with guesses that are run to learn their price
MAX_MISSES = 16  # lookups in a row that find nothing before the request pauses
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # tokens without guesses


@dataclass(slots=True, kw_only=True)
class _Record:
    """What is known of one request."""

    text: str = ""  # its tokens as characters, so that searching is fast
    acceptance: float = FIRST_ACCEPTANCE  # chance that a guess is right, given that those before it are; moving
    misses: int = 0  # lookups in a row that found nothing
    pause: int = FIRST_PAUSE  # tokens of the next pause
    resume_at: int = 0  # nothing is guessed while the request has fewer tokens


class Speculation:
    """Of all requests of one scheduler."""

    def __init__(self, config: SpeculativeConfig, step_time: StepTimeModel) -> None:
        self._config = config
        self._step_time = step_time
        self._records: dict[Request, _Record] = {}
        self.num_drafts = 0  # totals; never fall
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._records.pop(request, None)

    def expects(self, requests: Iterable[Request], *, num_rows: int, attended: int) -> bool:
        """Whether guesses for any of these would pay beside `num_rows` decoding rows, once the tokens now on their way are known."""
        chances = [chance for request in requests if self._is_open(request) for chance in self._chances(request, self._room(request))]
        return self._count_paying(chances, num_rows, attended) > 0

    def propose(self, requests: Sequence[Request], *, num_rows: int, attended: int, limit: int) -> dict[Request, tuple[int, ...]]:
        """At most `limit` guesses for decoding requests whose tokens are all known but the one that their rows in this step sample.

        num_rows, attended: of the step without guesses.
        """
        found: dict[Request, tuple[int, ...]] = {}
        for request in requests:
            if self._is_open(request) and (guesses := self._look_up(request)):
                found[request] = guesses
        ranked = sorted(
            ((chance, request) for request, guesses in found.items() for chance in self._chances(request, len(guesses))),
            key=lambda pair: -pair[0],
        )
        num_paying = self._count_paying([chance for chance, _ in ranked], num_rows, attended)
        counts = dict.fromkeys(found, 0)
        for _, request in ranked[: min(num_paying, limit)]:
            counts[request] += 1
        if found and not num_paying and self._count_paying([FIRST_ACCEPTANCE], num_rows, attended):  # it isn't the load
            for request in found:
                self._pause(request)
        return {request: guesses[: counts[request]] for request, guesses in found.items() if counts[request]}

    def take(self, request: Request, *, num_guessed: int, num_accepted: int) -> None:
        """What became of a request's guesses."""
        self.num_drafts += 1
        self.num_draft_tokens += num_guessed
        self.num_accepted_tokens += num_accepted
        record = self._record(request)
        for _ in range(num_accepted):
            record.acceptance += FOLLOW * (1.0 - record.acceptance)
        if num_accepted < num_guessed:
            record.acceptance -= FOLLOW * record.acceptance
        if record.acceptance > FIRST_ACCEPTANCE:
            record.pause = FIRST_PAUSE

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = _Record()
        return record

    def _is_open(self, request: Request) -> bool:
        if request.message.params.structured is not None:
            return False  # a grammar moves on with each token and knows the mask of one position at a time
        return self._room(request) > 0 and len(request.token_ids) >= self._record(request).resume_at

    def _room(self, request: Request) -> int:
        """Most guesses: the token sampled behind the last of them is still within the request's limit."""
        return min(self._config.num_speculative_tokens, request.max_total_tokens - request.num_computed - 1)

    def _chances(self, request: Request, count: int) -> list[float]:
        """That the first 1, 2, .. `count` guesses are all right."""
        acceptance = self._record(request).acceptance
        return [acceptance**place for place in range(1, count + 1)]

    def _look_up(self, request: Request) -> tuple[int, ...]:
        record = self._record(request)
        record.text += "".join(map(chr, request.token_ids[len(record.text) :]))
        config = self._config
        guesses = look_up(record.text, longest=config.prompt_lookup_max, shortest=config.prompt_lookup_min, count=self._room(request))
        record.misses = 0 if guesses else record.misses + 1
        if record.misses >= MAX_MISSES:
            self._pause(request)
        return guesses

    def _pause(self, request: Request) -> None:
        record = self._record(request)
        record.resume_at = len(request.token_ids) + record.pause
        record.pause = min(2 * record.pause, LONGEST_PAUSE)
        record.misses, record.acceptance = 0, FIRST_ACCEPTANCE

    def _count_paying(self, chances: Sequence[float], num_rows: int, attended: int) -> int:
        """How many guesses of these chances, likeliest first, give the most tokens a second; 0 where none is better."""
        if not chances or self._step_time.num_speculated < TRIALS or not self._step_time.ready:
            return len(chances)
        expected = float(num_rows)
        best, best_rate = 0, MIN_GAIN * expected / self._step_time.predict(StepWork(num_rows, attended))
        for count, chance in enumerate(sorted(chances, reverse=True), start=1):
            expected += chance
            more = attended * count // num_rows
            seconds = self._step_time.predict(StepWork(num_rows + count, attended + more), speculates=True)
            if expected / seconds > best_rate:
                best, best_rate = count, expected / seconds
        return best


def look_up(text: str, *, longest: int, shortest: int, count: int) -> tuple[int, ...]:
    """`count` tokens that followed the last tokens of `text` where those stood before; none where they did not.

    The longest suffix counts, from `longest` down to `shortest` tokens, at its latest place. Where what followed it reaches the end of the
    text, the text repeats itself, and so does the guess.
    """
    end = len(text) - 1  # a suffix is no earlier place of itself
    if text.rfind(text[-shortest:], 0, end) < 0:
        return ()
    for size in range(min(longest, end), shortest - 1, -1):
        place = text.rfind(text[-size:], 0, end)
        if place >= 0:
            followed = text[place + size : place + size + count]
            return tuple(map(ord, (followed * -(-count // len(followed)))[:count]))
    return ()
