"""Rounds over lines of unequal width: what members measure, how rounds are cut by it, and how long they then take.

Real exchanges on virtual time; vectors that have a length but no content, so that seconds of traffic cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange
from swarmnet.averaging.parts import shares
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Answer, Control, Finished, Packed, Part, Request, Round, Stamp
from swarmnet.stage.interfaces import Contribution, Reduced
from swarmnet.testing.clock import SimulatedProcess, VirtualLoop
from swarmnet.testing.links import Links
from swarmnet.testing.network import MemoryNetwork
from swarmnet.transport import ReadPayload

ELEMENTS, TOKENS = 4 << 20, 10
SIZE = 4.0 * ELEMENTS
MB = 1_000_000
ZEROS = memoryview(bytes(4 * ELEMENTS))
STAMP = Stamp(3, 0, Chain("00" * 32))


class Hollow:
    """An engine whose arithmetic takes no time."""

    num_elements, phases, private_phases, block, element_bytes = ELEMENTS, (ELEMENTS,), 0, 256, 4.0
    reference = b""

    def __init__(self) -> None:
        self.put_in = 0

    async def open_round(self, round_id: RoundId, **stands: object) -> None: ...

    async def open_sum(self) -> None:
        self.put_in = 0

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        return Packed("fp32", (stop - start,), ZEROS[4 * start : 4 * stop])

    async def reduce(self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int) -> Reduced:
        return Reduced(contributions[0].packed)

    async def put(self, start: int, packed: Packed) -> None:
        self.put_in += packed.shape[0]

    async def seal(self) -> tuple[bytes, float]:
        assert self.put_in == ELEMENTS, "every element once"
        return b"digest", 0.0


@dataclass
class Host:
    """What the network calls."""

    exchange: Exchange

    def on_tell(self, peer: PeerId, message: Control) -> None: ...

    def on_reached(self, peer: PeerId) -> None: ...

    def on_gone(self, peer: PeerId, *, definite: bool) -> None: ...

    async def on_call(self, peer: PeerId, request: Request, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        assert isinstance(request, Part)
        async for answer in self.exchange.serve(request):
            yield answer


class Members:
    """Replicas with lines of these bytes per second, both ways, `latency_s` apart."""

    def __init__(self, loop: VirtualLoop, rates: Sequence[float], latency_s: float = 0.01) -> None:
        self.loop = loop
        network = MemoryNetwork(loop, Links(latency_s=latency_s), seed=1)
        self.peers = tuple(PeerId(f"p{place}") for place in range(len(rates)))
        self.exchanges: dict[PeerId, Exchange] = {}
        self.processes = {peer: SimulatedProcess(peer) for peer in self.peers}
        self.network = network
        for peer, rate in zip(self.peers, rates, strict=True):
            network.lines.limit(peer, rate, rate)
            engine: Any = Hollow()
            exchange = Exchange(ExchangeContext(peer, engine, network.transport(peer), num_tokens=TOKENS))
            self.exchanges[peer] = exchange
            network.attach(peer, self.processes[peer], Host(exchange))

    def measured(self) -> tuple[int, ...]:
        return tuple(exchange.meter.line.bytes_per_s for exchange in self.exchanges.values())

    def take_part(
        self, number: int, bandwidths: tuple[int, ...], rows: tuple[int, ...] = ()
    ) -> list[asyncio.Task[Finished]]:
        """Everybody begins. rows: of a grid."""
        ballot = Ballot(1, self.peers[0])
        contributions = tuple((peer, Generation(1, 0), frozenset({at})) for at, peer in enumerate(self.peers))
        current = Round(
            replace(STAMP, step=number),
            RoundId(ballot, number),
            contributions,
            self.peers,
            (),
            bandwidths=bandwidths,
            rows=rows,
        )
        return [
            self.loop.start(self.processes[peer], exchange.sum(current, {at: (1.0, TOKENS)}))
            for at, (peer, exchange) in enumerate(self.exchanges.items())
        ]

    async def round(self, number: int, bandwidths: tuple[int, ...], rows: tuple[int, ...] = ()) -> float:
        """Everybody takes part; how long it took until all had the sum."""
        began = self.loop.time()
        assert len(set(await asyncio.gather(*self.take_part(number, bandwidths, rows)))) == 1
        took = self.loop.time() - began
        for exchange in self.exchanges.values():
            exchange.close()
        return took


def play(rates: Sequence[float], story: Any, **options: float) -> Any:
    async def begin() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return await story(Members(loop, rates, **options))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(begin())


def best_s(rates: Sequence[float]) -> float:
    """What the slowest member needs at the best cut there is: (1 + (n - 2) share) vectors each way."""
    cut = shares([round(rate) for rate in rates])
    return max(float(1 + (len(rates) - 2) * share) * SIZE / rate for share, rate in zip(cut, rates, strict=True))


@pytest.mark.parametrize("slow", [5 * MB, 2 * MB])
def test_with_one_slow_member_of_four_a_round_ends_near_the_optimum(slow: int) -> None:
    rates = [10 * MB, 10 * MB, slow, 10 * MB]

    async def story(members: Members) -> tuple[float, tuple[int, ...], float]:
        even = await members.round(1, ())
        found = members.measured()
        return even, found, await members.round(2, found)

    even, found, cut = play(rates, story)
    assert found[2] == pytest.approx(slow, rel=0.1), "everybody waits for it: it is busy all the time"
    assert all(1.5 * slow < found[fast] < 1.1 * rates[fast] for fast in (0, 1, 3)), "whose lines are idle at times"
    assert even > 1.4 * best_s(rates), "the slow member reduces a quarter like everybody"
    assert cut < 1.15 * best_s(rates), (even, cut, best_s(rates))


@pytest.mark.parametrize(("up", "down"), [(3 * MB, 50 * MB), (50 * MB, 3 * MB)])
def test_who_is_narrow_in_one_direction_is_narrow(up: int, down: int) -> None:
    rates = [10 * MB] * 4

    async def story(members: Members) -> tuple[int, ...]:
        members.network.lines.limit(members.peers[1], up, down)
        await members.round(1, ())
        return members.measured()

    found = play(rates, story)
    assert found[1] == pytest.approx(3 * MB, rel=0.3) and min(found[0], found[2], found[3]) > 1.5 * found[1]


def test_who_lies_about_its_line_costs_time_and_nothing_else() -> None:
    rates = [10 * MB, 10 * MB, 2 * MB, 10 * MB]

    async def story(members: Members) -> float:
        return await members.round(1, (10 * MB, 10 * MB, 10**12, 10 * MB))

    assert best_s(rates) < play(rates, story) < 3.5 * SIZE / (2 * MB), "it carries three vectors instead of one"


def test_round_trips_are_told_from_the_calls_of_a_round() -> None:
    async def story(members: Members) -> list[dict[PeerId, int]]:
        one, other, _ = members.peers
        members.network.lines.slow(one, other, None, 0.2)
        await members.round(1, ())
        return [dict(exchange.meter.line.round_trips) for exchange in members.exchanges.values()]

    first, second, third = play([100 * MB] * 3, story)
    assert 400_000 <= first["p1"] <= 1_000_000 and 400_000 <= second["p0"] <= 1_000_000
    assert max(first["p2"], second["p2"], *third.values()) < 100_000


def test_over_a_grid_too() -> None:
    """Nine members in three rows: what a slow one's line must carry is cut in every row, and little time is lost."""
    rates = [10 * MB] * 9
    rates[4] = 5 * MB

    async def story(members: Members) -> tuple[float, tuple[int, ...], float]:
        even = await members.round(1, (), (3, 3, 3))
        found = members.measured()
        return even, found, await members.round(2, found, (3, 3, 3))

    even, found, cut = play(rates, story)
    assert even > 1.7 * best_s(rates), "the slow member reduces a ninth like everybody"
    assert cut < 1.4 * best_s(rates), (even, cut, best_s(rates), found)


