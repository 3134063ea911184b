"""One replica: all objects of one (peer, stage), wired together; a summary of the core path.

    network -> Peer -> Replica -> Execution   microbatches: forward, backward, weight pass   \\
                               -> StepDriver  performs what Member decides: what counts       > Engine: arithmetic
                               -> Exchange    sums among the replicas of the stage           /
                               -> Restorer    state: from replicas, from disk, and for others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnet.audit.auditor import Auditor
from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import PIECE_ELEMENTS, Exchange
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage
from swarmnet.fetch.plan import PIECE_BYTES
from swarmnet.ids import PeerId, first_chain
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Process
from swarmnet.peer.proofs import PeerView
from swarmnet.peer.restore import Restorer
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.depth import Depth
from swarmnet.pipeline.execution import Execution
from swarmnet.pipeline.inputs import AnswerCheck, InputCheck, TurnedAway, Windows, may_feed
from swarmnet.pipeline.recovery import Recovery
from swarmnet.pipeline.router import Router, routing_rule
from swarmnet.pipeline.transfers import Transfers
from swarmnet.pipeline.works import KEPT_CACHES, LEAST_BYTES, ShownWorks, WorkBook
from swarmnet.plan.cost import BYTES
from swarmnet.stage.interfaces import Engine
from swarmnet.state.snapshot_source import KeptContent
from swarmnet.step.drift import NO_DRIFT, DriftRules
from swarmnet.step.driver import StepDriver
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member
from swarmnet.step.view import Seen

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer

_MOST_NAMED = 64
"""Peers that are named for bad inputs, at one version of the weights."""


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What the operator allows each replica of a peer, and has chosen for it."""

    slots: int
    """Microbatches in flight, at most."""
    output_cache_bytes: int
    """Of outputs and answers that are remembered."""
    keep_checkpoints: int = 3
    """On disk."""
    piece_bytes: int = PIECE_BYTES
    """Of the pieces in which state is handed over."""
    sum_piece: int = PIECE_ELEMENTS
    """Elements of the pieces in which a finished sum is handed over: all replicas of a stage cut alike."""
    no_initial_weights: str = ""
    """Why this peer has no weights of version 0 and takes them from others, for a person; empty: it has them."""
    bases: Mapping[int, KeptContent] = field(default_factory=dict)  # by stage: frozen weights, for other peers
    routing: str = "least_time"
    """The rule by which it calls the next stage (`pipeline.router.routing_rule`)."""
    fixed_slots: bool = False
    """Always as many as `slots`, even if they are not in use: the control of a benchmark."""


def input_check_of(manifest: Manifest, stage: int, windows: Windows) -> InputCheck:
    """What the input of `stage` must look like in this run."""
    batch, length = manifest.training.microbatch_size, manifest.training.sequence_length
    tokens = ("int32", (batch, length + 1))
    if stage == 0:
        return InputCheck((tokens,), manifest.model.vocab_size, windows)
    hidden = (manifest.wire.activations, (batch, length, manifest.model.hidden_size))
    return InputCheck((tokens, hidden), manifest.model.vocab_size, windows, manifest.wire.slow)


def answer_check_of(manifest: Manifest, stage: int) -> AnswerCheck:
    """What the answers of `stage` must look like in this run."""
    batch, length = manifest.training.microbatch_size, manifest.training.sequence_length
    further = max(manifest.cut.stages - stage - 1, 0)
    if stage == 0:
        return AnswerCheck((), batch * length, further=further)
    gradient = (manifest.wire.gradients, (batch, length, manifest.model.hidden_size))
    return AnswerCheck((gradient,), batch * length, manifest.wire.slow, further)


def crossing_bytes(manifest: Manifest, stage: int, line: int) -> float:
    """Bytes of a microbatch that a replica of `stage` sends, about, on a line of so many bytes per second; it receives
    as many."""
    training, wire = manifest.training, manifest.wire
    slow = wire.is_slow(line)
    elements = training.microbatch_size * training.sequence_length * manifest.model.hidden_size
    there = BYTES.get(wire.slow if slow else wire.activations, 4.0) if stage + 1 < manifest.cut.stages else 0.0
    back = BYTES.get(wire.slow if slow else wire.gradients, 4.0) if stage else 0.0
    return elements * (there + back)


