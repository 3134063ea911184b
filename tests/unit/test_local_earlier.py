"""A run that goes on: what it had done is read back, and what is done again is held against it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarmnet.errors import UsageError
from swarmnet.local import earlier
from swarmnet.local.earlier import await_end, finished, lives, members, replay
from swarmnet.local.progress import SwarmProgress
from swarmnet.local.report import RunOutcome, print_summary, summary
from swarmnet.local.screen import SwarmScreen
from swarmnet.manifest.schema import Manifest
from swarmnet.net.identity import own_identity
from swarmnet.telemetry.run_state import StageState, StepPoint
from swarmnet.testing.fault import kill_all
from swarmnet.testing.invariants import InvariantChecker, InvariantReport

GOOD: dict[str, Any] = {
    "event": "committed",
    "stage": 0,
    "step": 0,
    "loss_sum": 8.0,
    "num_tokens": 4,
    "digest": "d",
    "discarded": [],
    "contributions": [["a", [0, 1]]],
}


def audit(*events: tuple[int, dict[str, Any]], exact: bool = True) -> InvariantChecker:
    judge = InvariantChecker(stages=1, steps=1, microbatches=2, exact=exact)
    for life, event in events:
        judge.on(event, life=life)
    return judge


def test_a_step_done_again_with_the_same_sum_is_counted_and_fine() -> None:
    again = GOOD | {"contributions": [["b", [0]], ["c", [1]]]}
    verdict = audit((0, GOOD), (1, again)).report()
    assert verdict.problems == () and verdict.repeated == 1


def test_a_step_done_again_with_another_loss_is_a_problem() -> None:
    verdict = audit((0, GOOD), (1, GOOD | {"loss_sum": 8.1})).report()
    assert verdict.changed == (0,) and "step 0 had another loss than before" in verdict.problems[0]


def test_sums_of_two_lives_may_differ_only_where_order_counts() -> None:
    other = GOOD | {"digest": "e", "loss_sum": 8.00001}
    assert audit((0, GOOD), (1, other), exact=False).report().problems == ()
    assert audit((0, GOOD), (1, GOOD | {"digest": "e"})).report().conflicts == ((0, 0),)
    assert audit((1, GOOD), (1, GOOD | {"digest": "e"}), exact=False).report().conflicts == ((0, 0),)
    assert audit((0, GOOD), (1, GOOD | {"contributions": []})).report().lost == 2


def committed(t: float, step: int, loss: float) -> dict[str, Any]:
    return {
        "t": t,
        "event": "committed",
        "stage": 0,
        "step": step,
        "loss_sum": loss * 4,
        "num_tokens": 4,
        "digest": f"d{step}",
        "contributions": [["a", [0, 1]]],
        "discarded": [],
    }


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_was_done_before_is_read_from_the_children_s_own_files(tmp_path: Path) -> None:
    write(
        tmp_path / "events.jsonl",
        {"t": 100.0, "event": "began", "life": 0},
        {"t": 105.0, "event": "killed_all"},
        {"t": 200.0, "event": "began", "life": 1},
    )
    write(
        tmp_path / "peers/s0-r0/events.jsonl",
        committed(101.0, 0, 3.0),
        committed(102.0, 1, 2.0),
        committed(201.0, 1, 2.0),
        committed(202.0, 2, 1.5),
    )
    write(
        tmp_path / "peers/s0-r1/events.jsonl",
        committed(101.5, 0, 3.0),
        {"t": 150.0, "event": "applied", "x": 1},
        {"t": 101.0, "event": "evaluated", "step": 0, "loss": 3.5, "num_tokens": 4},
    )
    progress = SwarmProgress(steps=5, replicas={"s0-r0": StageState(0), "s0-r1": StageState(0)})
    judge = InvariantChecker(stages=1, steps=5, microbatches=2)
    replay(tmp_path, lives(tmp_path), progress, judge)
    assert [(point.step, point.loss, point.time) for point in progress.points] == [
        (0, 3.0, 1.0),
        (1, 2.0, 2.0),
        (2, 1.5, 4.0),
    ], "nothing was done between the two"
    assert progress.earlier_points == 3 and progress.earlier_s == 4.0 and progress.evaluations == {0: 3.5}
    assert progress.done == set()
    assert judge.report().repeated == 1 and judge.report().lost == 0


def test_what_stands_is_kept_as_it_was_with_what_was_done_to_the_run(tmp_path: Path) -> None:
    write(
        tmp_path / "events.jsonl",
        {"t": 100.0, "event": "began", "name": "local"},
        {"t": 101.5, "event": "killed", "name": "local", "child": "s0-r0", "step": 1},
        {"t": 101.6, "event": "stop", "name": "local", "child": "s0-r1", "step": 1},
        {"t": 101.7, "event": "stop", "name": "s0-r1"},
    )
    figures = {"event": "figures", "step": 0, "loss": 3.0, "num_tokens": 4, "learning_rate": 0.1, "grad_norm": 2.0}
    write(tmp_path / "peers/s0-r0/events.jsonl", committed(101.0, 0, 3.0), {"t": 101.1, **figures})
    write(tmp_path / "peers/s0-r1/events.jsonl", committed(102.0, 1, 2.0), committed(103.0, 2, 1.5))
    rows = ["step,loss,tokens,seconds,learning_rate,grad_norm,held_out", "0,3.0,4,1.017,0.1,2.0,", "1,9.0,4,2.021,,,"]
    (tmp_path / "loss.csv").write_text("\n".join(rows))
    progress = SwarmProgress(steps=3, replicas={"s0-r0": StageState(0), "s0-r1": StageState(0)})
    replay(tmp_path, lives(tmp_path), progress, InvariantChecker(stages=1, steps=3, microbatches=2))
    assert [point.time for point in progress.points] == [1.017, 2.0, 3.0], "the second is of another loss"
    assert progress.figures == {0: (0.1, 2.0)}
    assert [(name, step) for name, step, _ in progress.kills] == [("s0-r0", 1)]
    assert progress.faults == {"kill": 1, "stop": 1}


def test_a_resumed_run_adds_up_its_sessions_and_says_what_is_of_the_last() -> None:
    progress = SwarmProgress(steps=2, replicas={"s0-r0": StageState(0)}, earlier_s=20.0)
    progress.kills = [("s0-r0", 1, 3.0), ("s0-r0", 1, 4.0)]
    outcome = RunOutcome("ab", Manifest(), progress, InvariantReport(0, 0, 0, (), (), ()), 43.0, resumed=1)
    found = summary(outcome)
    assert (found["seconds"], found["session_seconds"], found["kills"]) == (43.0, 23.0, 2)
    console = Console(file=io.StringIO(), width=200)
    print_summary(outcome, Path("out"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "0 of 2 steps in 0:43, no loss, in this session 0:23, 0 tokens/s" in text
    assert "kills 2, in this session reroutes 0" in text


def test_who_lied_and_was_named_before_is_known_after_a_resume(tmp_path: Path) -> None:
    lying = {"s0-r1": "lazy"}
    write(
        tmp_path / "events.jsonl", {"t": 100.0, "event": "began", "life": 0}, {"t": 200.0, "event": "began", "life": 1}
    )
    write(
        tmp_path / "peers/s0-r0/events.jsonl",
        committed(102.0, 0, 3.0),
        {"t": 103.0, "event": "convicted", "peer": "L", "step": 0, "reason": "odd"},
    )
    write(
        tmp_path / "peers/s0-r1/events.jsonl",
        {"t": 100.5, "event": "listening", "peer": "L", "dht": ["here"]},
        {"t": 101.0, "event": "lied", "kind": "lazy", "step": 0, "index": 1},
        committed(102.0, 0, 9.0),
        {"t": 103.0, "event": "convicted", "peer": "H", "step": 0, "reason": "it is a liar's word"},
    )
    progress = SwarmProgress(steps=5, replicas={name: StageState(0) for name in ("s0-r0", "s0-r1")}, liars=lying)
    judge = InvariantChecker(stages=1, steps=1, microbatches=2)
    replay(tmp_path, lives(tmp_path), progress, judge)
    assert progress.events["s0-r1", "lied"] == 1 and progress.convictions.keys() == {"s0-r1"}
    assert progress.convictions["s0-r1"].step == 1 and not progress.dht, "nobody listens there now"
    assert judge.report().problems == () and [point.loss for point in progress.points] == [3.0]


def test_who_takes_part_is_who_has_a_directory(tmp_path: Path) -> None:
    for name in ("s1-r0", "s0-r1", "trainer-0", "s0-r0", "s1-r3", "lost+found"):
        (tmp_path / "peers" / name).mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no run"):
        members(tmp_path)
    (tmp_path / "run.toml").touch()
    replicas, trainers = members(tmp_path)
    assert list(replicas.items()) == [("s0-r0", 0), ("s1-r0", 1), ("s0-r1", 0), ("s1-r3", 1)]
    assert trainers == ("trainer-0",)


def test_orders_that_cannot_be_carried_out() -> None:
    assert kill_all(None, steps=5) == ()
    assert [fault.kind for fault in kill_all(4, steps=5)] == ["kill_all"]
    for step in (-1, 5):
        with pytest.raises(UsageError, match="--kill-all"):
            kill_all(step, steps=5)


def test_a_stage_that_dropped_steps_makes_another_run_of_what_follows() -> None:
    judge = InvariantChecker(stages=1, steps=1, microbatches=2)
    judge.on(GOOD, life=0)
    assert judge.restarted(0, life=1) and not judge.restarted(0, life=1)  # both replicas of the stage say it
    other = GOOD | {"digest": "e", "loss_sum": 8.1}
    judge.on(other, life=1)
    verdict = judge.report()
    assert verdict.problems == () and verdict.renewed == (0,) and verdict.repeated == 1
    judge.on(other | {"digest": "f"}, life=1)
    assert judge.report().conflicts == ((0, 0),)  # but its replicas still have to agree


def test_the_curve_goes_on_with_the_steps_of_a_stage_that_dropped_some(tmp_path: Path) -> None:
    dropped = {"event": "dropped", "stage": 0, "from": 0, "to": 1, "microbatches": 2, "reason": "training.allow_drop"}
    write(tmp_path / "events.jsonl", {"t": 100.0, "event": "began"}, {"t": 200.0, "event": "began"})
    write(
        tmp_path / "peers/s0-r0/events.jsonl",
        committed(101.0, 0, 3.0),
        committed(102.0, 1, 2.0),
        {"t": 200.5, **dropped},
        committed(201.0, 1, 2.5),
        committed(202.0, 2, 1.5),
    )
    write(tmp_path / "peers/s0-r1/events.jsonl", {"t": 201.5, **dropped})
    progress = SwarmProgress(steps=5, replicas={"s0-r0": StageState(0), "s0-r1": StageState(0)})
    judge = InvariantChecker(stages=1, steps=5, microbatches=2, exact=False)
    replay(tmp_path, lives(tmp_path), progress, judge)
    assert [point.loss for point in progress.points] == [3.0, 2.5, 1.5]
    assert judge.report().changed == () and judge.report().renewed == (1,)


def test_a_run_is_finished_when_every_stage_holds_the_last_version_on_a_disk(tmp_path: Path) -> None:
    def end(stage: int, version: int) -> dict[str, Any]:
        return {"t": 1.0, "event": "finished", "stage": stage, "version": version, "weights_sha256": "w"}

    write(tmp_path / "peers/s0-r0/events.jsonl", end(0, 5))
    write(tmp_path / "peers/s1-r0/events.jsonl", end(1, 4))
    assert not finished(tmp_path, stages=2, steps=5)
    write(tmp_path / "peers/s1-r1/events.jsonl", end(1, 5))
    assert not finished(tmp_path, stages=2, steps=5), "it is on no disk"
    for place in ("s0-r0/snapshots/ab/stage-0-step-5", "s1-r1/snapshots/ab/stage-1-step-4"):
        write(tmp_path / f"peers/{place}.json")
    assert not finished(tmp_path, stages=2, steps=5)
    write(tmp_path / "peers/s1-r1/snapshots/ab/stage-1-step-5.json")
    assert finished(tmp_path, stages=2, steps=5)


def test_a_resumed_run_says_from_where_and_what_is_done_again() -> None:
    progress = SwarmProgress(
        steps=9,
        replicas={"s0-r0": StageState(0, alive=True, version=4), "s1-r0": StageState(1, alive=True, version=5)},
        earlier_points=6,
    )
    assert progress.again() == "goes on from version 4: of the 6 steps done before, steps 4 to 5 are done again"
    progress.earlier_points = 5
    assert progress.again() == "goes on from version 4: of the 5 steps done before, step 4 is done again"
    progress.earlier_points = 4
    assert progress.again() == "goes on from version 4; the 4 steps before it are done"


def test_the_newest_checkpoint_of_all_stages_is_known() -> None:
    progress = SwarmProgress(steps=9, replicas={"s0-r0": StageState(0), "s1-r0": StageState(1)})
    assert progress.checkpoint is None
    for stage, version in ((0, 4), (0, 8), (1, 4)):
        progress.on(f"s{stage}-r0", {"event": "checkpoint", "stage": stage, "version": version}, now=0.0)
    assert progress.checkpoint == 4


def test_only_what_is_new_is_printed() -> None:
    console = Console(file=io.StringIO(), width=200)
    progress = SwarmProgress(steps=9, replicas={"s0-r0": StageState(0)}, earlier_points=2)
    progress.points = [StepPoint(step, 3.0, 4, float(step)) for step in range(3)]
    SwarmScreen(console).update(progress, now=9.0)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert len(lines) == 1 and lines[0].startswith("step    2  loss 3.0000")


def test_what_a_dying_member_still_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member = own_identity(tmp_path / "peers" / "s0-r0")
    member.__enter__()
    with pytest.raises(UsageError, match=r"s0-r0 is in use by a peer that still runs: end its `swarmnet local`"):
        await_end(tmp_path, patience_s=0.0)
    waits: list[float] = []

    def dies(seconds: float) -> None:
        waits.append(seconds)
        member.__exit__(None, None, None)

    monkeypatch.setattr(earlier.time, "sleep", dies)
    await_end(tmp_path)
    assert len(waits) == 1
    await_end(tmp_path / "nowhere")
