"""`sync = "local"` in real engines: who steps with what, what stays equal, what is kept by who missed a round."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from stage_chain import ROUND, StageChain, commit, compute_thread, take_over, tiny, weights_of
from torch import Tensor

from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.manifest.schema import Averaging
from swarmnet.messages import Commit
from swarmnet.stage.interfaces import Contribution, OuterStep
from swarmnet.wire import codecs

OTHER = RoundId(Ballot(1, PeerId("peer")), 0)


def local(codec: str = "fp32", **fields: object) -> Averaging:
    return Averaging(sync="local", codec=codec, **{"inner_steps": 3, "outer_warmup_steps": 0, **fields})


@contextlib.asynccontextmanager
async def chain_of(
    averaging: Averaging, *, replicas: int, stages: int = 1, microbatches: int = 4
) -> AsyncIterator[StageChain]:
    async with compute_thread() as compute:
        manifest = tiny(stages, mode="fp32", averaging=averaging, microbatches=microbatches)
        yield StageChain(manifest, compute, replicas=replicas)


async def count(chain: StageChain, shares: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Every replica of the only stage counts its indexes: (loss sum, tokens)."""
    loss, tokens = 0.0, 0
    for engine, indexes in zip(chain.engines[0], shares, strict=True):
        for index in indexes:
            (stash,) = await chain.travel([engine], index)
            assert await engine.accumulate(stash)
            loss, tokens = loss + stash.loss_sum, tokens + stash.num_tokens
    return loss, tokens


async def a_round(chain: StageChain, members: Sequence[int], shares: Sequence[Sequence[int]]) -> tuple[bytes, float]:
    """These members of the only stage sum; private phases in pairs of neighbours."""
    engines = [chain.engines[0][member] for member in members]
    for engine in engines:
        await engine.sums.open_round(ROUND)
        await engine.sums.open_sum()
    private = engines[0].sums.private_phases
    for phase, (start, stop) in enumerate(itertools.pairwise(itertools.accumulate(engines[0].sums.phases, initial=0))):
        places = tuple(range(len(engines)))
        for group in [places[at : at + 2] for at in range(0, len(places), 2)] if phase < private else [places]:
            weights = {place: 1 if phase < private else len(shares[members[place]]) for place in group}
            given = [
                Contribution(PeerId(f"{place}"), weight, await engines[place].sums.contribution(start, stop))
                for place, weight in weights.items()
                if weight
            ]
            reduced = (await engines[group[0]].sums.reduce(given, start, stop)).packed
            for place in group:
                await engines[place].sums.put(start, reduced)
    sealed = {await engine.sums.seal() for engine in engines}
    assert len(sealed) == 1
    return sealed.pop()


async def fetch_number(engine: TorchEngine, holder: TorchEngine) -> tuple[bytes, float]:
    """Collect what all members hold in the end, where a round's first phase is private."""
    start, stop = sum(holder.sums.phases[:-1]), sum(holder.sums.phases)
    return await take_over(engine.sums, await holder.sums.finished_sum(start, stop), start=start)


async def apply(chain: StageChain, commits: list[Commit]) -> list[OuterStep | None]:
    outer = [await engine.apply(commits) for engine in chain.engines[0]]
    chain.step_number += 1
    return outer


async def step(chain: StageChain, shares: Sequence[Sequence[int]]) -> list[OuterStep | None]:
    loss, tokens = await count(chain, shares)
    digest, square = await a_round(chain, range(len(shares)), shares)
    return await apply(chain, [commit(0, chain.step_number, digest, loss, tokens, square)])


def missed(outer: Sequence[OuterStep | None]) -> list[str]:
    """Why each replica's pseudo-gradient was left out; empty where it was not."""
    assert all(each is not None for each in outer)
    return [each.missed for each in outer if each is not None]


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


async def weights(engine: TorchEngine) -> Tensor:
    return flat(await weights_of(engine))


def slow(engine: TorchEngine) -> Tensor:
    assert engine._state.outer is not None
    return engine._state.outer.slow.clone()


