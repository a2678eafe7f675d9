"""Attention over the paged KV storage, eager, for CPU and CUDA.

A step's tokens lie flat, row after row; rows with one token (decode) come first. Decode rows are answered together: rows of similar
context length form a group, whose keys and values are gathered into one padded batch. Every other row (a prefill chunk) is answered
alone, over exactly its own context. What to gather and what to mask is the same in every layer with the same window, so it is planned
once a step and kept in the metadata.

Padding repeats the row's own last token under a mask, never a foreign or unwritten position: a non-finite value that another request
left in the storage can't reach a row (0 * NaN is NaN).

Shape suffixes: T tokens of the step, R rows, B blocks a row, G rows of a group, L gathered context, H query heads, K key/value heads,
M query heads per key/value head, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_GATHERED_TOKENS = 1 << 16  # most padded context tokens in one group: bounds the work space
_MIN_PADDING = 32  # up to so many padded tokens a row always beat one more group
_SOFTCAP_QUERY_SLICE = 256  # queries whose scores are held at once where they are computed by hand
MAX_FLOAT16 = 65504.0
_DETERMINISTIC_STEP = 64  # smallest padded context in deterministic mode


@dataclass(slots=True, kw_only=True)
class _Group:
    """Query tokens first .. last-1 of the planned order, answered by one call."""

    first: int
    last: int
    slots: Tensor  # int64 [G * L], flat KV positions
    mask: Tensor | None  # [G, 1, 1, L] in the query's dtype, 0 or -inf; None: all rows fill L


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """The tokens first .. last-1 of one prefill row."""

    first: int
    last: int
    slots: Tensor | slice  # int64 [L], or a run of storage
    mask: Tensor | None  # [T, L]; None: plain causal
    is_causal: bool


@dataclass(slots=True, kw_only=True)
class _StepLayout:
    order: Tensor | None  # int64 [tokens in groups]; None: already in order
    inverse: Tensor | None
    num_grouped: int  # the first so many tokens of the step are answered in groups
    groups: list[_Group]
    chunks: list[_Chunk]


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of one step stand. Built once a step, read by every layer; the lists spare a GPU the round trips.

    The rows 0 .. num_decode_rows-1 have exactly one token each. Every position below a row's context length has been written, or is
    written in this step, when a row attends.
    """

    query_start_R1: Tensor  # int32 [R + 1]: token offsets of the rows, and T at the end
    context_len_R: Tensor  # int32 [R]: tokens of the row's context, this step's included
    block_table_RB: Tensor  # int32 [R, B]: entries past a row's context are not read
    slot_mapping_T: Tensor  # int64 [T]: flat KV position (block * block_size + offset) that a token's key and value go to
    positions_T: Tensor  # int64 [T]
    query_lens: list[int]  # [R] tokens of each row in this step
    context_lens: list[int]  # [R] same as context_len_R
    num_decode_rows: int
    prompt_lens: list[int] | None = None  # [R] tokens of each row's prompt, for RoPE that depends on it; None: the context lengths
    prompt_tokens_R: Tensor | None = None  # int32 [R]: the first so many of a row's tokens in this step are of its prompt; None: none are
    deterministic: bool = False  # every token attends in a shape that depends on its position only
    _layouts: dict[tuple[int | None, torch.dtype, int], _StepLayout] = field(default_factory=dict, init=False, repr=False)

    def layout(self, *, sliding_window: int | None, dtype: torch.dtype, block_size: int) -> _StepLayout:
        """The plan for layers of one kind; made on first use."""
        key = (sliding_window, dtype, block_size)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = _plan_step(self, sliding_window, dtype, block_size)
        return found


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
    """Store the step's keys and values. Caches: [num_blocks, block_size, K, D], contiguous; slots: int64 [T], distinct.

    What a float16 cache can't hold becomes the largest that it can, not infinity.
    """
    for new, cache in ((k_TKD, k_cache), (v_TKD, v_cache)):
        flat = cache.view(-1, cache.shape[2], cache.shape[3])
        if new.dtype != cache.dtype:
            new = (new.clamp(-MAX_FLOAT16, MAX_FLOAT16) if cache.dtype == torch.float16 else new).to(cache.dtype)
        flat.index_copy_(0, slot_mapping_T, new)


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> Tensor:
    """Causal attention of the step's tokens over their rows' contexts; the step's own keys must be stored already.

    q: [T, H, D] float32, bfloat16 or float16; caches: [num_blocks, block_size, K, D] contiguous, H a multiple of K (query heads
    share key/value heads in order). A token at position p sees the positions p - sliding_window < j <= p. With `logit_softcap` c
    a score s becomes c * tanh(s / c). Returns [T, H, D].
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    k_flat, v_flat = (cache.view(-1, num_kv_heads * head_dim) for cache in (k_cache, v_cache))
    q_TKMD = q_THD.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    layout = meta.layout(sliding_window=sliding_window, dtype=q_THD.dtype, block_size=block_size)

    def gather(flat: Tensor, slots: Tensor | slice, rows: int) -> Tensor:
        """[rows, K, L, D], a view of one packed copy, or of the storage itself."""
        packed = flat[slots] if isinstance(slots, slice) else flat.index_select(0, slots)
        return packed.to(q_THD.dtype).view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)

    pieces: list[Tensor] = []
    q_grouped = q_TKMD[: layout.num_grouped] if layout.order is None else q_TKMD.index_select(0, layout.order)
    for group in layout.groups:
        rows = group.last - group.first
        k, v = gather(k_flat, group.slots, rows), gather(v_flat, group.slots, rows)
        pieces.append(_attend(q_grouped[group.first : group.last], k, v, group.mask, False, scale, logit_softcap))
    if layout.inverse is not None:
        pieces = [torch.cat(pieces).index_select(0, layout.inverse)]
    for chunk in layout.chunks:
        # one row's key/value heads are the batch, the query heads that share one are its heads: no copy of keys for each of them
        q = q_TKMD[chunk.first : chunk.last].permute(1, 2, 0, 3)
        k, v = (gather(flat, chunk.slots, 1).transpose(0, 1).expand(-1, q.shape[1], -1, -1) for flat in (k_flat, v_flat))
        out_KMTD = _attend(q, k, v, chunk.mask, chunk.is_causal, scale, logit_softcap)
        pieces.append(out_KMTD.permute(2, 0, 1, 3))
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out.reshape(num_tokens, num_heads, head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, softcap: float | None) -> Tensor:
    """q [batch, heads, queries, D], k and v [batch, heads, L, D] -> like q."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    out = torch.empty_like(q)
    num_queries, length = q.shape[2], k.shape[2]
    for first in range(0, num_queries, _SOFTCAP_QUERY_SLICE):
        last = min(first + _SOFTCAP_QUERY_SLICE, num_queries)
        scores = torch.matmul(q[:, :, first:last], k.transpose(-1, -2)).float() * scale
        scores = torch.tanh(scores / softcap) * softcap
        if is_causal:
            future = torch.ones(last - first, length, dtype=torch.bool, device=q.device).triu_(first + 1)
            scores.masked_fill_(future, float("-inf"))
        elif mask is not None:
            scores += mask[..., first:last, :] if mask.shape[-2] > 1 else mask
        out[:, :, first:last] = torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)
    return out


