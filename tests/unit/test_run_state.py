"""What the events of one process add up to."""

from __future__ import annotations

from swarmnet.telemetry.run_state import PACE_STEPS, STEP_BUCKETS_S, RunState, StepPoint, step_s, tokens_per_second


def test_a_wait_counts_from_its_reason_and_ends_with_what_it_waits_for() -> None:
    state = RunState()
    for now, reason in ((1.0, "no replica of stage 1"), (2.0, "no replica of stage 1"), (3.0, "no weights")):
        state.on("waiting", {"stage": 1, "reason": reason}, now=now)
        state.on("waiting", {"reason": "no trainer"}, now=now)
    assert {stage: wait.since for stage, wait in state.waits.items()} == {1: 3.0, None: 1.0}
    state.on("synced", {"stage": 1, "version": 4}, now=4.0)
    assert list(state.waits) == [None]
    state.on("complete", {"peers": 2}, now=5.0)
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


def test_the_pace_is_that_of_the_last_steps_and_unknown_once_the_run_went_back() -> None:
    state = RunState()
    pace = lambda: (step_s(state.points), tokens_per_second(state.points))  # noqa: E731
    assert pace() == (None, None)
    for step, now, num_tokens in ((4, 10.0, 8), (5, 12.0, 8), (6, 14.0, 0), (8, 18.0, 6)):
        figures = {"step": step, "loss": 1.0 / step, "num_tokens": num_tokens, "grad_norm": 0.5, "learning_rate": 0.1}
        state.on("figures", figures, now=now)
    assert (pace(), state.points[-1]) == ((2.0, 3.0), StepPoint(8, 0.125, 6, 18.0, 0.5, 0.1))
    state.on("figures", figures | {"step": 3, "num_tokens": 0}, now=20.0)
    assert state.points[-1].step == 8, "a step without tokens has no loss"
    state.on("figures", figures | {"step": 3}, now=20.0)
    assert pace() == (None, None)


def test_the_pace_forgets_what_is_older() -> None:
    state = RunState()
    for step in range(PACE_STEPS + 2):
        figures = {"step": step, "loss": 1.0, "num_tokens": 8, "grad_norm": 0.5, "learning_rate": 0.1}
        state.on("figures", figures, now=float(step) if step else -100.0)
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
