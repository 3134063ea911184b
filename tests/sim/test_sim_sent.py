"""Who counts one thing and sends another is named: the receiver shows it to its mates. Nobody honest ever is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from strike import kill_and_restart, reached

from swarmnet.audit.case import recheck, refusal
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Audits
from swarmnet.messages import (
    NONE,
    AuditRequest,
    Case,
    Fetch,
    Fetched,
    MemberState,
    Packed,
    Pledge,
    Process,
    Request,
    Sent,
    WorkRecord,
)
from swarmnet.peer.peer import Peer
from swarmnet.pipeline.works import digest
from swarmnet.pledge import leaf, path_of, root_of, shares_of
from swarmnet.statement import statement
from swarmnet.testing.network import Message
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Guise, SimulatedSigner, VirtualSwarm
from swarmnet.transport import Transport, ask

ALL = Audits(microbatches=0.5, contributions=0.0)
PLAN = Plan(stages=3, replicas=3, microbatches=9, steps=8, boundary_elements=3, audit=ALL)


def signed(sent: Sent) -> Sent:
    return replace(sent, signature=SimulatedSigner(sent.peer).sign(statement(sent)))


class FalseOutputs(Guise):
    """Computes, sums and pledges what is right, and sends other outputs on. says: what it signs of one."""

    def __init__(self, says: Callable[[Sent], Sent] = lambda sent: sent) -> None:
        self.says, self.told = says, 0

    def transport(self, honest: Transport) -> Any:
        return _Voice(self, honest)

    def payload(self, honest: tuple[Packed, ...]) -> tuple[Packed, ...]:
        """Another one each time."""
        self.told += 1
        tokens, hidden, proof = honest
        data = bytearray(hidden.data)
        data[0] ^= 1 + self.told % 3
        return tokens, replace(hidden, data=bytes(data)), proof


class _Voice:
    def __init__(self, of: FalseOutputs, honest: Transport) -> None:
        self._of, self._honest = of, honest

    def call(self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float) -> Any:
        if isinstance(request, Process) and request.sents:
            payload, (own, *others) = self._of.payload(payload), request.sents
            own = signed(self._of.says(replace(own, digest=digest(payload[:-1]))))
            request = replace(request, sents=(own, *others))
        return self._honest.call(peer, request, payload, deadline=deadline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


class Watch:
    """Who is named, and who sits out for what it shows or says."""

    def __init__(self, swarm: VirtualSwarm) -> None:
        self.named: set[PeerId] = set()
        self.reasons: set[str] = set()
        self.struck: set[PeerId] = set()
        self.refused: set[PeerId] = set()
        self.swarm = swarm
        swarm.hooks.append(self._look)

    def _look(self, peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        if event in ("convicted", "reducer_lied", "pledge_lied"):
            self.named.add(fields["peer"])
            self.reasons.add(fields.get("reason", ""))
        if event == "late" and "pledged" in fields["reason"]:
            self.struck.add(fields["peer"])
        if event == "bad_input":
            self.refused.add(fields["peer"])
        assert event != "disputed" or fields["peer"] == "liar", (peer, event, fields)


def watched(plan: Plan, seed: int = 1) -> tuple[VirtualSwarm, Watch]:
    swarm = VirtualSwarm(plan, seed)
    return swarm, Watch(swarm)


async def killing(swarm: VirtualSwarm, seed: int) -> None:
    """A replica after the other is killed, and comes back."""
    rng = random.Random(seed)
    while not swarm.done:
        await asyncio.sleep(rng.uniform(0.3, 1.2))
        node = rng.choice(swarm.honest)
        if swarm.may_die(node):
            kill_and_restart(swarm, node, after_s=rng.uniform(0.1, 0.6))


def with_liar(guise: Guise, **changes: Any) -> tuple[VirtualSwarm, Watch]:
    """`liar` lies, once it is added."""
    swarm, watch = watched(replace(PLAN, **changes))
    swarm.exact, swarm.detailed = False, False
    swarm.guises[PeerId("liar")] = guise
    return swarm, watch


@pytest.mark.parametrize(("stage", "killed"), [(0, False), (1, False), (1, True)])
def test_whoever_sends_other_outputs_than_it_counts_is_named(stage: int, killed: bool) -> None:
    swarm, watch = with_liar(FalseOutputs(), steps=14 if killed else 7)

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((stage,), PeerId("liar"))
        if killed:
            await killing(swarm, 3)

    swarm.run(until_s=240.0, script=script)
    assert watch.named == {"liar"}
    assert any("sent" in reason for reason in watch.reasons)


def test_in_a_stage_of_two_its_own_signatures_name_it() -> None:
    swarm, watch = with_liar(FalseOutputs(), replicas=1, steps=12)

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((1,), PeerId("liar"))

    swarm.run(until_s=240.0, script=script)
    assert watch.named == {"liar"}
    assert all("counted the output of" in reason and "sent another" in reason for reason in watch.reasons)


@pytest.mark.parametrize("replicas", [1, 3])
def test_whoever_says_that_it_may_have_counted_something_else_is_tried_by_a_jury(replicas: int) -> None:
    """An honest peer can be made to say so: of two signatures alone nothing follows."""
    swarm, watch = with_liar(FalseOutputs(lambda sent: replace(sent, again=True)), replicas=replicas, stages=2, steps=8)

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((0,), PeerId("liar"))

    swarm.run(until_s=240.0, script=script)
    assert watch.named == ({"liar"} if replicas > 2 else set())


FALSE_WORDS: dict[str, Callable[[Sent], Sent]] = {
    "another past": lambda sent: replace(sent, stamp=replace(sent.stamp, chain=Chain("ab" * 32))),
    "another input": lambda sent: replace(sent, input=bytes(32)),
    "a gradient": lambda sent: replace(sent, gradient=bytes(32)),
}


@pytest.mark.parametrize("says", FALSE_WORDS.values(), ids=FALSE_WORDS)
@pytest.mark.parametrize("stage", [0, 1])
def test_nobody_takes_what_is_not_made_of_something_signed(says: Callable[[Sent], Sent], stage: int) -> None:
    swarm, watch = with_liar(FalseOutputs(says), steps=6)

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((stage,), PeerId("liar"))

    swarm.run(until_s=240.0, script=script)
    assert watch.refused == {"liar"} and not watch.named


def test_whoever_does_not_show_the_work_that_it_counted_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, watch = with_liar(FalseOutputs(), stages=2, steps=8)
    answers = Peer._answers

    def refuse(self: Peer, caller: Any, request: Any, payload: Any) -> Any:
        if self.me == "liar" and isinstance(request, AuditRequest) and request.bare:
            request = replace(request, step=1 << 30)
        return answers(self, caller, request, payload)

    monkeypatch.setattr(Peer, "_answers", refuse)

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((0,), PeerId("liar"))

    swarm.run(until_s=240.0, script=script)
    # What it sends of what others have counted may name it all the same.
    assert watch.struck == {"liar"} and watch.named <= {"liar"}


def test_what_is_not_signed_is_refused_and_costs_its_sender_alone() -> None:
    swarm, refused = VirtualSwarm(PLAN, 1), set[PeerId]()

    def look(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        assert event not in ("convicted", "reducer_lied", "pledge_lied")
        if event == "bad_input":
            refused.add(fields["peer"])

    swarm.hooks.append(look)
    swarm.guises[PeerId("liar")] = FalseOutputs(lambda sent: replace(sent, digest=bytes(32)))

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((1,), PeerId("liar"))

    swarm.run(until_s=240.0, script=script)
    assert refused == {"liar"}


def test_nothing_is_signed_where_no_audit_is_asked_for() -> None:
    plan = Plan(stages=2, replicas=2, steps=2, audit=Audits(microbatches=0.0, contributions=0.0))
    swarm, sents = VirtualSwarm(plan, 1), []
    swarm.network.intercepts.append(
        lambda caller, callee, request: sents.append(request.sents) if isinstance(request, Process) else None
    )
    swarm.run(until_s=60.0)
    assert sents and not any(sents)


CHAOS = [("exact", 1 << 20, 1), ("overlap", 1 << 20, 2), ("exact", 64, 3)]


@pytest.mark.parametrize(("sync", "output_cache_bytes", "seed"), CHAOS)
def test_nobody_honest_is_named_while_replicas_die_and_repair(sync: Any, output_cache_bytes: int, seed: int) -> None:
    swarm, watch = watched(replace(PLAN, sync=sync, output_cache_bytes=output_cache_bytes), seed)

    async def script(swarm: VirtualSwarm) -> None:
        await killing(swarm, seed)

    swarm.run(until_s=240.0, script=script)
    assert swarm.counts["kills"] > 2 and not watch.named and not watch.refused


# ---------------------------------------------------------------- what nobody has counted


@pytest.mark.parametrize("stage", [0, 1])
def test_whoever_feeds_false_inputs_and_counts_nothing_is_named(stage: int) -> None:
    liar = FalseOutputs()
    swarm, watch = with_liar(liar, steps=12)

    def wants_none(sender: PeerId, receiver: PeerId, message: Message) -> Message | None:
        """It asks nobody whether it may count what it feeds on, and so counts nothing of it."""
        return replace(message, wants=NONE) if sender == "liar" and isinstance(message, MemberState) else None

    swarm.network.intercepts.append(wants_none)

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((stage,), PeerId("liar"))

    swarm.run(until_s=240.0, script=script)
    assert liar.told and watch.named == {"liar"}
    assert any("sent" in reason for reason in watch.reasons)


def forged(sent: Sent, judges: list[PeerId], wrong: bytes = bytes(32)) -> Case:
    """These, of whom the first has pledged, say that it was rightly made otherwise."""
    pledger = judges[0]
    work = WorkRecord(sent.index, sent.input, wrong, bytes(32), bytes(32), 0.0, 0)
    shares = tuple((peer, Generation(0, 0), frozenset({sent.index + at})) for at, peer in enumerate(judges))
    leaves, round_id = {work.index: leaf(work)}, RoundId(Ballot(0, pledger), 1)
    pledge = Pledge(sent.stamp, round_id, b"sum", shares_of(shares, frozenset()), pledger, 0, root_of(leaves))
    pledge = replace(pledge, signature=SimulatedSigner(pledger).sign(statement(pledge)))
    case = Case(pledge, work, path_of(leaves, work.index), sent, numerics="cpu", contributions=shares)
    return replace(case, rechecks=tuple(recheck(case, wrong, SimulatedSigner(peer), peer) for peer in judges))


@pytest.mark.parametrize("liars", [0, 3])
def test_a_jury_that_has_made_no_sum_convicts_nobody_of_what_it_sent(liars: int) -> None:
    """Whoever else says so."""
    swarm, watch = watched(replace(PLAN, stages=2, replicas=4))
    told: list[PeerId] = []

    def tell(sent: Sent) -> None:
        mates = sorted(node.peer_id for node in swarm.nodes if node.stages == (0,) and node.peer_id != sent.peer)
        case = forged(sent, [*map(PeerId, ("n1", "n2", "n3", "n4")), *mates[:liars]])
        contributors = frozenset(peer for peer, *_ in case.contributions)
        assert refusal(case, contributors, SimulatedSigner(PeerId("")).verify) == ""
        for node in swarm.nodes:
            for replica in node.peer.replicas.values():
                replica.auditor.hear(PeerId("n1"), case)

    def look(caller: PeerId, callee: PeerId, request: Request) -> None:
        if not told and isinstance(request, Process) and request.sents and request.step == 3:
            told.append(caller)
            swarm.loop.call_soon(tell, request.sents[0])

    swarm.network.intercepts.append(look)
    swarm.exact = False
    swarm.run(until_s=60.0)
    assert told and not watch.named


def test_nobody_takes_the_word_of_an_identity_that_serves_no_stage() -> None:
    """The liar sends what is right, and words for what it made it of that nobody of the run has signed."""
    swarm, watch = with_liar(Guise(), steps=6)
    kept, told = set[PeerId](), list[PeerId]()

    def forge(sender: PeerId, receiver: PeerId, message: Message) -> Message | None:
        if sender != "liar" or not isinstance(message, Process) or not message.sents:
            return None
        told.append(receiver)
        own, *others = message.sents
        return replace(message, sents=(own, *(signed(replace(each, peer=PeerId("nobody"))) for each in others)))

    swarm.network.intercepts.append(forge)

    def look(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        if event == "applied":
            works = swarm.last[peer].peer.replicas[fields["stage"]].execution.works
            kept.update(sent.peer for sent in works.sents(fields["step"]))

    swarm.hooks.append(look)

    async def script(swarm: VirtualSwarm) -> None:
        swarm.add((1,), PeerId("liar"))

    swarm.run(until_s=240.0, script=script)
    assert told and len(kept) > 6 and "nobody" not in kept
    assert not watch.named and not watch.refused, "views may differ"


def test_no_right_output_is_false_because_of_a_gradient_that_no_engine_takes() -> None:
    """A liar has a mate make an output again, counts a false one of the same input, with a gradient that is none, and
    tells the mate's mates."""
    swarm, watch = with_liar(FalseOutputs(), audit=Audits(microbatches=1e-9, contributions=0.0))
    swarm.guises[PeerId("liar")] = Guise()
    junk, asked = Packed("junk", (1,), bytes(4)), list[PeerId]()

    async def accuse(victim: PeerId, step: int, index: int) -> None:
        request = Fetch(step, 1, index, "input", cached=False)
        made = await ask(swarm.network.transport(PeerId("liar")), victim, request, limit_s=5.0)
        assert isinstance(made, Fetched) and made.sents[0].peer == victim
        mates = [node for node in swarm.honest if node.stages == (1,)]
        await reached(swarm, step + 1)
        for node in mates:
            swarm.network.tell(PeerId("liar"), node.peer_id, made.sents[0])

    async def script(swarm: VirtualSwarm) -> None:
        liar = swarm.add((1,), PeerId("liar"))
        await reached(swarm, 1)
        works = liar.peer.replicas[1].execution.works
        add = works.add

        def add_false(
            step: int, record: WorkRecord, payload: tuple[Packed, ...], sents: tuple[Sent, ...] = (), **made: Any
        ) -> None:
            if step >= 3 and not asked:
                asked.append(min(node.peer_id for node in swarm.honest if node.stages == (1,)))
                swarm.loop.create_task(accuse(asked[0], step, record.index))
                record = replace(record, output=bytes(32), gradient=digest((junk,)), resent=True)
                payload = (*payload[:-1], junk)
            add(step, record, payload, sents, **made)

        works.add = add_false

    swarm.run(until_s=240.0, script=script)
    assert asked and not watch.named
