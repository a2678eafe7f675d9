"""Fills the input of a step up to the static shape of a bucket.

The places past the step's own tokens and rows hold token 0 at position 0 in no slot, and rows without tokens: the kernels store nothing for
them and let them attend to nothing. All buffers are made once; entries of the block table past a row's context are not read, so
they are not cleared.

Legend: T tokens, R rows, B blocks of the static length.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headrace.runner.batch_inputs import Batch
from headrace.runner.buckets import Bucket

NO_SLOT = -1


@dataclass(slots=True)
class StaticInputs:
    """The buffers of one bucket, in the order of `StepModule.forward`."""

    input_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    query_start_R1: Tensor
    context_len_R: Tensor
    block_table_RB: Tensor
    prompt_tokens_R: Tensor

    @classmethod
    def empty(cls, bucket: Bucket, table_width: int) -> StaticInputs:
        tokens, rows = bucket.num_tokens, bucket.num_rows
        return cls(
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.int64),
            torch.full((tokens,), NO_SLOT, dtype=torch.int64),
            torch.zeros(rows + 1, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
            torch.zeros(rows, table_width, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
        )

    def fill(self, batch: Batch) -> list[Tensor]:
        """The batch and its padding; the tensors are overwritten by the next call. The batch must fit."""
        meta, num_tokens, num_rows = batch.meta, len(batch.input_ids_T), len(batch.order)
        assert meta.prompt_tokens_R is not None, "batches of the runner say it"
        for buffer, values, padding in (
            (self.input_ids_T, batch.input_ids_T, 0),
            (self.positions_T, meta.positions_T, 0),
            (self.slot_mapping_T, meta.slot_mapping_T, NO_SLOT),
            (self.query_start_R1, meta.query_start_R1, num_tokens),
            (self.context_len_R, meta.context_len_R, 0),
            (self.prompt_tokens_R, meta.prompt_tokens_R, 0),
        ):
            buffer[: len(values)] = values
            buffer[len(values) :] = padding
        self.block_table_RB[:num_rows, : meta.block_table_RB.shape[1]] = meta.block_table_RB
        return [getattr(self, each.name) for each in fields(self)]
