"""What the events of one process add up to, and what a replica reports of others from what happens to it."""

from __future__ import annotations

from stage_table import TIMERS, Table

from swarmnet.directory import Complaint, Record
from swarmnet.ids import Incarnation, PeerId, RunId
from swarmnet.messages import Exclusion
from swarmnet.peer.stall_reports import StallReports
from swarmnet.telemetry.run_state import (
    PACE_STEPS,
    STEP_BUCKETS_S,
    LineBytes,
    RunState,
    StageState,
    StepPoint,
    step_s,
    tokens_per_second,
)


def test_a_wait_counts_from_its_reason_and_ends_with_what_it_waits_for() -> None:
    state = RunState()
    for now, reason in ((1.0, "no replica of stage 1"), (2.0, "no replica of stage 1"), (3.0, "no weights")):
        state.on("waiting", {"stage": 1, "reason": reason}, now=now)
        state.on("waiting", {"reason": "no trainer"}, now=now)
    assert {stage: wait.since for stage, wait in state.waits.items()} == {1: 3.0, None: 1.0}
    state.on("synced", {"stage": 1, "version": 4}, now=4.0)
    assert list(state.waits) == [None]
    state.on("complete", {"num_peers": 2}, now=5.0)
    assert not state.waits
    state.on("waiting", {"reason": "no trainer"}, now=6.0)
    state.on("draining", {}, now=7.0)
    assert not state.waits


def test_a_step_takes_from_one_update_of_the_lowest_stage_to_the_next() -> None:
    state = RunState()
    for stage in (1, 2):
        state.serve(stage, now=0.0)
    for version, now in ((1, 10.0), (2, 12.0), (3, 412.0)):
        for stage in (1, 2):
            state.on("applied", {"stage": stage, "version": version}, now=now)
    assert (sum(state.durations), state.seconds) == (2, 402.0)
    assert state.durations[STEP_BUCKETS_S.index(2.5)] == state.durations[STEP_BUCKETS_S.index(600.0)] == 1
    assert [here.steps for here in state.stages.values()] == [3, 3] and state.events["applied"] == 6


def test_an_event_of_a_stage_that_is_not_served_here_changes_no_stage() -> None:
    state = RunState()
    here = state.serve(0, now=0.0)
    state.on("convicted", {"stage": 1, "peer": "P", "step": 3, "reason": "wrong work"}, now=1.0)
    assert not here.convicted and state.events["convicted"] == 1


def figures(step: int, num_tokens: int = 8) -> dict[str, object]:
    return {"step": step, "loss": 1.0 / max(step, 1), "num_tokens": num_tokens, "grad_norm": 0.5, "learning_rate": 0.1}


def test_the_pace_is_that_of_the_last_steps_and_unknown_once_the_run_went_back() -> None:
    state = RunState()
    pace = lambda: (step_s(state.points), tokens_per_second(state.points))  # noqa: E731
    assert pace() == (None, None)
    for step, now, num_tokens in ((4, 10.0, 8), (5, 12.0, 8), (6, 14.0, 0), (8, 18.0, 6)):
        state.on("figures", figures(step, num_tokens), now=now)
    assert (pace(), state.points[-1]) == ((2.0, 3.0), StepPoint(8, 0.125, 6, 18.0, 0.5, 0.1))
    state.on("figures", figures(3, 0), now=20.0)
    assert state.points[-1].step == 8, "a step without tokens has no loss"
    state.on("figures", figures(3), now=20.0)
    assert pace() == (None, None)
    state = RunState()
    for step in range(PACE_STEPS + 2):  # it forgets what is older
        state.on("figures", figures(step), now=float(step) if step else -100.0)
    assert step_s(state.points) == 1.0


def test_a_replica_has_finished_until_its_run_goes_on() -> None:
    state = RunState()
    here = state.serve(0, now=0.0)
    for event, version, finished in (
        ("applied", 9, False),
        ("finished", 9, True),
        ("synced", 9, True),
        ("applied", 10, False),
        ("finished", 10, True),
        ("synced", 4, False),
    ):
        state.on(event, {"stage": 0, "version": version}, now=1.0)
        assert (here.version, here.finished) == (version, finished)


def test_the_pace_of_a_replica_is_that_of_its_last_steps_and_fades_while_none_comes() -> None:
    state = RunState()
    here = state.serve(0, now=0.0)
    assert here.per_second(1.0) == 0.0
    for step in range(PACE_STEPS + 5):
        state.on("executed", {"stage": 0, "executions": 9, "counted": 4 * step}, now=2.0 * step)
    last = 2.0 * (PACE_STEPS + 4)
    assert here.per_second(last) == 2.0 and here.per_second(last + 2.0 * PACE_STEPS) == 1.0


def test_state_on_its_way_has_a_pace_of_its_own_until_it_is_here() -> None:
    state = RunState()
    state.serve(0, now=0.0)
    for now, got in ((1.0, 100), (3.0, 500)):
        state.on("fetching", {"stage": 0, "bytes": got}, now=now)
    state.on("following", {"stage": 0, "version": 4}, now=4.0)
    transfer = state.fetches[0]
    assert (transfer.since, transfer.first, transfer.fields["bytes"]) == (1.0, 100, 500)
    assert transfer.following is not None and state.version is None
    state.on("synced", {"stage": 0, "version": 4}, now=5.0)
    assert not state.fetches and state.version == 4
    state.on("following", {"stage": 0, "version": 4}, now=6.0)
    assert not state.fetches, "it is level"


