"""A schedule of faults: who is held, struck and released; who may be taken away; what lasts and ends."""

from __future__ import annotations

from typing import Any

import pytest
from fault_events import STEPS, asked, at, bring, brought, holds, machine, only, replicas, struck
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.testing.fault import (
    DiskFull,
    Drain,
    Fault,
    Join,
    Kill,
    KillAll,
    KillRank,
    LinkLimit,
    OneWayCut,
    Partition,
    Slow,
    Stop,
    kill_every,
    links_of,
    member_of,
    names,
    unlikely,
)
from swarmnet.testing.schedule import (
    ASK_S,
    WAIT_S,
    Action,
    FaultAction,
    FaultEnded,
    FaultPostponed,
    FaultSchedule,
    HoldAction,
    ReleaseAction,
    RestartAction,
)

NAMES = replicas(2, 3)


KILL = Kill(stage=1, step=3, phase="backward", moment="end").named("k")


def armed(fault: Fault) -> tuple[FaultSchedule, list[HoldAction]]:
    faults = machine([fault], NAMES)
    acts = brought(faults, *range(3))
    return faults, only(acts, HoldAction)


def test_a_disk_is_full_until_its_time_is_over_also_when_its_replica_dies_before() -> None:
    faults = machine([DiskFull(stage=1, step=1, for_s=9.0)], NAMES)
    (full,) = struck(brought(faults, *range(3)), DiskFull)
    assert not only(faults.gone(full.name, now=3.0), FaultEnded)
    (over,) = only(faults.tick(now=12.0), FaultEnded)
    assert over == FaultEnded(full.fault, full.name)


def test_a_rank_is_killed_nowhere_where_nobody_has_ranks() -> None:
    faults = machine([KillRank(step=1)], NAMES)
    acts = brought(faults, *range(3))
    assert [act.reason for act in acts if isinstance(act, FaultPostponed)] == ["no replica of stage 0 has its ranks up"]
    assert faults.pending


@pytest.mark.parametrize("phase", ["backward", "snapshot"])
def test_in_a_phase_all_of_the_stage_are_armed_a_step_ahead_and_the_first_to_come_is_struck(phase: Any) -> None:
    fault = KILL.model_copy(update={"phase": phase})
    faults, (first, second, *rest) = armed(fault)
    assert {hold.name for hold in (first, second, *rest)} <= {"s1-r0", "s1-r1", "s1-r2"}
    assert bring(faults, 3, now=3.0) == []  # nobody is there yet
    assert holds(faults, second.name, second.id, now=3.1) == [
        FaultAction(fault, 3, second.name, 1),
        ReleaseAction(first.name, first.id),
        *(ReleaseAction(other.name, other.id) for other in rest),
    ]
    assert faults.pending == ()
    assert holds(faults, first.name, first.id, now=3.2) == [ReleaseAction(first.name, first.id)]  # read late
    assert faults.gone(second.name, now=3.2) == []
    assert faults.tick(now=4.2) == [RestartAction(second.name)]


def test_a_replica_that_holds_when_it_may_not_die_is_released_and_armed_again_later() -> None:
    faults, (hold, *_) = armed(KILL)
    others = [name for name, stage in NAMES.items() if stage == 1 and name != hold.name]
    for name in others:
        faults.gone(name, back=False, now=2.5)
    acts = holds(faults, hold.name, hold.id, now=3.0)
    assert acts[:2] == [ReleaseAction(hold.name, hold.id), FaultPostponed(KILL, "1 synced replica in stage 1")]
    assert faults.pending == ("k",)
    faults.started(others[0], now=4.0)
    again = only(at(faults, others[0], 2, now=5.0), HoldAction)
    assert hold.id not in [each.id for each in again] and hold.name in [each.name for each in again]


def test_where_one_is_named_no_other_is_struck() -> None:
    faults = machine([Kill(peer="s1-r0", step=3, phase="backward")], NAMES)
    acts = brought(faults, *range(9))
    assert [hold.name for hold in only(acts, HoldAction)] == ["s1-r0"]


