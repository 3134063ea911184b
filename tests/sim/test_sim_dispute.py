"""A member whose heartbeats come and whose averaging does not work: the step ends without it, and it sits out a while.

Its contribution stands still, or is refused whenever it is sent. The sum and the weights are those of a single process
all the same: what it had counted is executed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from further import further

from swarmnet.ids import PeerId
from swarmnet.messages import Packed, Part
from swarmnet.testing.network import Message
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import SimulatedEngine
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

STEP, STAGE = 1, 0
Read = Callable[[int, int], Awaitable[Packed]]
Fault = Callable[[Read, int, int], Awaitable[Packed]]


async def stands_still(read: Read, start: int, stop: int) -> Packed:
    await asyncio.sleep(1e6)
    return await read(start, stop)


async def is_refused(read: Read, start: int, stop: int) -> Packed:
    return Packed("nonsense", (stop - start,), b"")


async def is_refused_in_one_place(read: Read, start: int, stop: int) -> Packed:
    return await (is_refused if start <= 2 < stop else _read)(read, start, stop)


async def _read(read: Read, start: int, stop: int) -> Packed:
    return await read(start, stop)


def spoil(node: Node, fault: Fault) -> None:
    """From now on this replica's contributions to STEP are so."""
    engine = node.engines[STAGE]
    assert isinstance(engine, SimulatedEngine)
    read = engine.contribution

    async def contribution(start: int, stop: int, reference: bytes = b"") -> Packed:
        return await (fault if engine.version == STEP else _read)(read, start, stop)

    engine.contribution = contribution  # type: ignore[method-assign]


def play(fault: Fault, *, leader: bool, replicas: int, steps: int = 4) -> tuple[VirtualSwarm, Node]:
    swarm = VirtualSwarm(Plan(stages=2, replicas=replicas, microbatches=2 * replicas, steps=steps), seed=3)
    struck: list[Node] = []

    def hook(peer: object, event: str, fields: dict[str, object]) -> None:
        if event == "leader" and (fields["stage"], fields["step"]) == (STAGE, STEP) and not struck:
            struck.append(next(node for node in swarm.replicas(STAGE) if (node.peer_id == peer) == leader))
            spoil(struck[0], fault)

    swarm.hooks.append(hook)
    swarm.run(until_s=300.0)
    return swarm, struck[0]


def left_out(swarm: VirtualSwarm) -> list[tuple[object, object, object]]:
    return [
        (fields["peer"], fields["reason"], fields["step"])
        for _, _, event, fields in swarm.events
        if event == "evicted" and fields["stage"] == STAGE
    ]


@pytest.mark.parametrize("replicas", [2, 3, *further(4)])
@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("fault", [stands_still, is_refused, is_refused_in_one_place])
def test_a_step_ends_without_who_holds_up_its_round(fault: Fault, leader: bool, replicas: int) -> None:
    steps = 40 if replicas > 2 and not leader and fault is not stands_still else 4
    swarm, node = play(fault, leader=leader, replicas=replicas, steps=steps)
    reason = "late" if fault is stands_still else "refused"
    found = left_out(swarm)
    assert found == [(node.peer_id, reason, STEP)], "two of them refuse it, or its own reducer does"
    took_part = {
        fields["step"]
        for _, peer, event, fields in swarm.events
        if event == "committed"
        and peer == node.peer_id
        and any(peer == node.peer_id and indexes for peer, indexes in fields["contributions"])  # type: ignore[attr-defined]
    }
    struck = [
        fields
        for _, peer, event, fields in swarm.events
        if event == "late"
        and fields["stage"] == STAGE
        and fields["peer"] == node.peer_id
        and fields["reason"] == f"holds up the round ({reason})"
    ]
    assert len(struck) == 1
    assert STEP not in took_part
    if replicas == 2 or (leader and fault is not stands_still):
        # Of two nobody sits out, and what a leader holds against itself is its own affair.
        assert took_part & {2, 3}, "it is back in the next steps"
    elif not leader:  # else all have waited for its stream, and it may keep the next step before they know how long
        assert not took_part & {2, 3}, "it sits out"
        if fault is not stands_still:
            assert took_part & set(range(4, steps)), "it is back once it has sat that out"


def test_why_a_sum_failed_is_said_once_in_a_round_however_often_it_is_tried_again() -> None:
    swarm, _ = play(is_refused_in_one_place, leader=False, replicas=3)
    said = Counter((peer, fields["reason"]) for _, peer, event, fields in swarm.events if event == "sum_failed")
    cuts = sum(event == "cut_again" for _, _, event, _ in swarm.events)
    assert said and max(said.values()) <= 1 + cuts, said


@pytest.mark.parametrize("replicas", [6, *further(8)])
def test_what_only_the_reducer_of_one_place_refuses_is_found_by_cutting_again_until_most_have(replicas: int) -> None:
    swarm, node = play(is_refused_in_one_place, leader=False, replicas=replicas)
    assert left_out(swarm) == [(node.peer_id, "refused", STEP)]
    cuts = sum(event == "cut_again" and fields["stage"] == STAGE for _, _, event, fields in swarm.events)
    assert cuts <= replicas // 2, "one for each voice of a majority, or less: its own turn may come"


def test_a_line_broken_between_two_members_costs_one_step_and_not_each() -> None:
    swarm = VirtualSwarm(Plan(stages=1, replicas=4, microbatches=8, steps=8), seed=3)
    broken: list[PeerId] = []
    since: list[float] = []

    def hook(peer: object, event: str, fields: dict[str, object]) -> None:
        if event == "leader" and fields["step"] == STEP and not broken:
            since.append(swarm.loop.time())
            one, other = [node for node in swarm.replicas(STAGE) if node.peer_id != peer][:2]
            broken.extend((one.peer_id, other.peer_id))

    def intercept(sender: PeerId, receiver: PeerId, message: Message) -> bool:
        """Chunks of a round come to nothing between the two; all else goes."""
        return not ({sender, receiver} == {*broken} and isinstance(message, Part) and message.kind != "sum")

    swarm.hooks.append(hook)
    swarm.network.intercepts.append(intercept)
    swarm.run(until_s=300.0)
    found = left_out(swarm)
    assert len(found) == 1 and found[0][1:] == ("alone", STEP) and found[0][0] in broken
    (left_at,) = [at for at, _, event, fields in swarm.events if event == "evicted" and fields["stage"] == STAGE]
    assert left_at - since[0] < 10.0, "what a stream may stand still, and how long others have to be heard"
    after = [at for at, _, event, fields in swarm.events if event == "applied" and fields["step"] > STEP]  # type: ignore[operator]
    assert max(after) - min(after) < 5.0, "the ends of the line sit out, or are kept apart"
