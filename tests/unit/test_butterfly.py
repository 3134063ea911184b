"""A round of any number of members over a vector of any size: each element is reduced once, everybody has the same sum,
whatever breaks on the way; what does not belong to it never gets into it."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging import parts
from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import PeerGone, RejectCode
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Answer, Fetched, Finished, Packed, Part, PartData, Request, Round, Running, Stamp
from swarmnet.stage.seams import Contribution, Reduced
from swarmnet.testing.clock import VirtualLoop

STAMP = Stamp(3, 0, Chain("00" * 32))
CHUNK = 4
TOKENS = 10


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(parts, "LEAST_CHUNK", CHUNK)
    yield
    patch.undo()


def pack(values: Sequence[int]) -> Packed:
    return Packed("int64", (len(values),), struct.pack(f"<{len(values)}q", *values))


def unpack(packed: Packed) -> list[int]:
    return list(struct.unpack(f"<{packed.shape[0]}q", bytes(packed.data)))


class Vector:
    """An engine over a list of integers that counts what is reduced and what is put where."""

    def __init__(self, values: list[int], shared: Counter[int]) -> None:
        self.values, self.reduced, self.sum = values, shared, dict[int, int]()
        self.num_elements, self.phases, self.block = len(values), (len(values),), 1
        self.reads = 0

    private_phases, reference = 0, b""

    async def open_round(self, round_id: RoundId, **stands: object) -> None:
        await asyncio.sleep(0)

    async def open_sum(self) -> None:
        self.sum = {}

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        await asyncio.sleep(0.001)
        self.reads += 1
        return pack(self.values[start:stop])

    async def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int) -> Reduced:
        await asyncio.sleep(0.001)
        self.reduced.update(range(start, stop))
        assert [c.peer for c in contributions] == sorted(c.peer for c in contributions), "in the round's order"
        columns = [unpack(contribution.packed) for contribution in contributions]
        return Reduced(pack([sum(column) for column in zip(*columns, strict=True)]))

    async def put(self, start: int, packed: Packed) -> None:
        for place, value in enumerate(unpack(packed), start):
            assert place not in self.sum, "put twice"
            self.sum[place] = value

    async def seal(self) -> tuple[bytes, float]:
        assert sorted(self.sum) == list(range(self.num_elements))
        return str(sorted(self.sum.items())).encode()[:32], 1.0


class Group:
    """Members that call each other over lines which break, stutter and say what they should not, by seed."""

    def __init__(self, num_members: int, num_elements: int, *, seed: int = 0, breaks: float = 0.0) -> None:
        self.peers = tuple(PeerId(f"p{place:02}") for place in range(num_members))
        self.reduced: Counter[int] = Counter()
        self.rng, self.breaks = random.Random(seed), breaks
        self.engines = {
            peer: Vector([100 * place + element for element in range(num_elements)], self.reduced)
            for place, peer in enumerate(self.peers)
        }
        engines: dict[PeerId, Any] = dict(self.engines)
        self.exchanges = {
            peer: Exchange(ExchangeContext(peer, engines[peer], self, num_tokens=TOKENS)) for peer in self.peers
        }
        self.change: Callable[[Part, Answer], list[Answer]] = lambda request, answer: [answer]
        self.asked: list[tuple[PeerId, Part]] = []
        self.bandwidths: tuple[int, ...] = ()

    def tell(self, peer: PeerId, message: object) -> None:
        raise AssertionError("nothing is told")

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert isinstance(request, Part)
        self.asked.append((peer, request))
        async for answer in self.exchanges[peer].serve(request):
            await asyncio.sleep(self.rng.random() / 10)
            if self.rng.random() < self.breaks:
                raise PeerGone("broken")
            for said in self.change(request, answer):
                yield said

    def round(self) -> Round:
        ballot = Ballot(1, self.peers[0])
        shares = tuple((peer, Generation(1, 0), frozenset({at})) for at, peer in enumerate(self.peers))
        return Round(STAMP, RoundId(ballot, 1), shares, self.peers, (), bandwidths=self.bandwidths)

    async def sum(self) -> list[Finished]:
        async with asyncio.timeout(3600.0), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(exchange.sum(self.round(), {at: (1.0, TOKENS)}))
                for at, exchange in enumerate(self.exchanges.values())
            ]
        return [task.result() for task in tasks]

    def run(self) -> list[Finished]:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(self.sum())

    def check(self, found: list[Finished]) -> None:
        size = self.engines[self.peers[0]].num_elements
        n = len(self.peers)
        whole = {element: n * element + 100 * n * (n - 1) // 2 for element in range(size)}
        assert all(engine.sum == whole for engine in self.engines.values())
        assert self.reduced == Counter(range(size)), "every element was reduced exactly once"
        assert len(set(found)) == 1 and found[0].num_tokens == n * TOKENS


@given(st.integers(1, 9), st.integers(1, 120), st.integers(0, 10**6))
def test_every_element_is_reduced_once_and_everybody_has_the_sum(members: int, elements: int, seed: int) -> None:
    group = Group(members, elements, seed=seed)
    group.check(group.run())
    reducers = min(members, elements)
    assert len(group.asked) == 2 * reducers * (members - 1), "one stream each way with every reducer"


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=7), st.integers(1, 120), st.integers(0, 10**6))
def test_whatever_the_bandwidths_every_element_is_reduced_once(bandwidths: list[int], elements: int, seed: int) -> None:
    group = Group(len(bandwidths), elements, seed=seed)
    group.bandwidths = tuple(bandwidths)
    group.check(group.run())
    reducers = sum(start < stop for start, stop in parts.parts(elements, bandwidths))
    assert len(group.asked) == 2 * reducers * (len(bandwidths) - 1)


@given(st.integers(2, 5), st.integers(1, 80), st.integers(0, 10**6))
def test_a_broken_stream_goes_on_where_it_broke(members: int, elements: int, seed: int) -> None:
    group = Group(members, elements, seed=seed, breaks=0.2)
    group.check(group.run())


def test_what_came_before_a_break_is_not_asked_for_again() -> None:
    group = Group(2, 64)
    broken = []

    def change(request: Part, answer: Answer) -> list[Answer]:
        if isinstance(answer, PartData) and request.kind == "contribution" and not broken:
            broken.append(request)
            return [answer, Running(), replace(answer, payload=())]  # one chunk, then something that is none
        return [answer]

    group.change = change
    group.check(group.run())
    again = [request for _, request in group.asked if request.kind == "contribution" and request.stop == broken[0].stop]
    assert [request.start for request in again] == [broken[0].start, broken[0].start + parts.chunk_elements(64, 2)]


def _shorter(answer: PartData) -> PartData:
    packed = answer.payload[0]
    return replace(answer, payload=(Packed(packed.codec, (packed.shape[0] - 1,), packed.data[:-8]),))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: [_shorter(answer)],
        lambda answer: [replace(answer, payload=())],
        lambda answer: [replace(answer, payload=answer.payload * 2)],
        lambda answer: [Fetched()],
    ],
    ids=["another size", "no payload", "two payloads", "no answer"],
)
@pytest.mark.parametrize("kind", ["contribution", "reduced"])
def test_a_chunk_that_does_not_fit_is_refused_and_asked_for_again(kind: str, spoil: Any) -> None:
    group = Group(3, 50)
    spoilt: set[tuple[int, int]] = set()

    def change(request: Part, answer: Answer) -> list[Answer]:
        if isinstance(answer, PartData) and request.kind == kind and (request.start, request.stop) not in spoilt:
            spoilt.add((request.start, request.stop))
            return list(spoil(answer))
        return [answer]

    group.change = change
    group.check(group.run())
    assert spoilt


def test_chunks_beyond_the_last_one_are_not_read() -> None:
    group = Group(3, 50)
    group.change = lambda request, answer: [answer, answer] if _is_last(request, answer) else [answer]
    group.check(group.run())


def _is_last(request: Part, answer: Answer) -> bool:
    return isinstance(answer, PartData) and request.stop - request.start <= CHUNK


def test_a_contributor_does_not_run_away_from_the_slowest() -> None:
    group = Group(3, 3 * 40 * CHUNK)
    slow, fast = group.engines[group.peers[2]], group.engines[group.peers[1]]
    free, read = asyncio.Event(), slow.contribution

    async def held(start: int, stop: int, reference: bytes = b"") -> Packed:
        await free.wait()
        return await read(start, stop)

    slow.contribution = held  # type: ignore[method-assign]

    async def story() -> int:
        async with asyncio.TaskGroup() as tasks:
            rounds = tasks.create_task(group.sum())
            await asyncio.sleep(60.0)
            reads = fast.reads
            free.set()
        group.check(rounds.result())
        return reads

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(story()) < 20, "of 80 chunks for the other two, and its own 40"


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 4), (0, 100), (8, 12)])
def test_only_the_rest_of_ones_own_part_is_handed_out_as_reduced(start: int, stop: int) -> None:
    group = Group(2, 16)

    async def story() -> list[Answer]:
        await group.sum()
        first = group.exchanges[group.peers[0]]
        return [answer async for answer in first.serve(Part(STAMP, group.round().id, "reduced", start, stop))]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        code = getattr(runner.run(story())[-1], "code", None)
    # Beyond the round's vector there is no round: that of another step may be longer.
    assert code is (RejectCode.NOT_READY if stop > 16 else RejectCode.NOT_FOUND)