def test_a_stopped_replica_goes_on_and_counts_for_nothing_until_it_has_moved() -> None:
    stop = Stop(peer="s1-r0", step=2, for_s=5.0)
    kill = Kill(peer="s1-r1", step=4, back=False)
    faults = machine([stop, kill], NAMES)
    acts = brought(faults, *range(3))
    acts += faults.tick(now=2.7)
    assert [act.name for act in struck(acts, Stop)] == ["s1-r0"]
    faults.gone("s1-r2", back=False, now=2.8)
    rest = [name for name in NAMES if name not in ("s1-r0", "s1-r2")]
    assert struck(bring(faults, 3, *rest, now=3.0) + bring(faults, 4, *rest, now=4.0), Kill) == []
    acts = faults.tick(now=7.7)
    assert acts[:1] == [FaultEnded(stop, "s1-r0")]
    assert struck(acts, Kill) == [] == struck(at(faults, "s1-r0", 4, now=9.0), Kill)  # what step 4 came to, r1 may
    assert struck(bring(faults, 5, *rest, "s1-r0", now=10.0), Kill) == []  # have alone; and step 5, too
    assert struck(bring(faults, 6, "s1-r0", now=11.0), Kill) == [FaultAction(kill, 6, "s1-r1", 1)]
    faults.gone("s1-r1", now=9.6)
    assert faults.tick(now=99.0) == []  # never returns


def test_a_drained_replica_is_told_and_returns_when_ordered() -> None:
    drain = Drain(peer="s0-r0", step=1, phase="apply", back_s=2.0)
    faults = machine([drain], NAMES)
    (hold,) = only(bring(faults, 0, now=0.0), HoldAction)
    assert holds(faults, "s0-r0", hold.id, now=1.0) == [
        FaultAction(drain, 0, "s0-r0", 0),
        ReleaseAction("s0-r0", hold.id),
    ]
    assert faults.gone("s0-r0", now=1.5) == []
    assert faults.tick(now=3.5) == [RestartAction("s0-r0")]


def test_a_replica_joins_while_another_holds_and_is_asked() -> None:
    join = Join(stage=1, step=1, phase="averaging")
    faults = machine([join], NAMES)
    (hold,) = only(bring(faults, 0, now=0.0), HoldAction)
    assert holds(faults, hold.name, hold.id, now=1.0) == [FaultAction(join, 0, "s1-r3", 1)]
    assert faults.started("s1-r3", now=1.0) == []
    assert asked(faults, "s1-r3", now=2.0) == [ReleaseAction(hold.name, hold.id)]
    assert at(faults, "s1-r3", 1, now=2.5) == []


def test_whoever_holds_for_a_joiner_that_does_not_come_is_let_go() -> None:
    join = Join(stage=1, step=1, phase="averaging")
    faults = machine([join], NAMES)
    (hold,) = only(bring(faults, 0, now=0.0), HoldAction)
    holds(faults, hold.name, hold.id, now=1.0)
    assert faults.tick(now=1.0 + ASK_S) == [ReleaseAction(hold.name, hold.id)]
    assert asked(faults, "s1-r3", now=30.0) == []


def test_a_join_without_a_stage_goes_where_the_fewest_live() -> None:
    faults = machine([Join(step=1)], NAMES)
    faults.gone("s1-r0", back=False, now=0.0)
    (join,) = struck(bring(faults, 0, now=0.0) + bring(faults, 1, now=1.0) + faults.tick(now=9.0), Join)
    assert (join.name, join.stage) == ("s1-r3", 1)


