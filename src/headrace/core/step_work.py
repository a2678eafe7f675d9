"""What is in a step: all that its time depends on."""

from __future__ import annotations

from typing import NamedTuple


class StepWork(NamedTuple):
    """What tokens attend to is the sum over rows of tokens * context, their own included: the work of attention."""

    decode_tokens: int = 0  # rows of one token that yield the next, and guesses behind them
    decode_attended: int = 0  # by these
    prompt_tokens: int = 0  # of all other rows
    prompt_attended: int = 0  # by these
    sampled: int = 0  # rows of both kinds that yield a token

    @property
    def tokens(self) -> int:
        return self.decode_tokens + self.prompt_tokens

    def with_decode(self, context: int) -> StepWork:
        """With one decode row more, whose token attends to so many."""
        return self._replace(decode_tokens=self.decode_tokens + 1, decode_attended=self.decode_attended + context, sampled=self.sampled + 1)

    def with_prompt(self, num_tokens: int, context: int) -> StepWork:
        """With so many prompt tokens more, behind `context` computed ones."""
        attended = num_tokens * (context + num_tokens)
        return self._replace(prompt_tokens=self.prompt_tokens + num_tokens, prompt_attended=self.prompt_attended + attended)


NO_WORK = StepWork()