EVEN = [(0, 1), (2, 3)]


async def test_one_replica_alone_trains_as_ever() -> None:
    ends = []
    alone = tiny(2, mode="fp32", averaging=local(outer_learning_rate=1.0, outer_momentum=0.0), microbatches=4)
    exact = tiny(2)
    for manifest in (alone, exact):
        async with compute_thread() as compute:
            chain = StageChain(manifest, compute)
            for number in range(8):
                await chain.step(random.Random(number))
            ends.append(flat(await chain.weights()))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "nf4", "sparse:0.05"])
async def test_between_exchanges_replicas_differ_and_after_one_their_slow_weights_are_equal(codec: str) -> None:
    async with chain_of(local(codec), replicas=2) as chain:
        first, second = chain.engines[0]
        for number in range(1, 5):
            outer = await step(chain, EVEN)
            assert not torch.equal(await weights(first), await weights(second))
            assert torch.equal(slow(first), slow(second))
            if number < 4:
                assert outer == [None, None]
            else:
                assert all(each is not None and not each.missed and 0 < each.moved < 1 for each in outer)


async def test_with_rate_1_and_no_momentum_slow_weights_become_the_mean_by_shares() -> None:
    async with chain_of(local(outer_learning_rate=1.0, outer_momentum=0.0), replicas=2) as chain:
        shares = [(0, 1, 2), (3,)]
        for _ in range(3):
            await step(chain, shares)
        before = [await weights(engine) for engine in chain.engines[0]]
        await step(chain, shares)
        for engine in chain.engines[0]:
            torch.testing.assert_close(slow(engine), 0.75 * before[0] + 0.25 * before[1], rtol=0, atol=1e-6)