def test_a_donor_that_may_not_go_yet_is_kept_until_it_may() -> None:
    fault = KILL.model_copy(update={"phase": "snapshot"})
    faults, (first, second, third) = armed(fault)
    for name in (second.name, third.name):
        faults.gone(name, back=False, now=2.5)
    assert holds(faults, first.name, first.id, now=3.0) == [FaultPostponed(fault, "1 synced replica in stage 1")]
    assert faults.tick(now=4.0) == []
    (again,) = faults.started(second.name, now=5.0)
    assert isinstance(again, HoldAction)
    acts = at(faults, second.name, 2, now=6.0)
    assert acts == [FaultAction(fault, 2, first.name, 1), ReleaseAction(again.name, again.id)]


def test_a_donor_that_may_never_go_is_let_go() -> None:
    fault = KILL.model_copy(update={"phase": "snapshot"})
    faults, (first, second, third) = armed(fault)
    for name in (second.name, third.name):
        faults.gone(name, back=False, now=2.5)
    holds(faults, first.name, first.id, now=3.0)
    assert faults.tick(now=3.0 + WAIT_S)[0] == ReleaseAction(first.name, first.id)
    assert faults.pending == ("k",)


def test_one_that_fetches_may_always_die_and_is_armed_as_it_starts() -> None:
    fault = KILL.model_copy(update={"phase": "fetch"})
    faults = machine([fault], NAMES)
    brought(faults, *range(3))
    for name in ("s1-r0", "s1-r1"):
        faults.gone(name, back=False, now=3.0)
    (hold,) = faults.started("s1-r0", now=4.0)
    assert hold == HoldAction("s1-r0", hold.id, fault)
    assert holds(faults, "s1-r0", hold.id, now=5.0)[0] == FaultAction(fault, 2, "s1-r0", 1)


def test_a_partition_begins_ends_and_spares_those_it_divides() -> None:
    cut = Partition(step=1, for_s=3.0, between=(("s1-r0",), ("s1-r1", "s1-r2", "s0")))
    faults = machine([cut, Kill(stage=1, step=2, back=False), Kill(stage=0, step=2, back=False)], NAMES)
    acts = bring(faults, 0, now=0.0) + bring(faults, 1, now=1.0) + faults.tick(now=1.7)
    assert struck(acts, Partition) == [FaultAction(cut, 1)]
    acts = bring(faults, 2, now=2.0) + faults.tick(now=2.9)
    assert [kill.stage for kill in struck(acts, Kill)] == [0]  # stage 0 is whole on its side
    acts = faults.tick(now=4.8)
    assert acts[:1] == [FaultEnded(cut)] and struck(acts, Kill) == []
    assert [kill.stage for kill in struck(bring(faults, 3, now=5.0), Kill)] == []
    assert [kill.stage for kill in struck(bring(faults, 4, now=6.0), Kill)] == [1]


def test_one_that_took_its_state_is_good_a_step_later() -> None:
    faults = machine([Kill(peer="s1-r0", step=3, back=False)], NAMES)
    for name in ("s1-r1", "s1-r2"):
        faults.gone(name, back=False, now=0.0)
    for version in range(4):
        bring(faults, version, "s0-r0", "s1-r0", now=float(version))
    faults.started("s1-r1", now=4.0)
    assert struck(at(faults, "s1-r1", 3, took=True, now=5.0), Kill) == []
    assert struck(bring(faults, 4, "s1-r0", now=6.0), Kill) == []
    assert len(struck(at(faults, "s1-r1", 4, now=6.1), Kill)) == 1


def test_at_the_end_everything_that_lasts_ends_and_nothing_begins() -> None:
    stop = Stop(peer="s1-r0", step=1, for_s=50.0)
    cut = Partition(step=1, for_s=50.0, between=(("s0-r0",), ("s0-r1",)))
    faults = machine([stop, cut, KILL.model_copy(update={"step": 1}), Kill(stage=0, at_s=5.0)], NAMES)
    acts = bring(faults, 0, now=0.0) + bring(faults, 1, now=1.0) + faults.tick(now=1.9)
    released = {ReleaseAction(hold.name, hold.id) for hold in only(acts, HoldAction)}
    acts = faults.complete(now=2.0)
    assert released and set(acts) == {*released, FaultEnded(stop, "s1-r0"), FaultEnded(cut)}
    assert faults.tick(now=60.0) == [] and set(faults.pending) == {"k", "kill s0 at 5 s"}


