from __future__ import annotations

from tests.scripts.load_script import load_script

quality = load_script("quality")


def result(perplexity: float, argmax: list[int], answers: list[list[int]]):  # type: ignore[no-untyped-def]
    return quality.Quality(perplexity=perplexity, argmax=argmax, answers=answers, weight_bytes=3 << 20)


def test_each_way_stands_beside_fp32() -> None:
    measured = {
        quality.REFERENCE: result(20.0, [1, 2, 3, 4], [[5, 6], [7, 8]]),
        "other": result(20.1, [1, 2, 3, 9], [[5, 9], [9, 8]]),
    }
    assert quality.table(measured).splitlines()[2:] == [
        "| none (fp32) | 20.0000 | +0.0000 % | 100.0% | 100.0% | 3 |",
        "| other | 20.1000 | +0.5000 % | 75.0% | 50.0% | 3 |",
    ]


def test_prompts_go_over_the_whole_text() -> None:
    ids = list(range(200))
    pieces = quality.prompts(ids)
    assert len(pieces) == quality.NUM_PROMPTS
    assert {len(piece) for piece in pieces} == {quality.PROMPT_TOKENS}
    assert (pieces[0][0], pieces[-1][-1]) == (0, 199)
