"""A tiny random llama on disk, its reference in transformers, and a hand that writes plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.core.messages import Row, SampledRow, SlotStart, StepPlan
from headrace.runner.interface import Runner
from headrace.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
EOS = (127,)


def save_tiny_llama(directory: Path, **changes: Any) -> Any:
    """Saves the model in fp32 and returns it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # logits far enough apart that greedy choices have no near ties
        "eos_token_id": EOS[0],
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()
    model.save_pretrained(directory)
    return model


def greedy_reference(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


@dataclass(slots=True, kw_only=True)
class Track:
    """One request as the hand sees it."""

    slot: int
    prompt: tuple[int, ...]
    params: SamplingParams
    blocks: list[int] = field(default_factory=list)
    told: int = 0  # blocks that the runner knows
    computed: int = 0  # tokens whose keys and values stand in the blocks
    answer: list[int] = field(default_factory=list)
    started: bool = False
    results: list[SampledRow] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)


class Hand:
    """Writes plans for a runner: blocks are taken in order and never given back unless a test does so."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.free = list(range(runner.num_blocks))
        self.step_id = 0
        self.tracks: dict[str, Track] = {}

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams = GREEDY, *, slot: int | None = None) -> Track:
        track = Track(slot=len(self.tracks) if slot is None else slot, prompt=tuple(prompt), params=params)
        self.tracks[request_id] = track
        return track

    def step(self, parts: dict[str, int], *, guesses: dict[str, Sequence[int]] | None = None, **transfers: Any) -> list[SampledRow]:
        """Computes the next so many tokens of each named request, and `guesses` behind its last one."""
        starts, rows = [], []
        for request_id, count in parts.items():
            track = self.tracks[request_id]
            if not track.started:
                starts.append(
                    SlotStart(
                        request_id=request_id,
                        slot=track.slot,
                        token_ids=track.tokens,
                        num_prompt_tokens=len(track.prompt),
                        params=track.params,
                        eos_token_ids=EOS,
                    )
                )
                track.started, track.told = True, 0
            end = track.computed + count
            guessed = tuple((guesses or {}).get(request_id, ()))
            while len(track.blocks) * self.runner.block_size < end + len(guessed):
                track.blocks.append(self.free.pop(0))
            known = (*track.tokens[track.computed : end], *guessed)
            rows.append(
                Row(
                    request_id=request_id,
                    slot=track.slot,
                    start=track.computed,
                    num_tokens=count + len(guessed),
                    token_ids=() if track.answer and track.computed == len(track.tokens) - 1 and not guessed else known,
                    block_offset=track.told,
                    new_block_ids=tuple(track.blocks[track.told :]),
                    sample=end == len(track.tokens),
                    num_speculated=len(guessed),
                )
            )
            track.told, track.computed = len(track.blocks), end
        self.step_id += 1
        result = self.runner.execute(StepPlan(step_id=self.step_id, rows=tuple(rows), starts=tuple(starts), **transfers))
        assert result.step_id == self.step_id
        assert [row.request_id for row in result.rows] == list(parts)
        for row in result.rows:
            self.tracks[row.request_id].answer += row.token_ids
            self.tracks[row.request_id].results.append(row)
            self.tracks[row.request_id].computed += max(0, len(row.token_ids) - 1)
        return list(result.rows)

    def finish(self, request_ids: Sequence[str], count: int, *, chunk: int = 10_000) -> None:
        """Runs the requests together until each has `count` tokens."""
        while True:
            parts = {
                request_id: min(chunk, len(track.tokens) - track.computed)
                for request_id in request_ids
                if len((track := self.tracks[request_id]).answer) < count
            }
            if not parts:
                return
            for row in self.step(parts):
                assert row.error is None, row.error
