"""When a joiner is level: the formula against a joiner that is played out byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.net.traffic import STATE_SHARE
from swarmnet.state.catch_up import line_needed, rate_needed, steps_until_in_sync

MBIT = 125_000.0
BILLION = 12e9, 1e9, 80.0
"""A stage of 1B parameters: weights and two moments in fp32, sums of a byte, steps of 80 s."""


def arrives(lines: list[float], down: float, *, busy: float = 1.0) -> float:
    """Bytes per second: of each source's line a tenth while it is busy with steps, and all of it while it rests."""
    return min(down, sum(line * (1.0 - busy * (1.0 - STATE_SHARE)) for line in lines))


def played(to_come: float, sum_bytes: float, step_s: float, bytes_per_s: float, *, most: int) -> float | None:
    """Steps until everything that is there has come; the others add a sum all the time. None: not within `most`."""
    left, parts = to_come, 64
    for tick in range(most * parts):
        if left <= 0.0:
            return tick / parts
        left += (sum_bytes - bytes_per_s * step_s) / parts
    return None


@given(st.floats(1e6, 3e11), st.floats(1e3, 1e10), st.floats(1.0, 600.0), st.floats(1e4, 1e9))
def test_it_takes_as_long_as_when_it_is_played_out(
    to_come: float, sum_bytes: float, step_s: float, bytes_per_s: float
) -> None:
    each = to_come, sum_bytes, step_s, bytes_per_s
    steps, found = steps_until_in_sync(*each), played(*each, most=40)
    if found is None:
        assert steps is None or steps > 39.9
    else:
        assert steps is not None and steps <= found + 1e-6 and found <= steps + 0.02


@given(st.floats(1e6, 3e11), st.floats(1e3, 1e10), st.floats(1.0, 600.0), st.integers(1, 100))
def test_what_is_needed_is_enough_and_no_more(to_come: float, sum_bytes: float, step_s: float, within: int) -> None:
    needed = rate_needed(to_come, sum_bytes, step_s, within)
    assert steps_until_in_sync(to_come, sum_bytes, step_s, needed) == pytest.approx(within, rel=1e-3)


def test_a_billion_parameters_over_home_lines() -> None:
    line = 200 * MBIT
    eight, three = (arrives([line] * members, line) for members in (8, 3))
    assert (eight, three) == (pytest.approx(0.8 * line), pytest.approx(0.3 * line))
    assert steps_until_in_sync(*BILLION, eight) == pytest.approx(20.0), "tenths of eight lines are enough"
    assert steps_until_in_sync(*BILLION, three) is None, "tenths of three bring 0.6 of a sum in each step"
    each = line_needed(rate_needed(*BILLION, 30), 3)
    assert each == pytest.approx(467 * MBIT, rel=0.01)
    assert steps_until_in_sync(*BILLION, arrives([each] * 3, each)) == pytest.approx(30.0)
    assert steps_until_in_sync(*BILLION, arrives([line] * 3, line, busy=0.5)) == pytest.approx(12.0), (
        "lines that rest are the joiner's"
    )
