"""Two peers that nobody can dial find a way that no relay is on, over real sockets: calls under way do not notice."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from test_relay import OF_THE_DEAD, World

from swarmnet.ids import PeerId
from swarmnet.messages import Gradient, Request
from swarmnet.net.nat import kinds, punch
from swarmnet.net.nat.kinds import Endpoint, Sight
from swarmnet.pacing import Backoff
from swarmnet.transport import ReadPayload
from tests.contracts.transport_contract import CHECKS, FETCH, HEARTBEAT, LIMIT_S, PROCESS, End, Pair, packed, same


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all live behind no router, at the one address that is nobody's outside."""

    def inside(mine: Sight, theirs: Sight) -> list[Endpoint]:
        assert mine.kind() == theirs.kind() == "none"
        return [theirs.inside]

    monkeypatch.setattr(punch, "dialled", inside)
    # On a busy machine a punch may fail, and calls here wait for the next.
    monkeypatch.setattr(kinds, "PUNCH_AGAIN", partial(Backoff, 0.1, 600.0))


class Homes(World):
    """Two relays, and peers that nobody can dial."""

    async def __aenter__(self) -> Homes:
        await super().__aenter__()
        self.relays = [await self.member(relay_bytes_per_s=1e10) for _ in range(2)]
        self.a, self.b = await self.hidden(), await self.hidden()
        return self

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def says(self, peer: PeerId, event: str) -> None:
        await self.until(lambda: any((peer, event) == (who, what) for who, what, _ in self.said))

    async def hole(self) -> None:
        """Until each calls the other through one."""
        for one, other in ((self.a, self.b), (self.b, self.a)):
            call = one.transport.call(other.peer, FETCH, deadline=asyncio.get_running_loop().time() + LIMIT_S)
            assert [answer async for answer in call]
        await self.says(self.a.peer, "punched")
        await self.says(self.b.peer, "punched")
        a, b = self.a, self.b
        await self.until(lambda: not a.transport.relayed(b.peer) and not b.transport.relayed(a.peer))

    def pair(self) -> Pair:
        return Pair(self.a, self.b, lambda: self.b.transport.__aexit__(None, None, None))


@asynccontextmanager
async def homes() -> AsyncIterator[Homes]:
    async with asyncio.timeout(2 * LIMIT_S), Homes() as world:
        yield world


