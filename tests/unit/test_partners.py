"""Partners that send differences to what they agreed on last: real sums and exchanges, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from at_once import JobsAtOnce
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange
from swarmnet.averaging.grid import random_groups
from swarmnet.errors import BadMessage, PeerGone
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Training
from swarmnet.messages import Answer, Commit, Part, PartData, Round, Stamp
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Contribution
from swarmnet.sums.local_sum import LocalSum
from swarmnet.sums.references import TURNS
from swarmnet.testing.doubles import FakeTransport, run_virtual
from swarmnet.wire import codecs

pytestmark = pytest.mark.virtual_time

CPU, TOKENS, BALLOT = torch.device("cpu"), 8, Ballot(1, PeerId("p0"))
MODEL = Model(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=64)


class Gradient:
    """What a replica has counted: its own microbatch, another gradient each time."""

    discards = 0

    def __init__(self, place: int) -> None:
        self.place = place

    def read(self, step: int) -> Tensor:
        return self.flat

    def indexes(self, step: int) -> frozenset[int]:
        return frozenset({self.place})


class Swarm:
    """Replicas of one stage that take an outer step in every step but the first. whole: what each of them has sent
    whole in this step, and what as a difference. breaks: how often a stream does."""

    def __init__(self, num: int, *, breaks: float = 0.0, **averaging: Any) -> None:
        manifest = Manifest(
            model=MODEL,
            cut=Cut(stages=1),
            training=Training(total_steps=40, microbatches=num, microbatch_size=1, sequence_length=TOKENS),
            numerics=Numerics(mode="fp32"),
            averaging=Averaging(
                **{"sync": "local", "partners": "pairs", "codec": "int8", "inner_steps": 1, "outer_warmup_steps": 99}
                | averaging
            ),
        )
        self.peers = [PeerId(f"p{place}") for place in range(num)]
        self.rng, self.breaks, self.step_number = random.Random(num), breaks, 0
        self.counted = {peer: Gradient(place) for place, peer in enumerate(self.peers)}
        self.sums: dict[PeerId, LocalSum] = {}
        for peer in self.peers:
            state = DeviceBackend(manifest.of_stage(0), device=CPU).state
            state.reset_to_seed()
            jobs: Any = JobsAtOnce()
            counted: Any = self.counted[peer]
            self.sums[peer] = LocalSum(jobs, state, counted, device=CPU)
        transport = FakeTransport(self.serve)
        self.exchanges = {
            peer: Exchange(ExchangeContext(peer, self.sums[peer], transport, num_tokens=TOKENS)) for peer in self.peers
        }
        self.sent: dict[PeerId, set[str]] = {}
        self.size = averaging.get("group_size", 2)

    async def serve(self, peer: PeerId, request: Part) -> AsyncGenerator[Answer, None]:
        async for answer in self.exchanges[peer].serve(request):
            await asyncio.sleep(self.rng.random() / 100)
            if self.rng.random() < self.breaks:
                raise PeerGone("broken", peer=peer)
            if isinstance(answer, PartData) and request.start < sum(self.sums[peer].phases[:-1]):
                self.sent.setdefault(peer, set()).add(answer.payload[0].codec)
            yield answer

    @property
    def groups(self) -> list[tuple[PeerId, ...]]:
        """Who exchanges in the step to come."""
        return random_groups(self.peers, self.size, 0, self.sums[self.peers[0]].draw[1])

    def weights(self, peer: PeerId) -> Tensor:
        outer = self.sums[peer].state.outer
        assert outer is not None
        return outer.vector(0, outer.slow.numel(), plain=True)

    def slow(self, peer: PeerId) -> Tensor:
        outer = self.sums[peer].state.outer
        assert outer is not None
        return outer.slow.clone()

    async def step(self, deaf: Sequence[PeerId] = (), *, later: bool = False) -> None:
        """A round and what follows it. deaf: they fetch the round's sum from others, and hear not of their partners;
        later: after the others have applied it."""
        self.sent.clear()
        number = self.step_number
        for seed, counted in enumerate(self.counted.values()):
            counted.flat = torch.randn(
                self.sums[self.peers[0]].num_elements, generator=torch.Generator().manual_seed(99 * number + seed)
            )
        there = [peer for peer in self.peers if peer not in deaf]
        parts = [(peer, self.counted[peer].place) for peer in there]
        round_id = RoundId(BALLOT, number)
        current = Round(
            Stamp(number, 0, Chain("00" * 32)),
            round_id,
            tuple((peer, Generation(1, 0), frozenset({place})) for peer, place in parts),
            tuple(there),
            (),
            discarded=frozenset(self.counted[peer].place for peer in deaf),
        )
        async with asyncio.timeout(3600.0), asyncio.TaskGroup() as group:
            tasks = {
                peer: group.create_task(self.exchanges[peer].sum(current, {place: (1.0, TOKENS)}))
                for peer, place in parts
            }
        done = tasks[there[0]].result()
        assert all(task.result() == done for task in tasks.values())
        commit = Commit(
            0, number, Chain(""), round_id, done.digest, done.num_tokens, 1.0, done.grad_sq_norm, current.discarded
        )
        for peer in (*there, *deaf) if later else (*deaf, *there):
            if peer in deaf:
                async with asyncio.timeout(600.0):
                    found = await self.exchanges[peer].collect(replace(current, holders=(there[0],)), done.digest)
                assert found == done
            self.sums[peer].apply([commit])
            self.exchanges[peer].applied((commit,))
        self.step_number += 1


def together(swarm: Swarm, groups: Sequence[Sequence[PeerId]]) -> None:
    """Everybody holds what its group does, bit by bit."""
    for first, *others in groups:
        assert all(torch.equal(swarm.slow(first), swarm.slow(other)) for other in others)


@pytest.mark.parametrize("codec", ["int8", "nf4"])
@pytest.mark.parametrize("breaks", [0.0, 0.2])
async def test_differences_travel_from_the_first_outer_step_on(codec: str, breaks: float) -> None:
    swarm, plain = Swarm(5, codec=codec, breaks=breaks), Swarm(5, codec="fp32")
    for number in range(2 * TURNS + 2):
        groups = swarm.groups
        await swarm.step()
        await plain.step()
        assert {each for sent in swarm.sent.values() for each in sent} == ({codec} if number else set())
        if number:
            together(swarm, groups)
    for peer in swarm.peers:
        error = torch.linalg.vector_norm(swarm.slow(peer) - plain.slow(peer))
        assert error < (0.001 if codec == "int8" else 0.02) * torch.linalg.vector_norm(plain.slow(peer))


async def test_groups_of_a_few_do_as_pairs_do() -> None:
    swarm = Swarm(9, partners="groups", group_size=3)
    for number in range(TURNS + 2):
        groups = swarm.groups
        await swarm.step()
        assert not number or [len(group) for group in groups] == [3, 3, 3]
        if number:
            together(swarm, groups)
            assert set().union(*swarm.sent.values()) == {"int8"}


@pytest.mark.parametrize("later", [False, True], ids=["open", "applied"])
@pytest.mark.parametrize("partners", ["all", "pairs", "groups"])
async def test_a_latecomer_fetches_the_sum_of_every_step_whatever_the_step_before_it_exchanged(
    partners: str, later: bool
) -> None:
    swarm = Swarm(4, partners=partners, inner_steps=3)
    for number in range(10):
        await swarm.step([swarm.peers[number % 4]], later=later)
        # All keep it for others before the next round takes the buffer.
        for exchange in swarm.exchanges.values():
            exchange.replay_log.wanted()


@pytest.mark.parametrize("what", ["restarted", "another reference"])
async def test_who_has_lost_its_references_makes_its_group_send_whole_vectors_once_in_each_turn(what: str) -> None:
    swarm = Swarm(4)
    lost = swarm.peers[2]
    for _ in range(TURNS + 2):
        await swarm.step()
    if what == "restarted":
        swarm.sums[lost].changed()
    else:
        for held in swarm.sums[lost]._references._agreed.values():
            held[0] += 1
    for number in range(2 * TURNS):
        groups = swarm.groups
        await swarm.step()
        together(swarm, groups)
        whole = {peer for peer, sent in swarm.sent.items() if sent == {"fp16"}}
        assert whole == ({peer for group in groups for peer in group if lost in group} if number < TURNS else set())
        assert all(sent == {"int8"} for peer, sent in swarm.sent.items() if peer not in whole)


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 6), st.integers(2, 3), st.integers(0, 10**6))
def test_whatever_anybody_has_missed_partners_agree_and_agree_on_their_mean(num: int, size: int, seed: int) -> None:
    swarm, rng = Swarm(num, partners="groups", group_size=size, breaks=0.05), random.Random(seed)

    async def story() -> None:
        await swarm.step()
        for _ in range(8):
            deaf = rng.sample(swarm.peers, 1) if num > size and rng.random() < 0.3 else []
            if rng.random() < 0.3:
                swarm.sums[rng.choice(swarm.peers)].changed()
            there = [peer for peer in swarm.peers if peer not in deaf]
            groups = random_groups(there, size, 0, swarm.sums[swarm.peers[0]].draw[1])
            means = [torch.stack([swarm.weights(peer) for peer in group]).mean(0) for group in groups]
            await swarm.step(deaf)
            together(swarm, groups)
            for group, mean in zip(groups, means, strict=True):
                assert torch.linalg.vector_norm(swarm.slow(group[0]) - mean) < 0.002 * torch.linalg.vector_norm(mean)

    run_virtual(story())


# ---------------------------------------------------------------- what partners send


@pytest.mark.parametrize("reducer", ["sum", "norm_clip"])
async def test_a_difference_to_what_is_not_here_is_refused_or_left_out_and_its_sender_named(reducer: str) -> None:
    swarm = Swarm(2, reducer=reducer)
    me, other = swarm.peers
    for _ in range(TURNS + 1):
        await swarm.step()
    sums, size = swarm.sums[me], swarm.sums[me].num_elements
    sums.changed()
    await sums.open_round(RoundId(BALLOT, 99))
    await sums.open_sum()
    own = Contribution(me, 1, await sums.contribution(0, size, sums.reference))
    assert (sums.reference, own.packed.codec) == (b"", "fp16")
    for wrong in ("int8", "fp32"):
        packed = codecs.encode(wrong, torch.zeros(size))
        with pytest.raises(BadMessage):
            await sums.put(0, packed)
        if reducer == "sum":
            with pytest.raises(BadMessage) as refused:
                await sums.reduce([own, Contribution(other, 1, packed)], 0, size)
            assert refused.value.facts["peer"] == other
        else:
            reduced = await sums.reduce([own, Contribution(other, 1, packed)], 0, size)
            assert [(each.peer, each.factor) for each in reduced.clipped] == [(other, 0.0)]
            torch.testing.assert_close(codecs.decode(reduced.packed), codecs.decode(own.packed), rtol=0, atol=1e-6)


async def test_codes_of_a_partner_move_nobody_further_than_their_scales_say() -> None:
    swarm = Swarm(2)
    me, other = swarm.peers
    for _ in range(TURNS + 1):
        await swarm.step()
    sums, size = swarm.sums[me], swarm.sums[me].num_elements
    await sums.open_round(RoundId(BALLOT, 99))
    own = Contribution(me, 1, await sums.contribution(0, size, sums.reference))
    lie = Contribution(other, 1, codecs.encode("int8", torch.full((size,), 1e30)))
    with pytest.raises(BadMessage) as refused:
        await sums.reduce([own, lie], 0, size)
    assert refused.value.facts["peer"] == other, "larger than any gradient"
