"""Reducers are checked in a grid, too: all have everybody's pledges, and no sum passes that is none."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from typing import Any

import pytest
from grid_members import STAMP, Members, pack, unpack

from swarmnet.audit.case import contradict
from swarmnet.averaging.round_check import says, sign_part
from swarmnet.errors import PeerGone, Refused
from swarmnet.ids import PeerId
from swarmnet.messages import Part, PartData, Pledge, Round
from swarmnet.stage.interfaces import Reduced
from swarmnet.testing.doubles import FakeTransport, Script, run_virtual
from swarmnet.testing.virtual_swarm import SimulatedSigner

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(("num", "size"), [(1, 4), (3, 4), (7, 3), (13, 3)])
def test_all_have_the_pledges_of_all(num: int, size: int) -> None:
    members = Members(num, 40, group_size=size, signs=True)
    asked: list[Part] = []
    members.on_part = lambda peer, part: asked.append(part)

    async def story() -> None:
        members.check(await members.sum(members.round()))

    run_virtual(story())
    for peer, exchange in members.exchanges.items():
        assert [pledge.peer for pledge in exchange.commitments(STAMP)] == list(members.peers), peer
    told = [part for part in asked if part.kind == "pledges"]
    # A whole row's pledges come from one of it, but when that one has not heard them all.
    assert num <= size or len(told) < num * (num - 1) / 1.2


async def test_nobody_takes_what_one_reducer_of_a_grid_has_changed() -> None:
    members = Members(7, 40, group_size=3, signs=True)
    engine: Any = members.engines[members.peers[0]]
    honest = engine.reduce

    async def reduce(contributions: Any, start: int, stop: int, *, hop: int) -> Reduced:
        values = unpack((await honest(contributions, start, stop, hop=hop)).packed)
        return Reduced(pack([values[0] + 1, *values[1:]]))

    engine.reduce = reduce
    current = members.round()
    tasks = [asyncio.ensure_future(members.take_part(peer, current)) for peer in members.peers]
    done, rest = await asyncio.wait(tasks, timeout=30.0)
    assert not [task for task in done if task.exception() is None], "somebody holds it"
    for task in rest:
        task.cancel()
    assert any(event == "reducer_lied" for _, event, _ in members.events)


def test_who_waits_for_its_own_sum_pledges_for_that_of_the_others() -> None:
    members = Members(3, 30, signs=True)
    first, *_, last = members.peers
    engine: Any = members.engines[last]
    free, seal = asyncio.Event(), engine.seal

    async def held() -> Any:
        await free.wait()
        return await seal()

    engine.seal = held

    async def story() -> None:
        current = members.round()
        tasks = {peer: asyncio.ensure_future(members.take_part(peer, current)) for peer in members.peers}
        done, _ = await asyncio.wait([tasks[first]], timeout=20.0)
        assert done and not tasks[last].done(), "one that is slow holds up nobody"
        assert len(members.exchanges[first].commitments(STAMP)) == 3
        free.set()
        assert (await tasks[last]).digest == tasks[first].result().digest
        await asyncio.wait(tasks.values())

    run_virtual(story())


async def test_two_that_cannot_call_each_other_hear_of_a_mate_what_both_pledge() -> None:
    members = Members(4, 40, signs=True)
    one, other = members.peers[:2]
    apart = {one, other}

    def serve(asker: PeerId, peer: PeerId, request: Part) -> Script:
        if peer in apart - {asker} and request.kind == "pledges" and request.start == request.stop:
            return PeerGone("the line is cut", peer=peer)
        return members.serve(peer, request)

    current = members.round()
    for peer in apart:
        members.exchanges[peer]._context.transport = FakeTransport(functools.partial(serve, peer))
    async with asyncio.timeout(60.0):
        found = await asyncio.gather(*(members.take_part(peer, current) for peer in members.peers))
    assert len({each.digest for each in found}) == 1
    assert all(len(exchange.commitments(STAMP)) == 4 for exchange in members.exchanges.values())


async def test_nothing_is_pledged_of_a_round_that_was_abandoned_meanwhile() -> None:
    members = Members(2, 30, signs=True)
    first, last = members.peers
    engine: Any = members.engines[last]
    honest = engine.prove

    async def held() -> Any:
        await asyncio.Event().wait()

    async def discarded(seed: bytes) -> int:
        members.exchanges[last].close()
        engine.values = [0] * len(engine.values)
        product: int = await honest(seed)
        return product

    engine.seal, engine.prove = held, discarded
    current = members.round()
    tasks = [asyncio.ensure_future(members.take_part(peer, current)) for peer in members.peers]
    await asyncio.sleep(0)  # the round is open
    request = Part(STAMP, current.id, "pledges", 0, 0, 0, bytes(range(32)))
    with pytest.raises(Refused, match="abandoned"):
        async for answer in members.exchanges[last].serve(request, first):
            assert not getattr(answer, "pledges", ()), "a product of what it has not contributed"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_nobody_pledges_two_things_where_a_leader_opens_a_round_twice() -> None:
    members = Members(3, 30, signs=True)
    *_, last = members.peers

    async def pledged(current: Round) -> tuple[Pledge, ...]:
        """What the last one tells who asks for a sum that it has not seen."""
        task = asyncio.ensure_future(members.take_part(last, current))
        await asyncio.sleep(1.0)
        try:
            asked = Part(current.stamp, current.id, "pledges", 0, 0, 0, b"d" * 32)
            told = [answer async for answer in members.exchanges[last].serve(asked) if isinstance(answer, PartData)]
            return told[0].pledges
        finally:
            task.cancel()
            await asyncio.wait([task])

    current = members.round()
    (one, of_one, ones), (other, of_other, others), mine = current.contributions
    swapped = replace(current, contributions=((one, of_one, others), (other, of_other, ones), mine))
    first = await pledged(current)
    assert [pledge.peer for pledge in first] == [last]
    assert await pledged(current) == first, "a round that is tried again"
    with pytest.raises(Refused, match="something else was committed"):
        await pledged(swapped)
    later = members.round()
    assert (later.id != current.id) and await pledged(replace(swapped, id=later.id)) != first


@pytest.mark.parametrize("mine", [1, 2])
async def test_who_was_started_again_pledges_nothing_for_the_process_before(mine: int) -> None:
    """Else a leader could ask both, and have an honest peer convicted of two pledges for one sum."""
    members = Members(2, 30, signs=True)
    *_, last = members.peers
    exchange = members.exchanges[last]
    exchange._context.incarnation = mine  # the round's contributions are of process 1
    current = members.round()
    task = asyncio.ensure_future(members.take_part(last, current))
    await asyncio.sleep(1.0)
    asked = exchange.serve(Part(current.stamp, current.id, "pledges", 0, 0, 0, b"d" * 32))
    if mine == 1:
        told = [answer async for answer in asked if isinstance(answer, PartData)]
        assert [pledge.incarnation for pledge in told[0].pledges] == [1]
    else:
        with pytest.raises(Refused, match="another process"):
            async for answer in asked:
                assert not isinstance(answer, PartData)
    task.cancel()
    await asyncio.wait([task])


async def test_a_check_that_is_called_off_takes_nothing_from_that_of_the_next_round() -> None:
    members = Members(3, 30, signs=True)
    first, *_, last = members.peers
    engine: Any = members.engines[last]
    seal, held = engine.seal, asyncio.Event()

    async def holding() -> Any:
        await held.wait()
        return await seal()

    engine.seal = holding
    current = members.round()
    tasks = [asyncio.ensure_future(members.take_part(peer, current)) for peer in members.peers]
    await asyncio.sleep(1.0)
    assert members.exchanges[first]._checked[STAMP].checks[current.id].round is current
    # As a step does it: nobody waits for the end of what is called off.
    for task in tasks:
        task.cancel()
    held.set()
    members.check(await members.sum(members.round()))
    assert len(members.exchanges[first].commitments(STAMP)) == 3


async def test_nobody_holds_two_sums_of_one_round() -> None:
    members = Members(3, 30, signs=True)
    current = members.round()
    members.check(await members.sum(current))
    await members.sum(members.round())
    members.check(await members.sum(current))
    # A liar's contribution is another one the next time.
    members.engines[members.peers[0]].values[0] += 1
    with pytest.raises(ExceptionGroup) as refused:
        await members.sum(current)
    assert "another sum of that round" in str(refused.value.exceptions)
    members.check(await members.sum(members.round()))


def test_two_parts_of_equal_bytes_contradict_nothing() -> None:
    """Such as zeros: whoever signs both has not pledged two things for one sum."""
    signer, current = SimulatedSigner(PeerId("a")), Members(2, 30, signs=True).round()
    one, other = (sign_part(signer, PeerId("a"), current, key, [b"zeros"]) for key in (bytes(32), b"k" * 32))
    assert not contradict(one, other) and says(one, [b"zeros"]) and not says(one, [b"others"])
