"""Members that lie about sums, beside three honest ones of production classes: what is committed is right, who lied is
left out, and nobody honest is."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.averaging.round_check import chunk_digest
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Packed, Part, PartData, Pledge
from swarmnet.statement import statement
from swarmnet.testing.virtual_engine import SimulatedEngine
from swarmnet.testing.virtual_swarm import SimulatedSigner
from tests.benchmark_modules import load

strangers, lies = load("strangers"), load("strangers_lies")
Lie: Any = lies.Lie

QUIET_S, SECONDS = 6.0, 10.0


def altered(packed: Packed) -> Packed:
    """With another first number."""
    (first,) = struct.unpack_from("<q", packed.data)
    return replace(packed, data=struct.pack("<q", first + 1) + bytes(packed.data)[8:])


def signed(pledge: Pledge, **changes: Any) -> Pledge:
    """Another pledge, signed by the same peer."""
    false = replace(pledge, **changes)
    return replace(false, signature=SimulatedSigner(pledge.peer).sign(statement(false)))


class Tells(Lie):  # type: ignore[misc]
    """Changes what callers of its parts get."""

    def told(self, caller: PeerId, request: Part, answer: PartData) -> PartData:
        raise NotImplementedError

    async def _all(
        self, caller: PeerId, request: Part, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        async for answer in honest:
            yield self.told(caller, request, answer) if isinstance(answer, PartData) else answer

    def answers(self, caller: PeerId, request: Any, read: Any, honest: Any) -> Any:
        return self._all(caller, request, honest) if isinstance(request, Part) else honest


class FalseProduct(Tells):
    """pledges another product than its contribution has"""

    def told(self, caller: PeerId, request: Part, answer: PartData) -> PartData:
        if request.kind != "pledges" or request.start < request.stop:
            return answer
        return replace(answer, pledges=tuple(self.false(caller, each) for each in answer.pledges))

    def false(self, caller: PeerId, pledge: Pledge) -> Pledge:
        return signed(pledge, product=pledge.product ^ 1) if pledge.peer == self.me else pledge


class TwoProducts(FalseProduct):
    """pledges its product to some, and another one to the rest"""

    def false(self, caller: PeerId, pledge: Pledge) -> Pledge:
        return super().false(caller, pledge) if caller == min(self.mates) else pledge


class ReducesAndPledgesFalsely(FalseProduct):
    """hands out another sum than that of what it reduced, and pledges another product"""

    def bend(self, engine: SimulatedEngine) -> Any:
        return lies.LyingReducer.bend(self, engine)


class TwoSums(Tells):
    """hands one member another sum than the rest, each under its signature"""

    def told(self, caller: PeerId, request: Part, answer: PartData) -> PartData:
        if request.kind != "reduced" or caller != min(self.mates):
            return answer
        packed = altered(answer.payload[0])
        seen = chunk_digest(packed)
        pledges = tuple(signed(each, digest=hashlib.sha256(each.shares + seen).digest()) for each in answer.pledges)
        return replace(answer, payload=(packed,), pledges=pledges)


class UnsignedContribution(Tells):
    """contributes something else than it signs"""

    def told(self, caller: PeerId, request: Part, answer: PartData) -> PartData:
        return replace(answer, payload=(altered(answer.payload[0]),)) if request.kind == "contribution" else answer


class TwoContributions(Lie):  # type: ignore[misc]
    """signs to reducers a contribution that it did not make, and shows the true one to whoever looks again"""

    def bend(self, engine: SimulatedEngine) -> Any:
        handed: set[tuple[int, int]] = set()

        async def contribution(start: int, stop: int, reference: bytes = b"") -> Packed:
            packed = await engine.contribution(start, stop, reference)
            if not self.lying or (engine.version, start) in handed:
                return packed
            handed.add((engine.version, start))
            return altered(packed)

        return lies.Bent(engine, contribution=contribution)


KINDS = {
    "lying-reducer": lies.LyingReducer,
    "false-product": FalseProduct,
    "two-products": TwoProducts,
    "reduces-and-pledges-falsely": ReducesAndPledgesFalsely,
    "two-sums": TwoSums,
    "unsigned-contribution": UnsignedContribution,
    "two-contributions": TwoContributions,
}

LEFT_OUT = frozenset({"evicted", "late", "reducer_lied", "pledge_lied"})


@pytest.mark.parametrize("name", KINDS)
def test_what_is_committed_is_right_and_the_liar_is_left_out(name: str) -> None:
    trial = strangers.Trial(3, SECONDS, 1, strangers.STAGE, QUIET_S)
    liar = KINDS[name](trial.swarm, PeerId("liar.0"))
    trial.run([liar])
    assert trial.weights_equal and not trial.broken
    named = trial.named(liar.me)
    # What is not signed is refused before anything is summed; two pledges for one sum prove it to everybody.
    how = "sum_failed" if name == "unsigned-contribution" else "reducer_lied"
    assert named[how] + named["pledge_lied"] + named["convicted"], named
    assert trial.steps >= SECONDS / 2, "a step takes half a second"
    committed = [
        {peer for peer, indexes in fields["contributions"] if indexes}
        for at, _, event, fields in trial.swarm.events
        if event == "committed" and fields["stage"] == strangers.STAGE and at > QUIET_S + 1.0
    ]
    assert len(committed) >= 3
    # Who has told most of them the truth may be in a sum, which is right.
    assert name in ("two-products", "two-sums") or not [each for each in committed if liar.me in each]
    honest = {node.peer_id for node in trial.swarm.honest}
    # Whom the liar told another sum lacks the one that most have signed, and fetches it: no fault of its own.
    accused = [
        (event, fields)
        for _, peer, event, fields in trial.swarm.events
        if peer in honest and event in LEFT_OUT and fields.get("peer") in honest
        if (name, event, fields.get("reason")) != ("two-sums", "evicted", "late")
    ]
    assert not accused, accused[:4]


def test_members_that_are_honest_have_everybodys_pledges_of_each_step() -> None:
    trial = strangers.Trial(3, SECONDS, 1, strangers.STAGE, QUIET_S)
    honest = Lie(trial.swarm, PeerId("liar.0"))
    trial.run([honest])
    for node in trial.swarm.honest:
        for stage, replica in node.peer.replicas.items():
            stamps = replica.exchange._checked.keys()
            told = {stamp: replica.exchange.commitments(stamp) for stamp in stamps}
            assert 3 <= len([stamp for stamp, pledges in told.items() if pledges]) <= 4, stage
            for stamp, pledges in told.items():
                assert {each.stamp for each in pledges} <= {stamp} and len({each.digest for each in pledges}) <= 1
                verify = SimulatedSigner(node.peer_id).verify
                assert all(verify(each.peer, statement(each), each.signature) for each in pledges)
