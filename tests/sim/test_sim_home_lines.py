"""A stage of 1B parameters is joined over lines of 200 Mbit/s that steps fill: when the joiner is level, what it says
of that meanwhile, what it costs the others, and what it says if it never is (`benchmarks/join.py --home`)."""

from __future__ import annotations

import pytest

from swarmnet.state.catch_up import steps_until_in_sync
from tests.benchmark_modules import load

home = load("join_home")


def foreseen(scene, joined) -> float | None:
    sizes, rate = scene.parameters, home.arrives([scene.line] * scene.members, scene.line)
    return steps_until_in_sync(scene.state_bytes * sizes, scene.sum_bytes * sizes, joined.step_s, rate)


def test_with_eight_members_it_is_level_within_thirty_steps() -> None:
    scene = home.Scene(members=8, sum_bytes=1.1)
    joined, _ = home.play(scene)
    assert joined.steps is not None and joined.steps <= 30
    assert joined.slowed <= 0.15, f"steps of {joined.step_s:.0f} s instead of {joined.alone_s:.0f}"
    promised = foreseen(scene, joined)
    assert promised is not None and 0.6 * promised < joined.steps <= 1.05 * promised, "a tenth of each line, or more"
    said = [(at, left) for at, left in joined.foreseen if 2.0 < at < 0.8 * joined.steps]
    assert said and all(left is not None and 0.6 < (at + left) / joined.steps < 1.4 for at, left in said)
    assert joined.too_slow is None


def test_with_three_it_never_is_and_says_which_line_would_be_needed() -> None:
    scene = home.Scene(members=3, sum_bytes=1.45, within=8)
    joined, _ = home.play(scene)
    assert joined.steps is None and joined.slowed <= 0.2
    assert foreseen(scene, joined) is None
    said = joined.too_slow
    assert said is not None and said["donors"] == 3 and 0.6 * said["needs"] > said["bytes_per_s"]
    assert said["needs_each"] == pytest.approx(said["needs"] / 0.3, rel=0.01)
    assert all(left is None for at, left in joined.foreseen if at > 1.0), "once a step has been seen"
