"""Carries out a farewell: asks `leaving` until it lets the peer go, tells everybody meanwhile, and says what is left.

It finishes nothing itself: the replicas go on as always, only that new microbatches are turned away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarmnet.directory import Record
from swarmnet.ids import PeerId
from swarmnet.peer.leaving import Leaving, Standing
from swarmnet.peer.replica import Replica
from swarmnet.transport import Transport

_LOOKS_PER_HEARTBEAT = 5


@dataclass(frozen=True, slots=True)
class Around:
    """What a leaving peer sees of itself and others. over(): the run will do no further step."""

    me: PeerId
    replicas: Mapping[int, Replica]
    transport: Transport
    records: Callable[[], Mapping[PeerId, Record]]
    everyone: Callable[[], Iterable[PeerId]]
    over: Callable[[], bool]
    say: Callable[[str], None]


async def drain(around: Around, *, drain_s: float, heartbeat_s: float) -> str:
    """Return, with the reason, once the peer may go; after `drain_s` in any case."""
    loop = asyncio.get_running_loop()
    leaving = Leaving(now=loop.time(), drain_s=drain_s)
    said, beat_at = "", loop.time()
    while True:
        now = loop.time()
        for replica in around.replicas.values():
            replica.member.view.draining = True
        if now >= beat_at:
            # Stages that are no neighbours hear it too: who leaves with everybody else waits for nobody.
            beat_at = now + heartbeat_s
            _tell_everyone(around)
        standings = [standing_of(around, replica, now) for replica in around.replicas.values()]
        for standing in standings:
            around.replicas[standing.stage].execution.leaving = standing.refusing
        verdict = leaving.decide(standings, deserted=is_deserted(around, now), now=now)
        if verdict.go:
            return verdict.words
        if verdict.words != said:
            said = verdict.words
            around.say(said)
        await asyncio.sleep(heartbeat_s / _LOOKS_PER_HEARTBEAT)


def standing_of(around: Around, replica: Replica, now: float) -> Standing:
    """Where a replica stands, as far as its view goes."""
    member, execution = replica.member, replica.execution
    staying = [
        seen
        for peer, seen in member.view.mates()
        # Of several that leave at once the lowest stays until somebody else has the state.
        if member.view.alive(peer, now=now) and (not seen.draining or (seen.synced and peer < around.me))
    ]
    heirs = [
        seen
        for seen in staying
        if seen.synced
        and (seen.version > member.version or (seen.version == member.version and seen.chain == member.chain))
    ]
    followers = len(staying) - len(heirs)
    # An heir that knows the commit need not hold the sum: only one that has applied the step surely does.
    newest = max((seen.version for seen in heirs), default=-1)
    ahead = newest > member.version
    return Standing(
        stage=replica.stage,
        step=member.version,
        idle=not member.synced or around.over() or (member.done and not followers),
        heirs=len(heirs),
        followers=followers,
        microbatches=max(execution.num_tasks, execution.queue),
        counted=sum(len(step.claims.owned) for step in member.steps if newest <= step.stamp.step),
        whole=member.finished is not None and not ahead,
        applying=member.applying,
    )


def is_deserted(around: Around, now: float) -> bool:
    """Is every other peer that serves a stage leaving as well, or gone? Records count only of peers never heard."""
    heard: set[PeerId] = {around.me}
    for replica in around.replicas.values():
        for stage, peer, seen in replica.member.view.known():
            heard.add(peer)
            if not seen.draining and peer != around.me and replica.member.view.alive(peer, now=now, stage=stage):
                return False
    return not any(
        status
        for peer, record in around.records().items()
        if peer not in heard
        for status in record.stages
        if not status.draining
    )


def _tell_everyone(around: Around) -> None:
    everyone = sorted(around.everyone())
    for replica in around.replicas.values():
        for peer, beat in replica.member.heartbeats(everyone):
            around.transport.tell(peer, beat)