async def test_rounds_carry_one_number_but_for_the_exchange() -> None:
    async with chain_of(local(inner_steps=4, fragments=2), replicas=2) as chain:
        engine = chain.engines[0][0]
        lengths = []
        for _ in range(7):
            lengths.append(sum(engine.sums.phases))
            await step(chain, EVEN)
        whole = engine.sums.num_elements
        assert lengths == [1, 1, whole // 2 + 1, 1, whole - whole // 2 + 1, 1, lengths[2]]


async def test_who_only_fetches_the_sum_keeps_what_it_has_learned_and_adds_nothing() -> None:
    async with chain_of(local(), replicas=3) as chain:
        first, second, third = chain.engines[0]
        shares = [(0, 1), (2,), (3,)]
        for _ in range(3):
            await step(chain, shares)
        loss, tokens = await count(chain, shares)
        learned = await weights(third) - slow(third)
        third.discard()  # evicted: its share is counted by somebody else
        (stash,) = await chain.travel([second], 3)
        assert await second.accumulate(stash)
        digest, square = await a_round(chain, [0, 1], [(0, 1), (2, 3), ()])
        sums = first.sums
        pieces = [await sums.finished_sum(0, 1000), await sums.finished_sum(1000, sum(sums.phases))]
        assert await take_over(third.sums, *pieces) == (digest, square)
        outer = await apply(chain, [commit(0, 3, digest, loss, tokens, square)])
        assert missed(outer) == ["", "", "collected the sum instead of taking part"]
        assert torch.equal(slow(third), slow(first))
        torch.testing.assert_close(await weights(third) - slow(third), learned, rtol=0, atol=1e-6)


async def test_who_counted_nothing_goes_along_and_is_told_why_it_added_nothing() -> None:
    async with chain_of(local(), replicas=2) as chain:
        for _ in range(3):
            await step(chain, EVEN)
        assert missed(await step(chain, [(0, 1, 2, 3), ()])) == ["", "counted nothing in this step"]
        assert torch.equal(slow(chain.engines[0][0]), slow(chain.engines[0][1]))


async def test_a_member_that_waited_for_its_partner_in_vain_is_told_so() -> None:
    async with chain_of(local(partners="pairs"), replicas=4) as chain:
        engines = chain.engines[0]
        for _ in range(3):
            await step(chain, FOUR)
        loss, tokens = await count(chain, FOUR)
        await engines[0].sums.open_round(ROUND)  # and its partner died: the number comes from somebody else
        digest, square = await a_round(chain, [1, 2, 3], [(), *FOUR[1:]])
        assert await fetch_number(engines[0], engines[1]) == (digest, square)
        outer = await apply(chain, [commit(0, 3, digest, loss, tokens, square)])
        assert missed(outer) == ["did not get its partners' mean", "", "", ""]


@pytest.mark.parametrize("how", ["discarded", "more than was summed"])
async def test_an_accumulator_that_is_not_the_rounds_any_more_is_not_applied(how: str) -> None:
    async with chain_of(local(), replicas=2) as chain:
        first, second = chain.engines[0]
        loss, tokens = await count(chain, [(0,), (2, 3)])
        digest, square = await a_round(chain, [0, 1], [(0,), (2, 3)])
        if how == "discarded":
            first.discard()
        else:
            (stash,) = await chain.travel([first], 1)
            assert await first.accumulate(stash)
        before = [await weights(engine) for engine in (first, second)]
        await apply(chain, [commit(0, 0, digest, loss, tokens, square)])
        assert torch.equal(await weights(first), before[0]) and first.version == 1
        assert not torch.equal(await weights(second), before[1])


async def test_a_joiner_takes_a_donors_state_whole_and_goes_on_as_the_donor_would() -> None:
    async with chain_of(local(), replicas=3) as chain:
        donor, joiner, other = chain.engines[0]
        alone = [(0, 1), (), (2, 3)]
        for _ in range(5):
            await step(chain, alone)
        await joiner.restore(await donor.snapshot(), version=5)
        assert torch.equal(slow(joiner), slow(donor)) and torch.equal(await weights(joiner), await weights(donor))
        for _ in range(3):
            await step(chain, alone)
        assert torch.equal(slow(joiner), slow(other)), "the momentum came along"


async def test_a_donor_that_has_sat_out_a_step_goes_on_as_its_joiner_does() -> None:
    async with chain_of(local(), replicas=3) as chain:
        donor, joiner, _ = chain.engines[0]
        await step(chain, [(), (), (0, 1, 2, 3)])
        await joiner.restore(await donor.snapshot(), version=1)
        shares = [(0,), (0,), ()]
        loss, tokens = await count(chain, shares)
        for member, engine in enumerate((donor, joiner)):
            digest, square = await a_round(chain, [member], shares)
            await engine.apply([commit(0, 1, digest, loss, tokens, square)])
        assert torch.equal(await weights(donor), await weights(joiner))


# ---------------------------------------------------------------- sparse outer steps


async def codecs_of_outer_steps(chain: StageChain) -> list[str]:
    """Take the steps up to the run's end; the codecs in which the outer steps' vectors travelled."""
    found = []
    while chain.step_number < 20:
        (engine, *_), at = chain.engines[0], chain.step_number
        if len(engine.sums.phases) > 1:
            await engine.sums.open_round(ROUND)
            found.append((at, (await engine.sums.contribution(0, 1)).codec))
        await step(chain, EVEN)
    return found


async def test_warm_up_and_last_outer_step_send_all_elements_the_others_the_largest() -> None:
    async with chain_of(local("sparse:0.05", inner_steps=5, outer_warmup_steps=5), replicas=2) as chain:
        dense, sparse = "int8", "sparse:0.05"
        assert await codecs_of_outer_steps(chain) == [(5, dense), (10, sparse), (15, sparse), (19, dense)]
        first, second = chain.engines[0]
        assert torch.equal(slow(first), slow(second))


async def test_a_sparse_outer_step_moves_what_was_sent_and_the_rest_stays() -> None:
    async with chain_of(local("sparse:0.05", outer_learning_rate=1.0, outer_momentum=0.0), replicas=2) as chain:
        for _ in range(3):
            await step(chain, EVEN)
        before = [slow(engine) - await weights(engine) for engine in chain.engines[0]]
        old = slow(chain.engines[0][0])
        sent = [codecs.decode(codecs.encode("sparse:0.05", 2 * vector)) / 2 for vector in before]
        for engine in chain.engines[0]:  # so that no gradient of its own moves the weights, too
            engine._state.apply = lambda *_, state=engine._state, **__: state.stay(_[1])
        await step(chain, EVEN)
        for engine, vector, part in zip(chain.engines[0], before, sent, strict=True):
            assert 0 < int(part.count_nonzero()) <= 0.06 * part.numel()
            torch.testing.assert_close(old - slow(engine), (sent[0] + sent[1]) / 2, rtol=0, atol=1e-4)
            torch.testing.assert_close(slow(engine) - await weights(engine), vector - part, rtol=0, atol=1e-6)


async def test_a_round_cut_and_opened_again_leaves_the_same_weights() -> None:
    ends = []
    for again in (False, True):
        async with chain_of(local("sparse:0.05"), replicas=2) as chain:
            for _ in range(3):
                await step(chain, EVEN)
            loss, tokens = await count(chain, EVEN)
            if again:  # some of it was sent in a round that was given up
                await chain.engines[0][0].sums.open_round(OTHER)
                await chain.engines[0][0].sums.contribution(4096, 8192)
            digest, square = await a_round(chain, (0, 1), EVEN)
            await apply(chain, [commit(0, 3, digest, loss, tokens, square)])
            ends.append([await weights(engine) for engine in chain.engines[0]])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


async def test_sparse_replicas_that_were_restored_go_on_with_the_same_bits() -> None:
    async with chain_of(local("sparse:0.05"), replicas=2) as chain:
        for _ in range(5):
            await step(chain, EVEN)
        saved = [bytes(await engine.snapshot()) for engine in chain.engines[0]]
        ends = []
        for _ in range(2):
            for _ in range(5):
                await step(chain, EVEN)
            ends.append([await weights(engine) for engine in chain.engines[0]])
            for engine, snapshot in zip(chain.engines[0], saved, strict=True):
                await engine.restore(snapshot, version=5)
            chain.step_number = 5
        assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


async def test_a_joiner_of_a_sparse_run_has_the_same_outer_weights_from_its_first_outer_step_on() -> None:
    async with chain_of(local("sparse:0.05"), replicas=3) as chain:
        donor, joiner, other = chain.engines[0]
        for _ in range(5):
            await step(chain, [(0, 1), (), (2, 3)])
        await joiner.restore(await donor.snapshot(), version=5)
        for _ in range(5):
            await step(chain, [(0, 1), (2,), (3,)])
        assert torch.equal(slow(joiner), slow(donor)) and torch.equal(slow(joiner), slow(other))
        assert not torch.equal(await weights(joiner), await weights(donor))


# ---------------------------------------------------------------- pairs


FOUR = [(0,), (1,), (2,), (3,)]


async def test_partners_agree_on_a_vector_of_their_own_and_everybody_on_the_number() -> None:
    async with chain_of(local(partners="pairs", outer_learning_rate=1.0, outer_momentum=0.0), replicas=4) as chain:
        engines = chain.engines[0]
        for _ in range(3):
            await step(chain, FOUR)
        assert engines[0].sums.private_phases == 1 and engines[0].sums.phases[1:] == (1,)
        mean = torch.stack([await weights(engine) for engine in engines]).mean(0)
        outer = await step(chain, FOUR)
        assert all(each is not None and not each.missed for each in outer)
        assert torch.equal(slow(engines[0]), slow(engines[1])), "they began equal, and agreed"
        assert torch.equal(slow(engines[2]), slow(engines[3]))
        assert not torch.equal(slow(engines[0]), slow(engines[2]))
        found = torch.stack([slow(engine) for engine in engines]).mean(0)
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)


