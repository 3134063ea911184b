"""The decision to go: never while something here is still needed, at once when nothing is, always when time is up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_leader import ME, STAMP, B, Office

from swarmnet.messages import Heartbeat
from swarmnet.peer.leaving import Leaving, Standing, is_deserted, why_it_stays

DRAIN_S, SETTLE_S = 60.0, 1.0
FREE = Standing(stage=0, step=41, heirs=1)

standings = st.builds(
    Standing,
    stage=st.integers(0, 3),
    step=st.integers(0, 100),
    idle=st.booleans(),
    heirs=st.integers(0, 2),
    followers=st.integers(0, 2),
    microbatches=st.integers(0, 4),
    counted=st.integers(0, 8),
    whole=st.booleans(),
    applying=st.booleans(),
)


def farewell(now: float) -> Leaving:
    return Leaving(now=now, drain_s=DRAIN_S, settle_s=SETTLE_S)


def decide(*standings: Standing, deserted: bool = False, after_s: float = 1.0):
    return farewell(100.0).decide(standings, deserted=deserted, now=100.0 + after_s)


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (replace(FREE, microbatches=3), "3 microbatches left, step 41"),
        (replace(FREE, microbatches=1, counted=5), "1 microbatch left, step 41"),
        (replace(FREE, counted=5), "step 41 is not committed yet, 5 of its microbatches are counted here"),
        (replace(FREE, applying=True), "applying step 41"),
        (replace(FREE, whole=True), "step 41 waits for other stages, or for another replica to have its sum"),
        (replace(FREE, heirs=0, followers=2), "no other replica of stage 0 is at version 41 yet"),
        (replace(FREE, heirs=0), "no other replica has the state of stage 0: waiting for one, 60 s at most"),
    ],
)
def test_it_stays_and_says_why(standing: Standing, words: str) -> None:
    verdict = decide(standing)
    assert not verdict.go and verdict.words == words
    late = decide(standing, after_s=DRAIN_S)
    words = words.replace(": waiting for one, 60 s at most", ", and the run waits for one")
    assert late.go and late.words == f"60 s have passed, going all the same: {words}"


def test_all_its_stages_must_be_free() -> None:
    assert decide(FREE, replace(FREE, stage=3)).go
    verdict = decide(FREE, replace(FREE, stage=3, heirs=0))
    assert not verdict.go and "stage 3" in verdict.words


def test_when_everybody_leaves_only_a_sum_at_hand_is_waited_for_and_not_for_long() -> None:
    alone, leaving = replace(FREE, heirs=0, microbatches=2, counted=3), farewell(0.0)
    assert decide(alone, deserted=True).go
    for at, go in ((1.0, False), (1.0 + 0.9 * SETTLE_S, False), (1.0 + SETTLE_S, True)):
        assert leaving.decide([replace(alone, whole=True)], deserted=True, now=at).go is go


def test_somebody_who_comes_meanwhile_is_waited_for_again() -> None:
    alone, leaving = replace(FREE, heirs=0, whole=True), farewell(0.0)
    assert not leaving.decide([alone], deserted=True, now=1.0).go
    assert not leaving.decide([alone], deserted=False, now=1.5).go
    assert not leaving.decide([alone], deserted=True, now=2.5).go, "settling begins anew"


@given(found=st.lists(standings, max_size=4), deserted=st.booleans(), after_s=st.floats(0, DRAIN_S - 0.01))
def test_before_its_time_it_goes_only_if_nothing_is_lost_or_nobody_is_left(found, deserted, after_s) -> None:
    verdict = decide(*found, deserted=deserted, after_s=after_s)
    if verdict.go and not deserted:
        assert all(s.idle or (s.heirs and not (s.microbatches or s.counted or s.whole or s.applying)) for s in found)
    if verdict.go and deserted:
        assert all(s.free or not (s.applying or s.whole) for s in found)
    assert verdict.words


@given(found=st.lists(standings, max_size=4), deserted=st.booleans(), late_s=st.floats(DRAIN_S, 1e6))
def test_it_never_stays_longer_than_it_may(found, deserted, late_s) -> None:
    assert decide(*found, deserted=deserted, after_s=late_s).go


@given(found=standings)
def test_new_microbatches_are_turned_away_exactly_when_others_can_take_them(found: Standing) -> None:
    assert found.refusing == (found.heirs > 0 or found.idle)


@pytest.mark.parametrize(
    ("standing", "paused", "words"),
    [
        (FREE, True, "it was paused"),
        (replace(FREE, idle=True), False, "stage 0 has ended or lost its state here"),
        (replace(FREE, heirs=0), False, "no other replica of stage 0 stays"),
        (replace(FREE, heirs=0, followers=2), False, ""),
        (replace(FREE, microbatches=3), False, ""),
    ],
)
def test_a_peer_that_cannot_leave_for_another_stage_says_why(standing: Standing, paused: bool, words: str) -> None:
    """Replicas that are one step behind will have the state in a moment: they are waited for."""
    assert why_it_stays([standing], paused=paused) == words


def test_who_is_silent_for_some_seconds_has_not_gone() -> None:
    """On a busy machine the only replica of a stage left at once, as if all peers left."""
    office = Office(B)
    office.view.hear(B, Heartbeat(STAMP, 1, True, None), now=9.0)
    member = SimpleNamespace(view=office.view)
    leaver = SimpleNamespace(me=ME, records={}, replicas={0: SimpleNamespace(member=member)})
    timers = office.view.timers
    for silent_s, gone in ((timers.suspect_s + 1.0, False), (timers.long_silence_s + 1.0, True)):
        assert is_deserted(leaver, now=9.0 + silent_s) is gone
    office.view.hear(B, Heartbeat(STAMP, 1, True, None, draining=True), now=9.0)
    assert is_deserted(leaver, now=10.0), "it leaves, too"
