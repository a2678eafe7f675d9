"""A service in which anything may arrive: requests of all lengths come, are computed in random chunks beside each other, and go."""

from __future__ import annotations

import random

from headrace.runner.interface import Runner
from tests.models.tiny_models import prompt
from tests.runner.tiny_model import Hand

MOST_TOKENS = 64  # of a step


def random_service(runner: Runner, *, slots: int, requests: int = 14, seed: int = 0) -> dict[str, list[int]]:
    """The greedy answers by request; the same for every runner of one model."""
    rng, hand = random.Random(seed), Hand(runner)
    waiting = [(f"r{seed}-{i}", prompt(rng.choice([1, 2, 5, 17, 40, 70]), seed=i), rng.randint(1, 12)) for i in range(requests)]
    running: dict[str, int] = {}
    free = list(range(slots))
    while waiting or running:
        while waiting and free and rng.random() < 0.7:
            name, tokens, count = waiting.pop(0)
            hand.add(name, tokens, slot=free.pop())
            running[name] = count
        parts, room = {}, MOST_TOKENS
        for name in running:
            track = hand.tracks[name]
            count = min(rng.choice([1, 3, 20, MOST_TOKENS]), len(track.tokens) - track.computed, room)
            if count > 0:
                parts[name] = count
                room -= count
        if parts:
            assert all(row.error is None for row in hand.step(parts))
        for name in [name for name, count in running.items() if len(hand.tracks[name].answer) >= count]:
            free.append(hand.tracks[name].slot)
            del running[name]
    return {name: track.answer for name, track in hand.tracks.items()}
