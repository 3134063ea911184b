"""Decided cases: who believes them, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from swarmnet.audit.case import recheck
from swarmnet.audit.evidence import Evidence
from swarmnet.directory import Complaint, Record, StageStatus
from swarmnet.errors import UsageError
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Audits
from swarmnet.messages import NONE, Case, Contributions, Pledge, Process, Request, Stamp
from swarmnet.peer.run import until_banned
from swarmnet.pipeline.router import least_time
from swarmnet.pledge import shares_of
from swarmnet.statement import statement
from swarmnet.testing.plan import RUN, Plan, manifest_of
from swarmnet.testing.virtual_swarm import SimulatedSigner, VirtualSwarm
from swarmnet.trainer.trainer import FirstStage
from tests.sim.strike import reached


def case_on(suspect: PeerId, number: int = 0, *, by: Sequence[str] = ("a", "b")) -> Case:
    """These say that its contribution was false, to an aggregate of which no one has heard."""
    names = suspect, *(PeerId(name) for name in by)
    shares = tuple((peer, Generation(1, 0), frozenset({at})) for at, peer in enumerate(names))
    return decided(suspect, Stamp(7, 0, Chain("11" * 32)), shares, bytes(32), number)


def two_faced(peer: PeerId) -> Case:
    """It has signed two pledges for one aggregate."""
    one = case_on(peer).pledge
    other = replace(one, product=2)
    return Case(one, other=replace(other, signature=SimulatedSigner(peer).sign(statement(other))))


def decided(accused: PeerId, stamp: Stamp, shares: Contributions, digest: bytes, number: int = 0) -> Case:
    """All others who contributed say that it lied in that sum."""
    others, round_id = [peer for peer, _, _ in shares if peer != accused], RoundId(Ballot(0, accused), number)
    pledge = Pledge(stamp, round_id, digest, shares_of(shares, NONE), accused, 1, bytes(32))
    pledge = replace(pledge, signature=SimulatedSigner(accused).sign(statement(pledge)))
    case = Case(pledge, numerics="cpu", contributions=shares)
    return replace(case, rechecks=tuple(recheck(case, b"f" * 32, SimulatedSigner(peer), peer) for peer in others))


def test_identities_of_ones_own_ban_only_each_other_and_fill_nothing() -> None:
    swarm = VirtualSwarm(
        Plan(stages=1, replicas=3, steps=8, forward_s=0.2, audit=Audits(microbatches=1e-9, contributions=0.0)), 1
    )

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 3)
        hears = swarm.nodes[0].peer.replicas[0].auditor
        assert hears is not None
        for number in range(20):
            hears.hear(PeerId("n1"), case_on(PeerId(f"nobody{number}"), number))
            hears.hear(PeerId("n1"), two_faced(PeerId(f"nobody{number}")))
        hears.hear(PeerId("n1"), case_on(swarm.nodes[2].peer_id))  # by two strangers

    swarm.run(script=script)
    assert not swarm.counts["convicted"] and not swarm.counts["tainted"]


def test_a_trainer_leaves_a_convict_with_all_that_it_has_brought_there() -> None:
    """Nobody tells a convict that a step is over, so what was brought there would be in work until the call's limit."""
    plan = Plan(stages=2, replicas=3, microbatches=12, steps=14, forward_s=0.2, audit=Audits(microbatches=1e-9))
    swarm, out = VirtualSwarm(plan, 1), PeerId("s0.2")
    asked, applied, told_at = list[float](), dict[int, float](), list[float]()

    def note(caller: PeerId, callee: PeerId, request: Request) -> None:
        if callee == out and isinstance(request, Process):
            asked.append(swarm.loop.time())

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 6)
        hears = swarm.nodes[0].peer.replicas[0].auditor
        assert hears is not None
        told_at.append(swarm.loop.time())
        hears.hear(PeerId("n1"), two_faced(out))
        await reached(swarm, 12)
        swarm.kill(next(node for node in swarm.nodes if node.peer_id == out))

    def step(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "applied" and peer != out:
            applied.setdefault(fields["step"], swarm.loop.time())

    swarm.hooks.append(step)
    swarm.network.intercepts.append(note)
    swarm.run(script=script)
    took = [after - before for before, after in pairwise(applied[each] for each in range(14))]
    assert max(took) <= 2 * took[0], "of three replicas two are left, and no step waits for a call that ends late"
    assert asked[-1] <= told_at[0] + 1.0


@pytest.mark.parametrize(("members", "believed"), [(3, True), (4, True), (5, False)])
def test_a_trainer_calls_no_peer_that_most_of_the_stage_have_banned(members: int, believed: bool) -> None:
    """Two of them say so in their records, and a replica of another stage."""
    out, leaves = PeerId("s0.0"), list[PeerId]()
    names = [PeerId(f"s0.{number}") for number in range(members)]
    says = Complaint(0, out, "convicted", "step 7: false work")

    def record(peer: PeerId, stage: int, *complaints: Complaint) -> Record:
        status = StageStatus(stage, 0, Chain("11" * 32), synced=True)
        return Record(RUN, peer, 1, (), (status,), complaints=complaints)

    class Known:
        async def records(self, stages: object, at_once: bool) -> list[Record]:
            told = (record(peer, 0, *([says] if peer in names[1:3] else [])) for peer in names)
            return [*told, record(PeerId("s1.0"), 1, says)]

        def complete(self) -> bool:
            return False

    stage = FirstStage(PeerId("t"), manifest_of(Plan()), None, Known(), print, least_time)
    stage.caller.leave = leaves.append  # type: ignore[method-assign, assignment]
    for _ in range(2):
        asyncio.run(stage.refresh())
    assert (out not in stage.candidates()) == believed and leaves == [out] * believed


def test_a_trainer_believes_two_signatures_of_a_peer_against_it() -> None:
    out = PeerId("s0.0")
    stage = FirstStage(PeerId("t"), manifest_of(Plan()), None, None, print, least_time)
    status = StageStatus(0, 0, Chain("11" * 32), synced=True)
    stage.records = {peer: Record(RUN, peer, 1, (), (status,)) for peer in (out, PeerId("s0.1"))}
    proof = two_faced(out)
    unsigned = replace(proof, other=replace(proof.pledge, product=3))
    for case in (unsigned, case_on(out), two_faced(PeerId("nobody"))):
        stage.hear(case, SimulatedSigner(out).verify)
    assert out in stage.candidates()
    stage.hear(proof, SimulatedSigner(out).verify)
    assert out not in stage.candidates()


def test_who_was_convicted_in_an_earlier_life_takes_part_in_no_step_of_this_one() -> None:
    swarm = VirtualSwarm(Plan(stages=1, replicas=3, steps=4, forward_s=0.2, audit=Audits(microbatches=1e-9)), 1)
    out = swarm.names[2] = PeerId("out")

    async def script(swarm: VirtualSwarm) -> None:
        for node in swarm.nodes[:2]:
            hears = node.peer.replicas[0].auditor
            assert hears is not None
            proof = case_on(out)
            hears._kept = [Evidence(RUN, proof)]
        await reached(swarm, 2)
        swarm.kill(swarm.nodes[2])

    swarm.run(script=script)
    assert not [event for _, _, event, _ in swarm.events if event == "convicted_here"], "it never heard of it"
    shut = [at for at, _, event, fields in swarm.events if event == "convicted" and fields["peer"] == out]
    assert len(shut) == 2 and max(shut) < min(at for at, _, event, _ in swarm.events if event == "applied")


@pytest.mark.parametrize("again", [False, True], ids=["while it runs", "started again"])
def test_a_convict_hears_of_it_and_what_its_operator_can_do(again: bool) -> None:
    """The last that mates tell it is the proof; started again, it knows it by its own evidence."""
    swarm = VirtualSwarm(Plan(stages=1, replicas=4, steps=8, forward_s=0.2, audit=Audits(microbatches=1e-9)), 1)
    out, proof = (PeerId("s0.3"), case_on(PeerId("s0.3"), by=("s0.0", "s0.1", "s0.2")))

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 1)
        hears = swarm.nodes[3 if again else 0].peer.replicas[0].auditor
        assert hears is not None
        if again:
            hears._kept = [Evidence(RUN, proof)]
        else:
            hears.hear(swarm.nodes[1].peer_id, two_faced(out))
        await reached(swarm, 4)
        peer = swarm.nodes[3].peer
        assert peer.banned.is_set() and "another --dir" in peer.ban_notice
        with pytest.raises(UsageError, match=r"banned for wrong work in stage 0.*step 7.*test its memory"):
            await until_banned(peer)
        assert peer.state.events["stopped"] == 1
        swarm.kill(swarm.nodes[3])

    swarm.run(script=script)
    assert [who for _, who, event, _ in swarm.events if event == "convicted_here"] == [out]


def test_who_is_told_a_proof_against_it_that_proves_nothing_goes_on() -> None:
    """One liar sends an honest peer what it has not signed, what a jury of strangers says, and what only one says."""
    swarm = VirtualSwarm(Plan(stages=1, replicas=3, steps=4, forward_s=0.2, audit=Audits(microbatches=1e-9)), 1)
    me = PeerId("s0.0")
    whole = case_on(me, by=("s0.1", "s0.2"))
    unsigned = replace(whole, pledge=replace(whole.pledge, signature=b"x" * 64))
    others = case_on(me, 1)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 1)
        for proof in (unsigned, others, replace(whole, rechecks=whole.rechecks[:1])):
            swarm.nodes[0].peer.on_tell(PeerId("s0.2"), proof)
        assert not swarm.nodes[0].peer.banned.is_set()

    swarm.run(script=script)
    assert not swarm.counts["convicted_here"]
