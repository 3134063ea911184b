"""A run that goes on: what it had done is read back, and what is done again is held against it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UsageError
from swarmnet.local.audit import Audit
from swarmnet.local.earlier import lives, members, replay
from swarmnet.local.events import Committed
from swarmnet.local.options import LocalOptions, parse_kill_all
from swarmnet.local.progress import Progress, ReplicaView

GOOD = Committed(stage=0, step=0, loss_sum=8.0, num_tokens=4, digest="d", voided=frozenset(),
                 contributions=(("a", (0, 1)),))


def audit(*events: tuple[int, Committed], exact: bool = True) -> Audit:
    judge = Audit(stages=1, steps=1, microbatches=2, exact=exact)
    for life, event in events:
        judge.on(event, life=life)
    return judge


def test_a_step_done_again_with_the_same_sum_is_counted_and_fine() -> None:
    again = replace(GOOD, contributions=(("b", (0,)), ("c", (1,))))
    verdict = audit((0, GOOD), (1, again)).verdict()
    assert verdict.problems == () and verdict.repeated == 1


def test_a_step_done_again_with_another_loss_is_a_problem() -> None:
    verdict = audit((0, GOOD), (1, replace(GOOD, loss_sum=8.1))).verdict()
    assert verdict.changed == (0,) and "step 0 had another loss than before" in verdict.problems[0]


def test_sums_of_two_lives_may_differ_only_where_order_counts() -> None:
    other = replace(GOOD, digest="e", loss_sum=8.00001)
    assert audit((0, GOOD), (1, other), exact=False).verdict().problems == ()
    assert audit((0, GOOD), (1, replace(GOOD, digest="e"))).verdict().conflicts == ((0, 0),)
    assert audit((1, GOOD), (1, replace(GOOD, digest="e")), exact=False).verdict().conflicts == ((0, 0),)
    assert audit((0, GOOD), (1, replace(GOOD, contributions=()))).verdict().lost == 2


def committed(t: float, step: int, loss: float) -> dict[str, Any]:
    return {"t": t, "event": "committed", "stage": 0, "step": step, "loss_sum": loss * 4, "num_tokens": 4,
            "digest": f"d{step}", "contributions": [["a", [0, 1]]], "voided": []}


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_was_done_before_is_read_from_the_children_s_own_files(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", {"t": 100.0, "event": "began", "life": 0}, {"t": 105.0, "event": "killed_all"},
          {"t": 200.0, "event": "began", "life": 1})
    write(tmp_path / "peers/s0-r0/events.jsonl", committed(101.0, 0, 3.0), committed(102.0, 1, 2.0),
          committed(201.0, 1, 2.0), committed(202.0, 2, 1.5))
    write(tmp_path / "peers/s0-r1/events.jsonl", committed(101.5, 0, 3.0), {"t": 150.0, "event": "applied", "x": 1},
          {"t": 101.0, "event": "evaluated", "step": 0, "loss": 3.5, "num_tokens": 4})
    progress = Progress(steps=5, replicas={"s0-r0": ReplicaView(0), "s0-r1": ReplicaView(0)})
    judge = Audit(stages=1, steps=5, microbatches=2)
    replay(tmp_path, lives(tmp_path), progress, judge)
    assert [(point.step, point.loss, point.seconds) for point in progress.points] == [
        (0, 3.0, 1.0), (1, 2.0, 2.0), (2, 1.5, 102.0)]
    assert progress.earlier_points == 3 and progress.earlier_s == 102.0 and progress.evaluations == {0: 3.5}
    assert progress.done == set()
    assert judge.verdict().repeated == 1 and judge.verdict().lost == 0


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
    assert parse_kill_all(None, steps=5) == ()
    assert [fault.kind for fault in parse_kill_all(4, steps=5)] == ["kill_all"]
    for step in (-1, 5):
        with pytest.raises(UsageError, match="--kill-all"):
            parse_kill_all(step, steps=5)
    with pytest.raises(UsageError, match="--resume needs --out"):
        LocalOptions(resume=True)
    with pytest.raises(UsageError, match="--chaos and --kill"):
        LocalOptions(chaos="random:1", kill=("0@1",))
    with pytest.raises(UsageError, match="--checkpoint-every"):
        LocalOptions(checkpoint_every=0)
