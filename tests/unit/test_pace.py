"""What is usual, and under which leader steps are slower."""

from __future__ import annotations

from pathlib import Path

from stage_table import TIMERS

from swarmnet.ids import PeerId
from swarmnet.manifest.timers import DERIVED
from swarmnet.step.pace import Pace

A, B, C = (PeerId(name) for name in "ABC")


def pace_of(*steps: tuple[PeerId, float]) -> tuple[Pace, float, list[float]]:
    """Steps of these seconds under these leaders; the clock, and what each told."""
    pace, now = Pace(TIMERS), 0.0
    pace.applied(now=now)
    told = []
    for leader, took_s in steps:
        now += took_s
        told.append(pace.applied(leader, now=now))
    return pace, now, told


def test_patience_is_two_usual_steps_and_at_least_two_silences():
    """It does not grow while steps are disturbed: a mean of steps of which two thirds take a minute would be 44 s."""
    assert Pace(TIMERS).patience_s == TIMERS.lease_s == 30.0, "no step is known yet"
    for steps, patience_s in (
        ([(A, 1.0)] * 2, 6.0),
        ([(A, 5.0)] * 2, 10.0),
        ([(A, 1.0)] * 5 + [(B, 60.0)] * 11, 6.0),
        ([(A, 1.0)] * 5 + [(B, 60.0)] * 16, 120.0),  # nothing else is usual any more
    ):
        assert pace_of(*steps)[0].patience_s == patience_s


def test_free_indexes_are_ordered_after_four_usual_pauses_whatever_disturbs_most_steps():
    pace, now = Pace(TIMERS), 0.0
    assert pace.idle_s == TIMERS.idle_s, "no pause is known yet"
    for number in range(16):
        pace.begin()
        for pause_s in (0.3, 0.5 if number % 3 else 2.5):
            pace.claimed(now=now)
            now += pause_s
        pace.claimed(now=now)
    pace.begin()
    assert abs(pace.idle_s - 4 * 0.5) < 1e-9


def test_a_step_is_compared_with_two_usual_steps_under_other_leaders():
    assert pace_of((A, 1.0), (A, 1.0), (B, 9.0), (B, 1.5), (A, 3.0), (C, 3.0))[2] == [0.0, 0.0, 7.0, 0.0, 0.0, 1.0]
    told = pace_of(*[(A, 1.0)] * 4, *[(B, 3.0)] * 40)[2]
    assert told[4:] == [1.0] * 40, "one that is always slow does not become the measure"
    assert pace_of(*[(B, 3.0)] * 8)[2] == [0.0] * 8, "no other has led"


def test_how_long_a_state_was_fetched_is_nobodys_pace():
    pace, now, _ = pace_of((A, 1.0))
    pace.interrupted()
    assert pace.applied(B, now=now + 500.0) == 0.0 and pace.usual_s == 1.0


def test_the_protocol_page_prints_the_table_of_timers():
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    for name, (times, of, what) in DERIVED.items():
        assert f"| `{name}` | {times} x `{of}` | {getattr(TIMERS, name):g} s | {what} |" in page.splitlines()
