"""How a peer moves to a stage that needs it more: a leave and a join, so no count changes (docs/routing.md).

`rebalance` decides whether. Then, in this order: the state of the new stage is fetched to disk while the old stage is
served; the old stage is left in good order, or not at all; and the supervisor of the peer starts it again, with the new
stage. The device's memory never holds two states. If the peer dies on the way, that is the failure of one peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from swarmnet.clock import loop_time
from swarmnet.errors import NoReplica, SwarmError
from swarmnet.net.records import TTL_S
from swarmnet.peer.joining import servings
from swarmnet.peer.leaving import hand_over
from swarmnet.peer.placement import Serving
from swarmnet.peer.rebalance import Intent, Picture, Promises, Rebalancer, RecentMoves, Rules
from swarmnet.peer.replica import Replica
from swarmnet.state.snapshot_fetch import SnapshotFetch

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer

_LONGEST_PROMISE_S = 1800.0


@dataclass(frozen=True, slots=True)
class NewStage:
    """The stage to continue with. version: of its state that was put on disk for it; None: the state already on
    disk."""

    stage: int
    version: int | None


class HostMemory(Protocol):
    """The memory of the machine that a peer runs on."""

    fits: Mapping[int, int] | None
    """The stages of which it could serve one within the limits in force, with their slots; None: it does not move."""

    def memory_for_copy(self) -> int | None:
        """Bytes of host memory that a copy of a state may take on its way to disk, in addition to the stage that is
        served on; None: unknown."""


class Moving:
    """Moves one peer of one stage. Begun when the peer is.

    recent_moves: outlive a move of this peer.
    """

    def __init__(self, peer: Peer, rules: Rules, room: HostMemory, recent_moves: RecentMoves) -> None:
        self._peer, self._rules, self._room = peer, rules, room
        self._promises = Promises(rules)
        self._began = loop_time()
        self._distress = False  # of some stage, when I looked last
        self._rebalancer = Rebalancer(peer.me, rules, now=loop_time(), recent_moves=recent_moves)
        peer.may_move = True

    async def run(self) -> NewStage:
        """Until the peer may go to another stage: it has handed over the old one, and is to leave at once."""
        peer, rebalancer = self._peer, self._rebalancer
        while True:
            await asyncio.sleep(peer.timers.settle_s)
            replica = self._at_home()
            if replica is None:
                self._intend(Intent())
                continue
            rules = self._rules_now(replica)
            rebalancer.rules = rules
            # It decides only when the announcements of all others have arrived.
            if loop_time() >= rebalancer.due or rebalancer.intent.to is not None or self._distress:
                await peer.refresh(whole=True)
            if not peer.sees_all:
                continue
            there = servings([record for record in peer.records.values() if not peer.is_dead(record)])
            heard = [each for each in there if self._is_live(replica, each)]
            serving = self._promises.believed([*heard, *servings([peer.status()])], loop_time())
            picture = Picture(peer.manifest.cut.stages, serving, rules)
            self._distress = bool(picture.in_distress)
            intent = rebalancer.decide(picture, self._fitting(replica), now=loop_time())
            self._intend(intent)
            if intent.to is not None and intent.surely:
                rates = {str(stage): round(rate, 3) for stage, rate in enumerate(picture.served)}
                peer.say("moving", {"from": replica.stage, "to": intent.to, "rates": rates})
                moved = await self._move(replica, intent.to, rules.promise_s)
                if moved is not None:
                    return moved
                rebalancer.stay(now=loop_time())
                self._intend(rebalancer.intent)

    def _intend(self, intent: Intent) -> None:
        if self._peer.intent != intent:
            self._peer.intent = intent
            self._peer.news.set()

    def _at_home(self) -> Replica | None:
        """The replica, if this peer is one that may move now: it serves, and neither pauses nor leaves."""
        peer = self._peer
        replica = next(iter(peer.replicas.values()), None)
        if replica is None or peer.paused or peer.state.halted is not None:
            return None
        # Of stages farther away I know only what was announced, also by peers that have died since.
        far = peer.manifest.cut.stages > replica.stage + 2 or replica.stage > 1
        if loop_time() - self._began < (TTL_S if far else 2 * peer.timers.suspect_s):
            return None
        member = replica.member
        return replica if member.synced and not member.done and not member.view.draining else None

    def _fitting(self, replica: Replica) -> Collection[int]:
        """The stages of which a copy fits now, too."""
        fits, room = self._room.fits or {}, self._room.memory_for_copy()
        if room is None:
            return fits
        return [stage for stage in fits if replica.compute.snapshot_bytes(stage) <= room]

    def _is_live(self, replica: Replica, each: Serving) -> bool:
        """Records outlive their peers. A serving peer in an adjacent stage sends heartbeats, or it is gone."""
        expected = self._peer.expects(each.peer, each.stage)
        return not (expected and each.synced) or replica.member.view.in_touch(
            each.peer, now=loop_time(), stage=each.stage
        )

    def _rules_now(self, replica: Replica) -> Rules:
        """By how long the state of a stage takes on my line. Who needs long may promise for longer."""
        line = replica.exchange.meter.line.bytes_per_s
        fetch_s = replica.compute.snapshot_bytes(replica.stage) / line if line else 0.0
        promise_s = min(max(self._rules.promise_s, 3 * fetch_s), _LONGEST_PROMISE_S)
        return replace(self._rules, fetch_s=fetch_s, promise_s=promise_s)

    async def _move(self, replica: Replica, to: int, within_s: float) -> NewStage | None:
        """None: it came to nothing, which is said."""
        try:
            async with asyncio.timeout(within_s):
                version = await self._fetch(replica, to)
        except (SwarmError, TimeoutError) as error:
            self._failed(to, str(error) or f"the state did not come within {within_s:.0f} s")
            return None
        if self._at_home() is None:
            self._failed(to, f"stage {replica.stage} was paused, has ended or lost its state while the copy came")
            return None
        if to not in (self._room.fits or ()):  # by limits that came with `swarmnet control limits`
            self._failed(to, "it no longer fits in the memory that this machine lends")
            return None
        if reason := await hand_over(self._peer, self._peer.timers.lease_s, standstill=version is None):
            self._failed(to, reason)
            return None
        return NewStage(to, version)

    def _failed(self, to: int, reason: str) -> None:
        self._peer.say("move_failed", {"to": to, "reason": reason})

    async def _fetch(self, replica: Replica, to: int) -> int | None:
        """Put the newest state of that stage on disk. Raises SwarmError."""
        peer = self._peer

        # All peers that served it are gone: only the checkpoint here helps, and the run goes back to it.
        if not peer.have_state(to) and (await peer.disk.open(to)).good:
            return None
        fetch = SnapshotFetch(
            peer.transport,
            to,
            max_bytes=replica.compute.snapshot_bytes(to),
            failed=lambda source, error: None,
            unfit=replica.state.unfit,
            witnesses=replica.state.witnesses(to),
        )
        snapshot, data = await fetch.fetch(lambda: sorted(peer.have_state(to)))
        written = await peer.disk.write(to, snapshot.header, data)
        if written.problem is not None:
            raise NoReplica(f"its state cannot be written: {written.problem}", stage=to)
        return snapshot.header.version