def test_everything_can_be_killed() -> None:
    everything = KillAll(step=4)
    faults = machine([everything], NAMES)
    assert brought(faults, *range(4)) == []
    acts = bring(faults, 4, now=4.0) + faults.tick(now=4.7)
    assert acts == [FaultAction(everything, 4)]


def test_time_counts_from_when_every_stage_has_a_replica() -> None:
    faults = machine([Kill(stage=0, at_s=5.0, back=False)], NAMES)
    bring(faults, 0, "s0-r0", "s0-r1", now=10.0)
    assert struck(faults.tick(now=20.0), Kill) == []
    bring(faults, 0, now=30.0)
    assert struck(faults.tick(now=34.9), Kill) == []
    assert len(struck(faults.tick(now=35.0), Kill)) == 1


phases = st.sampled_from(["forward", "backward", "averaging", "apply", "snapshot", "fetch", None])
place = {"stage": st.integers(0, 1), "step": st.integers(0, 3), "phase": st.none() | phases}
taking = (
    st.builds(Kill, **place, back_s=st.just(0.5), back=st.booleans())
    | st.builds(Stop, **place, for_s=st.floats(0.5, 3.0))
    | st.builds(Drain, **place, back_s=st.sampled_from([None, 0.5]))
)
cut_off = {"step": st.integers(0, 3), "for_s": st.floats(0.5, 3.0)}
cutting = st.builds(Partition, **cut_off, between=st.just((("s0-r0",), ("s0-r1", "s0-r2")))) | st.builds(
    Slow, **cut_off, peers=st.just(("s0-r0",)), latency_s=st.just(0.1)
)
moves = st.sampled_from(["step", "step", "step", "hold", "gone", "wait"])
story = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), moves, st.floats(0.0, 2.0)), min_size=60, max_size=150)


@given(st.lists(taking | cutting, max_size=8), story, st.sampled_from([None, 0.5, 3.0]))
def test_whatever_takes_a_replica_away_leaves_a_good_one(
    orders: list[Fault], story: list, every_s: float | None
) -> None:
    """The law, from outside: at each kill, stop and drain of a replica with state another one of its stage is up, is
    not stopped or leaving, and holds the newest version ever shown. Whoever is stopped goes on; whoever holds is
    let go, or dies."""
    orders += kill_every(every_s, back_s=0.5)
    faults = FaultSchedule(orders, replicas=NAMES, steps=STEPS)
    version: dict[str, int | None] = dict.fromkeys(NAMES)
    up, away, holding = dict.fromkeys(NAMES, True), set(), {}
    newest, stopped, now = {0: -1, 1: -1}, set(), 0.0

    def check(acts: list[Action]) -> None:
        for act in acts:
            match act:
                case FaultAction(Kill() | Stop() | Drain() as fault, step, name):
                    stage = NAMES[name]
                    assert step == newest[stage]
                    others = [
                        version[other]
                        for other in NAMES
                        if NAMES[other] == stage
                        and other != name
                        and up[other]
                        and other not in away
                        and version[other] is not None
                    ]
                    assert version[name] is None or max(others, default=-1) >= newest[stage]
                    away.add(name)
                    if isinstance(fault, Stop):
                        stopped.add(name)
                    if isinstance(fault, Kill):
                        up[name], version[name] = False, None
                        check(faults.gone(name, now=now))
                case FaultEnded(Stop(), name):
                    stopped.discard(name)
                    away.discard(name)
                case HoldAction(name, id):
                    holding[id] = name
                case ReleaseAction(_, id):
                    holding.pop(id, None)
                case RestartAction(name):
                    assert not up[name]
                    up[name] = True
                    away.discard(name)
                    check(faults.started(name, now=now))

    for name, move, seconds in story:
        now += seconds
        if move == "step" and up[name] and name not in away:
            known = [v for n, v in version.items() if NAMES[n] == NAMES[name] and v is not None]
            own = version[name]
            version[name] = max(known, default=0) if own is None else min(own + 1, STEPS)
            newest[NAMES[name]] = max(newest[NAMES[name]], version[name])
            check(at(faults, name, version[name], now=now))
        elif move == "hold" and up[name] and name not in away:
            for id in [id for id, who in holding.items() if who == name]:
                check(holds(faults, name, id, now=now))
        elif move == "gone" and up[name]:
            up[name], version[name] = False, None
            away.discard(name)
            stopped.discard(name)
            check(faults.gone(name, now=now))
        else:
            check(faults.tick(now=now))
    check(faults.complete(now=now))
    assert stopped == set()


