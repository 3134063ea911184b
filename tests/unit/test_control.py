"""What a peer answers its operator, and what it has done: requests and the time in, answers out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.config.peer import Hours, PeerConfig
from swarmnet.peer.control import Control, Reply, WorkCount, WorkDone
from swarmnet.telemetry.run_state import RunState


def control() -> Control:
    return Control(PeerConfig(), WorkCount(WorkDone(1.0)), paused=False)


def ask(at: Control, request: object, *, minute: int = 720) -> Reply:
    return at.answer(request, minute=minute, day="2026-11-23")


def test_a_pause_holds_until_it_is_ended() -> None:
    at = control()
    assert not at.pauses(0)
    ask(at, {"ask": "pause"})
    assert at.pauses(0) == "as asked: `swarmnet control resume` ends it" and at.paused
    assert ask(at, {"ask": "resume"}).words == "resumed"
    assert ask(at, {"ask": "resume"}).words == "it was not paused"
    assert not at.pauses(0) and not at.paused


def test_outside_its_hours_it_pauses_by_itself() -> None:
    at = control()
    ask(at, {"ask": "limits", "change": {"caps": {"hours": "22:00-07:00"}}})
    assert [bool(at.pauses(60 * hour)) for hour in (23, 0, 6, 7, 12, 21)] == [False, False, False, True, True, True]
    reply = ask(at, {"ask": "resume"})
    assert reply.words == "it stays paused, outside caps.hours = 22:00-07:00" and reply.facts == {"paused": True}


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_hours_and_the_rest_of_the_day_are_the_day(begin: int, end: int, minute: int) -> None:
    if begin == end:
        return
    text = "-".join(f"{at // 60:02}:{at % 60:02}" for at in (begin, end))
    assert Hours.parse(text) == Hours(begin, end)
    assert Hours(begin, end).includes(begin) and not Hours(begin, end).includes(end)
    assert Hours(begin, end).includes(minute) != Hours(end, begin).includes(minute)


def test_caps_change_what_is_said_and_what_is_not_said_stays() -> None:
    at = control()
    ask(at, {"ask": "limits", "change": {"caps": {"upload_mbit": 5.0}}})
    change = {"slots": 2, "caps": {"disk_gib": 1.5}}
    reply = ask(at, {"ask": "limits", "change": change})
    assert at.config.slots == 2 and (at.config.caps.disk_gib, at.config.caps.upload_mbit) == (1.5, 5.0)
    assert reply.change == change
    assert reply.words.endswith("disk 1.5 GiB, slots 2, hours all day") and reply.facts["disk_gib"] == 1.5
    before = at.config
    assert ask(at, {"ask": "limits", "change": {}}).words == reply.words and at.config == before


def test_only_drain_has_it_leave() -> None:
    assert ask(control(), {"ask": "drain"}).leave
    assert not control().answer({"ask": "drain"}, minute=0, day="", leaves=True).leave
    assert not any(ask(control(), {"ask": each, "change": {}}).leave for each in ("pause", "resume", "limits", "stats"))


def does(*steps: tuple[int, int, int]) -> RunState:
    """A process that applies these steps. steps: (stage, version, microbatches in committed aggregates by then)."""
    state = RunState()
    for stage in {stage for stage, _, _ in steps}:
        state.serve(stage, now=0.0)
    for stage, version, counted in steps:
        state.on("applied", {"stage": stage, "version": version}, now=0.0)
        state.on("executed", {"stage": stage, "executions": counted, "counted": counted}, now=0.0)
    return state


def test_what_it_has_done_adds_up_over_its_lives() -> None:
    first, state = WorkCount(WorkDone(1.0)), does((0, 1, 3), (1, 1, 4), (0, 2, 5))
    first.passed(10.0, state, 1000, 500, serving=True)
    first.passed(10.0, state, 1500, 900, serving=False)
    kept = WorkDone(1.0, microbatches=9, steps=3, seconds=10.0, sent=1500, received=900)
    assert first.kept == kept
    second = WorkCount(kept)  # its own counts begin at 0 again
    second.passed(1.0, does((0, 3, 2)), 10, 10, serving=True)
    assert second.kept == WorkDone(1.0, 11, 4, 11.0, 1510, 910)
    words = "11 microbatches counted, 4 steps applied, 0 min served, 1.5 kB sent and 910 B received since 2026-11-23"
    assert ask(Control(PeerConfig(), second, paused=False), {"ask": "stats"}).words == words


def test_what_a_run_computes_again_after_it_went_back_is_not_counted_again() -> None:
    tally = WorkCount(WorkDone(1.0))
    state = does(*((0, *each) for each in ((1, 3), (2, 6), (3, 9), (2, 13), (3, 17), (4, 19))))
    tally.passed(0.0, state, 0, 0, serving=True)
    assert tally.kept == WorkDone(1.0, microbatches=11, steps=4)


@pytest.mark.parametrize("data", [[], {}, {"since": 1}, {"since": "x"}, None])
def test_a_file_of_something_else_is_refused(data: object) -> None:
    with pytest.raises(ValueError):
        WorkDone.parse(data)
