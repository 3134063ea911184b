"""Cuts between peers at exact points of a step, healed at exact points.

Each stage has two numerics classes, so two sides that go on by themselves leave different chains behind. Whatever is
cut and whenever it heals: every sum on the way has each index once, every stage ends with one chain, and the exact part
of its weights is that of a single process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from further import further
from strike import watched

from swarmnet.manifest.schema import Protocol
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

STEP = 1
"""The step that is cut."""

LONG_S = Protocol().long_silence_s


def plan(replicas: int) -> Plan:
    return Plan(stages=3, replicas=replicas, microbatches=6, steps=5, classes=2)


def halves(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Two sides, the first the smaller one."""
    return list(nodes[: len(nodes) // 2]), list(nodes[len(nodes) // 2 :])


def inside_one_stage(swarm: VirtualSwarm) -> tuple[list[Node], list[Node]]:
    """Both sides see the stages beside them."""
    return halves(swarm.replicas(1))


def whole_swarm(swarm: VirtualSwarm) -> tuple[list[Node], list[Node]]:
    """All stages on both sides; trainers reach both."""
    sides = [halves(swarm.replicas(stage)) for stage in range(swarm.plan.stages)]
    return [node for one, _ in sides for node in one], [node for _, other in sides for node in other]


def last_stage_on_one_side(swarm: VirtualSwarm) -> tuple[list[Node], list[Node]]:
    """The smaller side has no replica of the last stage."""
    one, other = whole_swarm(swarm)
    lost = [node for node in one if 2 in node.stages]
    return [node for node in one if node not in lost], other + lost


CUTS = {
    "inside_one_stage": inside_one_stage,
    "whole_swarm": whole_swarm,
    "last_stage_on_one_side": last_stage_on_one_side,
}


def members(nodes: Sequence[Node], stage: int = 1) -> list:
    return [node.peer.replicas[stage].member for node in nodes if node.up and stage in node.peer.replicas]


REACHED: dict[str, Callable[[list], bool]] = {
    "before_round": lambda found: any(
        m.version > STEP or (m.version == STEP and m.oldest.claims.accumulated) for m in found
    ),
    "after_sum": lambda found: any(m.version > STEP or (m.version == STEP and m.oldest.finished) for m in found),
    "after_commit": lambda found: any(
        m.version > STEP or (m.version == STEP and m.oldest.barrier.of(1)) for m in found
    ),
    "after_apply": lambda found: any(m.version > STEP for m in found),
}


def forked(one: Sequence[Node], other: Sequence[Node]) -> bool:
    """Do replicas of stage 1 stand at one version, on different chains?"""
    return any(a.version == b.version and a.chain != b.chain for a in members(one) for b in members(other))


async def until(swarm: VirtualSwarm, reached: Callable[[], bool], *, within_s: float) -> bool:
    """Look every two milliseconds."""
    ends = swarm.loop.time() + within_s
    while not reached():
        if swarm.loop.time() > ends:
            return False
        swarm.check_now()
        await asyncio.sleep(0.002)
    return True


CUT_AT = ["before_round", "after_sum", "after_commit"]


@pytest.mark.parametrize("half", [0, *further(1)])
@pytest.mark.parametrize("cut_at", CUT_AT)
@pytest.mark.parametrize("cut", CUTS)
def test_two_replicas_cut_and_healed(cut: str, cut_at: str, half: int) -> None:
    """Each cut at each point, healed at every other of the points: other ones at the next point."""
    turn = (list(CUTS).index(cut) + CUT_AT.index(cut_at)) % 2
    cut_and_heal(CUTS[cut], cut_at, list(REACHED)[2 * half + turn], replicas=2, directory=False)


@pytest.mark.long
@pytest.mark.parametrize("directory", [False, True], ids=["", "directory_too"])
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("heal_at", REACHED)
@pytest.mark.parametrize("cut_at", CUT_AT)
@pytest.mark.parametrize("cut", CUTS)
def test_cut_and_heal(cut: str, cut_at: str, heal_at: str, replicas: int, directory: bool) -> None:
    """Cut in step STEP when any replica of stage 1 is there; heal when both sides are that far on."""
    cut_and_heal(CUTS[cut], cut_at, heal_at, replicas=replicas, directory=directory)


def cut_and_heal(
    cut: Callable[[VirtualSwarm], tuple[list[Node], list[Node]]],
    cut_at: str,
    heal_at: str,
    *,
    replicas: int,
    directory: bool,
    seed: int = 1,
) -> VirtualSwarm:
    swarm = watched(plan(replicas), seed)

    async def script(swarm: VirtualSwarm) -> None:
        assert await until(swarm, lambda: REACHED[cut_at](members(swarm.replicas(1))), within_s=60.0)
        one, other = cut(swarm)
        swarm.partition(one, other, directory=directory)
        sides = [side for side in (one, other) if members(side)]
        await until(
            swarm,
            lambda: (
                forked(one, other) if heal_at == "forked" else all(REACHED[heal_at](members(side)) for side in sides)
            ),
            within_s=3 * LONG_S,
        )
        swarm.heal()
        await until(swarm, lambda: swarm.done and not forked(one, other), within_s=200.0)

    swarm.run(until_s=260.0, script=script)
    assert swarm.counts["partition"] == 1
    return swarm


@pytest.mark.parametrize(("seed", "heal_at"), [(2, "forked"), (10, "after_apply")])
def test_halves_that_go_on_by_themselves_fork_and_the_fork_heals(seed: int, heal_at: str) -> None:
    """Two replicas, cut for longer than the long silence: no protocol can tell that from death."""
    swarm = cut_and_heal(whole_swarm, "before_round", heal_at, replicas=2, directory=False, seed=seed)
    assert swarm.checker.forks >= 1
    assert any(event == "resync" and fields["reason"] == "fork" for _, _, event, fields in swarm.events)


def test_a_cut_inside_one_stage_of_two_forks_it_once_at_most_and_heals() -> None:
    """Each of two may be the one that lives. The neighbours wait for the other's word, which the cut does not stop."""
    swarm = cut_and_heal(inside_one_stage, "before_round", "after_apply", replicas=2, directory=False)
    assert swarm.checker.forks <= 1


def test_with_a_majority_on_one_side_the_other_waits_and_nothing_forks() -> None:
    swarm = watched(plan(3))

    async def script(swarm: VirtualSwarm) -> None:
        assert await until(swarm, lambda: REACHED["before_round"](members(swarm.replicas(1))), within_s=60.0)
        few, many = inside_one_stage(swarm)
        swarm.partition(few, many)
        assert await until(swarm, lambda: REACHED["after_apply"](members(many)), within_s=0.8 * LONG_S)
        swarm.heal()

    swarm.run(until_s=120.0, script=script)
    assert swarm.checker.forks == 0


def test_a_line_that_is_deaf_one_way_delays_and_breaks_nothing() -> None:
    swarm = watched(plan(3))

    async def script(swarm: VirtualSwarm) -> None:
        assert await until(swarm, lambda: REACHED["before_round"](members(swarm.replicas(1))), within_s=60.0)
        one, two, _ = swarm.replicas(1)
        swarm.deafen(one, two)
        await asyncio.sleep(12.0)
        swarm.heal()

    swarm.run(until_s=160.0, script=script)
    assert swarm.counts["deafened"] == 1
