"""Log probabilities of raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.messages import TokenLogprobs

LOGPROB_FLOOR = -1e4  # for a logit of -inf: what goes to clients is finite


def token_logprobs(logits_RV: Tensor, target_R: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row: the log probability and rank of the token `target_R` (int64), and the `counts` likeliest tokens.

    logits: float32 [R, V] without NaN or +inf.
    """
    log_z_R1 = torch.logsumexp(logits_RV, dim=1, keepdim=True)
    chosen_R1 = logits_RV.gather(1, target_R[:, None])
    rank_R = (logits_RV > chosen_R1).sum(dim=1) + 1
    logprobs = (chosen_R1 - log_z_R1).clamp_(min=LOGPROB_FLOOR).squeeze(1).tolist()
    ranks, targets = rank_R.tolist(), target_R.tolist()
    most = min(max(counts, default=0), logits_RV.shape[1])
    tops: list[list[tuple[int, float]]] = [[] for _ in counts]
    if most:
        values_RK, ids_RK = logits_RV.topk(most, dim=1)
        values = (values_RK - log_z_R1).clamp_(min=LOGPROB_FLOOR).tolist()
        tops = [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in zip(ids_RK.tolist(), values, strict=True)]
    return [
        TokenLogprobs(token_id=token, logprob=logprob, rank=rank, top=tuple(top[:count]))
        for token, logprob, rank, top, count in zip(targets, logprobs, ranks, tops, counts, strict=True)
    ]
