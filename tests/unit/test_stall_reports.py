"""What a replica holds against its mates, from what happens to it; and since when its stage stands still."""

from __future__ import annotations

from stage_table import TIMERS, Table

from swarmnet.directory import Complaint
from swarmnet.ids import PeerId
from swarmnet.messages import Exclusion
from swarmnet.peer.stall_reports import StallReports
from swarmnet.telemetry.run_state import RunState


def test_a_step_is_late_by_the_usual_pace_and_who_sits_out_is_named_until_it_does_not() -> None:
    state = RunState().serve(0, now=0.0)
    complaints = StallReports(TIMERS, state, lambda event, fields: None)
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
    state = RunState().serve(0, now=0.0)
    complaints = StallReports(TIMERS, state, lambda event, fields: None)
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
