"""How a peer leaves, or pauses: before it goes, its work is finished or safe in another peer, unless no peer stays.

Rule 18 (docs/protocol.md): a draining replica stays until another member of its stage has its state. It finishes
nothing itself: the replicas continue as always, except that new microbatches are refused. `Leaving` decides, purely;
`drain` asks it until it lets the peer go, announces the leave to all others meanwhile, and reports what is left.

A pause is a leave that does not end: others send the peer nothing new, and it follows the state (`hold`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet.clock import loop_time
from swarmnet.ids import PeerId
from swarmnet.peer.replica import Replica
from swarmnet.step.view import Seen

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer


@dataclass(frozen=True, slots=True)
class Standing:
    """One replica of the leaving peer, now.

    idle: it is not needed (it has no state, or the run is over). heirs: other replicas of the stage that have its state
    and stay (successors). followers: others that stay and have older state, or none yet. microbatches: at work here.
    applying: the optimizer is at it. As long as no successor has applied the step: counted, microbatches in this
    replica's own sum; whole, is the sum of all replicas here?
    """

    stage: int
    step: int
    idle: bool = False
    heirs: int = 0
    followers: int = 0
    microbatches: int = 0
    counted: int = 0
    whole: bool = False
    applying: bool = False

    @property
    def refusing(self) -> bool:
        """New microbatches go to the successors. Without one it serves on: the run must not stop because a peer
        leaves."""
        return self.heirs > 0 or self.idle

    @property
    def free(self) -> bool:
        """Nothing is lost, and nothing executed again, if it goes now."""
        if self.idle:
            return True
        return bool(self.heirs) and not (self.microbatches or self.counted or self.whole or self.applying)


@dataclass(frozen=True, slots=True)
class LeaveDecision:
    """Go now, or stay; why, in words for the operator."""

    go: bool
    words: str


class Leaving:
    """One leave, begun at `now`. Times are seconds of one clock; it never lasts longer than `drain_s`.

    settle_s: when all peers leave, how long a replica that holds a step's aggregate waits to apply it, as others may
    have already. Checkpoints of stages at different versions are worth little.
    """

    def __init__(self, *, now: float, drain_s: float, settle_s: float) -> None:
        self._began_at, self._drain_s, self._settle_s = now, drain_s, settle_s
        self._deserted_at: float | None = None

    def decide(self, standings: Sequence[Standing], *, deserted: bool, now: float) -> LeaveDecision:
        """deserted: every other live peer of the run is leaving too, so no peer will continue from the state here."""
        waiting = [standing for standing in standings if not standing.free]
        if not waiting:
            return LeaveDecision(True, "nothing here is needed any more")
        left, alone = self.left(waiting), any(not each.heirs and not each.followers for each in waiting)
        if now - self._began_at >= self._drain_s:
            then = ", and the run waits for one" if alone else ""
            return LeaveDecision(True, f"{self._drain_s:g} s have passed, going all the same: {left}{then}")
        # A peer stays: the state goes to it first.
        if not deserted:
            self._deserted_at = None
            until = f": waiting for one, {self._drain_s:g} s at most" if alone else ""
            return LeaveDecision(False, left + until)
        if self._deserted_at is None:
            self._deserted_at = now
        unsettled = any(standing.applying or standing.whole for standing in waiting)
        if unsettled and now - self._deserted_at < self._settle_s:
            return LeaveDecision(False, "all peers leave; applying the last step")
        return LeaveDecision(True, "all peers leave")

    def left(self, standings: Sequence[Standing]) -> str:
        """What is not finished or safe elsewhere, in words."""
        return "; ".join(self._of(standing) for standing in standings if not standing.free)

    def _of(self, standing: Standing) -> str:
        if not standing.heirs and standing.followers:
            return f"no other replica of stage {standing.stage} is at version {standing.step} yet"
        if not standing.heirs:
            return f"no other replica has the state of stage {standing.stage}"
        if standing.microbatches:
            plural = "" if standing.microbatches == 1 else "es"
            return f"{standing.microbatches} microbatch{plural} left, step {standing.step}"
        if standing.applying:
            return f"applying step {standing.step}"
        if standing.whole:
            return f"step {standing.step} waits for other stages, or for another replica to have its sum"
        return f"step {standing.step} is not committed yet, {standing.counted} of its microbatches are counted here"


_LOOKS_PER_HEARTBEAT = 5


async def drain(leaver: Peer, drain_s: float) -> str:
    """Return, with the reason, once the peer may go; after `drain_s` in any case."""
    loop = asyncio.get_running_loop()
    farewell, said = Farewell(leaver), ""
    leaving = Leaving(now=loop.time(), drain_s=drain_s, settle_s=leaver.timers.settle_s)
    while True:
        standings, now = farewell.look(), loop.time()
        verdict = leaving.decide(standings, deserted=is_deserted(leaver, now), now=now)
        if verdict.go:
            return verdict.words
        # Each reason is said once.
        if verdict.words != said:
            said = verdict.words
            leaver.say("draining", {"left": said})
        await farewell.pause()


async def hand_over(mover: Peer, patience_s: float, *, standstill: bool) -> str:
    """Leave a stage for another one: "" once others have all that is here. Else why the peer stays, and serves on.

    standstill: no peer serves the other stage, so until this peer is there no step ends: others have its state, and the
    work under way is computed again.
    """
    farewell, began, reason = Farewell(mover), loop_time(), "it was ended"
    leaving = Leaving(now=began, drain_s=patience_s, settle_s=mover.timers.settle_s)
    try:
        while not (reason := why_it_stays(standings := farewell.look(), paused=mover.paused)):
            lasted = loop_time() - began
            # A peer waits until another one that leaves as well can have announced it: of those the lowest stays.
            heard, ready = lasted >= mover.timers.suspect_s, all(standing.heirs for standing in standings)
            if heard and ready and (standstill or all(standing.free for standing in standings)):
                break
            if lasted >= patience_s:
                reason = f"after {patience_s:g} s others do not have all that is here: {leaving.left(standings)}"
                break
            await farewell.pause()
    finally:
        if reason:
            farewell.end()
    return reason


def why_it_stays(standings: Sequence[Standing], *, paused: bool) -> str:
    """Why a peer does not leave its stage for another one; "" if it may. A replica that is one step behind takes over
    when it has applied the step."""
    if paused:
        return "it was paused"
    for standing in standings:
        if standing.idle:
            return f"stage {standing.stage} has ended or lost its state here"
        if not standing.heirs and not standing.followers:
            return f"no other replica of stage {standing.stage} stays"
    return ""


class Farewell:
    """What a peer does while it leaves: it announces that, and starts nothing new where others have its state."""

    def __init__(self, leaver: Peer) -> None:
        self._leaver, self._beat_at = leaver, loop_time()

    def look(self) -> list[Standing]:
        """Where each replica stands now."""
        leaver, now = self._leaver, loop_time()
        for replica in leaver.replicas.values():
            replica.member.view.draining = True
        if now >= self._beat_at:
            # Stages that are not adjacent get it too: if all peers leave, none waits for another.
            self._beat_at = now + leaver.timers.beat_s
            everyone = sorted(leaver.everyone())
            for replica in leaver.replicas.values():
                for peer, beat in replica.member.heartbeats.to_each(everyone):
                    leaver.transport.tell(peer, beat)
        standings = [standing_of(leaver, replica, now) for replica in leaver.replicas.values()]
        for standing in standings:
            leaver.replicas[standing.stage].execution.leaving = standing.refusing
        return standings

    async def pause(self) -> None:
        """Until the next look."""
        await asyncio.sleep(self._leaver.timers.beat_s / _LOOKS_PER_HEARTBEAT)

    def end(self) -> None:
        """The peer stays after all."""
        for replica in self._leaver.replicas.values():
            replica.member.view.draining = replica.execution.leaving = False
        self._leaver.news.set()


async def hold(holder: Peer) -> None:
    """Until cancelled, take no new microbatches, except for a stage with no other replica in sync; follow the state."""
    said: list[int] | None = None
    turned_at = loop_time()
    holder.paused = True
    holder.news.set()
    try:
        while True:
            standings = [standing_of(holder, replica, loop_time()) for replica in holder.replicas.values()]
            for standing in standings:
                replica = holder.replicas[standing.stage]
                replica.member.view.draining, replica.execution.leaving = True, standing.refusing
            # The run must not stop because a peer pauses.
            serving = [standing.stage for standing in standings if not standing.refusing]
            now = loop_time()
            if serving == said:
                turned_at = now
            # The first replica at a new version is alone there until a heartbeat shows otherwise.
            elif now - turned_at > 2 * holder.timers.beat_s:
                said, turned_at = serving, now
                holder.news.set()
                holder.say("paused", {"serves_on": serving} if serving else {})
            await asyncio.sleep(holder.timers.beat_s / _LOOKS_PER_HEARTBEAT)
    finally:
        holder.paused = False
        Farewell(holder).end()


def standing_of(leaver: Peer, replica: Replica, now: float) -> Standing:
    """Where a replica stands, as far as its view goes."""
    member, execution, paused = replica.member, replica.execution, _paused(leaver)

    def stays(peer: PeerId, seen: Seen) -> bool:
        if not seen.draining:
            return True
        # A paused peer has the state, and serves when no other does: enough for a peer that leaves.
        if peer in paused and not leaver.paused:
            return True
        # Of several that leave, or pause, at the same time the lowest stays until another peer has the state.
        return seen.synced and peer < leaver.me and (peer in paused or not leaver.paused)

    staying = [seen for peer, seen in member.view.mates() if member.view.in_touch(peer, now=now) and stays(peer, seen)]
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
        idle=not member.synced or leaver.state.halted is not None or (member.done and not followers),
        heirs=len(heirs),
        followers=followers,
        microbatches=max(execution.num_tasks, execution.queue),
        counted=sum(len(step.claims.assigned) for step in member.steps if newest <= step.stamp.step),
        whole=member.oldest.finished is not None and not ahead,
        applying=member.oldest.applying,
    )


def _paused(leaver: Peer) -> frozenset[PeerId]:
    return frozenset(peer for peer, record in leaver.records.items() if record.paused)


def is_deserted(leaver: Peer, now: float) -> bool:
    """Is every other peer that serves a stage leaving as well, or gone? Records count only of peers without
    heartbeats."""
    heard, paused = {leaver.me}, _paused(leaver)
    for replica in leaver.replicas.values():
        for stage, peer, seen in replica.member.view.known():
            heard.add(peer)
            stays, view = not seen.draining or peer in paused, replica.member.view
            # A busy machine may be silent for a while: its peer has not gone for that.
            if (
                stays
                and peer != leaver.me
                and view.in_touch(peer, now=now, stage=stage, within=view.timers.long_silence_s)
            ):
                return False
    return not any(
        status
        for peer, record in leaver.records.items()
        if peer not in heard
        for status in record.stages
        if not status.draining or record.paused
    )
