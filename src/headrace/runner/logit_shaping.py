"""What changes logits before a token is picked from them, in place and in this order: logit_bias, penalties, and what may not come at all
(tokens outside of allowed_token_ids, bad words, ends before min_tokens, what a grammar forbids).

Legend: R rows, V vocabulary, L tokens of the longest history. Each function takes the slots of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from headrace.runner.grammar_masks import GrammarMasks
from headrace.runner.sampling_table import Need, SamplingTable
from headrace.runner.token_history import TokenHistory

_NEVER = float("-inf")


def shape_logits(
    logits_RV: Tensor, slot_R: np.ndarray, length_R: np.ndarray, table: SamplingTable, history: TokenHistory, masks: GrammarMasks
) -> None:
    """Applies to each row of float32 `logits_RV` what its slot asks for, where the first `length_R` tokens of the slot are its history."""
    need_R = table.need[slot_R]
    if (need_R & Need.BIAS).any():
        rows, ids = _flat((row, table.bias_ids[slot]) for row, slot in enumerate(slot_R))
        values = torch.from_numpy(np.concatenate([table.bias_values[slot] for slot in slot_R])).to(logits_RV.device)
        logits_RV.index_put_((rows.to(logits_RV.device), ids.to(logits_RV.device)), values, accumulate=True)
    penalised = np.flatnonzero(need_R & Need.PENALTY)
    if len(penalised):
        rows = torch.from_numpy(penalised).to(logits_RV.device)
        logits_RV[rows] = _penalise(logits_RV[rows], slot_R[penalised], length_R[penalised], table, history)
    if (need_R & Need.ALLOWED).any():
        _keep_only(logits_RV, ((row, table.allowed_ids[slot]) for row, slot in enumerate(slot_R) if need_R[row] & Need.ALLOWED))
    bans = np.flatnonzero(need_R & (Need.BAD_WORDS | Need.MIN_TOKENS)).tolist()
    banned = [(row, _banned(slot_R[row], int(length_R[row]), table, history, masks)) for row in bans]
    if banned:
        rows, ids = _flat(banned)
        logits_RV[rows.to(logits_RV.device), ids.to(logits_RV.device)] = _NEVER
    held = np.flatnonzero(need_R & Need.GRAMMAR).tolist()
    if held:
        masks.apply(logits_RV, held, slot_R[held].tolist())


def _flat(pairs: Iterable[tuple[int, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """(row, token id) of every id, as two index tensors."""
    listed = list(pairs)
    rows = np.repeat(np.array([row for row, _ in listed], dtype=np.int64), [len(ids) for _, ids in listed])
    return torch.from_numpy(rows), torch.from_numpy(np.concatenate([ids for _, ids in listed]))


def _keep_only(logits_RV: Tensor, pairs: Iterable[tuple[int, np.ndarray]]) -> None:
    rows, ids = (index.to(logits_RV.device) for index in _flat(pairs))
    kept = logits_RV[rows, ids]
    logits_RV[rows.unique()] = _NEVER
    logits_RV[rows, ids] = kept


def _penalise(logits_RV: Tensor, slot_R: np.ndarray, length_R: np.ndarray, table: SamplingTable, history: TokenHistory) -> Tensor:
    """Repetition over prompt and answer; presence and frequency over the answer."""
    device = logits_RV.device

    def column(values_S: np.ndarray) -> Tensor:
        return torch.from_numpy(values_S[slot_R]).to(device)[:, None]

    longest = int(length_R.max())
    place_L = np.arange(longest)
    known_RL = place_L < length_R[:, None]
    answer_RL = known_RL & (place_L >= history.num_prompt_S[slot_R][:, None])
    ids_RL = torch.from_numpy(np.where(known_RL, history.tokens_SL[slot_R, :longest], 0).astype(np.int64)).to(device)

    def counts(where_RL: np.ndarray) -> Tensor:
        return torch.zeros_like(logits_RV).scatter_add_(1, ids_RL, torch.from_numpy(where_RL.astype(np.float32)).to(device))

    if (table.repetition_penalty[slot_R] != 1.0).any():
        penalty_R1 = column(table.repetition_penalty)
        damped_RV = torch.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
        logits_RV = torch.where(counts(known_RL) > 0, damped_RV, logits_RV)
    if (table.frequency_penalty[slot_R] != 0.0).any() or (table.presence_penalty[slot_R] != 0.0).any():
        count_RV = counts(answer_RL)
        logits_RV = logits_RV - column(table.frequency_penalty) * count_RV - column(table.presence_penalty) * (count_RV > 0)
    return logits_RV


def _banned(slot: int, length: int, table: SamplingTable, history: TokenHistory, masks: GrammarMasks) -> np.ndarray:
    """Tokens that this slot may not give now: ends before min_tokens, and the last token of each bad word whose rest stands there.

    Where its grammar allows nothing but an end, the answer ends before min_tokens.
    """
    num_prompt = int(history.num_prompt_S[slot])
    banned = table.end_ids[slot] if length - num_prompt < table.min_tokens[slot] else table.end_ids[slot][:0]
    if len(banned) and table.need[slot] & Need.GRAMMAR and masks.ends_only(slot, banned):
        banned = banned[:0]
    words = table.bad_words[slot]
    if not words:
        return banned
    longest = max(len(word) for word in words)
    answer = tuple(history.tokens_SL[slot, max(num_prompt, length - longest + 1) : length].tolist())
    last = [word[-1] for word in words if len(word) == 1 or answer[-(len(word) - 1) :] == word[:-1]]
    return np.concatenate([banned, np.asarray(last, dtype=np.int64)])
