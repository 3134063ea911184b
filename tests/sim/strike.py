"""Faults at exact points of a step: a trap springs when a matching event, message or call passes by.

Everything is watched from below or beside the product: events it reports, messages it sends, calls it opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from event_schema import event_problem

from swarmnet.ids import PeerId
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm


def node_of(swarm: VirtualSwarm, peer: PeerId) -> Node | None:
    """The live peer process of that name."""
    return next((node for node in swarm.nodes if node.up and node.peer_id == peer), None)


def member_of(swarm: VirtualSwarm, peer: PeerId, stage: int):
    """The step machine of a live replica."""
    node = node_of(swarm, peer)
    return node.peer.replicas[stage].member if node is not None and stage in node.peer.replicas else None


def leader_of(swarm: VirtualSwarm, stage: int) -> Node | None:
    """Whoever keeps a stage under the highest ballot."""
    keeping = [
        (member.oldest.leader.ballot, node)
        for node in swarm.replicas(stage)
        if stage in node.peer.replicas and (member := node.peer.replicas[stage].member).oldest.leader is not None
    ]
    return max(keeping, key=lambda entry: entry[0])[1] if keeping else None


def soon(swarm: VirtualSwarm, act: Callable[[], object]) -> None:
    """Do it right after the callback that runs now: the process has done this and nothing more."""
    swarm.loop.call_soon(act)


def kill_and_restart(swarm: VirtualSwarm, node: Node | None, *, after_s: float | None = 1.0) -> None:
    """SIGKILL, and the same name again after a while (None: never)."""
    if node is None or not node.up:
        return
    swarm.kill(node)
    if after_s is not None:
        swarm.loop.call_later(after_s, lambda: swarm.over or swarm.add(node.stages, node.peer_id))


async def until(condition: Callable[[], object], *, every_s: float = 0.002) -> None:
    """Look again and again: on virtual time that costs nothing."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(every_s)


async def happened(swarm: VirtualSwarm, *events: str, peer: PeerId | None = None, **wanted: object) -> None:
    """Wait for one of these events with these fields, from now on."""
    seen = asyncio.Event()

    def watch(who: PeerId, event: str, fields: dict[str, object]) -> None:
        if event in events and peer in (None, who) and wanted.items() <= fields.items():
            seen.set()

    swarm.hooks.append(watch)
    await seen.wait()


async def reached(swarm: VirtualSwarm, step: int) -> None:
    """The last stage has committed `step`."""
    await happened(swarm, "committed", stage=swarm.plan.stages - 1, step=step)


def versions(swarm: VirtualSwarm, event: str, how: str | None = None) -> list[int]:
    return [
        fields["version"]
        for _, _, name, fields in swarm.events
        if name == event and (how is None or fields.get("how") == how)
    ]


def watched(plan: Plan, seed: int = 1) -> VirtualSwarm:
    """A swarm whose invariants are checked at every event and every 50 virtual milliseconds, and so is every event."""
    swarm = VirtualSwarm(plan, seed)
    swarm.hooks.append(lambda peer, event, fields: swarm.check_now())
    swarm.hooks.append(_check_event)
    return swarm


def _check_event(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
    assert not (problem := event_problem(event, fields)), problem


async def check_always(swarm: VirtualSwarm) -> None:
    """A script that only checks."""
    while not swarm.done:
        swarm.check_now()
        await asyncio.sleep(0.05)