class Replica:
    """A stage served by this peer."""

    def __init__(self, stage: int, engine: Engine, peer: Peer) -> None:
        manifest, training, averaging = peer.manifest, peer.manifest.training, peer.manifest.averaging
        num_stages, timers, limits = manifest.cut.stages, peer.timers, peer.limits
        self.stage, self.compute, self._peer, self.timers = stage, engine.compute, peer, timers
        self.spawn, self.tokens = peer.spawn, peer.tokens
        self._named_at, self._named = -1, set[tuple[str, PeerId]]()
        shape = Shape(
            num_stages,
            training.microbatches,
            training.total_steps,
            training.max_discarded,
            averaging.delay,
            averaging.group_size,
            peer.notices,
        )

        # Decides which microbatches count, which sum is the step's, and when it is applied. Pure.
        self.member = Member(
            peer.me,
            stage,
            shape,
            timers,
            incarnation=peer.incarnation,
            chain=first_chain(peer.run_id, stage),
            now=loop_time(),
            signer=peer.signer,
            drift=DriftRules(averaging.drift_every, averaging.resync_every) if averaging.equal_bits else NO_DRIFT,
            numerics=peer.numerics,
        )

        # Sums the accumulators of the stage's replicas.
        self.exchange = Exchange(
            ExchangeContext(
                peer.me,
                engine.sums,
                peer.transport,
                num_tokens=training.microbatch_size * training.sequence_length,
                group_size=averaging.group_size,
                running_s=timers.beat_s,
                on_event=self.event,
                spans=peer.spans,
                signer=peer.signer if manifest.audited else None,
                incarnation=peer.incarnation,
                on_contradiction=lambda one, other: self.auditor.contradicted(one, other) if self.auditor else None,
            ),
            piece_elements=limits.sum_piece,
            meeting=peer.meeting,
        )

        # Performs what the member decides: messages, sums, optimizer steps.
        self.driver = StepDriver(
            self.member,
            transport=peer.transport,
            engine=self.compute,
            exchange=self.exchange,
            listener=peer,
            spawn=peer.spawn,
            spans=peer.spans,
        )

        # Records of what it contributes and of what it signs of its transfers, for audits.
        cap_bytes = max(KEPT_CACHES * limits.output_cache_bytes, LEAST_BYTES)
        keeps_made = not manifest.numerics.deterministic
        works = WorkBook(cap_bytes if manifest.audited else 0, keeps_made=keeps_made)
        transfers = Transfers(peer.me, peer.signer, PeerView(self, peer), num_stages) if manifest.audited else None

        # Calls the next stage; the last one has none.
        input_check = input_check_of(manifest, stage, peer.windows)
        answer_check = answer_check_of(manifest, stage + 1)
        stages_ahead = num_stages - stage - 1
        self.caller = (
            Caller(
                peer.transport,
                Router(timers, stages=stages_ahead, rule=routing_rule(limits.routing)),
                NextStage(self),
                answer_check,
                transfers,
            )
            if stages_ahead
            else None
        )

        # Computes microbatches, for any caller.
        self.execution = Execution(
            stage,
            num_stages,
            training.microbatches,
            engine=self.compute,
            claims=self.driver,
            host=self,
            caller=self.caller,
            recovery=Recovery(
                peer.transport, stage, self, check=input_check, answers=answer_check, transfers=transfers
            ),
            check=input_check,
            slots=limits.slots,
            output_cache_bytes=limits.output_cache_bytes,
            depth=None if limits.fixed_slots else Depth(stage, num_stages - stage, most=limits.slots),
            spans=peer.spans,
            transfers=transfers,
            works=works,
            shown=ShownWorks(limits.output_cache_bytes),
        )
        self.driver.attach(self.execution)

        # Gets the stage's state, stores it on disk, sends it to other replicas.
        self.state = Restorer(self, peer, shape)

        # Rechecks the work of other replicas; has the work done here rechecked by them.
        self.auditor = None
        if manifest.audited and peer.meeting is None:
            self.auditor = Auditor(self, peer, manifest.of_stage(stage))
            self.driver.on_applied = self.auditor.applied

    def ban(self, peer: PeerId, step: int, reason: str) -> None:
        """It is proven that `peer` has done wrong: it counts no more, and is not waited for."""
        self.member.membership.convict(peer, step, reason)
        if self.caller is not None:
            self.caller.leave(peer)
        self.gone(peer, definite=True)

    def gone(self, peer: PeerId, *, definite: bool) -> None:
        """A connection to `peer` broke."""
        if definite and self.caller is not None:
            self.caller.gone(peer)
        self.driver.gone(peer, definite=definite)

    # ------------------------------------------------------------ whom it calls, and who may call it

    # PipelineHost

    def share(self) -> float:
        return self._peer.manifest.training.microbatches / (1 + len(self.live(self.stage)))

    def live(self, stage: int) -> list[PeerId]:
        return self.member.view.live(stage, now=loop_time()) if stage >= 0 else self._peer.token_holders()

    def may_live(self, peer: PeerId) -> bool:
        return self.member.view.may_live(peer, now=loop_time())

    def device_full(self, slots: int, reason: str) -> None:
        self.event("device_full", {"slots": slots, "reason": reason})

    def may_feed(self, caller: PeerId, request: Process) -> TurnedAway | None:
        view, upstream = self.member.view, self.stage - 1
        away = may_feed(
            request,
            feeds=caller == self._peer.me or self.is_live(caller, upstream),
            replica=self.is_live(caller, self.stage),
            known=view.get(caller, upstream) is not None or upstream in view.sparse,
            admitted=self._peer.admitted(caller, "trainer"),
        )
        # Who is only early will be let in in a moment.
        if away is not None and not away.soon:
            self.name_once("turned_away", caller, {"step": request.step, "index": request.index, "reason": away.reason})
        return away

    def is_live(self, peer: PeerId, stage: int) -> bool:
        """Is this a live replica of that stage? Asked with every call. In a large stage a silent peer may call, too."""
        view, record = self.member.view, self._peer.records.get(peer)
        seen = view.get(peer, stage)
        if seen is None and stage in view.sparse:
            if record is None:
                self._peer.look_for(peer)
            return record is not None and any(status.stage == stage and status.synced for status in record.stages)
        return seen is not None and seen.synced and view.in_touch(peer, now=loop_time(), stage=stage)

    def bad_input(self, peer: PeerId, step: int, index: int, error: BadMessage) -> None:
        self.name_once(
            "bad_input", peer, {"step": step, "index": index, "code": error.code.value, "reason": error.reason}
        )

    def name_once(self, event: str, peer: PeerId, fields: dict[str, object]) -> None:
        """Log what a peer did: once per version and peer, and for a limited number, or peers could fill the disk."""
        if self._named_at != self.member.version:
            self._named_at, self._named = self.member.version, set()
        if (event, peer) not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add((event, peer))
            self.event(event, {"peer": peer, **fields})

    def event(self, event: str, fields: dict[str, object]) -> None:
        self._peer.on_event(self.stage, event, fields)