async def complaints(members: Members, tasks: Sequence[asyncio.Task[Finished]], *, until_s: float) -> list[float]:
    """Seconds from now of each complaint of anybody about anybody but `p3`; -1.0: of all about that one."""
    began, found = members.loop.time(), []
    while not all(task.done() for task in tasks) and members.loop.time() - began < until_s:
        await asyncio.sleep(1.0)
        named = [
            [late.peer for late in exchange.trouble.late] if exchange.trouble is not None else []
            for exchange in members.exchanges.values()
        ]
        if named[:3] == [["p3"]] * 3:
            return [*found, -1.0]
        found += [members.loop.time() - began for peers in named for peer in peers if peer != "p3"]
    return found


@pytest.mark.parametrize("hung", [False, True])
def test_in_a_first_round_slow_lines_are_waited_for_and_a_stream_that_hangs_is_found_in_a_minute(hung: bool) -> None:
    rates = [1.5 * MB, 0.5 * MB, 1.5 * MB, 10 * MB]

    async def story(members: Members) -> tuple[list[float], float]:
        if hung:

            async def contribution(start: int, stop: int, reference: bytes = b"") -> Packed:
                await asyncio.sleep(1e6)
                raise AssertionError

            sums: Any = members.exchanges[members.peers[3]]._sums
            sums.contribution = contribution
        began = members.loop.time()
        tasks = members.take_part(1, ())
        found = await complaints(members, tasks, until_s=300.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found, members.loop.time() - began

    found, took = play(rates, story)
    if hung:
        assert found == [-1.0] and took < 75.0, "all three name it, and nobody else is named by anybody"
    else:
        assert found == [] and took > 40.0, "the round is over, and nobody was late"
