"""Decided cases: who believes them, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from swarmnet.audit.case import recheck
from swarmnet.audit.evidence import Evidence
from swarmnet.audit.pledge import shares_of
from swarmnet.directory import Record, StageStatus
from swarmnet.errors import UsageError
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Audits
from swarmnet.messages import NONE, Case, Contributions, Pledge, Process, Request, Stamp
from swarmnet.peer.run import until_convicted
from swarmnet.pipeline.router import least_time
from swarmnet.simulate.plan import Plan, manifest_of
from swarmnet.simulate.swarm import RUN, SimulatedSigner, Swarm
from swarmnet.statement import statement
from swarmnet.trainer.trainer import FirstStage
from tests.sim.strike import reached, watch_calls


def case_on(suspect: PeerId, number: int = 0, *, by: Sequence[str] = ("a", "b")) -> Case:
    """These say that its contribution was false, to an aggregate of which no one has heard."""
    names = suspect, *(PeerId(name) for name in by)
    shares = tuple((peer, Generation(1, 0), frozenset({at})) for at, peer in enumerate(names))
    return decided(suspect, Stamp(7, 0, Chain("11" * 32)), shares, bytes(32), number)


def decided(accused: PeerId, stamp: Stamp, shares: Contributions, digest: bytes, number: int = 0) -> Case:
    """All others who contributed say that it lied in that sum."""
    others, round_id = [peer for peer, _, _ in shares if peer != accused], RoundId(Ballot(0, accused), number)
    pledge = Pledge(stamp, round_id, digest, shares_of(shares, NONE), accused, 1, bytes(32))
    pledge = replace(pledge, signature=SimulatedSigner(accused).sign(statement(pledge)))
    case = Case(pledge, numerics="cpu", contributions=shares)
    return replace(case, rechecks=tuple(recheck(case, b"f" * 32, SimulatedSigner(peer), peer) for peer in others))


def test_identities_of_ones_own_ban_only_each_other_and_fill_nothing() -> None:
    swarm = Swarm(
        Plan(stages=1, replicas=3, steps=8, forward_s=0.2, audit=Audits(microbatches=1e-9, contributions=0.0)), 1
    )

    async def script(swarm: Swarm) -> None:
        await reached(swarm, 3)
        hears = swarm.nodes[0].peer.replicas[0].auditor
        assert hears is not None
        for number in range(20):
            hears.hear(PeerId("n1"), case_on(PeerId(f"nobody{number}"), number))
            alone = case_on(PeerId(f"nobody{number}"), number).pledge
            other = replace(alone, product=2)
            other = replace(other, signature=SimulatedSigner(other.peer).sign(statement(other)))
            hears.hear(PeerId("n1"), Case(alone, other=other))
        hears.hear(PeerId("n1"), case_on(swarm.nodes[2].peer_id))  # by two strangers

    swarm.run(script=script)
    assert not swarm.counts["convicted"] and not swarm.counts["tainted"]


def test_verdicts_taint_the_steps_that_were_applied_and_no_others_also_of_who_is_out_already() -> None:
    swarm = Swarm(
        Plan(
            stages=1,
            replicas=4,
            microbatches=16,
            steps=16,
            forward_s=0.2,
            audit=Audits(microbatches=1e-9, contributions=0.0),
        ),
        1,
    )
    told, liar = list[tuple[PeerId, int]](), PeerId("s0.3")
    swarm.hooks.append(lambda peer, event, fields: told.append((peer, fields["step"])) if event == "tainted" else None)

    async def script(swarm: Swarm) -> None:
        await reached(swarm, 8)
        hears, me = swarm.nodes[0].peer.replicas[0].auditor, swarm.nodes[0].peer_id
        assert hears is not None
        sums = {stamp.step: (stamp, finished) for stamp, finished in hears._sums.items()}
        (stamp, finished), (before, old) = sums[6], sums[4]
        pretended = tuple(each for each in finished.contributions if each[0] != me)
        hears.hear(PeerId("n1"), decided(liar, stamp, pretended, finished.digest))
        assert not told, "others contributed to the sum of that step"
        for _ in range(2):
            hears.hear(PeerId("n1"), decided(liar, stamp, finished.contributions, finished.digest))
            hears.hear(PeerId("n1"), decided(liar, before, old.contributions, old.digest))
        hears.hear(PeerId("n1"), decided(liar, sums[5][0], sums[5][1].contributions, bytes(32)))
        assert told == [(me, 6), (me, 4)]
        await asyncio.sleep(0.1)
        swarm.kill(swarm.nodes[3])

    swarm.run(script=script)
    assert {step for _, step in told} == {6, 4} and swarm.counts["convicted"] >= 3


def test_a_trainer_leaves_a_convict_with_all_that_it_has_brought_there() -> None:
    """Nobody tells a convict that a step is over, so what was brought there would be in work until the call's limit."""
    plan = Plan(stages=2, replicas=3, microbatches=12, steps=14, forward_s=0.2, audit=Audits(microbatches=1e-9))
    swarm, out = Swarm(plan, 1), PeerId("s0.2")
    asked, applied, told_at = list[float](), dict[int, float](), list[float]()

    def note(caller: PeerId, callee: PeerId, request: Request) -> None:
        if callee == out and isinstance(request, Process):
            asked.append(swarm.loop.time())

    async def script(swarm: Swarm) -> None:
        await reached(swarm, 6)
        hears = swarm.nodes[0].peer.replicas[0].auditor
        assert hears is not None
        told_at.append(swarm.loop.time())
        hears.hear(PeerId("n1"), case_on(out, by=("s0.0", "s0.1")))
        await reached(swarm, 12)
        swarm.kill(next(node for node in swarm.nodes if node.peer_id == out))

    def step(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "applied" and peer != out:
            applied.setdefault(fields["step"], swarm.loop.time())

    swarm.hooks.append(step)
    watch_calls(swarm, note)
    swarm.run(script=script)
    took = [after - before for before, after in pairwise(applied[each] for each in range(14))]
    assert max(took) <= 2 * took[0], "of three replicas two are left, and no step waits for a call that ends late"
    assert asked[-1] <= told_at[0] + 1.0


@pytest.mark.parametrize(("members", "believed"), [(3, True), (4, False)])
def test_a_trainer_believes_a_verdict_of_more_than_half_of_the_stage(members: int, believed: bool) -> None:
    """With names of its own anybody makes one: these two and their victim, who are at most three of the stage."""
    out = PeerId("s0.0")
    stage = FirstStage(PeerId("t"), manifest_of(Plan()), None, None, print, least_time, lambda step: 0)
    status = StageStatus(0, 0, Chain("11" * 32), synced=True)
    names = [PeerId(f"s0.{number}") for number in range(members)]
    stage.records = {peer: Record(RUN, peer, 1, (), (status,)) for peer in names}
    stage.hear(case_on(PeerId("nobody")), SimulatedSigner(out).verify)
    case = case_on(out, by=names[1:3])
    stage.hear(replace(case, rechecks=case_on(out, 1, by=names[1:3]).rechecks), SimulatedSigner(out).verify)
    stage.hear(case_on(out), SimulatedSigner(out).verify)
    assert len(stage.candidates()) == members, "a stranger, what is not signed, what strangers say"
    stage.hear(case, SimulatedSigner(out).verify)
    assert (out not in stage.candidates()) == believed


def test_who_was_convicted_in_an_earlier_life_takes_part_in_no_step_of_this_one() -> None:
    swarm = Swarm(Plan(stages=1, replicas=3, steps=4, forward_s=0.2, audit=Audits(microbatches=1e-9)), 1)
    out = swarm.names[2] = PeerId("out")

    async def script(swarm: Swarm) -> None:
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
    swarm = Swarm(Plan(stages=1, replicas=4, steps=8, forward_s=0.2, audit=Audits(microbatches=1e-9)), 1)
    out, proof = (PeerId("s0.3"), case_on(PeerId("s0.3"), by=("s0.0", "s0.1", "s0.2")))

    async def script(swarm: Swarm) -> None:
        await reached(swarm, 1)
        hears = swarm.nodes[3 if again else 0].peer.replicas[0].auditor
        assert hears is not None
        if again:
            hears._kept = [Evidence(RUN, proof)]
        else:
            hears.hear(swarm.nodes[1].peer_id, proof)
        await reached(swarm, 4)
        peer = swarm.nodes[3].peer
        assert peer.convicted.is_set() and "another --dir" in peer.conviction
        ended = list[str]()
        with pytest.raises(UsageError, match=r"convicted of wrong work in stage 0.*step 7.*test its memory"):
            await until_convicted(peer, lambda event, fields: ended.append(event))
        assert ended == ["stopped"]
        swarm.kill(swarm.nodes[3])

    swarm.run(script=script)
    assert [who for _, who, event, _ in swarm.events if event == "convicted_here"] == [out]


def test_who_is_told_a_proof_against_it_that_proves_nothing_goes_on() -> None:
    """One liar sends an honest peer what it has not signed, what a jury of strangers says, and what only one says."""
    swarm = Swarm(Plan(stages=1, replicas=3, steps=4, forward_s=0.2, audit=Audits(microbatches=1e-9)), 1)
    me = PeerId("s0.0")
    whole = case_on(me, by=("s0.1", "s0.2"))
    unsigned = replace(whole, pledge=replace(whole.pledge, signature=b"x" * 64))
    others = case_on(me)

    async def script(swarm: Swarm) -> None:
        await reached(swarm, 1)
        for proof in (unsigned, others, replace(whole, rechecks=whole.rechecks[:1])):
            swarm.nodes[0].peer.on_tell(PeerId("s0.2"), proof)
        assert not swarm.nodes[0].peer.convicted.is_set()

    swarm.run(script=script)
    assert not swarm.counts["convicted_here"]
