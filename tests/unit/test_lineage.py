"""Checkpoints of two pasts are never put together; what nobody gave up stays of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import NO_RESTART, OnDisk, PeerId, Restart
from swarmnet.state.rollback import Announced, Holding, Rollbacks, newest_on_disk, of_one_lineage

ONE = Restart(1, 8)


def has(name: str, stage: int, *kept: OnDisk, version: int | None = None, under: Restart = NO_RESTART) -> Announced:
    return Holding(PeerId(name), stage, under, version), kept


def disks(current: Restart, *announced: Announced) -> dict[str, tuple[int, ...]]:
    rules = Rollbacks(2, 100, settle_s=0.0, lost_s=0.0, current=current)
    return {held.peer: held.disk for held in of_one_lineage(announced, rules)}


def old(*versions: int) -> list[OnDisk]:
    return [OnDisk(version) for version in versions]


def test_who_was_away_when_the_run_went_back_brings_nothing_later_with_it() -> None:
    away, here = has("a", 0, *old(4, 8, 12)), has("b", 1, *old(4, 8), OnDisk(12, ONE))
    assert disks(NO_RESTART, away, here) == {"a": (4, 8), "b": (4, 8, 12)}
    assert disks(ONE, away, here) == {"a": (4, 8), "b": (4, 8, 12)}, "however much is known already"
    serving = has("c", 0, version=13, under=ONE)
    assert disks(ONE, away, here, serving)["a"] == (4, 8)


def test_without_a_restart_everything_is_of_one_past() -> None:
    assert disks(NO_RESTART, has("a", 0, *old(4, 8)), has("b", 1, *old(8, 12))) == {"a": (4, 8), "b": (8, 12)}


def test_a_restart_that_only_a_dead_side_had_does_not_take_from_those_who_serve() -> None:
    """While somebody serves under the present one, a later one on a newcomer's disk gives nothing up."""
    late = has("x", 0, OnDisk(10, Restart(2, 10)))
    serving = has("a", 0, *old(4), OnDisk(12, ONE), version=13, under=ONE)
    assert disks(ONE, late, serving, has("b", 1, OnDisk(12, ONE)))["b"] == (12,)


def test_a_restart_that_leaves_nothing_to_go_on_from_was_known_to_too_few() -> None:
    """All are dead. One disk remembers a restart that the others never heard of, and whose versions they have not."""
    lonely = has("x", 0, OnDisk(10, Restart(2, 9)))
    found = disks(NO_RESTART, lonely, has("a", 0, OnDisk(12, ONE)), has("b", 1, OnDisk(12, ONE)))
    assert found == {"x": (), "a": (12,), "b": (12,)}
    decided = disks(Restart(3, 12), lonely, has("a", 0, OnDisk(12, ONE)), has("b", 1, OnDisk(12, ONE)))
    assert decided["a"] == decided["b"] == (12,), "what was decided can be carried out"


def test_the_seed_is_nothing_to_go_on_from_while_a_disk_has_more() -> None:
    """A newcomer has begun at the seed and left; whoever was in the run keeps what it has."""
    assert disks(NO_RESTART, has("new", 0, *old(0)), has("a", 1, OnDisk(40, ONE))) == {"new": (0,), "a": (40,)}
    assert disks(NO_RESTART, has("none", 0), has("a", 1, OnDisk(40, ONE)))["a"] == (40,)


def test_two_sides_that_went_back_alone_under_one_number() -> None:
    low, high = Restart(1, 4), Restart(1, 8)
    found = disks(NO_RESTART, has("a", 0, *old(2, 4), OnDisk(6, low)), has("b", 1, *old(2, 4, 6), OnDisk(9, high)))
    assert found == {"a": (2, 4), "b": (2, 4, 6, 9)}, "a's sixth step is not b's"


PASTS = (NO_RESTART, Restart(1, 4), Restart(2, 6), Restart(3, 2))
kept = st.sampled_from(PASTS).flatmap(
    lambda under: st.builds(OnDisk, st.integers(under.version + 1, 9), st.just(under))
)
one_disk = st.lists(kept, max_size=5, unique_by=lambda one: one.version)


@given(st.lists(one_disk, min_size=2, max_size=5))
def test_what_every_stage_has_of_the_newest_common_version_is_of_one_past(found: list[list[OnDisk]]) -> None:
    """Whoever was away when: steps that were done under one restart are never put beside those of another."""
    announced = [has(f"p{n}", n % 2, *disk) for n, disk in enumerate(found)]
    rules = Rollbacks(2, 100, settle_s=0.0, lost_s=0.0)
    holdings = of_one_lineage(announced, rules)
    newest = newest_on_disk(holdings, 2)
    used = {
        one.restart
        for held, disk in zip(holdings, found, strict=True)
        for one in disk
        if one.version == newest and newest in held.disk
    }
    assert len(used) == (newest is not None)
