"""When checkpoints are due and which are kept: uneven stages must still have a version in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import NO_RESTART, Restart
from swarmnet.state.checkpoints import CheckpointSchedule, retained, roundness
from swarmnet.state.rollback import abandoned


def test_multiples_and_the_last_version_are_due() -> None:
    rhythm = CheckpointSchedule(every=5, last=23)
    assert [version for version in range(24) if rhythm.due(version)] == [5, 10, 15, 20, 23]


def test_without_a_rhythm_only_the_end_is_due() -> None:
    rhythm = CheckpointSchedule(every=0, last=7)
    rhythm.took(3)
    assert [version for version in range(8) if rhythm.due(version)] == [7]


@pytest.mark.parametrize(("steps", "stride"), [(0, 1), (10, 1), (11, 2), (20, 2), (21, 4), (79, 8), (-5, 1)])
def test_a_slow_disk_is_given_fewer(steps: int, stride: int) -> None:
    rhythm = CheckpointSchedule(every=10, last=1000)
    rhythm.took(steps)
    assert [v for v in range(1, 161) if rhythm.due(v)] == list(range(10 * stride, 161, 10 * stride))


def test_a_disk_that_recovers_is_given_all_again() -> None:
    rhythm = CheckpointSchedule(every=10, last=1000)
    rhythm.took(75)
    rhythm.took(4)
    assert rhythm.due(30)


def test_roundness() -> None:
    assert [roundness(version, 10) for version in (10, 20, 30, 80, 85, 0)] == [0, 1, 0, 3, -1, -1]
    assert roundness(10, 0) == -1


def test_even_stages_keep_the_last_ones() -> None:
    assert retained([10, 20, 30, 40], keep=3, every=10, common=30) == {40, 30, 20}
    assert retained([10, 20, 30, 40], keep=3, every=10, common=40) == {40, 30, 20}
    assert retained([10, 20, 30, 33], keep=2, every=10, common=30) == {33, 30}


def test_the_common_one_stays_however_old_it_is() -> None:
    assert retained([10, 50, 60, 70], keep=2, every=10, common=10) == {70, 60, 10}
    assert retained([10, 50], keep=1, every=10, common=10) == {50, 10}
    assert retained([50], keep=3, every=10, common=10) == {50}


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(1, 6), st.integers(0, 4), st.none() | st.integers(0, 60))
def test_what_is_kept(versions: set[int], keep: int, every: int, common: int | None) -> None:
    kept = retained(versions, keep=keep, every=every, common=common)
    assert max(versions) in kept and kept <= versions
    assert common not in versions or common in kept
    assert len(kept) <= max(keep, 3) and len(kept) >= min(keep, len(versions))


@dataclass
class Stage:
    """A stage whose disk takes `slow` steps per checkpoint."""

    slow: int
    rhythm: CheckpointSchedule
    held: set[int] = field(default_factory=set)
    writing: int | None = None

    def step(self, version: int, keep: int, common: int | None) -> None:
        if self.writing is not None and version - self.writing >= self.slow:
            self.held = set(retained(self.held | {self.writing}, keep=keep, every=self.rhythm.every, common=common))
            self.rhythm.took(version - self.writing)
            self.writing = None
        if self.writing is None and self.rhythm.due(version):
            self.writing = version


@given(st.lists(st.integers(0, 70), min_size=2, max_size=4), st.integers(1, 4), st.integers(1, 5))
def test_stages_with_unequal_disks_always_share_a_version_and_move_on(slow: list[int], keep: int, every: int) -> None:
    stages = [Stage(steps, CheckpointSchedule(every=every, last=10**6)) for steps in slow]
    common: int | None = None
    for version in range(1, 700):
        for stage in stages:
            stage.step(version, keep, common)
        shared = set.intersection(*(stage.held for stage in stages))
        assert common is None or max(shared) >= common, "a common version was deleted before a newer one existed"
        common = max(shared, default=None)
    longest = max(stage.rhythm.stride for stage in stages) * every
    assert common is not None and common >= 700 - 4 * max(longest, max(slow), every)


def test_going_back_gives_up_what_came_after() -> None:
    back = [Restart(2, 100)]
    assert abandoned(150, NO_RESTART, back) and abandoned(150, Restart(1, 50), back)
    assert not abandoned(100, NO_RESTART, back) and not abandoned(150, Restart(2, 100), back)
    later = [Restart(2, 100), Restart(3, 200)]
    assert abandoned(150, NO_RESTART, later) and not abandoned(150, Restart(2, 100), later)
