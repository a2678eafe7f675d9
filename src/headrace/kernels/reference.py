"""The slow oracle of the kernels: float64, one token and one head at a time, straight from the definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_tables: list[list[int]],
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> Tensor:
    """What `kernels.attention.paged_attention` must return, as float64 [T, H, D].

    Row r has `query_lens[r]` tokens, the last ones of a context of `context_lens[r]`; its position p is stored in block
    `block_tables[r][p // block_size]` of the caches [num_blocks, block_size, K, D].
    """
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    num_heads = q_THD.shape[1]
    out = torch.zeros(q_THD.shape, dtype=torch.float64)
    token = 0
    for table, num_queries, context in zip(block_tables, query_lens, context_lens, strict=True):
        for position in range(context - num_queries, context):
            lowest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            places = [(table[p // block_size], p % block_size) for p in range(lowest, position + 1)]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                query = q_THD[token, head].double()
                scores = [float(query @ k_cache[block, offset, kv_head].double()) * scale for block, offset in places]
                if logit_softcap is not None:
                    scores = [logit_softcap * math.tanh(score / logit_softcap) for score in scores]
                weights = [math.exp(score - max(scores)) for score in scores]
                values = torch.stack([v_cache[block, offset, kv_head].double() for block, offset in places])
                out[token, head] = torch.tensor(weights, dtype=torch.float64) @ values / sum(weights)
            token += 1
    return out
