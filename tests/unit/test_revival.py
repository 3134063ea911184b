"""When a crashed peer is started again: later each time, never after a clean end, at once healthy again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.peer.supervise import FINAL, Revivals, exit_code

CRASHES = st.integers(-64, 255).filter(lambda code: code not in FINAL)


def test_pauses_double_up_to_a_minute_and_begin_anew_after_ten_good_minutes() -> None:
    decider = Revivals(random.Random(1))
    pauses = [decider.crashed(-9, ran_s=ran_s)[0] for ran_s in (*[5.0] * 9, 600.0, 5.0)]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 2], rel=0.1)


def test_a_peer_that_is_killed_for_memory_comes_back_ever_later() -> None:
    decider, why = Revivals(random.Random(1)), "killed for memory, limit 1.17 GiB"
    pauses, words = zip(*[decider.crashed(-9, ran_s=57.0, for_memory=why) for _ in range(14)], strict=True)
    assert all(each.startswith(f"the peer was {why}, after 57 s") for each in words)
    assert pauses == pytest.approx([min(2**count, 3600) for count in range(14)], rel=0.1)


def test_machines_that_crashed_together_come_back_apart() -> None:
    assert len({Revivals(random.Random(seed)).crashed(-9, ran_s=5.0) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("code", "asked", "expected"),
    [(0, False, 0), (2, False, 2), (0, True, 0), (1, True, 1), (-15, True, 143), (-2, True, 130), (-9, True, 137)],
)
def test_the_end(code: int, asked: bool, expected: int) -> None:
    assert exit_code(code, asked=asked) == expected


def test_the_line_says_what_happened_and_what_comes() -> None:
    decider = Revivals(random.Random(1))
    _, words = decider.crashed(-9, ran_s=12.3)
    assert words.startswith(
        "the peer was ended by SIGKILL after 12 s (a person or a service did it, or memory ran out); it"
    )
    _, words = decider.crashed(1, ran_s=0.2)
    assert words.startswith("the peer ended with exit code 1 after 0 s, the 2nd time in a row;")
    assert "signal 63 " in decider.crashed(-63, ran_s=5.0)[1]
    assert "the 4th time" in decider.crashed(-9, ran_s=5.0)[1]


@given(codes=st.lists(st.tuples(CRASHES, st.floats(0, 1e6)), max_size=100), seed=st.integers())
def test_no_crash_is_final_and_no_pause_is_long(codes: list[tuple[int, float]], seed: int) -> None:
    decider = Revivals(random.Random(seed))
    for code, ran_s in codes:
        assert exit_code(code, asked=False) is None
        assert 0.9 <= decider.crashed(code, ran_s=ran_s)[0] <= 66.0