def test_names() -> None:
    assert names("s1", "s1-r0") and names("s1-r0", "s1-r0") and names("trainer-0", "trainer-0")
    assert not (
        names("s1", "s11-r0") or names("s1-r0", "s1-r1") or names("trainer-0", "trainer-1") or names("s1", "trainer-1")
    )
    assert member_of((("s0",), ("s1-r0", "s2")), "s2-r5") == 1
    assert member_of((("s0",), ("s1-r0", "s2")), "s1-r1") is None


def test_links_are_cut_between_groups_and_the_slowest_pace_counts() -> None:
    cut = Partition(step=0, between=(("s0-r0",), ("s0-r1", "s1")), for_s=1.0)
    slow = Slow(step=0, peers=("s1-r0",), bytes_per_s=100.0, latency_s=0.1, for_s=1.0)
    slower = Slow(step=0, peers=("s1",), bytes_per_s=50.0, for_s=1.0)
    everybody = ["s0-r0", "s0-r1", "s0-r2", "s1-r0", "trainer-0"]
    assert links_of("s0-r0", [cut], everybody) == ({"s0-r1", "s1-r0"}, {})
    assert links_of("s0-r2", [cut], everybody) == (set(), {})
    deaf = OneWayCut(step=0, senders=("s0-r0",), receivers=("s1",), for_s=1.0)
    assert links_of("s0-r0", [deaf], everybody) == ({"s1-r0"}, {}) and links_of("s1-r0", [deaf], everybody) == (
        set(),
        {},
    )
    assert links_of("s1-r0", [cut], everybody) == ({"s0-r0"}, {})
    _, paces = links_of("trainer-0", [slow, slower], everybody)
    assert paces == {"s1-r0": LinkLimit(50.0, 0.1)}


def test_what_nobody_may_be_there_for_is_said_beforehand() -> None:
    faults = [
        Kill(stage=1, step=5),
        Kill(stage=0, step=5),
        Slow(step=1, peers=("s1",), latency_s=0.1, for_s=1.0),
        Stop(peer="s1-r9", step=2, for_s=1.0),
    ]
    one = {"s0-r0": 0, "s0-r1": 0, "s1-r0": 1}

    def said_of(faults: list[Fault], replicas: dict[str, int]) -> list[str]:
        return list(unlikely(faults, replicas))

    never, absent = "cannot be carried out", "no replica of that name is there"
    assert said_of(faults, one) == [
        f"note: the only replica of a stage is never taken away, so this {never}: kill s1@5",
        f"note: {absent}, so this {never}: stop s1-r9@2",
    ]
    joined = said_of([*faults, Join(stage=1, step=3)], one)
    assert len(joined) == 2 and all("waits for one that joins" in line for line in joined)
    elsewhere = said_of([*faults, Join(stage=0, step=3)], one)
    assert len(elsewhere) == 2 and all(never in line for line in elsewhere)
    assert said_of(faults[:3], {**one, "s1-r1": 1}) == []
