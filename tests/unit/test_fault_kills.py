"""Kills: who is killed when, what is postponed, who comes back."""

from __future__ import annotations

import pytest
from fault_events import STEPS, at, bring, machine, only, replicas

from swarmnet.errors import UsageError
from swarmnet.testing import fault
from swarmnet.testing.fault import Fault, Kill
from swarmnet.testing.schedule import FaultAction, FaultPostponed, FaultSchedule, RestartAction

PAIRS = replicas(2, 2)


def kill_order(stage: int, step: int) -> Fault:
    return Kill(stage=stage, step=step).named(f"kill {stage}@{step}")


def test_a_kill_waits_for_its_step_then_fires_inside_it() -> None:
    churn = machine([kill_order(1, 3)], PAIRS)
    for version in range(3):
        assert bring(churn, version, "s1-r0", "s1-r1", now=float(version)) == []
    assert bring(churn, 3, "s1-r0", "s1-r1", now=3.0) == []  # a step takes 1 s: not at its very beginning
    assert churn.tick(now=3.05) == []
    (kill,) = churn.tick(now=3.65)
    assert isinstance(kill, FaultAction) and kill.stage == 1 and kill.step == 3 and kill.name in ("s1-r0", "s1-r1")
    assert churn.pending == ()


def test_a_kill_that_missed_its_moment_fires_at_once() -> None:
    churn = machine([kill_order(0, 2)], PAIRS)
    bring(churn, 0, "s0-r0", "s0-r1", now=0.0)
    bring(churn, 1, "s0-r0", "s0-r1", now=10.0)
    assert bring(churn, 2, "s0-r0", "s0-r1", now=20.0) == []
    assert any(isinstance(action, FaultAction) for action in bring(churn, 3, "s0-r0", "s0-r1", now=20.1))


def test_the_last_synced_replica_is_spared_and_that_is_said_once() -> None:
    churn = machine([kill_order(0, 1), kill_order(0, 1)], PAIRS)
    bring(churn, 0, "s0-r0", "s0-r1", now=0.0)
    bring(churn, 1, "s0-r0", "s0-r1", now=1.0)
    kill, postponed = churn.tick(now=1.7)
    assert isinstance(kill, FaultAction)
    assert postponed == FaultPostponed(kill_order(0, 1), "1 synced replica in stage 0")
    assert churn.tick(now=1.8) == []
    assert churn.gone(kill.name, now=2.0) == []
    assert churn.tick(now=2.9) == []
    assert churn.tick(now=3.0) == [RestartAction(kill.name)]
    assert churn.started(kill.name, now=3.0) == []
    assert churn.pending == ("kill 0@1",)
    assert [type(action) for action in at(churn, kill.name, 1, now=4.0)] == [FaultAction]  # synced again: now it may
    assert churn.pending == ()


def test_a_fault_that_names_a_replica_which_is_away_says_so() -> None:
    order = Kill(peer="s0-r0", step=2).named("kill s0-r0@2")
    churn = machine([order], replicas(2, 3))
    bring(churn, 1, "s0-r0", "s0-r1", "s0-r2", now=1.0)
    churn.gone("s0-r0", now=1.5)
    said = [action for version in (2, 3) for action in bring(churn, version, "s0-r1", "s0-r2", now=float(version))]
    assert only(said, FaultPostponed) == [FaultPostponed(order, "s0-r0 is away, or something is being done to it")]


def test_a_replica_that_lags_does_not_make_its_fellow_dispensable() -> None:
    churn = machine([kill_order(0, 5)], PAIRS)
    bring(churn, 4, "s0-r0", "s0-r1", now=0.0)
    (kill,) = only(bring(churn, 5, "s0-r0", now=50.0) + churn.tick(now=99.0), FaultAction)
    assert kill.name == "s0-r1"  # r0 alone holds version 5


def test_words_of_the_dead_count_for_nothing() -> None:
    churn = machine([kill_order(0, 0), kill_order(0, 1)], PAIRS)
    (kill,) = only(bring(churn, 0, "s0-r0", "s0-r1", now=0.0), FaultAction)
    other = {"s0-r0": "s0-r1", "s0-r1": "s0-r0"}[kill.name]
    at(churn, kill.name, 1, now=0.01)  # written before, read after the kill
    actions = bring(churn, 1, other, now=0.02) + churn.tick(now=0.5)
    assert not any(isinstance(action, FaultAction) for action in actions)


def test_one_that_crashed_for_good_is_not_started_again() -> None:
    churn = machine([], PAIRS)
    churn.gone("s0-r0", back=False, now=0.0)
    assert churn.tick(now=100.0) == []


def test_timed_kills_begin_when_every_stage_has_a_replica_and_do_not_pile_up() -> None:
    churn = machine(fault.kill_every(5.0), PAIRS)
    bring(churn, 0, "s0-r0", now=0.0)
    assert churn.tick(now=50.0) == []
    bring(churn, 0, "s1-r0", now=60.0)
    assert churn.tick(now=64.9) == []
    assert [type(a) for a in churn.tick(now=65.0)] == [FaultPostponed]
    for now in (70.0, 75.0, 80.0):
        assert churn.tick(now=now) == []
    assert churn.pending == ("kill every 5 s",)


def comes_back(churn: FaultSchedule, name: str, now: float) -> None:
    """Its process ends, and the next one has it in sync again."""
    churn.gone(name, now=now)
    churn.tick(now=now + 1.0)
    churn.started(name, now=now + 1.0)
    at(churn, name, 0, now=now + 2.0)


def test_a_timed_kill_is_ordered_again_when_it_is_done() -> None:
    churn = machine(fault.kill_every(5.0), PAIRS)
    bring(churn, 0, now=0.0)
    killed = []
    for now in (5.0, 9.9, 10.0, 14.9, 15.0):
        for kill in only(churn.tick(now=now), FaultAction):
            killed.append(now)
            assert (kill.fault.place, str(kill.fault)) == (None, "kill every 5 s")
            comes_back(churn, kill.name, now)
    assert killed == [5.0, 10.0, 15.0] and churn.pending == ()


def test_kills_that_name_no_replica_strike_each_in_turn() -> None:
    churn, killed = machine(fault.kill_every(5.0), PAIRS), []
    bring(churn, 0, now=0.0)
    for now in range(5, 45, 5):
        (kill,) = only(churn.tick(now=now), FaultAction)
        killed.append(kill.name)
        comes_back(churn, kill.name, now)
    assert killed == 2 * ["s0-r0", "s1-r0", "s0-r1", "s1-r1"]


def test_nobody_is_killed_after_the_last_step() -> None:
    churn = machine([kill_order(0, STEPS - 1)], PAIRS)
    bring(churn, STEPS - 2, "s0-r0", now=0.0)
    assert [type(a) for a in bring(churn, STEPS - 1, "s0-r0", now=1.0) + churn.tick(now=9.0)] == [FaultPostponed]
    assert bring(churn, STEPS, "s0-r0", "s0-r1", now=10.0) == []
    assert churn.pending == (f"kill 0@{STEPS - 1}",)


@pytest.mark.parametrize("text", ["", "1", "1@", "a@b", "1@2@3", "-1@2", "3@0", "0@20", f"{'9' * 5000}@1"])
def test_a_kill_order_nobody_can_carry_out_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--kill"):
        list(fault.flagged(Kill, (text,), stages=3, steps=20))


def test_kill_orders_parse() -> None:
    assert [*fault.flagged(Kill, ("1@7", " 0 @ 19 "), stages=3, steps=20)] == [kill_order(1, 7), kill_order(0, 19)]
