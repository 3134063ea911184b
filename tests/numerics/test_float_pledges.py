"""Sums of floats: what is not longer than rounding passes, what is does not, and who lied is named."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from stage_chain import Direct, StageChain, compute_thread, tiny
from test_recompute import KEPT, REPLICAS, STEPS, Counted, other_than, run, shares, train

from swarmnet.audit.pledge import other_than as another
from swarmnet.audit.pledge import whole_of
from swarmnet.audit.products import Sketch, add_up, same
from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import Refused
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Manifest
from swarmnet.messages import Packed, Round, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.simulate.swarm import SimulatedSigner
from swarmnet.stage.rounding import NoRounding
from swarmnet.sums import linear
from swarmnet.wire import codecs

pytestmark = pytest.mark.usefixtures("one_thread")

PEERS = tuple(PeerId(name) for name in "abcde")
TOKENS = 32  # of a microbatch of `tiny`
STAMP = Stamp(0, 0, Chain("00" * 32))
Lie = Callable[[torch.Tensor], torch.Tensor]


# ---------------------------------------------------------------- the vectors


def test_a_sketch_is_the_same_however_a_vector_is_cut() -> None:
    x = torch.randn(5000)
    vector = linear.drawn_real(b"seed", x.numel())
    whole, edges = vector.sketch(x), (0, 1, 1000, 1024, 3000, 5000)
    pieces = [vector.sketch(x[a:b], a) for a, b in itertools.pairwise(edges)]
    added = [sum(products) for products in zip(*(piece.products for piece in pieces), strict=True)]
    assert added == pytest.approx(whole.products, rel=1e-12)
    r = vector.rows.repeat_interleave(linear.WIDTH, 0)[:5000] * vector.columns.repeat(len(vector.rows), 1)[:5000]
    assert whole.products == pytest.approx((r.T @ x.double()).tolist(), rel=1e-12)
    assert whole.length == pytest.approx(float(x.double().norm()))
    assert float(linear.drawn_real(b"seed", 1 << 20).columns.square().mean()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("members", [2, 8, 64])
def test_no_honest_sum_is_refused_and_no_lie_passes(members: int) -> None:
    """Contributions that nearly add up to nothing, summed in fp32; and lies of a thousandth of what was contributed."""
    torch.manual_seed(members)
    size, worst = 20_000, 0.0
    x_JN = torch.randn(members, size) * torch.logspace(-6, 6, size)
    x_JN[1::2] -= x_JN[::2] * 0.99
    total = torch.zeros(size)
    for x_N in x_JN:
        total += x_N
    for number in range(40):
        vector = linear.drawn_real(bytes([number]), size)
        parts = [Sketch.of(vector.sketch(x_N).packed) for x_N in x_JN]
        found, lengths = vector.sketch(total), sum(part.length for part in parts)
        assert add_up(parts, found)
        columns = zip(found.products, *(part.products for part in parts), strict=True)
        off = max(abs(its - sum(each)) for its, *each in columns)
        worst = max(worst, off / found._most(members, lengths))
        lie = torch.randn(size) if number % 2 else torch.zeros(size)
        lie[number] = 1.0
        forged = total + lie * (1e-3 * lengths / lie.norm())
        assert not add_up(parts, vector.sketch(forged))
    assert worst < 0.25, "there is no room for what other orders round"


# ---------------------------------------------------------------- rounds


def manifest_of(codec: str, reducer: str = "sum") -> Manifest:
    return tiny(1, mode="fp32", microbatches=len(PEERS), averaging=Averaging(codec=codec, reducer=reducer))


class Floats(Direct):
    """Five members that have counted a microbatch each, and call each other directly. reduces: what the first hands out
    instead of a sum. contributes: what it sends instead of what it pledges."""

    def __init__(
        self, manifest: Manifest, compute: Any, *, reduces: Lie | None, contributes: Lie | None, group: int
    ) -> None:
        noise = torch.Generator().manual_seed(1)
        self.heard: list[tuple[PeerId, str, dict[str, object]]] = []
        self.exchanges, self.engines = dict[PeerId, Exchange](), {}
        for place, peer in enumerate(PEERS):
            backend = DeviceBackend(manifest.of_stage(0))
            engine = self.engines[peer] = torch_engine(manifest, 0, compute, backend)
            gradient = torch.randn(engine.sums.num_elements, generator=noise)
            assert backend.sums[0].add([gradient], NoRounding(), step=0, index=place, voids=backend.sums[0].voids)
            if place == 0 and reduces is not None:
                self._bend(engine.sums, "reduce", reduces)
            if place == 0 and contributes is not None:
                self._bend(engine.sums, "contribution", contributes)
            self.exchanges[peer] = Exchange(
                peer, engine.sums, self, num_tokens=TOKENS, group_size=group, signer=SimulatedSigner(peer),
                on_event=lambda event, fields, peer=peer: self.heard.append((peer, event, fields)),
            )  # fmt: skip

    @staticmethod
    def _bend(sums: Any, name: str, lie: Lie) -> None:
        honest = getattr(sums, name)

        def bent(packed: Packed) -> Packed:
            return codecs.encode(packed.codec, lie(codecs.decode(packed)))

        async def call(*args: Any, **options: Any) -> Any:
            found = await honest(*args, **options)
            return bent(found) if isinstance(found, Packed) else replace(found, packed=bent(found.packed))

        setattr(sums, name, call)

    async def sum(self) -> list[Any]:
        """What becomes of one round at each of them: a sum or an error."""
        ballot = Ballot(1, PEERS[0])
        counted = tuple((peer, Generation(1, 0), frozenset({place})) for place, peer in enumerate(PEERS))
        current = Round(STAMP, ballot, RoundId(ballot, 0), counted, PEERS, ())
        jobs = [
            asyncio.ensure_future(exchange.sum(current, {PEERS.index(peer): (1.0, TOKENS)}))
            for peer, exchange in self.exchanges.items()
        ]
        _, waiting = await asyncio.wait(jobs, timeout=60.0)
        assert not waiting
        return [job.exception() or job.result() for job in jobs]


def played(
    codec: str, *, reducer: str = "sum", reduces: Lie | None = None, contributes: Lie | None = None, group: int = 16
) -> Any:
    async def whole() -> Any:
        async with compute_thread() as compute:
            floats = Floats(manifest_of(codec, reducer), compute, reduces=reduces, contributes=contributes, group=group)
            return floats, await floats.sum()

    return asyncio.run(whole())


@pytest.mark.parametrize(
    ("codec", "group"), [("fp32", 16), ("fp32", 3), ("bf16", 16), ("int8", 16), ("auto", 16), ("int8", 3)]
)
def test_honest_members_have_everybodys_pledges(codec: str, group: int) -> None:
    floats, found = played(codec, group=group)
    assert len({one.digest for one in found}) == 1
    for exchange in floats.exchanges.values():
        pledges = exchange.pledges(STAMP)
        assert [pledge.peer for pledge in pledges] == list(PEERS) and {pledge.product for pledge in pledges} == {0}
    assert {event for _, event, _ in floats.heard} == {"sum_checked"}


@pytest.mark.parametrize(("codec", "group"), [("fp32", 16), ("fp32", 3), ("bf16", 16), ("int8", 16)])
def test_a_reducer_that_lies_is_named_and_nobody_takes_its_sum(codec: str, group: int) -> None:
    floats, found = played(codec, reduces=lambda x: -x, group=group)
    others = [error for peer, error in zip(PEERS, found, strict=True) if peer != PEERS[0]]
    assert all(isinstance(error, Refused | ExceptionGroup) for error in others)
    named = {(peer, fields["peer"]) for peer, event, fields in floats.heard if event == "reducer_lied"}
    # In a grid whoever handed it over is named, too.
    assert {(peer, PEERS[0]) for peer in PEERS[1:] if group > 3 or (peer, PEERS[0]) in named} <= named and named
    assert not [event for _, event, _ in floats.heard if event == "sum_checked"]


def test_a_lie_of_a_thousandth_of_one_reducers_part_is_seen_in_fp32() -> None:
    floats, found = played("fp32", reduces=lambda x: x * 1.01)
    assert not [one for one in found if not isinstance(one, BaseException)]
    assert {fields["peer"] for _, event, fields in floats.heard if event == "reducer_lied"} == {PEERS[0]}


def test_who_pledges_something_else_than_it_sends_is_named() -> None:
    floats, found = played("fp32", contributes=lambda x: x * 2.0)
    assert not [one for peer, one in zip(PEERS, found, strict=True) if not isinstance(one, BaseException)]
    named = {fields["peer"] for peer, event, fields in floats.heard if event == "pledge_lied" and peer != PEERS[0]}
    assert named == {PEERS[0]} and not [event for _, event, _ in floats.heard if event == "reducer_lied"]


def test_under_a_rule_all_pledge_and_reducers_are_believed() -> None:
    floats, found = played("fp32", reducer="norm_clip", reduces=lambda x: -x)
    assert len({one.digest for one in found}) == 1
    assert all(len(exchange.pledges(STAMP)) == len(PEERS) for exchange in floats.exchanges.values())


@pytest.mark.parametrize(
    ("averaging", "yes"),
    [
        (Averaging(codec="fp32"), True), (Averaging(codec="auto"), True), (Averaging(codec="int8"), True),
        (Averaging(codec="nf4"), False), (Averaging(codec="topk:0.01"), False), (Averaging(codec="powersgd:4"), False),
        (Averaging(codec="fp32", reducer="norm_clip"), True), (Averaging(codec="fp32", sync="local"), False),
    ],
)  # fmt: skip
def test_which_sums_are_pledged_for(averaging: Averaging, yes: bool) -> None:
    assert averaging.pledged == yes
    if averaging.sync != "local":
        manifest = tiny(1, mode="fp32", averaging=averaging)

        async def whole() -> bool:
            async with compute_thread() as compute:
                return torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0))).sums.pledged

        assert asyncio.run(whole()) == yes == manifest.audited


# ---------------------------------------------------------------- a contribution again


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_mate_finds_a_contribution_right_or_wrong(codec: str) -> None:
    manifest = tiny(2, mode="fp32", averaging=Averaging(codec=codec))
    seed = b"of the sum"

    async def scenario(chain: StageChain) -> None:
        pledged: dict[tuple[int, int, int], Sketch] = {}

        async def look(works: Sequence[Counted]) -> None:
            for stage, replicas in enumerate(chain.engines):
                for replica, engine in enumerate(replicas):
                    found = await engine.sums.prove(seed)
                    assert isinstance(found, Sketch)
                    pledged[chain.step_number, stage, replica] = found

        works, _ = await train(chain, look, digests=False)
        seen = 0
        for (step, stage, replica), share in shares(works).items():
            if step < STEPS - KEPT:
                continue
            mate, stated = other_than(chain, share[0]), pledged[step, stage, replica].packed
            again = [(w.index, w.inputs, w.gradient) for w in share]
            assert (await mate.recompute_share(step, again, seed, stated))[1] == whole_of(stated, 0)
            # In another order it rounds otherwise, and is the same contribution.
            assert (await mate.recompute_share(step, again[::-1], seed, stated))[1] == whole_of(stated, 0)
            for wrong in (again[1:], again[:1] + [(w.index, w.inputs, share[0].gradient) for w in share[1:]]):
                if stage == 0:  # the last stage takes no gradient
                    assert (await mate.recompute_share(step, wrong, seed, stated))[1] == another(stated)
            flipped = Sketch(
                tuple(-x for x in pledged[step, stage, replica].products), pledged[step, stage, replica].length
            )
            assert (await mate.recompute_share(step, again, seed, flipped.packed))[1] == another(flipped.packed)
            seen += 1
        assert seen == KEPT * len(chain.engines) * REPLICAS

    run(manifest, scenario)


def test_same_is_not_close_enough_for_another_sign() -> None:
    x = torch.randn(4000)
    vector = linear.drawn_real(b"", 4000)
    assert same(vector.sketch(x), vector.sketch(x)) and not same(vector.sketch(x), vector.sketch(-x))