def _plan_step(meta: AttentionMetadata, window: int | None, dtype: torch.dtype, block_size: int) -> _StepLayout:
    chunks: list[_Chunk] = []
    grouped_rows: Sequence[int]
    if meta.deterministic:
        grouped_rows = [row for row, length in enumerate(meta.query_lens) for _ in range(length)]
        contexts = [context - length + 1 + i for context, length in zip(meta.context_lens, meta.query_lens, strict=True) for i in range(length)]
    else:
        grouped_rows = range(meta.num_decode_rows)
        contexts = meta.context_lens[: meta.num_decode_rows]
        first = meta.num_decode_rows
        for row in range(meta.num_decode_rows, len(meta.query_lens)):
            chunks.append(_plan_chunk(meta, row, first, window, dtype, block_size))
            first += meta.query_lens[row]
    attended = contexts if window is None else [min(context, window) for context in contexts]
    order, bounds, lengths = _partition(attended, deterministic=meta.deterministic)
    device = meta.block_table_RB.device
    in_order = order == list(range(len(order)))
    rows_R = torch.tensor([grouped_rows[i] for i in order], dtype=torch.int64, device=device)
    context_R = torch.tensor([contexts[i] for i in order], dtype=torch.int64, device=device)
    start_R = context_R - torch.tensor([attended[i] for i in order], dtype=torch.int64, device=device)
    groups: list[_Group] = []
    for (first, last), length in zip(pairwise(bounds), lengths, strict=True):
        offsets_GL = start_R[first:last, None] + torch.arange(length, device=device)
        last_G1 = context_R[first:last, None] - 1
        positions_GL = torch.minimum(offsets_GL, last_G1)
        blocks_GL = meta.block_table_RB[rows_R[first:last, None], positions_GL // block_size]
        mask = None
        if meta.deterministic or any(attended[i] != length for i in order[first:last]):
            mask = torch.zeros(offsets_GL.shape, dtype=dtype, device=device).masked_fill_(offsets_GL > last_G1, float("-inf"))[:, None, None]
        slots = blocks_GL.to(torch.int64) * block_size + positions_GL % block_size
        groups.append(_Group(first=first, last=last, slots=slots.view(-1), mask=mask))
    order_T = None if in_order else torch.tensor(order, dtype=torch.int64, device=device)
    inverse_T = None if order_T is None else torch.argsort(order_T)
    return _StepLayout(order=order_T, inverse=inverse_T, num_grouped=len(order), groups=groups, chunks=chunks)


def _plan_chunk(meta: AttentionMetadata, row: int, first: int, window: int | None, dtype: torch.dtype, block_size: int) -> _Chunk:
    device = meta.block_table_RB.device
    num_queries, context = meta.query_lens[row], meta.context_lens[row]
    start = context - num_queries
    lowest = 0 if window is None else max(0, start + 1 - window)
    positions_L = torch.arange(lowest, context, device=device)
    slots: Tensor | slice = meta.block_table_RB[row, positions_L // block_size].to(torch.int64) * block_size + positions_L % block_size
    run = _as_run(slots) if device.type == "cpu" else None  # to look would make a GPU wait
    slots = slots if run is None else run
    is_causal = start == 0 and (window is None or context <= window)
    mask = None
    if not is_causal and num_queries > 1:
        queries_T1 = torch.arange(start, context, device=device)[:, None]
        hidden = positions_L > queries_T1
        if window is not None:
            hidden |= positions_L <= queries_T1 - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return _Chunk(first=first, last=first + num_queries, slots=slots, mask=mask, is_causal=is_causal and num_queries > 1)


def _as_run(slots: Tensor) -> slice | None:
    """Blocks that follow each other in the storage, as a long prompt gets them from a fresh pool, need no copy."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first != len(slots) - 1 or not bool((slots.diff() == 1).all()):
        return None
    return slice(first, last + 1)


def _partition(attended: Sequence[int], *, deterministic: bool) -> tuple[list[int], list[int], list[int]]:
    """Group rows by attended length: (order of rows, group bounds in that order, padded length of each group).

    A group is padded by at most a quarter of its longest row. In deterministic mode a row's padded length is a function of its own
    length, and only rows of the same one share a group.
    """
    padded = [_padded_length(length) for length in attended] if deterministic else list(attended)
    longest = max(padded, default=0)
    order = list(range(len(padded)))
    one_group = all(_fits(longest, length, deterministic) for length in padded)
    if not one_group or longest * len(padded) > _MAX_GATHERED_TOKENS:
        order.sort(key=lambda i: -padded[i])
    if not order:
        return [], [0], []
    bounds, lengths = [0], [longest]
    for place, i in enumerate(order):
        full = place > bounds[-1] and (place + 1 - bounds[-1]) * lengths[-1] > _MAX_GATHERED_TOKENS
        if full or not _fits(lengths[-1], padded[i], deterministic):
            bounds.append(place)
            lengths.append(padded[i])
    bounds.append(len(order))
    return order, bounds, lengths


def _fits(longest: int, length: int, deterministic: bool) -> bool:
    return length == longest if deterministic else longest - length <= max(_MIN_PADDING, longest // 4)


def _padded_length(length: int) -> int:
    """The next multiple of an eighth of the power of two above; at least `_DETERMINISTIC_STEP`."""
    step = max(_DETERMINISTIC_STEP, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step
