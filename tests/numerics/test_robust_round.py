"""Whole rounds between real engines in which somebody lies: all end up with the same bits, and with the liar's name."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from stage_chain import commit, compute_thread, tiny, weights_of
from torch import Tensor

from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import SwarmError
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Manifest
from swarmnet.messages import Finished, Packed, Round, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Contribution
from swarmnet.sums.reducer import float_sum, rule_of
from swarmnet.testing.doubles import FakeTransport
from swarmnet.wire import codecs

PEERS = tuple(PeerId(name) for name in "abcde")
LIAR = PEERS[0]
TOKENS = 32  # of a microbatch of `tiny`
Lie = Callable[[Tensor], Packed]


def manifest_of(reducer: str, codec: str = "fp32") -> Manifest:
    averaging = Averaging(codec=codec, reducer=reducer, sync="local", inner_steps=1, outer_warmup_steps=0)
    return tiny(1, mode="fp32", microbatches=len(PEERS), averaging=averaging)


def member(manifest: Manifest, compute: ComputeThread, gradient: Tensor, send: Lie) -> TorchEngine:
    """An engine whose pseudo-gradient is what it is told to send, sent as it is told to."""
    engine = torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0)))
    lengths = engine.sums.contribution

    async def contribution(start: int, stop: int, reference: bytes = b"") -> Packed:
        return await lengths(start, stop) if start >= gradient.numel() else send(gradient[start:stop])

    engine.sums.contribution = contribution  # type: ignore[method-assign]
    return engine


class Group:
    """Five members that call each other directly; the first lies."""

    def __init__(self, manifest: Manifest, compute: ComputeThread, lie: Lie | None) -> None:
        noise, codec = torch.Generator().manual_seed(1), manifest.averaging.codec
        size = torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0))).sums.num_elements
        self.shared = torch.randn(size, generator=noise)
        self.gradients = [self.shared + 0.1 * torch.randn(size, generator=noise) for _ in PEERS]
        self.engines = {
            peer: member(
                manifest,
                compute,
                gradient,
                lie if lie is not None and peer == LIAR else (lambda piece: codecs.encode(codec, piece.clone())),
            )
            for peer, gradient in zip(PEERS, self.gradients, strict=True)
        }
        self.heard: list[tuple[PeerId, dict[str, object]]] = []
        transport = FakeTransport(lambda peer, part: self.exchanges[peer].serve(part))
        self.exchanges = {
            peer: Exchange(
                ExchangeContext(
                    peer,
                    engine.sums,
                    transport,
                    num_tokens=TOKENS,
                    on_event=(lambda event, fields, peer=peer: self.heard.append((peer, {"event": event, **fields}))),
                )
            )
            for peer, engine in self.engines.items()
        }

    async def begin(self) -> Group:
        """At version 1: no outer step is in step 0."""
        for engine in self.engines.values():
            await engine.restore(await engine.snapshot(), version=0, becomes=1)
        return self

    async def step(self, step: int) -> list[Finished]:
        """One round, applied by everybody."""
        ballot = Ballot(1, PEERS[0])
        shares = tuple((peer, Generation(1, 0), frozenset({place})) for place, peer in enumerate(PEERS))
        current = Round(Stamp(step, 0, Chain("00" * 32)), RoundId(ballot, step), shares, PEERS, ())
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(exchange.sum(current, {PEERS.index(peer): (1.0, TOKENS)}))
                for peer, exchange in self.exchanges.items()
            ]
        found = [task.result() for task in tasks]
        for engine in self.engines.values():
            one = found[0]
            done = commit(0, step, one.digest, one.loss_sum, one.num_tokens, one.grad_sq_norm)
            await engine.apply([replace(done, id=one.id)])
        return found

    @property
    def length(self) -> float:
        """Of the last sum."""
        return float(self.engines[PEERS[0]].sums._exchanged.flat.norm())


def play(reducer: str, lie: Lie | None, *, steps: int = 2, codec: str = "fp32") -> tuple[Group, Sequence[Finished]]:
    async def whole() -> tuple[Group, Sequence[Finished]]:
        async with compute_thread() as compute:
            group = await Group(manifest_of(reducer, codec), compute, lie).begin()
            for step in range(1, 1 + steps):
                found = await group.step(step)
                assert len({(one.digest, one.grad_sq_norm) for one in found}) == 1, "replicas differ"
            weights = [await weights_of(engine) for engine in group.engines.values()]
            assert all(torch.equal(each[name], weights[0][name]) for each in weights for name in each)
            return group, found

    return asyncio.run(whole())


LIES: dict[str, Lie] = {
    "flip": lambda piece: codecs.encode("fp32", piece * -50.0),
    "NaN": lambda piece: Packed("fp32", tuple(piece.shape), (piece * float("nan")).numpy().tobytes()),
}


@pytest.mark.parametrize("reducer", ["norm_clip", "centered_clip"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_everybody_ends_up_with_the_same_sum_and_every_reducer_names_the_liar(reducer: str, lie: Lie) -> None:
    group, found = play(reducer, lie)
    honest = float(group.shared.norm()) * len(PEERS)
    assert group.length < 1.1 * honest
    assert found[0].num_tokens == TOKENS * len(PEERS)
    named = [(at, fields["step"]) for at, fields in group.heard if fields["peer"] == LIAR]
    assert set(named) == {(peer, step) for peer in PEERS for step in (1, 2)}
    assert all(fields["event"] == "clipped" and 0.0 <= float(str(fields["factor"])) < 0.5 for _, fields in group.heard)
    assert {fields["peer"] for _, fields in group.heard} == {LIAR}


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_coarse_codecs_leave_replicas_equal(codec: str) -> None:
    group, _ = play("centered_clip", lambda piece: codecs.encode(codec, piece * -50.0), codec=codec)
    assert {fields["peer"] for _, fields in group.heard} == {LIAR}


def test_the_plain_sum_believes_a_flip_and_refuses_a_nan() -> None:
    group, _ = play("sum", LIES["flip"])
    assert not group.heard and group.length > 9 * float(group.shared.norm())
    with pytest.raises(ExceptionGroup) as caught:
        play("sum", LIES["NaN"])
    named, others = caught.value.split(SwarmError)
    assert named is not None and others is None and "peer='a'" in str(_first(named))


@pytest.mark.parametrize(
    "lie",
    [LIES["NaN"], lambda piece: codecs.encode("bf16", piece), lambda piece: Packed("fp32", tuple(piece.shape), b"")],
    ids=["NaN", "another codec", "too short"],
)
async def test_who_is_refused_under_the_plain_sum_is_named_and_the_others_sum_without_it(lie: Lie) -> None:
    async with compute_thread() as compute:
        group = await Group(manifest_of("sum"), compute, lie).begin()
        others = PEERS[1:]
        shares = tuple((peer, Generation(1, 0), frozenset({place})) for place, peer in enumerate(PEERS))
        ballot = Ballot(1, PEERS[1])
        first = Round(Stamp(1, 0, Chain("00" * 32)), RoundId(ballot, 0), shares, PEERS, ())

        async def take_part(peer: PeerId, current: Round) -> Finished:
            place = PEERS.index(peer)
            return await group.exchanges[peer].sum(current, {place: (1.0, TOKENS)})

        tries = [asyncio.create_task(take_part(peer, first)) for peer in PEERS]
        _, waiting = await asyncio.wait(tries, timeout=10.0, return_when=asyncio.ALL_COMPLETED)
        assert not waiting and all(task.exception() is not None for task in tries), "all of them reduce a part"
        for peer in others:
            trouble = group.exchanges[peer].trouble
            assert trouble is not None and (trouble.id, trouble.refused) == (first.id, (LIAR,))
        second = replace(first, id=RoundId(ballot, 1), contributions=shares[1:], receivers=others)
        found = await asyncio.gather(*(take_part(peer, second) for peer in others))
        assert len(set(found)) == 1 and found[0].num_tokens == TOKENS * len(others)
        assert all(group.exchanges[peer].trouble is None for peer in others)


def test_where_nobody_is_clipped_norm_clip_is_the_sum() -> None:
    digests = {play(reducer, None)[1][0].digest for reducer in ("sum", "norm_clip")}
    assert len(digests) == 1


async def test_the_centre_is_the_last_mean_and_who_has_just_arrived_has_none() -> None:
    async with compute_thread() as compute:
        group = await Group(manifest_of("centered_clip"), compute, None).begin()
        await group.step(1)
        old, size = group.engines[PEERS[0]], group.engines[PEERS[0]].sums.num_elements
        last = codecs.decode(await old.sums.finished_sum(0, size)) / len(PEERS)
        clipped = manifest_of("centered_clip")
        new = torch_engine(clipped, 0, compute, DeviceBackend(clipped.of_stage(0)))
        await new.restore(bytes(await old.snapshot()), version=2)
        contributions = [
            Contribution(peer, 1, codecs.encode("fp32", gradient + 1.0))
            for peer, gradient in zip(PEERS, group.gradients, strict=True)
        ]
        rule, (start, stop) = rule_of(clipped.averaging), (5, size - 7)
        reducer = functools.partial(float_sum, rule, codec="fp32")
        part = [
            replace(each, packed=codecs.encode("fp32", codecs.decode(each.packed)[start:stop].clone()))
            for each in contributions
        ]
        for engine, centre in ((old, last[start:stop]), (new, None)):
            found = codecs.decode((await engine.sums.reduce(part, start, stop)).packed)
            assert torch.equal(found, reducer(part, stop - start, centre)[0])
        assert not torch.equal(reducer(part, stop - start, last[start:stop])[0], reducer(part, stop - start)[0])


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
