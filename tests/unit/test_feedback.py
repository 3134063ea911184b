"""Error feedback: nothing is lost and nothing is sent twice, whatever becomes of a round."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.averaging.parts import parts
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.sums.feedback import Feedback
from swarmnet.sums.sum_codec import SumCodec
from swarmnet.wire import codecs

CPU = torch.device("cpu")
SHAPES = [("layers.0.weight", (120, 70)), ("layers.0.norm.weight", (70,)), ("head.weight", (40, 120))]
NUM_ELEMENTS = 120 * 70 + 70 + 40 * 120
COARSE = ("topk:0.05", "nf4", "auto:nf4")


def round_id(number: int) -> RoundId:
    return RoundId(Ballot(1, PeerId("keeper")), number)


@dataclass
class Replica:
    """A gradient, and what a replica has not sent yet."""

    codec: SumCodec
    gradient: torch.Tensor
    voids: int = 0

    @property
    def residual(self) -> torch.Tensor:
        assert self.codec.feedback is not None
        return self.codec.feedback.residual


def swarm(codec: str, size: int, seed: int = 0) -> list[Replica]:
    seeded = torch.Generator().manual_seed(seed)
    return [
        Replica(
            SumCodec(codec, SHAPES, NUM_ELEMENTS, device=CPU),
            torch.randn(NUM_ELEMENTS, generator=seeded) * 10 ** torch.randint(-3, 3, (), generator=seeded).item(),
        )
        for _ in range(size)
    ]


def average(replicas: list[Replica], number: int, *, order: int = 0) -> torch.Tensor:
    """A round that becomes whole at everybody: what all of them would apply."""
    for replica in replicas:
        replica.codec.begin(round_id(number), voids=replica.voids)
    total = torch.empty(NUM_ELEMENTS)
    for place, (start, stop) in enumerate(parts(NUM_ELEMENTS, [0] * len(replicas))):
        summed = torch.zeros(stop - start)
        for replica in replicas:
            packed = replica.codec.contribution(replica.gradient, start, stop, voids=replica.voids)
            codecs.add_decoded(summed, packed)
        reducer = replicas[(place + order) % len(replicas)]
        codecs.decode_into(total[start:stop], reducer.codec.sum(summed, start, voids=reducer.voids))
    return total


def apply(replicas: list[Replica], number: int) -> None:
    for replica in replicas:
        replica.codec.applied(round_id(number), voids=replica.voids)


@pytest.mark.parametrize("codec", COARSE)
def test_over_all_replicas_what_is_applied_and_what_is_owed_is_what_was_computed(codec: str) -> None:
    replicas = swarm(codec, 3)
    computed, applied = torch.zeros(NUM_ELEMENTS, dtype=torch.float64), torch.zeros(NUM_ELEMENTS, dtype=torch.float64)
    largest = max(replica.gradient.abs().max().item() for replica in replicas)
    for number in range(6):
        computed += sum(replica.gradient.double() for replica in replicas)
        applied += average(replicas, number, order=number).double()
        apply(replicas, number)
        owed = sum(replica.residual.double() for replica in replicas)
        # Each round a few fp32 additions of numbers up to a few times the largest.
        assert (applied + owed - computed).abs().max().item() <= (number + 1) * 16 * 2**-23 * 3 * largest
    assert owed.abs().max().item() > 0


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_topk_sends_and_keeps_exactly_what_was_there(seed: int, sizes: list[int]) -> None:
    """Every element is sent whole or kept whole, so nothing is rounded but gradient + residual itself."""
    seeded = torch.Generator().manual_seed(seed)
    gradient, old = torch.randn(2, sum(sizes), generator=seeded).unbind()
    feedback = Feedback(sum(sizes), device=CPU)
    feedback.take_over(old, voids=0)
    feedback.begin(round_id(1), voids=0)
    sent, start = torch.empty(sum(sizes)), 0
    for size in sizes:
        corrected = feedback.corrected(gradient[start : start + size], start)
        codecs.decode_into(sent[start : start + size], codecs.encode("topk:0.05", corrected))
        feedback.contributed(corrected, sent[start : start + size], start)
        start += size
    feedback.applied(round_id(1))
    assert torch.equal(sent + feedback.residual, gradient + old)
    assert not bool((sent * feedback.residual).any())


@pytest.mark.parametrize("codec", COARSE)
def test_an_abandoned_round_leaves_the_residual_and_the_next_attempt_alone(codec: str) -> None:
    replicas, undisturbed = swarm(codec, 3), swarm(codec, 3)
    for each in (replicas, undisturbed):
        average(each, 1)
        apply(each, 1)
    before = [replica.residual.clone() for replica in replicas]
    average(replicas, 2)  # never applied: re-formed by two, then by all
    average(replicas[:2], 3)
    assert all(torch.equal(replica.residual, old) for replica, old in zip(replicas, before, strict=True))
    assert torch.equal(average(replicas, 4), average(undisturbed, 4))
    for each in (replicas, undisturbed):
        apply(each, 4)
    for one, other in zip(replicas, undisturbed, strict=True):
        assert torch.equal(one.residual, other.residual)


@pytest.mark.parametrize("codec", COARSE)
def test_a_sum_of_another_round_counts_nothing_as_sent(codec: str) -> None:
    replicas = swarm(codec, 2)
    average(replicas, 1)
    apply(replicas, 1)
    before = replicas[0].residual.clone()
    average(replicas, 2)
    apply(replicas, 3)  # what became whole is a round without us
    assert torch.equal(replicas[0].residual, before)


@pytest.mark.parametrize("codec", COARSE)
def test_a_round_that_turns_up_whole_after_the_next_has_begun_counts(codec: str) -> None:
    replicas, undisturbed = swarm(codec, 3), swarm(codec, 3)
    for each in (replicas, undisturbed):
        average(each, 1)
    for replica in replicas:
        replica.codec.begin(round_id(2), voids=0)  # nothing is sent in it
    average(replicas[:2], 3)
    for each in (replicas, undisturbed):
        apply(each, 1)
    for one, other in zip(replicas, undisturbed, strict=True):
        assert torch.equal(one.residual, other.residual) and bool(one.residual.any())


def test_nothing_of_a_step_that_ended_without_a_sum_counts_later() -> None:
    """Round ids repeat from step to step."""
    (replica,) = swarm("nf4", 1)
    average([replica], 1)
    replica.codec.applied(None, voids=0)
    replica.codec.begin(round_id(2), voids=0)
    apply([replica], 1)
    assert not bool(replica.residual.any())


@pytest.mark.parametrize("codec", COARSE)
def test_a_void_drops_the_residual_and_what_is_owed(codec: str) -> None:
    replicas = swarm(codec, 2)
    average(replicas, 1)
    apply(replicas, 1)
    average(replicas, 2)
    replicas[0].voids += 1
    apply(replicas, 2)
    assert not bool(replicas[0].residual.any()) and bool(replicas[1].residual.any())


def test_a_void_between_rounds_does_not_spoil_the_next() -> None:
    replicas = swarm("nf4", 2)
    replicas[0].voids += 1
    average(replicas, 1)
    apply(replicas, 1)
    assert bool(replicas[0].residual.any())


def test_a_void_within_a_round_means_that_nothing_was_sent_in_it() -> None:
    (replica,) = swarm("nf4", 1)
    replica.codec.begin(round_id(1), voids=0)
    replica.codec.contribution(replica.gradient, 0, 500, voids=0)
    replica.codec.contribution(replica.gradient, 500, 900, voids=1)
    replica.codec.applied(round_id(1), voids=1)
    assert not bool(replica.residual.any())


def test_a_reducer_that_contributes_nothing_owes_what_it_rounds_off() -> None:
    (replica,) = swarm("nf4", 1)
    replica.codec.begin(round_id(1), voids=0)
    total = torch.randn(300, generator=torch.Generator().manual_seed(1))
    sent = codecs.decode(replica.codec.sum(total, 50, voids=0))
    assert not bool(replica.residual.any())
    apply([replica], 1)
    assert torch.equal(replica.residual[50:350], total - sent)
    assert not bool(replica.residual[:50].any()) and not bool(replica.residual[350:].any())


def test_the_same_elements_again_are_counted_once() -> None:
    (replica,) = swarm("nf4", 1)
    replica.codec.begin(round_id(1), voids=0)
    once = replica.codec.contribution(replica.gradient, 0, 500, voids=0)
    again = replica.codec.contribution(replica.gradient, 0, 500, voids=0)
    assert bytes(once.data) == bytes(again.data)
    apply([replica], 1)
    assert torch.equal(replica.residual[:500], replica.gradient[:500] - codecs.decode(once))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16", "int8", "bnb8", "auto", "auto:bf16"])
def test_codecs_that_lose_little_keep_no_memory_of_it(codec: str) -> None:
    assert SumCodec(codec, SHAPES, NUM_ELEMENTS, device=CPU).feedback is None


@pytest.mark.parametrize(
    ("residual", "code"),
    [
        (torch.zeros(5), RejectCode.BAD_SHAPE),
        (torch.zeros(4, dtype=torch.float64), RejectCode.BAD_SHAPE),
        (torch.tensor([0.0, 1.0, float("nan"), 0.0]), RejectCode.NON_FINITE),
        (torch.tensor([0.0, 1.0, -float("inf"), 0.0]), RejectCode.NON_FINITE),
    ],
)
def test_a_saved_residual_that_does_not_fit_is_refused(residual: torch.Tensor, code: RejectCode) -> None:
    feedback = Feedback(4, device=CPU)
    feedback.take_over(torch.ones(4), voids=3)
    with pytest.raises(BadMessage) as caught:
        feedback.take_over(residual, voids=4)
    assert caught.value.code is code and torch.equal(feedback.residual, torch.ones(4))
    feedback.at(3)
    assert torch.equal(feedback.residual, torch.ones(4))