async def test_without_a_partner_nothing_is_exchanged_and_all_is_kept() -> None:
    async with chain_of(local(partners="pairs"), replicas=4) as chain:
        engines = chain.engines[0]
        for _ in range(3):
            await step(chain, FOUR)
        before = [(slow(engine), await weights(engine)) for engine in engines]
        loss, tokens = await count(chain, FOUR)
        digest, square = await a_round(chain, [0, 1], [(0,), (1,), (), ()])
        for absent in engines[2:]:
            await fetch_number(absent, engines[0])
        outer = await apply(chain, [commit(0, 3, digest, loss, tokens, square)])
        assert missed(outer) == ["", "", *["was no member of the round to the end"] * 2]
        for (slow_before, weights_before), engine in list(zip(before, engines, strict=True))[2:]:
            assert torch.equal(slow(engine), slow_before) and torch.equal(await weights(engine), weights_before)


async def test_a_partner_may_have_agreed_before_the_number_is_fetched_from_somebody_else() -> None:
    async with chain_of(local(partners="pairs"), replicas=4) as chain:
        engines = chain.engines[0]
        for _ in range(3):
            await step(chain, FOUR)
        loss, tokens = await count(chain, FOUR)
        digest, square = await a_round(chain, range(4), FOUR)
        assert await fetch_number(engines[0], engines[3]) == (digest, square)
        outer = await apply(chain, [commit(0, 3, digest, loss, tokens, square)])
        assert all(each is not None and not each.missed for each in outer)
        assert torch.equal(slow(engines[0]), slow(engines[1]))


