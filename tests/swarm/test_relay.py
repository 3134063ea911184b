"""Peers that nobody can dial, over real sockets: through a relay, or coming to their callers themselves."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from swarmnet.errors import PeerGone, SwarmError
from swarmnet.ids import PeerId, RunId
from swarmnet.messages import Accepted, Answer, Busy, Fetched, Rejected, Request
from swarmnet.net import circuits, hidden, relay
from swarmnet.net.address import Address
from swarmnet.net.circuits import Called
from swarmnet.net.grpc_options import CHANNEL_OPTIONS
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.hidden import asked
from swarmnet.net.identity import Identity
from swarmnet.net.relay import ARRIVE, CONNECT, RESERVE
from swarmnet.net.relay_book import RelayCaps
from swarmnet.net.tls import Leaf
from swarmnet.transport import ReadPayload
from swarmnet.wire.convert import GreetFirst
from swarmnet.wire.relay import MAX_BYTES, Arrive, Ask, Connect, Reply, Reserve, Reserved, Summon, read_reply, write_ask
from tests.contracts.transport_contract import (
    CHECKS,
    FETCH,
    LIMIT_S,
    End,
    Pair,
    ScriptedService,
    calling_the_dead_is_definite,
    death_breaks_a_link,
    death_of_the_callee_is_definite,
)

RUN = RunId("ab" * 32)


class World:
    """Transports on loopback that know each other's addresses. A hidden one's port is told to nobody."""

    def __init__(self) -> None:
        self.transports: dict[PeerId, GrpcTransport] = {}
        self.said: list[tuple[PeerId, str, dict[str, object]]] = []
        self.news = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> World:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._stack.__aexit__(*raised)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        return self.transports[peer].addresses if peer in self.transports else ()

    async def member(self, **options: object) -> End:
        service, identity = ScriptedService(), options.pop("identity", None) or Identity.generate()
        transport = GrpcTransport(identity, RUN, addresses=self.addresses, service=service, **options)
        await self._stack.enter_async_context(transport)
        self.transports[transport.peer] = transport
        return End(transport.peer, transport, service)

    def say(self, who: PeerId) -> Callable[[str, dict[str, object]], None]:
        def say(event: str, fields: dict[str, object]) -> None:
            self.said.append((who, event, fields))
            self.news.set()

        return say

    async def hidden(self, **options: object) -> End:
        found = await self.member(**options)

        def candidates() -> list[PeerId]:
            return [peer for peer, transport in self.transports.items() if not transport.hidden]

        del self.transports[found.peer]  # a candidate would be dialled
        transport = found.transport
        assert await transport.hide(candidates, self.say(found.peer))
        self.transports[found.peer] = transport
        return found


@asynccontextmanager
async def pair_of(kind: str) -> AsyncIterator[Pair]:
    async with World() as world:
        await world.member(relay_bytes_per_s=1e10)
        a = await (world.hidden() if kind == "both hidden" else world.member())
        b = await world.hidden()
        assert all("/p2p-circuit/" in address for address in world.addresses(b.peer))
        # Under a load the first way there takes longer than some checks wait.
        assert await answers(a, b)
        b.service.answering = ScriptedService.answering
        yield Pair(a, b, lambda: b.transport.__aexit__(None, None, None))


OF_THE_DEAD = (death_of_the_callee_is_definite, calling_the_dead_is_definite, death_breaks_a_link)
"""Only a relay says that nobody listens behind it, and its word proves nothing."""


@pytest.mark.parametrize("kind", ["one hidden", "both hidden"])
@pytest.mark.parametrize(
    "check", [each for each in CHECKS if each not in OF_THE_DEAD], ids=lambda check: check.__name__
)
def test_contract(check: Callable[[Pair], Awaitable[None]], kind: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), pair_of(kind) as pair:
            await check(pair)

    asyncio.run(main())


def test_who_listens_everywhere_is_dialled_by_ipv6_and_by_ipv4() -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), World() as world:
            member, caller = await world.member(host="::"), await world.member()
            assert {Address.parse(text).kind for text in member.transport.addresses} <= {"ip4", "ip6"}
            for text in member.transport.addresses:
                await caller.transport.dial(member.peer, text, deadline=asyncio.get_running_loop().time() + LIMIT_S)

    asyncio.run(main())


# ---------------------------------------------------------------- relays come and go


async def answers(caller: End, callee: End) -> bool:
    """Does a call get its answer?"""

    async def fetched(who: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Fetched()

    callee.service.answering = fetched
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    return [each async for each in caller.transport.call(callee.peer, FETCH, deadline=deadline)] == [Fetched()]


async def answers_now(caller: End, callee: End) -> bool:
    with contextlib.suppress(PeerGone):
        return await answers(caller, callee)
    return False


def play(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), World() as world:
            await scenario(world)

    asyncio.run(main())


async def said(world: World, event: str, count: int) -> list[dict[str, object]]:
    """The first so many of these events, once they are there."""
    while len(found := [fields for _, name, fields in world.said if name == event]) < count:
        world.news.clear()
        await world.news.wait()
    return found


def test_a_lost_relay_is_replaced_and_callers_take_the_other() -> None:
    async def scenario(world: World) -> None:
        relays = [await world.member() for _ in range(3)]
        caller, hidden = await world.hidden(), await world.hidden()
        first, _ = [fields["relay"] for fields in await said(world, "relay_reserved", 4)][2:]
        assert await answers(caller, hidden) and caller.transport.relayed(hidden.peer)
        (lost,) = [relay for relay in relays if relay.peer == first]
        await lost.transport.__aexit__(None, None, None)
        while not await answers_now(caller, hidden):  # by the other; calls that are under way are lost
            pass
        assert lost.peer in [fields["relay"] for fields in await said(world, "relay_lost", 1)]
        del world.transports[lost.peer]
        while len(hidden.transport.relays) < 2:
            world.news.clear()
            await world.news.wait()
        assert lost.peer not in hidden.transport.relays and await answers(caller, hidden)

    play(scenario)


class Cable:
    """A port that leads to another, until it is pulled: then nothing comes through, and nobody is told."""

    def __init__(self) -> None:
        self.port, self._to = 0, 0
        self._whole = asyncio.Event()
        self._whole.set()

    async def lay(self, stack: AsyncExitStack) -> None:
        listening = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        stack.callback(listening.close)
        self.port = listening.sockets[0].getsockname()[1]

    def lead_to(self, port: int) -> None:
        self._to = port

    def pull(self) -> None:
        self._whole.clear()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("127.0.0.1", self._to)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, far[1]), self._pass_on(far[0], writer))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._whole.wait()
            sink.write(data)
        sink.close()


def test_a_pulled_cable_is_noticed_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (relay, hidden):
        monkeypatch.setattr(module, "PING_S", 0.2)
        monkeypatch.setattr(module, "SILENCE_S", 1.0)

    async def scenario(world: World) -> None:
        async with AsyncExitStack() as stack:
            cable, identity = Cable(), Identity.generate()
            await cable.lay(stack)
            at = Address.of("127.0.0.1", cable.port, identity.peer)
            far = await world.member(announce=(at,), identity=identity)
            cable.lead_to(far.transport.port)
            home = await world.hidden()
            assert home.transport.relays == (far.peer,) and set(far.transport.relay.book.places) == {home.peer}
            cable.pull()
            (lost,) = await said(world, "relay_lost", 1)
            assert lost["relay"] == far.peer and "nothing was heard" in str(lost["reason"])
            while True:
                if not far.transport.relay.book.places:
                    return
                await asyncio.sleep(0.0)

    play(scenario)


def test_who_finds_no_relay_stays_as_it_was() -> None:
    async def scenario(world: World) -> None:
        none = RelayCaps(peers=0)
        others = [(await world.member(relay_caps=none)).peer, (await world.member(relay_caps=none)).peer]
        one = await world.member()
        before = one.transport.addresses
        assert not await one.transport.hide(lambda: others, world.say(one.peer))
        assert one.transport.addresses == before and not one.transport.hidden and one.transport.relay.open
        assert not world.said

    play(scenario)


def test_a_relay_that_is_hidden_itself_lets_go_whom_it_has() -> None:
    async def scenario(world: World) -> None:
        one, _ = await world.member(), await world.member()
        hidden = await world.hidden()
        await said(world, "relay_reserved", 2)
        assert await one.transport.hide(lambda: [p for p in world.transports if p != one.peer], world.say(one.peer))
        lost = await said(world, "relay_lost", 1)
        assert lost[0]["relay"] == one.peer and one.peer not in hidden.transport.relays

    play(scenario)


def test_a_caller_that_can_be_dialled_has_the_peer_come_and_the_relay_carries_nothing() -> None:
    async def scenario(world: World) -> None:
        relay, caller, hidden = await world.member(), await world.member(), await world.hidden()
        assert await answers(caller, hidden) and not caller.transport.relayed(hidden.peer)
        assert not len(relay.transport.relay.book)
        assert await answers(relay, hidden), "the relay calls it, too"
        other = await world.hidden()
        assert await answers(other, hidden) and other.transport.relayed(hidden.peer)
        assert len(relay.transport.relay.book) + len(caller.transport.relay.book)
        assert not other.transport.relayed(caller.peer)

    play(scenario)


# ---------------------------------------------------------------- hostile ones


def asks(who: End, relay: End, method: str, ask: Ask):
    """A stream from one to the other that begins with this question."""
    return asked(who.transport._channels_to(relay.peer), method, write_ask(ask), limit_s=LIMIT_S)


async def reply(end: Called) -> Reply | None:
    return read_reply(data) if (data := await end.read()) else None


def test_a_flood_of_one_identity_costs_nobody_else() -> None:
    async def scenario(world: World) -> None:
        relay, flooder = await world.member(), await world.member()
        hidden, caller = await world.hidden(), await world.hidden()
        async with AsyncExitStack() as stack:
            replies = []
            for at in range(60):
                ask = Reserve() if at % 2 else Connect(hidden.peer, at.to_bytes(16, "big"))
                end = await stack.enter_async_context(asks(flooder, relay, CONNECT if at % 2 == 0 else RESERVE, ask))
                replies.append(asyncio.ensure_future(reply(end)))
            assert any(isinstance(each, Busy) for each in await asyncio.gather(*replies[40:], return_exceptions=True))
            book = relay.transport.relay.book
            assert len(book) <= book.caps.of_caller and len(book.places) <= 4
            for each in replies:
                each.cancel()
        assert await answers(caller, hidden)

    play(scenario)


def test_what_is_not_asked_for_is_refused() -> None:
    async def scenario(world: World) -> None:
        relay, stranger = await world.member(), await world.member()
        hidden, caller = await world.hidden(), await world.hidden()
        async with asks(stranger, relay, CONNECT, Connect(stranger.peer, bytes(16))) as end:
            assert isinstance(await reply(end), Rejected), "it has no place there"
        async with asks(stranger, relay, CONNECT, Reserve()) as end:
            assert isinstance(await reply(end), Rejected), "of another method"
        for ident in (bytes(16), b"x" * 16):
            async with asks(stranger, relay, ARRIVE, Arrive(ident)) as end:
                assert isinstance(await reply(end), Accepted) and await end.read() == b"", "nobody waits for it"
        channel = grpc.aio.secure_channel(
            Address.parse(relay.transport.addresses[0]).target,
            Leaf(Identity.generate()).channel_credentials(relay.peer),
            options=CHANNEL_OPTIONS,
        )
        ungreeted = Called(channel.stream_stream(RESERVE)())
        assert isinstance(await reply(ungreeted), GreetFirst)
        await channel.close()
        assert await answers(caller, hidden)

    play(scenario)


def test_garbage_in_a_circuit_ends_that_circuit_alone() -> None:
    async def scenario(world: World) -> None:
        relay, stranger = await world.member(), await world.member()
        hidden, caller = await world.hidden(), await world.hidden()
        async with asks(stranger, relay, CONNECT, Connect(hidden.peer, bytes(16))) as end:
            assert isinstance(await reply(end), Accepted)
            await end.write(b"no TLS " * 1000)
            with contextlib.suppress(SwarmError):
                while await end.read():  # an alert, and the end
                    pass
        async with asks(stranger, relay, CONNECT, Connect(hidden.peer, b"y" * 16)) as end:
            assert isinstance(await reply(end), Accepted)
            with contextlib.suppress(SwarmError):
                await end.write(bytes(MAX_BYTES + 1))
                assert not await end.read()
        assert await answers(caller, hidden)

    play(scenario)


def test_who_does_not_read_is_let_go_and_holds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of the circuit are hostile: one sends, the other does not read."""
    monkeypatch.setattr(circuits, "STALL_S", 0.5)

    async def scenario(world: World) -> None:
        relay, sender, mute = await world.member(relay_bytes_per_s=1e10), await world.member(), await world.member()
        async with asks(mute, relay, RESERVE, Reserve()) as place:
            assert isinstance(await reply(place), Reserved)
            async with asks(sender, relay, CONNECT, Connect(mute.peer, bytes(16))) as near:
                summon = await reply(place)
                assert isinstance(summon, Summon) and summon.caller == sender.peer
                async with asks(mute, relay, ARRIVE, Arrive(summon.id)):
                    assert isinstance(await reply(near), Accepted)
                    sent = 0
                    with contextlib.suppress(SwarmError):
                        while True:
                            await near.write(bytes(MAX_BYTES))
                            sent += MAX_BYTES
                    assert sent < 64 << 20 and not len(relay.transport.relay.book)

    play(scenario)


def test_who_summons_a_peer_without_end_keeps_nobody_elses_calls_from_it() -> None:
    async def main() -> None:
        async with World() as world:
            relay = (await world.member()).transport.relay
            peer = (await world.hidden()).peer

            def pause_s(home: str) -> float:
                return relay.summon(relay.me, peer, secrets.token_bytes(16), reverse=True, home=home)

            assert max(pause_s("2600:44::/64") for _ in range(1000)) <= 0.5, "what is refused costs nothing"
            assert pause_s("203.0.113.7") == 0 and pause_s("") == 0

    asyncio.run(main())
