"""A round of any number of members over a vector of any size: each element is reduced once, everybody has the same sum,
whatever breaks on the way; what does not belong to it never gets into it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from grid_members import STAMP, Members
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging import parts
from swarmnet.errors import RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Fetched, Packed, Part, PartData, Running
from swarmnet.testing.doubles import run_virtual

pytestmark = pytest.mark.virtual_time

CHUNK = 4


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(parts, "LEAST_CHUNK", CHUNK)
    yield
    patch.undo()


class Group(Members):
    """Members of one round. change: what arrives in place of an answer."""

    def __init__(self, num_members: int, num_elements: int, *, seed: int = 0, breaks: float = 0.0) -> None:
        super().__init__(num_members, num_elements, seed=seed, breaks=breaks)
        self.current = self.round()

    def run(self) -> None:
        """All take part."""
        self.check(run_virtual(self.sum(self.current)))
        num_elements = self.engines[self.peers[0]].num_elements
        assert self.work.reduced == {0: Counter(range(num_elements))}, "every element was reduced exactly once"


@given(st.integers(1, 9), st.integers(1, 120), st.integers(0, 10**6))
def test_every_element_is_reduced_once_and_everybody_has_the_sum(members: int, elements: int, seed: int) -> None:
    group = Group(members, elements, seed=seed)
    group.run()
    reducers = min(members, elements)
    assert len(group.transport.requests) == 2 * reducers * (members - 1), "one stream each way with every reducer"


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=7), st.integers(1, 120), st.integers(0, 10**6))
def test_whatever_the_bandwidths_every_element_is_reduced_once(bandwidths: list[int], elements: int, seed: int) -> None:
    group = Group(len(bandwidths), elements, seed=seed)
    group.current = replace(group.current, bandwidths=tuple(bandwidths))
    group.run()
    reducers = sum(start < stop for start, stop in parts.parts(elements, bandwidths))
    assert len(group.transport.requests) == 2 * reducers * (len(bandwidths) - 1)


@given(st.integers(2, 5), st.integers(1, 80), st.integers(0, 10**6))
def test_a_broken_stream_goes_on_where_it_broke(members: int, elements: int, seed: int) -> None:
    group = Group(members, elements, seed=seed, breaks=0.2)
    group.run()


def test_what_came_before_a_break_is_not_asked_for_again() -> None:
    group = Group(2, 64)
    broken = []

    def change(peer: PeerId, request: Part, answer: Answer) -> list[Answer]:
        if isinstance(answer, PartData) and request.kind == "contribution" and not broken:
            broken.append(request)
            return [answer, Running(), replace(answer, payload=())]  # one chunk, then something that is none
        return [answer]

    group.transport.intercept = change
    group.run()
    asked = [request for _, request in group.transport.requests if request.kind == "contribution"]
    again = [request for request in asked if request.stop == broken[0].stop]
    assert [request.start for request in again] == [broken[0].start, broken[0].start + parts.chunk_elements(64, 2, 8.0)]


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

    def change(peer: PeerId, request: Part, answer: Answer) -> list[Answer]:
        if isinstance(answer, PartData) and request.kind == kind and (request.start, request.stop) not in spoilt:
            spoilt.add((request.start, request.stop))
            return list(spoil(answer))
        return [answer]

    group.transport.intercept = change
    group.run()
    assert spoilt


def test_chunks_beyond_the_last_one_are_not_read() -> None:
    group = Group(3, 50)
    group.transport.intercept = lambda peer, request, answer: [answer] * (1 + _is_last(request, answer))
    group.run()


def _is_last(request: Part, answer: Answer) -> bool:
    return isinstance(answer, PartData) and request.stop - request.start <= CHUNK


async def test_a_contributor_does_not_run_away_from_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_CHUNK", CHUNK)
    group = Group(3, 3 * 40 * CHUNK)
    slow, fast = group.engines[group.peers[2]], group.peers[1]
    free, read = asyncio.Event(), slow.contribution

    async def held(start: int, stop: int, reference: bytes = b"") -> Packed:
        await free.wait()
        return await read(start, stop)

    slow.contribution = held  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        rounds = tasks.create_task(group.sum(group.current))
        await asyncio.sleep(60.0)
        reads = group.work.read[fast] // CHUNK
        free.set()
    group.check(rounds.result())
    assert reads < 20, "of 80 chunks for the other two, and its own 40"


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 4), (0, 100), (8, 12)])
async def test_only_the_rest_of_ones_own_part_is_handed_out_as_reduced(start: int, stop: int) -> None:
    group = Group(2, 16)
    await group.sum(group.current)
    first = group.exchanges[group.peers[0]]
    part = Part(STAMP, group.current.id, "reduced", start, stop)
    code = getattr([answer async for answer in first.serve(part)][-1], "code", None)
    # Beyond the round's vector there is no round: that of another step may be longer.
    assert code is (RejectCode.NOT_READY if stop > 16 else RejectCode.NOT_FOUND)
