"""What a replica shows of its work to the replicas that audit it, and what it knows of others' state for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import Chain, PeerId, first_chain, next_chain
from swarmnet.messages import Answer, AuditData, AuditRequest, Stamp
from swarmnet.pipeline.recovery import kept_alive
from swarmnet.pipeline.works import digest, opened, show
from swarmnet.quorum import has_quorum

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer
    from swarmnet.peer.replica import Replica


class PeerView:
    """What a replica knows of its own stage and of others, for `pipeline.transfers`."""

    def __init__(self, replica: Replica, peer: Peer) -> None:
        self._replica, self._peer = replica, peer
        self._once_known: set[tuple[int, PeerId]] = set()

    def stamp(self, step: int) -> Stamp:
        """Of an open step."""
        return next(of.stamp for of in self._replica.member.steps if of.stamp.step == step)

    def allows(self, stamp: Stamp) -> bool:
        """May a replica of that stage compute that step with this header, as far as this replica knows?"""
        step, mine = self._replica.member.step(stamp.step), self._replica.stage
        if step is None:
            return True
        if stamp.restart != step.stamp.restart:
            return False
        # Stages that were cut apart may heal with commits of different sides. Then the neighbours of a stage alone
        # hear what its chain is, and each stage checks the transfers of the one before it.
        if abs(stamp.stage - mine) > 1:
            return True
        chain = self._chain(stamp.stage, step.stamp.chain)
        return chain in (None, stamp.chain) or (stamp.stage != mine and self._is_announced(stamp))

    def _chain(self, stage: int, mine: Chain) -> Chain | None:
        """A stage's chain where the chain of this stage is `mine`, if the same commits led both there; or None."""
        member, run = self._replica.member, self._peer.run_id
        # Where nothing was applied yet the run says it.
        if mine == first_chain(run, self._replica.stage):
            return first_chain(run, stage)
        chains = {commit.stage: commit.chain for commit in member.last_commits}
        if not {stage, self._replica.stage} <= chains.keys():
            return None
        here, there = chains[self._replica.stage], chains[stage]
        for made in member.evidence:
            if here == mine:
                break
            here, there = next_chain(here, made), next_chain(there, made)
        return there if here == mine else None

    def _is_announced(self, stamp: Stamp) -> bool:
        """Do the heartbeats of a quorum of that stage's live replicas name its chain?"""
        view, now = self._replica.member.view, asyncio.get_running_loop().time()
        live = frozenset(view.live(stamp.stage, now=now))
        seen = {peer: view.get(peer, stamp.stage) for peer in live}
        named = {peer for peer, at in seen.items() if at is not None and stamp.chain in (at.chain, at.before)}
        return has_quorum(named, live)

    def known(self, stage: int, peer: PeerId) -> bool:
        """May that peer serve that stage? In a stage far away any peer may, unless all records were read lately.

        By its record, which all can read: it may send heartbeats to this peer alone, and then the work that this peer
        makes of what it signed could be checked by this peer only."""
        far = abs(stage - self._replica.stage) > 1 and not self._peer.sees_all
        if far or (stage, peer) in self._once_known:
            return True
        named = self._peer.serving(stage)
        if named and peer not in named and peer != self._peer.me:
            self._peer.look_for(peer, stage)
            return False
        self._once_known.add((stage, peer))
        return True

    async def looked(self) -> None:
        """Return once records have been read again, or `settle_s` later."""
        await self._peer.looked()


async def answered(peer: Peer, replica: Replica, caller: PeerId, request: AuditRequest) -> AsyncGenerator[Answer, None]:
    """Answer a replica that audits work of this stage. Raises Refused."""
    # Only a replica of the stage has the weights to compute it again with.
    if not replica.is_live(caller, replica.stage):
        raise Refused(RejectCode.NOT_A_FEEDER, "you are not known here as a replica of this stage")
    try:
        shown = show(replica.execution.works, replica.execution.shown, caller, request, me=peer.me)
        if not request.made:
            yield shown
            return
        if (made := replica.execution.works.made(request.step, request.index)) is not None and request.peer == peer.me:
            yield replace(shown, payload=made)
            return
        # In the same class the auditor computes the same bits itself; and no auditor checks two works at the same time.
        auditor = replica.auditor
        if auditor is None or auditor.in_my_class(caller) or caller in auditor.made_for:
            raise Refused(RejectCode.TOO_OFTEN, "computing again is for replicas of another class, one work at a time")
        auditor.made_for.add(caller)
        try:
            async for answer in kept_alive(_made(replica, request, shown), peer.timers.beat_s):
                yield answer
        finally:
            auditor.made_for.discard(caller)
    except Refused as refused:
        if refused.code is RejectCode.TOO_OFTEN:
            replica.name_once("asks_too_often", caller, {"step": request.step, "index": request.index})
        raise


async def _made(replica: Replica, request: AuditRequest, shown: AuditData) -> AuditData:
    """What this replica made then. Raises Refused(NOT_FOUND) if it makes another thing now."""
    inputs, gradient = opened(shown, lambda payload: None)
    (again,), _ = await replica.compute.recompute(request.step, [(request.index, inputs, gradient)])
    if (digest(again.output), digest(again.answer)) != (shown.work.output, shown.work.answer):
        raise Refused(RejectCode.NOT_FOUND, "it was made otherwise", step=request.step, index=request.index)
    return replace(shown, payload=(*again.output, *again.answer))