@pytest.mark.parametrize("partners", ["all", "pairs"])
async def test_what_is_discarded_in_a_round_is_not_contributed_before_another_opens(partners: str) -> None:
    async with chain_of(local(partners=partners, inner_steps=1), replicas=2) as chain:
        await step(chain, EVEN)
        await count(chain, EVEN)
        engine = chain.engines[0][0]
        await engine.sums.open_round(ROUND)
        engine.discard()
        for place in (0, sum(engine.sums.phases) - 1):
            with pytest.raises(Refused) as refused:
                await engine.sums.contribution(place, place + 1)
            assert refused.value.code is RejectCode.NOT_READY
        await engine.sums.open_round(OTHER)
        assert not codecs.decode(await engine.sums.contribution(place, place + 1)).item()


async def test_a_round_that_was_given_up_leaves_nothing_behind() -> None:
    async with chain_of(local(partners="pairs"), replicas=4) as chain:
        engines = chain.engines[0]
        for _ in range(3):
            await step(chain, FOUR)
        loss, tokens = await count(chain, FOUR)
        await a_round(chain, range(4), FOUR)
        await engines[0].sums.open_round(OTHER)  # and nothing comes of it: the first round's sum is adopted after all
        digest, square = await fetch_number(engines[0], engines[3])
        outer = await apply(chain, [commit(0, 3, digest, loss, tokens, square)])
        assert missed(outer) == ["was no member of the round to the end", "", "", ""]


# ---------------------------------------------------------------- what peers send


async def test_pieces_that_are_no_sum_are_refused() -> None:
    async with chain_of(local("int8"), replicas=1) as chain:
        engine = chain.engines[0][0]
        for wrong in (codecs.encode("fp32", torch.zeros(2)), codecs.encode("bf16", torch.zeros(1))):
            with pytest.raises(BadMessage):
                await take_over(engine.sums, wrong)
        await engine.sums.open_sum()
        with pytest.raises(BadMessage):
            await engine.sums.put(0, codecs.encode("int8", torch.zeros(1)))
        with pytest.raises(BadMessage):
            await engine.sums.seal()
        with pytest.raises(BadMessage):
            await engine.sums.finished_sum(0, 2)


def test_the_manifest_refuses_what_cannot_be() -> None:
    for averaging, advice in [
        ({"sync": "local", "codec": "fp32", "inner_steps": 2, "fragments": 3}, "turns"),
        ({"sync": "local", "codec": "acme.half", "partners": "pairs"}, "may spoil"),
        ({"sync": "local", "codec": "sparse:0.1", "partners": "pairs"}, 'partners = "all"'),
        ({"sync": "exact", "codec": "small", "inner_steps": 2}, "no effect"),
    ]:
        with pytest.raises(ValueError, match=advice):
            Averaging(**averaging)


# ---------------------------------------------------------------- reducers
