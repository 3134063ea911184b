"""Liars whom one operator runs are drawn sooner than as many strangers, by production courts."""

from __future__ import annotations

import statistics

from benchmark_modules import load


def test_of_one_operator_they_are_drawn_sooner() -> None:
    bench = load("operators")
    means = [
        statistics.mean(own for run in range(60) for own in bench.until_drawn(5, 2, run, together=together))
        for together in (False, True)
    ]
    assert means[1] < 0.9 * means[0]
    # One liar has no friends, so it does not matter who runs it.
    assert bench.until_drawn(4, 1, 3, together=True) == bench.until_drawn(4, 1, 3, together=False)