def test_the_end_is_as_far_away_as_the_steps_that_are_left_of_the_stage_that_has_come_least_far() -> None:
    state = RunState()
    for stage, version in ((0, 7), (1, 6)):
        state.serve(stage, now=0.0)
        state.on("synced", {"stage": stage, "version": version}, now=1.0)
    assert state.version == 6 and state.eta_s(1.0) is None
    for step in (5, 6):
        state.on("figures", figures(step), now=2.0 * step)
    assert state.eta_s(12.0) is None, "nobody has said how many steps there are"
    state.record = Record(RunId("ab" * 32), PeerId("me"), Incarnation(1), (), (), steps=100)
    assert state.eta_s(12.0) == state.eta_s(14.0) == 94 * 2.0
    assert state.eta_s(30.0) == 94 * 10.0, "no step for 18 s: the end moves away"


def test_warnings_are_remembered_by_what_they_are_about_and_told_events_in_their_order() -> None:
    state = RunState()
    for now, peer in ((1.0, "A"), (2.0, "B"), (3.0, "A")):
        state.on("cannot_reach", {"stage": 0, "peer": peer, "reason": "silence"}, now=now)
    state.on("waiting", {"reason": "no trainer"}, now=4.0)
    state.on("relay_lost", {"relay": "R", "reason": "it left"}, now=5.0)
    assert [(kind, peer, at) for (kind, _, peer), (_, at) in state.warned.items()] == [
        ("cannot_reach", "B", 2.0),
        ("cannot_reach", "A", 3.0),
        ("relay_lost", None, 5.0),
    ]
    assert [event for event, _ in state.told] == ["relay_lost"] and state.num_told == 1
    assert (state.first["cannot_reach"], state.first["relay_lost"]) == (1.0, 5.0)


def test_what_crosses_the_line_is_told_of_the_last_seconds() -> None:
    state = RunState()
    assert state.line == (0.0, 0.0)
    for second in range(30):
        state.crossed.append(LineBytes(float(second), 100 * second, 0 if second < 25 else 500))
    assert state.line == (100.0, 50.0)


def test_why_it_pauses_and_what_it_waits_for_when_it_leaves() -> None:
    state = RunState()
    state.on("pausing", {"why": "as asked"}, now=1.0)
    assert state.pausing == "as asked"
    state.on("resumed", {}, now=2.0)
    state.on("draining", {"left": "another replica to have its state"}, now=3.0)
    assert (state.pausing, state.leaving) == ("", "another replica to have its state")


# ---------------------------------------------------------------- what a replica reports of others


def reports() -> tuple[StageState, StallReports]:
    state = RunState().serve(0, now=0.0)
    return state, StallReports(TIMERS, state, lambda event, fields: None)


def test_a_step_is_late_by_the_usual_pace_and_who_sits_out_is_named_until_it_does_not() -> None:
    state, complaints = reports()
    assert (complaints.still_s(now=15.0), complaints.still_s(now=16.0)) == (0, 16), "before the first step"
    for step in range(1, 6):
        state.on("applied", {"version": step}, now=10.0 * step)
    assert (complaints.still_s(now=90.0), complaints.still_s(now=91.0)) == (0, 41)
    state.on("evicted", {"peer": PeerId("P"), "reason": "late"}, now=100.0)
    state.on("late", {"peer": PeerId("Q"), "reason": "does not report"}, now=100.0)
    table = Table("A")
    table.members["A"].membership.restored((), (Exclusion(PeerId("Q"), 5, 1),))
    assert complaints.of(table.members["A"], None, now=110.0) == (
        Complaint(0, PeerId("Q"), "sits_out", "does not report", 50),
        Complaint(0, PeerId("P"), "left_out", "late", 10),
    )
    table.members["A"].membership.restored((), (Exclusion(PeerId("Q"), 0, 1),))
    assert complaints.of(table.members["A"], None, now=161.0) == ()


def test_a_conviction_names_its_step_and_disputes_are_counted() -> None:
    state, complaints = reports()
    for peer, reason in (("P", "has signed two sums of one round"), ("Q", "step 7, microbatch 3: others find another")):
        state.on("convicted", {"peer": PeerId(peer), "step": 7, "reason": reason}, now=100.0)
    table = Table("A")
    assert complaints.of(table.members["A"], None, now=110.0) == (
        Complaint(0, PeerId("P"), "convicted", "step 7: has signed two sums of one round", 10),
        Complaint(0, PeerId("Q"), "convicted", "step 7, microbatch 3: others find another", 10),
    )
    for step in (3, 5):
        state.on("disputed", {"peer": PeerId("P"), "step": step, "index": 0, "peers": []}, now=100.0)
    assert complaints.disputed is None and not complaints.num_disputed, "work of a convict"
    for peer, step in (("R", 3), ("S", 4), ("R", 5)):
        state.on("disputed", {"peer": PeerId(peer), "step": step, "index": 0, "peers": []}, now=100.0)
    assert (complaints.disputed, complaints.num_disputed) == ((5, "R"), 3)
    state.on("convicted", {"peer": PeerId("R"), "step": 7, "reason": "lies"}, now=100.0)
    assert (complaints.disputed, complaints.num_disputed) == ((4, "S"), 1)


def test_a_leader_names_whose_report_it_waits_for() -> None:
    table = Table("A", "B")
    [leader] = [member for member in table.members.values() if member.oldest.leader is not None]
    other = next(name for name in table.members if name != leader.me)
    assert leader.oldest.leader is not None and leader.oldest.leader.waits() == {}
    del leader.oldest.leader.members[PeerId(other)]
    complaints = StallReports(TIMERS, RunState().serve(0, now=table.now - 20.0), lambda event, fields: None)
    said = complaints.of(leader, None, now=table.now)
    assert said == (Complaint(0, PeerId(other), "waited_for", "does not report"),)
