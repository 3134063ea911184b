"""Error feedback: nothing is lost and nothing is sent twice, whatever becomes of a round."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from swarmnet.averaging.parts import parts
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.sums.sum_codec import SumCodec
from swarmnet.wire import codecs

CPU = torch.device("cpu")
NUM_ELEMENTS = 13_270
COARSE = "nf4"


def round_id(number: int) -> RoundId:
    return RoundId(Ballot(1, PeerId("leader")), number)


@dataclass
class Replica:
    """A gradient, and what a replica has not sent yet."""

    codec: SumCodec
    gradient: torch.Tensor

    @property
    def residual(self) -> torch.Tensor:
        assert self.codec.residual is not None
        return self.codec.residual


def swarm(size: int, seed: int = 0) -> list[Replica]:
    seeded = torch.Generator().manual_seed(seed)
    return [
        Replica(
            SumCodec(COARSE, NUM_ELEMENTS, device=CPU),
            torch.randn(NUM_ELEMENTS, generator=seeded) * 10 ** torch.randint(-3, 3, (), generator=seeded).item(),
        )
        for _ in range(size)
    ]


def average(replicas: list[Replica], number: int, *, order: int = 0) -> torch.Tensor:
    """A round that becomes whole at everybody: what all of them would apply."""
    for replica in replicas:
        replica.codec.begin(round_id(number))
    total = torch.empty(NUM_ELEMENTS)
    for place, (start, stop) in enumerate(parts(NUM_ELEMENTS, [0] * len(replicas))):
        summed = torch.zeros(stop - start)
        for replica in replicas:
            packed = replica.codec.contribution(replica.gradient, start, stop)
            summed += codecs.decode(packed)
        reducer = replicas[(place + order) % len(replicas)]
        total[start:stop] = codecs.decode(reducer.codec.sum(summed, start))
    return total


def apply(replicas: list[Replica], number: int) -> None:
    for replica in replicas:
        replica.codec.applied(round_id(number))


def test_over_all_replicas_what_is_applied_and_what_is_owed_is_what_was_computed() -> None:
    replicas = swarm(3)
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


def test_an_abandoned_round_leaves_the_residual_and_the_next_attempt_alone() -> None:
    replicas, undisturbed = swarm(3), swarm(3)
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


def test_a_sum_of_another_round_counts_nothing_as_sent() -> None:
    replicas = swarm(2)
    average(replicas, 1)
    apply(replicas, 1)
    before = replicas[0].residual.clone()
    average(replicas, 2)
    apply(replicas, 3)  # what became whole is a round without us
    assert torch.equal(replicas[0].residual, before)


def test_a_round_that_turns_up_whole_after_the_next_has_begun_counts() -> None:
    replicas, undisturbed = swarm(3), swarm(3)
    for each in (replicas, undisturbed):
        average(each, 1)
    for replica in replicas:
        replica.codec.begin(round_id(2))  # nothing is sent in it
    average(replicas[:2], 3)
    for each in (replicas, undisturbed):
        apply(each, 1)
    for one, other in zip(replicas, undisturbed, strict=True):
        assert torch.equal(one.residual, other.residual) and bool(one.residual.any())


def test_nothing_of_a_step_that_ended_without_a_sum_counts_later() -> None:
    """Round ids repeat from step to step."""
    (replica,) = swarm(1)
    average([replica], 1)
    replica.codec.applied(None)
    replica.codec.begin(round_id(2))
    apply([replica], 1)
    assert not bool(replica.residual.any())


def test_another_state_drops_the_residual_and_what_is_owed() -> None:
    replicas = swarm(2)
    average(replicas, 1)
    apply(replicas, 1)
    average(replicas, 2)
    replicas[0].codec.forget()
    apply(replicas, 2)
    assert not bool(replicas[0].residual.any()) and bool(replicas[1].residual.any())


def test_a_reducer_that_contributes_nothing_owes_what_it_rounds_off() -> None:
    (replica,) = swarm(1)
    replica.codec.begin(round_id(1))
    total = torch.randn(300, generator=torch.Generator().manual_seed(1))
    sent = codecs.decode(replica.codec.sum(total, 50))
    assert not bool(replica.residual.any())
    apply([replica], 1)
    assert torch.equal(replica.residual[50:350], total - sent)
    assert not bool(replica.residual[:50].any()) and not bool(replica.residual[350:].any())


def test_the_same_elements_again_are_counted_once() -> None:
    (replica,) = swarm(1)
    replica.codec.begin(round_id(1))
    once = replica.codec.contribution(replica.gradient, 0, 500)
    again = replica.codec.contribution(replica.gradient, 0, 500)
    assert bytes(once.data) == bytes(again.data)
    apply([replica], 1)
    assert torch.equal(replica.residual[:500], replica.gradient[:500] - codecs.decode(once))


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_codecs_that_lose_little_keep_no_memory_of_it(codec: str) -> None:
    assert SumCodec(codec, NUM_ELEMENTS, device=CPU).residual is None
