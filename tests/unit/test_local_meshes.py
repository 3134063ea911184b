"""`--ranks` of a local swarm: who gets which mesh, what is refused, and what is kept for a run that goes on."""

from __future__ import annotations

from typing import Any

import pytest
from fault_events import STEPS, bring, brought, holds, machine, ranks

from swarmnet.config.peer import Mesh
from swarmnet.errors import UsageError
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import device_of, in_words, mesh_of, meshed, parse_meshes
from swarmnet.local.progress import SwarmProgress
from swarmnet.local.screen import News
from swarmnet.manifest.schema import Manifest, Model, Training
from swarmnet.telemetry.run_state import StageState
from swarmnet.testing.fault import KillRank, flagged
from swarmnet.testing.schedule import FaultAction, FaultPostponed, HoldAction, ReleaseAction

MANIFEST = Manifest(
    model=Model(num_heads=8, num_kv_heads=4, intermediate_size=96, vocab_size=258),
    training=Training(microbatch_size=4, sequence_length=36),
)
REPLICAS = [f"s{stage}-r{number}" for number in range(2) for stage in range(3)]
STAGES = {name: int(name[1]) for name in REPLICAS}


def parsed(*ranks: str, **changes: Any) -> dict[str, Mesh]:
    return parse_meshes(LocalOptions(ranks=ranks, **changes), MANIFEST, REPLICAS)


def test_a_stage_or_one_replica_of_it_gets_ranks() -> None:
    meshes = parsed("1=2, 2=4", "2.1=1", sequence_parallel=True)
    assert {name: mesh_of(meshes, name).ranks for name in REPLICAS} == {
        "s0-r0": 1,
        "s0-r1": 1,
        "s1-r0": 2,
        "s1-r1": 2,
        "s2-r0": 4,
        "s2-r1": 1,
    }
    assert mesh_of(meshes, "s1-r7") == Mesh(ranks=2, sequence_parallel=True) and mesh_of(meshes, "trainer-0") == Mesh()
    assert meshed(meshes, REPLICAS) == {"s1-r0", "s1-r1", "s2-r0"}
    assert in_words(meshes, MANIFEST) == "ranks: s1 2 (tp2sp), s2 4 (tp4sp), s2-r1 1"
    assert in_words(parsed("1=1"), MANIFEST) == in_words({}, MANIFEST) == ""
    assert in_words(parsed("0=4", shard="zero2", tensor=2), MANIFEST) == "ranks: s0 4 (tp2-zero2x2)"


def test_replicas_on_gpus_take_the_next_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    meshes = parsed(device="cuda")
    assert [mesh_of(meshes, name).gpus for name in sorted(REPLICAS)] == ["0,", "1,", "0,", "1,", "0,", "1,"]
    assert {device_of(mesh_of(meshes, name)) for name in [*REPLICAS, "s1-r7"]} == {"cuda"}
    assert device_of(mesh_of(meshes, "trainer-0")) == device_of(mesh_of({}, "s0-r0")) == "cpu"
    assert in_words(meshes, MANIFEST) == "on 2 GPUs"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UsageError, match="--device cuda: torch sees no CUDA device here; use --device cpu"):
        parsed(device="cuda")
    with pytest.raises(UsageError, match="--ranks are on the CPU"):
        parsed("1=2", device="cuda")


# ---------------------------------------------------------------- a rank is killed


def test_a_rank_is_killed_in_the_middle_of_its_step_and_no_replica_goes_away() -> None:
    faults = machine(flagged(KillRank, ("1@2",), stages=3, steps=STEPS), STAGES, meshed=("s1-r1",))
    assert brought(faults, *range(3)) == []
    (act,) = faults.tick(now=2.9)
    assert isinstance(act, FaultAction) and (act.name, act.step, str(act.fault)) == ("s1-r1", 2, "kill_rank 1@2")
    assert act.rank in (0, 1) and faults.pending == ()


def test_the_ranks_of_the_only_replica_may_be_killed_and_while_they_are_away_the_next_kill_waits() -> None:
    faults = machine(flagged(KillRank, ("1@1", "1@1"), stages=3, steps=STEPS), STAGES, meshed=("s1-r1",))
    assert faults.gone("s1-r0", back=False, now=0.5) == []
    bring(faults, 0, now=1.0)
    acts = [*bring(faults, 1, now=2.0), *faults.tick(now=2.9)]
    (act,) = acts
    assert isinstance(act, FaultAction)
    assert ranks(faults, "s1-r1", 0, now=3.0) == []
    assert bring(faults, 2, now=3.0) == [FaultPostponed(act.fault, "no replica of stage 1 has its ranks up")]
    assert [type(act) for act in ranks(faults, "s1-r1", 2, now=3.5)] == [FaultAction]


def test_a_rank_is_killed_while_its_replica_holds_in_a_phase() -> None:
    faults = machine([KillRank(step=3, phase="backward")], STAGES, meshed=("s1-r0", "s1-r1"))
    hold, other = brought(faults, *range(3))
    assert isinstance(hold, HoldAction) and {hold.name, other.name} == {"s1-r0", "s1-r1"}
    kill, *released = holds(faults, hold.name, hold.id, now=3.0)
    assert isinstance(kill, FaultAction) and kill.name == hold.name
    assert released == [ReleaseAction(hold.name, hold.id), ReleaseAction(other.name, other.id)]


def test_bad_places_of_a_kill_name_the_flag() -> None:
    with pytest.raises(UsageError, match="--kill-rank 1: write STAGE@STEP, for example 1@20"):
        list(flagged(KillRank, ("1",), stages=3, steps=20))


# ---------------------------------------------------------------- what a mesh says


STARTED = {"event": "mesh_started", "stage": 1, "mesh": "tp2", "epoch": 1, "pids": [11, 12], "seconds": 1.25}
LOST = {"event": "rank_lost", "stage": 1, "rank": 1, "reason": "killed by SIGKILL"}


def test_ranks_that_are_lost_and_back_are_told_and_counted() -> None:
    news, progress = News(), SwarmProgress(steps=3, replicas={"s1-r0": StageState(1)})
    progress.started("s1-r0", now=0.0)
    lines, states = [], []
    for event in (STARTED, LOST, STARTED | {"epoch": 2}):
        progress.on("s1-r0", event, now=1.0)
        lines += news.on("s1-r0", event)
        states.append(progress.state_of("s1-r0"))
    assert lines == [
        "s1-r0 has lost rank 1 (killed by SIGKILL): its ranks restart",
        "s1-r0 has its 2 ranks (tp2) again, after 1.2 s",
    ]
    assert states == ["starting", "ranks restart", "starting"] and progress.total("rank_restarts") == 1
    assert News().on("s1-r0", LOST | {"rank": None, "reason": "silence"}) == [
        "s1-r0 has lost a rank (silence): its ranks restart"
    ]