@pytest.mark.parametrize(
    "check", [each for each in CHECKS if each not in OF_THE_DEAD], ids=lambda check: check.__name__
)
def test_contract(check: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        async with homes() as world:
            await world.hole()
            for relay in world.relays:
                await relay.transport.__aexit__(None, None, None)
            await check(world.pair())

    asyncio.run(main())


def answers_when(told: asyncio.Event) -> Callable[[PeerId, Request, ReadPayload], AsyncIterator[Gradient]]:
    async def answering(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Gradient]:
        received = await payload()
        await told.wait()
        yield Gradient(0.0, 1, payload=received)

    return answering


def test_a_call_under_way_and_the_link_go_on_when_a_hole_is_found_and_when_it_is_lost() -> None:
    async def main() -> None:
        async with homes() as world:
            a, b, told = world.a, world.b, asyncio.Event()
            b.service.answering = answers_when(told)
            assert a.transport.relayed(b.peer)

            async def call() -> tuple[object, ...]:
                payload = (packed(300_000),)
                deadline = asyncio.get_running_loop().time() + LIMIT_S
                answers = [answer async for answer in a.transport.call(b.peer, PROCESS, payload, deadline=deadline)]
                assert same(answers[-1].payload, payload)
                return tuple(answers)

            under_way = asyncio.create_task(call())
            a.transport.tell(b.peer, HEARTBEAT)
            assert (await b.service.told.get())[0] == a.peer
            await world.says(a.peer, "punched")
            # The link moves with the next messages, each of which arrives.
            for _ in range(20):
                a.transport.tell(b.peer, HEARTBEAT)
                assert (await b.service.told.get())[0] == a.peer
            assert not a.transport.relayed(b.peer)
            assert not under_way.done(), "the call began on the circuit, and goes on there"
            told.set()
            await under_way
            assert a.service.gone.empty() and b.service.gone.empty()

            lose_hole(a, b)
            await world.says(a.peer, "hole_lost")
            assert a.transport.relayed(b.peer)
            await call()

    asyncio.run(main())


def test_a_channel_that_is_given_up_leaves_its_calls_their_hole_and_later_ones_take_a_circuit() -> None:
    async def main() -> None:
        async with homes() as world:
            a, b, told = world.a, world.b, asyncio.Event()
            await world.hole()
            channels = a.transport._channels_to(b.peer)

            async def call() -> None:
                payload = (packed(300_000),)
                deadline = asyncio.get_running_loop().time() + LIMIT_S
                answers = [answer async for answer in a.transport.call(b.peer, PROCESS, payload, deadline=deadline)]
                assert same(answers[-1].payload, payload)

            b.service.answering = answers_when(told)
            told.set()
            await call()
            told.clear()
            under_way = asyncio.create_task(call())
            await world.until(lambda: any(channel.users for channel in channels._open_channels()))
            (channel,) = set(channels._open_channels())

            async def stall(*, for_s: float) -> None:
                """A call on the same channel, of which nothing is heard."""
                with pytest.raises(TimeoutError):
                    async with channels.asked(punch.OBSERVE, b"", limit_s=for_s):
                        raise TimeoutError

            await stall(for_s=2 * LIMIT_S)
            assert not channel.retired and not a.transport.relayed(b.peer), "something was heard there"
            channel.heard_at = -math.inf
            await stall(for_s=LIMIT_S)
            assert channel.retired and a.transport.relayed(b.peer)
            another = asyncio.create_task(call())
            await world.until(lambda: any(each.users for each in channels._open_channels()))
            told.set()
            await asyncio.gather(another, under_way)
            await world.says(a.peer, "hole_lost")

    asyncio.run(main())


def test_once_there_is_a_hole_nobody_asks_for_another() -> None:
    async def main() -> None:
        async with homes() as world:
            holes, asked = world.a.transport.network.holes, 0
            ask = holes._ask

            def counted(peer: PeerId):
                nonlocal asked
                asked += 1
                return ask(peer)

            holes._ask = counted
            await world.hole()
            await world.until(lambda: not holes._wanted)
            ended = [what for who, what, _ in world.said if who == world.a.peer and what in ("punched", "not_punched")]
            assert asked == len(ended)

    asyncio.run(main())


def lose_hole(a: End, b: End) -> None:
    """As a router that forgets it does."""
    a.transport.network.holes._mine[b.peer].sock.shutdown(socket.SHUT_RDWR)


def test_who_is_not_hidden_and_who_names_no_place_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punch, "dialled", lambda mine, theirs: [])

    async def main() -> None:
        async with homes() as world:
            call = world.a.transport.call(world.b.peer, FETCH, deadline=asyncio.get_running_loop().time() + LIMIT_S)
            assert [answer async for answer in call]
            await world.says(world.a.peer, "not_punched")
            assert world.a.transport.relayed(world.b.peer)

    asyncio.run(main())


def test_the_end_of_a_stream_over_a_socket_does_not_stop_another_one_that_has_its_number() -> None:
    async def main() -> None:
        sock, far = socket.socketpair()
        async with punch._over(sock):
            number = sock.fileno()
            sock.close()
            another, its_far = socket.socketpair()
            assert number in (another.fileno(), its_far.fileno())
            if number != another.fileno():
                another, its_far = its_far, another
            reader, writer = await asyncio.open_connection(sock=another)
        with far, its_far:
            its_far.sendall(b"word")
            async with asyncio.timeout(LIMIT_S):
                assert await reader.readexactly(4) == b"word"
            writer.transport.abort()

    asyncio.run(main())
