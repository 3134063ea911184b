"""A liar is convicted after its false work was applied: the step is named in status, or the run goes back before it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest

from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.peer.replica import ReplicaLimits
from swarmnet.peer.swarm_health import Assessment, assess
from swarmnet.testing import virtual_swarm
from swarmnet.testing.plan import RUN, Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm
from tests.benchmark_modules import load
from tests.sim.going_back import GoingBack
from tests.sim.strike import reached

load("audit")

import audit_lies  # noqa: E402  # beside it
import audit_model  # noqa: E402

LIAR, AT = PeerId("liar"), 9

PLAN = Plan(stages=2, served=((0,), (0,), (0,), (1,), (1,), (1,)), microbatches=24, steps=30, checkpoint_every=4)


class Once(audit_lies.Flips):  # type: ignore[misc, name-defined]
    """flips the sign in every microbatch of one step"""

    def decides(self, step: int) -> bool:
        return step == AT


def lived(
    on_late: Literal["record", "rollback"],
    kind: type[audit_lies.FalseWork] = Once,
    *,
    share: float = 0.6,
    seed: int = 3,
    **changes: Any,
) -> tuple[VirtualSwarm, GoingBack, Assessment]:
    """A run with that liar, and what status says of it near its end."""
    audit = Audits(microbatches=share, contributions=share, on_late=on_late)
    swarm = VirtualSwarm(replace(PLAN, audit=audit, **changes), seed, audit_model.Regression)
    swarm.exact = False  # while the false step is applied
    back, lie, found = GoingBack(swarm), kind(swarm, LIAR, 1), list[Assessment]()

    async def script(swarm: VirtualSwarm) -> None:
        lie.begin()
        swarm.loop.start(lie._process, lie.live(0.0))
        await reached(swarm, 26)
        found.append(assess(RUN, await swarm.directory.records(), swarm.plan.stages))

    swarm.run(script=script)
    # Whether its one false step is drawn at all, and in time, differs by seed.
    assert {fields["peer"] for _, _, event, fields in swarm.events if event == "convicted"} <= {LIAR}
    return swarm, back, found[0]


def said(swarm: VirtualSwarm, event: str) -> dict[PeerId, dict[str, Any]]:
    return {peer: fields for _, peer, name, fields in swarm.events if name == event}


def is_as_if_nobody_had_lied(swarm: VirtualSwarm) -> bool:
    return all(
        engine.weights == swarm.reference.weights[stage]
        for node in swarm.honest
        for stage, engine in node.engines.items()
    )


def test_a_step_with_false_work_stays_applied_and_status_names_it() -> None:
    swarm, back, found = lived("record")
    assert not back.moves and not is_as_if_nobody_had_lied(swarm)
    (fields,) = {tuple(sorted(fields.items())) for fields in said(swarm, "tainted").values()}
    assert dict(fields) == {"step": AT, "stage": 1, "peer": LIAR} and len(said(swarm, "tainted")) == 6
    assert found.num_tainted == 1 and [(each.stage, each.step, each.by) for each in found.tainted] == [(1, AT, 6)]
    (problem,) = [problem for problem in found.problems if problem.kind == "tainted"]
    assert f"{AT} of stage 1 (say 6 of 6 replicas)" in problem.text
    assert [(each.peer, each.stages, each.by) for each in found.convicts] == [(LIAR, (1,), 6)]
    (line,) = [problem.text for problem in found.problems if problem.kind == "convicted"]
    assert line.startswith(f"banned: {LIAR} of stage 1 (step {AT}") and line.endswith("as 6 of 6 replicas say")


def test_a_run_goes_back_before_the_false_step_and_ends_as_if_nobody_had_lied() -> None:
    swarm, back, found = lived("rollback")
    assert {(restart.number, restart.version) for restart in back.restarts} == {(1, 8)}
    assert {move.peer for move in back.moves} == {node.peer_id for node in swarm.honest}
    assert not any(move.kept for move in back.moves) and is_as_if_nobody_had_lied(swarm)
    assert found.num_tainted == 0 and not found.tainted and not said(swarm, "stays_applied")


def test_the_version_that_is_gone_back_to_stays_on_disk_until_all_are_there() -> None:
    """By the time that all want it, it would be too old to be kept."""
    lives = (lived("rollback", checkpoint_every=1, seed=seed)[:2] for seed in range(1, 9))
    swarm, back = next((swarm, back) for swarm, back in lives if back.restarts)
    assert {(restart.number, restart.version) for restart in back.restarts} == {(1, AT)}
    assert is_as_if_nobody_had_lied(swarm)


def test_who_accuses_wrongly_has_tainted_no_step() -> None:
    swarm, back, found = lived("rollback", audit_lies.Accuser)
    assert not back.moves and not swarm.counts["tainted"] and not found.num_tainted


def test_where_no_checkpoint_is_old_enough_the_step_stays_and_everybody_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_swarm, "ReplicaLimits", partial(ReplicaLimits, keep_checkpoints=1))
    swarm, back, _ = lived("rollback", checkpoint_every=1, steps=80, seed=4)
    assert not back.moves and not is_as_if_nobody_had_lied(swarm)
    stays = said(swarm, "stays_applied")
    assert len(stays) == 6 and all("keep_checkpoints" in fields["reason"] for fields in stays.values())
