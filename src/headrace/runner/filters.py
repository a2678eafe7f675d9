"""top_k, top_p and min_p.

Each of them comes down to a floor: the logit of the least likely token that it still needs. All tokens at or above the highest of the
three floors stay, so tokens of equal logit stay or go together and the order in which a sort meets them has no influence.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_SIZE = 128  # candidates looked at first where top_k does not say how many are needed
_GROWTH = 8


def candidates(x_RV: Tensor, *, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that stay: (float32 [R, K] logits, likeliest first, -inf for those that go; int64 [R, K] token ids).

    x: float32 [R, V] logits after temperature, the largest of each row 0. top_k: int64 [R], 0 off; top_p, min_p: float32 [R].
    The order is min_p, then top_k, then top_p over the probabilities of what those left.
    """
    vocab_size = x_RV.shape[1]
    size = min(vocab_size, max(int(top_k_R.max()), 1 if bool((top_k_R > 0).all()) else _FIRST_SIZE))
    while True:
        values_RK, ids_RK = x_RV.topk(size, dim=1)
        floor_R1, complete = _floor(x_RV, values_RK, top_k_R, top_p_R, min_p_R)
        if size == vocab_size or (complete and int((x_RV >= floor_R1).sum(dim=1).max()) <= size):
            return values_RK.masked_fill(values_RK < floor_R1, float("-inf")), ids_RK
        size = min(vocab_size, size * _GROWTH)


def _floor(x_RV: Tensor, values_RK: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> tuple[Tensor, bool]:
    """The floor of each row [R, 1], and whether the K largest values sufficed to find them."""
    floor_R1 = min_p_R.log()[:, None]
    last_R1 = (top_k_R - 1).clamp_(min=0)[:, None]
    kth_R1 = values_RK.gather(1, last_R1)
    floor_R1 = torch.where((top_k_R > 0)[:, None], torch.maximum(floor_R1, kth_R1), floor_R1)
    cut_R1 = (top_p_R < 1)[:, None]
    if not bool(cut_R1.any()):
        return floor_R1, True
    log_z_R1 = x_RV.masked_fill(x_RV < floor_R1, float("-inf")).logsumexp(dim=1, keepdim=True)
    share_RK = (values_RK - log_z_R1).double().exp().masked_fill_(values_RK < floor_R1, 0.0)
    up_to_RK = share_RK.cumsum(dim=1)
    needed_RK = up_to_RK - share_RK < top_p_R[:, None]  # the mass before a token has not reached top_p yet
    complete_R1 = ~cut_R1 | (up_to_RK[:, -1:] >= top_p_R[:, None]) | (values_RK[:, -1:] < floor_R1)
    least_R1 = values_RK.gather(1, needed_RK.sum(dim=1, keepdim=True).clamp_(min=1) - 1)
    floor_R1 = torch.where(cut_R1, torch.maximum(floor_R1, least_R1), floor_R1)
    return floor_R1, bool(complete_R1.all())
