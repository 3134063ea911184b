"""A few microbatches of each evaluation are looked at twice: what that finds, and what it never lets pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import PeerId
from swarmnet.messages import Gradient
from swarmnet.trainer.scores import TOLERANCE, NoScore, same, score


def look(loss_sum: float, num_tokens: int, *route: PeerId) -> Gradient:
    return Gradient(loss_sum, num_tokens, route=route)


@dataclass
class Stages:
    """Stages of `replicas` each, who compute microbatch n's loss as n + 1 nats; `liars` say something else.

    looks: of all that was asked, by number. disputes: what was heard.
    """

    replicas: tuple[int, ...]
    liars: frozenset[PeerId]
    rng: random.Random
    share: float = 1.0
    looks: list[tuple[int, Gradient]] = field(default_factory=list)
    disputes: list[tuple[int, list[Gradient]]] = field(default_factory=list)

    async def look(self, number: int, around: tuple[PeerId, ...]) -> Gradient:
        route, loss = [], number + 1.0
        for stage, count in enumerate(self.replicas):
            everybody = [PeerId(f"{stage}.{replica}") for replica in range(count)]
            route.append(self.rng.choice([peer for peer in everybody if peer not in around] or everybody))
            if route[-1] in self.liars and self.rng.random() < self.share:
                loss += 0.5
        self.looks.append((number, look(loss, 2, *route)))
        return self.looks[-1][1]

    def alike(self, one: Gradient, other: Gradient) -> bool:
        return same(one, other, numerics=lambda peer: "cpu")

    def disputed(self, number: int, looks: Sequence[Gradient]) -> None:
        self.disputes.append((number, list(looks)))

    def score(self, microbatches: int) -> float | None:
        """What is published."""
        try:
            loss, num_tokens = asyncio.run(score(microbatches, self, self.rng))
        except NoScore:
            return None
        assert num_tokens == 2 * microbatches
        return loss


def honest(microbatches: int) -> float:
    """The loss per token of `Stages`."""
    return (microbatches + 1) / 4


REPLICAS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(REPLICAS, st.integers(1, 40), st.integers())
def test_honest_replicas_are_never_in_dispute(replicas: tuple[int, ...], microbatches: int, seed: int) -> None:
    stages = Stages(replicas, frozenset(), random.Random(seed))
    assert stages.score(microbatches) == honest(microbatches) and not stages.disputes
    # A tenth of them, one at least, and by peers that the first route does not have.
    first, again = stages.looks[:microbatches], stages.looks[microbatches:]
    assert len(again) == max(1, -(-microbatches // 10)) == len({number for number, _ in again})
    for number, second in again:
        pairs = zip(first[number][1].route, second.route, replicas, strict=True)
        assert all((one != other) == (count > 1) for one, other, count in pairs)


@given(st.lists(st.integers(3, 5), min_size=1, max_size=3).map(tuple), st.integers(1, 20), st.integers())
def test_one_liar_among_three_is_gone_around(replicas: tuple[int, ...], microbatches: int, seed: int) -> None:
    """Who lies in every answer: once a second look has met it, the score is the honest one."""
    liar = PeerId(f"{len(replicas) - 1}.0")
    stages = Stages(replicas, frozenset({liar}), random.Random(seed))
    published = stages.score(microbatches)
    assert published is not None
    if stages.disputes:
        assert published == honest(microbatches)
        assert all(len(looks) == 3 and any(liar in look.route for look in looks) for _, looks in stages.disputes)


@given(REPLICAS, st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.floats(0, 1), st.integers())
def test_nothing_is_published_that_a_second_look_contradicts(
    replicas: tuple[int, ...], liars: set[tuple[int, int]], share: float, seed: int
) -> None:
    named = frozenset(PeerId(f"{stage}.{replica}") for stage, replica in liars)
    stages = Stages(replicas, named, random.Random(seed), share)
    published = stages.score(6)
    if published is None:
        assert stages.disputes
        return
    # It is the last pass: six first looks, and one of them again.
    *first, (number, again) = stages.looks[-7:]
    assert published == sum(look.loss_sum for _, look in first) / 12
    assert again.loss_sum == first[number][1].loss_sum
    for disputed, (one, other, third) in stages.disputes:
        assert third.loss_sum in (one.loss_sum, other.loss_sum)
        odd, right = (one, other) if third.loss_sum == other.loss_sum else (other, one)
        out = set(odd.route) - set(right.route)
        assert not any(out & set(look.route) for _, look in (*first, (disputed, right))), "nobody who was wrong"


def test_of_two_replicas_nobody_can_tell_who_is_right() -> None:
    for seed in range(20):
        stages = Stages((2, 2), frozenset({PeerId("1.0")}), random.Random(seed))
        assert stages.score(5) is None
        ((_, looks),) = stages.disputes
        assert len(looks) == 2 and len({look.loss_sum for look in looks}) == 2


def test_weights_that_move_on_while_a_third_is_asked_leave_the_dispute() -> None:
    stages = Stages((3,), frozenset({PeerId("0.0"), PeerId("0.1")}), random.Random(1))
    answers = iter([look(1.0, 2, PeerId("0.0")), look(2.0, 2, PeerId("0.1")), None])

    async def next_look(number: int, around: tuple[PeerId, ...]) -> Gradient | None:
        return next(answers)

    stages.look = next_look  # type: ignore[method-assign]
    with pytest.raises(NoScore, match="moved on"):
        asyncio.run(score(1, stages, stages.rng))
    assert len(stages.disputes) == 1


A, B = PeerId("a"), PeerId("b")


@pytest.mark.parametrize(
    "classes, exact",
    [({A: "cpu", B: "cpu"}, True), ({A: "cpu", B: "cuda"}, False), ({A: "cpu"}, False), ({}, False), (None, False)],
)
def test_bits_are_equal_only_in_one_known_class(classes: dict[PeerId, str] | None, exact: bool) -> None:
    alike = partial(same, numerics=None if classes is None else lambda peer: classes.get(peer, ""))
    one = look(100.0, 8, A)
    assert alike(one, look(100.0, 8, B)) and not alike(one, look(100.0, 9, B))
    assert alike(one, look(100.0 * (1 + TOLERANCE / 2), 8, B)) == (not exact)
    assert not alike(one, look(100.0 * (1 + 2 * TOLERANCE), 8, B))
    # What one peer says twice is equal, whatever its class.
    assert alike(one, look(100.0001, 8, A)) == (classes is None)
