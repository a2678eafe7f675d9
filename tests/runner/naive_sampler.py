"""The sampler's rules once more, one row and one token at a time, in plain Python."""

from __future__ import annotations

import math

from headrace.runner.draws import splitmix64
from headrace.sampling_params import SamplingParams

M32 = (1 << 32) - 1


def naive_noise(key: int, position: int, token: int) -> float:
    """The formula of headrace.runner.draws in float64."""
    seed = splitmix64((key + position) & ((1 << 64) - 1))
    x = splitmix64(token) & M32
    x = ((x ^ (seed & M32)) * 0x7FEB352D) & M32
    x ^= x >> 15
    x = ((x + (seed >> 32)) * 0x846CA68B) & M32
    x ^= x >> 13
    x = (x * 0x9E3779B1) & M32
    w = min(((x >> 1) + 0.5) / 2**31, 1 - 2.0**-24)
    return -math.log(-math.log1p(-w))


def shaped(logits: list[float], params: SamplingParams, *, eos: tuple[int, ...], prompt: list[int], answer: list[int]) -> list[float]:
    out = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    for token in range(len(out)):
        if token in prompt or token in answer:
            out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        out[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty * (token in answer)
    banned = set()
    if len(answer) < params.min_tokens:
        banned |= set(eos) | set(params.stop_token_ids)
    for word in params.bad_words_ids:
        rest = list(word[:-1])
        if not rest or answer[-len(rest) :] == rest:
            banned.add(word[-1])
    allowed = range(len(out)) if params.allowed_token_ids is None else params.allowed_token_ids
    return [value if token in allowed and token not in banned else -math.inf for token, value in enumerate(out)]


def kept(logits: list[float], params: SamplingParams) -> tuple[set[int], float]:
    """Tokens that the filters leave, and how close the nearest decision was."""
    best = max(logits)
    x = [(value - best) / params.temperature for value in logits]
    stay = {t for t, value in enumerate(x) if value > -math.inf}
    margin = math.inf
    if params.min_p > 0:
        margin = min(margin, *(abs(x[t] - math.log(params.min_p)) for t in stay))
        stay = {t for t in stay if x[t] >= math.log(params.min_p)}
    if params.top_k > 0 and params.top_k < len(stay):
        floor = sorted((x[t] for t in stay), reverse=True)[params.top_k - 1]
        stay = {t for t in stay if x[t] >= floor}
    if params.top_p < 1:
        total = sum(math.exp(x[t]) for t in stay)
        before, floor = 0.0, 0.0
        for token in sorted(stay, key=lambda t: -x[t]):
            margin = min(margin, abs(before - params.top_p))
            if before >= params.top_p:
                break
            floor = x[token]
            before += math.exp(x[token]) / total
        stay = {t for t in stay if x[t] >= floor}
    return stay, margin


def naive_sample(
    logits: list[float], params: SamplingParams, *, key: int, eos: tuple[int, ...], prompt: list[int], answer: list[int]
) -> tuple[int | None, float]:
    """(token, how close the nearest decision was); None: no token is left."""
    out = shaped(logits, params, eos=eos, prompt=prompt, answer=answer)
    if max(out) == -math.inf:
        return None, math.inf
    margin = math.inf
    if params.greedy or params.top_k == 1:
        scores = dict(enumerate(out))
    else:
        stay, margin = kept(out, params)
        best = max(out)
        scores = {t: (out[t] - best) / params.temperature + naive_noise(key, len(answer), t) for t in stay}
    order = sorted(scores, key=lambda t: (-scores[t], t))
    if len(order) > 1:
        margin = min(margin, scores[order[0]] - scores[order[1]])
    return order[0], margin
