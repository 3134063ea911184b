"""Rounds over a grid, by real exchanges: the whole sum for everybody."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import pytest
from grid_members import STAMP, Members
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.averaging import parts
from swarmnet.averaging.grid import grid_of, partners
from swarmnet.errors import Refused
from swarmnet.messages import Accepted, Answer, Part
from swarmnet.testing.doubles import run_virtual

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(parts, "LEAST_CHUNK", 4)
    yield
    patch.undo()


@settings(max_examples=25)
@given(st.integers(1, 16), st.integers(1, 70), st.integers(2, 6), st.integers(0, 10**6), st.sampled_from([0.0, 0.1]))
def test_everybody_has_the_sum_and_it_was_made_once(
    num: int, elements: int, size: int, seed: int, breaks: float
) -> None:
    members = Members(num, elements, group_size=size, seed=seed, breaks=breaks)

    async def story() -> None:
        current = members.round()
        members.check(await members.sum(current))
        rows, last = len(grid_of(current).rows), max(members.work.reduced)
        assert (rows > 1) == (num > size) == (last > 0)
        assert members.work.reduced[0] == Counter(dict.fromkeys(range(elements), rows)), "once in every row"
        if last == 1:
            assert members.work.reduced[1] == Counter(range(elements)), "and once over the rows"

    run_virtual(story())


async def test_three_axes() -> None:
    members = Members(30, 200, group_size=3)
    members.check(await members.sum(members.round()))
    assert members.work.reduced[max(members.work.reduced)] == Counter(range(200))
    assert max(members.work.reduced) == 3, "groups of three and two, four times"


async def test_who_has_counted_nothing_reduces_and_receives() -> None:
    members = Members(16, 100, group_size=4)
    idle = members.peers[4:9]  # a whole row and one more
    for peer in idle:
        members.held[members.peers[0]] |= members.held[peer]
        members.held[peer] = frozenset()
        members.ledger.evict((peer, members.generation[peer]))
    members.ledger.enter((members.peers[0], members.generation[members.peers[0]]), members.held[members.peers[0]])
    for peer in idle:
        members.engines[peer].values = [0] * 100
    members.check(await members.sum(members.round()))
    assert not members.work.read.keys() & set(idle)


async def test_a_latecomer_receives_what_a_grid_sums() -> None:
    members = Members(10, 100, group_size=3)
    late = members.peers[9]
    members.held[members.peers[8]] |= members.held[late]
    members.ledger.evict((late, members.generation[late]))
    members.ledger.enter((members.peers[8], members.generation[members.peers[8]]), members.held[members.peers[8]])
    members.held[late], members.engines[late].values = frozenset(), [0] * 100
    members.dead.add(late)
    current = members.round()
    members.dead.clear()
    assert late not in current.receivers
    members.check(await members.sum(current))


async def test_random_pairs_sum_among_themselves_and_the_rest_is_everybodys() -> None:
    members = Members(9, 50, group_size=3, phases=(30, 20), private_phases=1)
    current = members.round()
    told = await members.sum(current)
    assert len(set(told.values())) == 1, "what pairs have of their own is no part of what all have"
    for peer in members.peers:
        pair = partners(peer, members.peers, 2, STAMP.stage, 0)
        engine = members.engines[peer]
        assert [engine.sum[at] for at in range(30)] == [
            sum(members.engines[other].values[at] for other in pair) for at in range(30)
        ]
        assert [engine.sum[at] for at in range(30, 50)] == [
            sum(members.engines[other].values[at] for other in members.peers) for at in range(30, 50)
        ]


def test_a_stranger_to_a_hop_is_told_so() -> None:
    members = Members(9, 90, group_size=3)

    async def story() -> list[object]:
        current = members.round()
        await members.sum(current)
        first = members.peers[0]
        other = Part(STAMP, current.id, "contribution", 0, 90, 1)  # not the part that it sums over the rows
        none = Part(STAMP, current.id, "reduced", 0, 30, 7)
        async with asyncio.timeout(60):
            return [answer for part in (other, none) async for answer in members.exchanges[first].serve(part)]

    answers = run_virtual(story())
    assert [getattr(answer, "reason", "") for answer in answers if hasattr(answer, "reason")] == [
        "that round is not open here"
    ] * 2


@settings(max_examples=25)
@given(st.integers(2, 14), st.integers(2, 5), st.integers(0, 10**6))
def test_the_sum_is_of_what_is_held_in_the_end_whatever_came_between(num: int, size: int, seed: int) -> None:
    """Rounds that some have not heard of, or that break off anywhere; members lost, discarded; rounds tried again."""
    members, rng = Members(num, 120, group_size=size, seed=seed), random.Random(seed)

    async def story() -> None:
        current = members.round()
        for _ in range(rng.randrange(5)):
            deaf = rng.sample(members.alive, rng.randrange(len(members.alive)))
            if not await members.give_up(current, rng.choice([0.001, 0.02, 0.05, 0.2]), deaf):
                return  # somebody has it whole: the others would fetch it
            event = rng.choice(["lost", "discard", "heard again", "again", "again"])
            if event == "lost" and len(members.alive) > 2:
                members.lose(rng.choice(members.alive[1:]))
            elif event == "discard":
                members.discard(rng.choice(members.alive))
            if event != "heard again":
                current = members.round()
        members.check(await members.sum(current))

    run_virtual(story())


async def test_who_came_after_a_round_among_partners_was_opened_takes_no_part_and_breaks_nothing() -> None:
    members = Members(4, 50, phases=(30, 20), private_phases=1)
    current = members.round()
    earlier = replace(current, contributions=current.contributions[:3], receivers=current.receivers[:3])
    with pytest.raises(Refused):
        await members.exchanges[members.peers[3]].sum(earlier, {})


@pytest.mark.parametrize(("phases", "private"), [((50,), 0), ((30, 20), 0), ((30, 20), 1)])
async def test_whoever_waits_is_waiting_for_who_answers_nothing_and_not_for_its_partner(
    phases: tuple[int, ...], private: int
) -> None:
    members = Members(6, 50, phases=phases, private_phases=private)
    *others, stuck = members.peers

    async def hang(request: Part) -> AsyncGenerator[Answer, None]:
        yield Accepted()
        await asyncio.sleep(1e6)

    members.exchanges[stuck].serve = hang
    current = members.round()
    tasks = [asyncio.ensure_future(members.take_part(peer, current)) for peer in members.peers]
    await asyncio.sleep(60.0)
    for peer in others:
        trouble = members.exchanges[peer].trouble
        assert trouble is not None and [(late.peer, late.owes) for late in trouble.late] == [(stuck, True)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
