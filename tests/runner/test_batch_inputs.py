from __future__ import annotations

import random

import pytest
import torch

from headrace.core.messages import Row, SlotStart
from headrace.runner.batch_inputs import BatchInputs
from headrace.runner.token_history import TokenHistory
from headrace.sampling_params import SamplingParams

BLOCK = 4


def make(num_slots: int = 6, max_model_len: int = 40) -> tuple[TokenHistory, BatchInputs]:
    history = TokenHistory(num_slots=num_slots, max_model_len=max_model_len)
    inputs = BatchInputs(history=history, max_num_tokens=100, max_blocks=10, block_size=BLOCK, device=torch.device("cpu"), deterministic=False)
    return history, inputs


def start(history: TokenHistory, slot: int, tokens: list[int]) -> None:
    history.start(
        SlotStart(request_id=f"r{slot}", slot=slot, token_ids=tuple(tokens), num_prompt_tokens=1, params=SamplingParams(), eos_token_ids=())
    )


def row(slot: int, first: int, count: int, *, offset: int = 0, blocks: tuple[int, ...] = ()) -> Row:
    return Row(request_id=f"r{slot}", slot=slot, start=first, num_tokens=count, token_ids=(), block_offset=offset, new_block_ids=blocks, sample=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_of_random_rows(seed: int) -> None:
    rng = random.Random(seed)
    history, inputs = make()
    slots = rng.sample(range(6), rng.randrange(1, 7))
    free = rng.sample(range(1000), 60)
    tokens: dict[int, list[int]] = {}
    tables: dict[int, list[int]] = {}
    rows = []
    for slot in slots:
        tokens[slot] = [rng.randrange(500) for _ in range(rng.randrange(1, 30))]
        start(history, slot, tokens[slot])
        first = rng.randrange(len(tokens[slot]))
        count = rng.choice((1, rng.randrange(1, len(tokens[slot]) - first + 1)))
        tables[slot] = [free.pop() for _ in range(-(-(first + count) // BLOCK))]
        rows.append(row(slot, first, count, blocks=tuple(tables[slot])))
        inputs.place_blocks(rows[-1])
    batch = inputs.build(rows)
    meta = batch.meta
    assert sorted(batch.order) == list(range(len(rows)))
    assert [rows[i].num_tokens == 1 for i in batch.order] == sorted((r.num_tokens == 1 for r in rows), reverse=True)
    assert meta.num_decode_rows == sum(r.num_tokens == 1 for r in rows)
    assert meta.query_start_R1.tolist() == batch.query_starts
    assert batch.query_starts[-1] == len(batch.input_ids_T) == len(meta.positions_T) == len(meta.slot_mapping_T)
    assert meta.context_len_R.tolist() == meta.context_lens
    for place, index in enumerate(batch.order):
        planned = rows[index]
        part = slice(batch.query_starts[place], batch.query_starts[place + 1])
        positions = list(range(planned.start, planned.start + planned.num_tokens))
        table = tables[planned.slot]
        assert meta.query_lens[place] == planned.num_tokens
        assert meta.context_lens[place] == positions[-1] + 1
        assert meta.prompt_lens is not None
        assert meta.prompt_lens[place] == 1  # what start() says
        assert meta.prompt_tokens_R is not None
        assert meta.prompt_tokens_R[place] == (planned.start == 0)
        assert meta.positions_T[part].tolist() == positions
        assert batch.input_ids_T[part].tolist() == [tokens[planned.slot][p] for p in positions]
        assert meta.slot_mapping_T[part].tolist() == [table[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
        assert meta.block_table_RB[place, : len(table)].tolist() == table


def test_tables_grow_and_change_where_a_row_says() -> None:
    history, inputs = make()
    start(history, 2, list(range(12)))
    for planned in (row(2, 0, 4, blocks=(7,)), row(2, 4, 4, offset=1, blocks=(3,)), row(2, 8, 1, offset=1, blocks=(5, 9))):
        inputs.place_blocks(planned)
        table = inputs.build([planned]).meta.block_table_RB.tolist()
    assert table == [[7, 5, 9]]


def test_a_sample_is_the_next_input() -> None:
    history, inputs = make()
    start(history, 1, [5, 6])
    start(history, 3, [8])
    history.append([3, 1], [40, 41])
    inputs.place_blocks(row(1, 0, 1, blocks=(0,)))
    inputs.place_blocks(row(3, 0, 1, blocks=(1,)))
    assert inputs.build([row(1, 2, 1), row(3, 1, 1)]).input_ids_T.tolist() == [41, 40]
    with pytest.raises(AssertionError, match="not known yet"):
        inputs.build([row(1, 3, 1)])


def test_a_slot_is_held_until_it_is_given_away_or_released() -> None:
    history, _ = make()
    assert not history.holds(row(0, 0, 1))
    start(history, 0, [1])
    assert history.holds(row(0, 0, 1))
    history.release(0)
    assert not history.holds(row(0, 0, 1))
