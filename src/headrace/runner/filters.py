"""top_k, top_p and min_p.

Each of them comes down to a floor: the logit of the least likely token that it still needs. All tokens at or above the highest of the
three floors stay, so tokens of equal logit stay or go together and the order in which a sort meets them has no influence.

A distribution is mostly so steep that its few largest logits settle everything. Where it is flat the floor of top_p is found without
sorting the vocabulary: the mass is summed in bins of equal width, and only the bin in which top_p is reached is sorted.

Legend: R rows, V vocabulary, K largest logits looked at, N bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_SIZE = 128  # largest logits looked at; more where top_k asks for more
_BINS = 2048
_WIDEST = 40.0  # the bins span so much below the largest logit: what lies lower has no mass worth a bin
_NEVER = float("-inf")


@dataclass(slots=True, kw_only=True)
class Kept:
    """What stays in each row."""

    floor_R1: Tensor  # float32: logits from here up stay
    values_RK: Tensor  # float32: the largest logits, likeliest first; -inf for those that go
    ids_RK: Tensor  # int64: their tokens
    fits_R: Tensor  # bool: all that stays is among the K


def keep(x_RV: Tensor, *, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Kept:
    """The order is min_p, then top_k, then top_p over the probabilities of what those left.

    x: float32 [R, V] logits after temperature, the largest of each row 0. top_k: int64 [R], 0 off; top_p, min_p: float32 [R].
    """
    size = min(x_RV.shape[1], max(int(top_k_R.max()), _FIRST_SIZE))
    values_RK, ids_RK = x_RV.topk(size, dim=1)
    kth_R1 = values_RK.gather(1, (top_k_R - 1).clamp_(min=0)[:, None])
    floor_R1 = min_p_R.log()[:, None]
    floor_R1 = torch.where((top_k_R > 0)[:, None], torch.maximum(floor_R1, kth_R1), floor_R1)
    cut = torch.nonzero(top_p_R < 1).squeeze(1)
    if len(cut):
        floor_R1[cut] = _raise_floor(x_RV[cut], values_RK[cut], floor_R1[cut], top_p_R[cut, None])
    fits_R = (x_RV >= floor_R1).sum(dim=1) <= size
    return Kept(floor_R1=floor_R1, values_RK=values_RK.masked_fill(values_RK < floor_R1, _NEVER), ids_RK=ids_RK, fits_R=fits_R)


def _raise_floor(x_RV: Tensor, values_RK: Tensor, floor_R1: Tensor, top_p_R1: Tensor) -> Tensor:
    """The floor after top_p of rows that have one; `floor_R1` is what min_p and top_k made of it."""
    x_RV = x_RV.masked_fill(x_RV < floor_R1, _NEVER)
    log_z_R1 = x_RV.logsumexp(dim=1, keepdim=True)
    share_RK = (values_RK.masked_fill(values_RK < floor_R1, _NEVER) - log_z_R1).double().exp_()
    raised_R1, found_R = _reach(values_RK, share_RK, torch.zeros_like(top_p_R1), top_p_R1)
    missing = torch.nonzero(~found_R & (values_RK[:, -1] >= floor_R1[:, 0])).squeeze(1)
    if len(missing) and values_RK.shape[1] < x_RV.shape[1]:
        for rows in missing.split(1 if x_RV.device.type == "cpu" else len(x_RV)):  # one row's work stays in a core's cache
            raised_R1[rows] = _reach_in_bins(x_RV[rows], log_z_R1[rows], top_p_R1[rows])
    return torch.maximum(raised_R1, floor_R1)


def _reach(values_RK: Tensor, share_RK: Tensor, before_R1: Tensor, top_p_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The value (values fall along K) at which the mass, with `before_R1` ahead of them, reaches top_p [R, 1]; and whether it does [R]."""
    up_to_RK = share_RK.cumsum(dim=1) + before_R1
    needed_R1 = ((up_to_RK - share_RK < top_p_R1) & (share_RK > 0)).sum(dim=1, keepdim=True)
    return values_RK.gather(1, needed_R1.clamp_(min=1) - 1), up_to_RK[:, -1] >= top_p_R1[:, 0]


def _reach_in_bins(x_RV: Tensor, log_z_R1: Tensor, top_p_R1: Tensor) -> Tensor:
    """The same over the whole vocabulary; tokens with logit -inf are out."""
    share_RV = (x_RV - log_z_R1).double().exp_()
    lowest_R1 = x_RV.masked_fill(x_RV == _NEVER, 0.0).amin(dim=1, keepdim=True).clamp_(min=-_WIDEST, max=-1e-30)
    bin_RV = (x_RV.clamp(min=-_WIDEST) / lowest_R1 * (_BINS - 1)).clamp_(max=_BINS - 1).to(torch.int64)
    mass_RN = torch.zeros(len(x_RV), _BINS, dtype=torch.float64, device=x_RV.device).scatter_add_(1, bin_RV, share_RV)
    up_to_RN = mass_RN.cumsum(dim=1)
    place_R1 = (up_to_RN < top_p_R1).sum(dim=1, keepdim=True).clamp_(max=_BINS - 1)
    inside_RV = (bin_RV == place_R1) & (x_RV > _NEVER)
    before_R1 = (up_to_RN - mass_RN).gather(1, place_R1)
    values_RK = x_RV.masked_fill(~inside_RV, _NEVER).topk(max(1, int(inside_RV.sum(dim=1).max())), dim=1).values
    return _reach(values_RK, (values_RK - log_z_R1).double().exp_(), before_R1, top_p_R1)[0]