class NextStage:
    """The stage after a replica's, as the replica knows it. Implements CalledStage."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self._stage = replica, replica.stage + 1

    def _seen(self) -> Iterator[tuple[PeerId, Seen]]:
        for peer in self._replica.live(self._stage):
            if (seen := self._replica.member.view.get(peer, self._stage)) is not None:
                yield peer, seen

    def candidates(self) -> Mapping[PeerId, int]:
        """Live replicas of the next stage and their queues."""
        found, member = dict(self._seen()), self._replica.member
        without, newest = member.passed_over(self._stage, now=loop_time()), member.version + 1
        chains = Counter((seen.version, seen.chain) for seen in found.values())
        # The smaller side of a fork computes on other weights than the run's.
        minority = {at for at in chains if any(at[0] == other[0] and chains[at] < chains[other] for other in chains)}
        fit = {
            peer: seen.queue
            for peer, seen in found.items()
            if peer not in without and seen.version <= newest and (seen.version, seen.chain) not in minority
        }
        # A replica that is not fit answers with a refusal at worst: better than to wait for no replica at all.
        return fit or {peer: seen.queue for peer, seen in found.items()}

    def leaving(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, seen in self._seen() if seen.draining)

    def contributors(self) -> Set[PeerId]:
        return self._replica.member.membership.voters(self._stage)

    def left(self, step: int) -> int:
        return self._replica.execution.left(step)

    def rerouted(self, request: Process, peer: PeerId, reason: str) -> None:
        fields = {"step": request.step, "index": request.index, "peer": peer, "reason": reason}
        self._replica.event("rerouted", fields)
