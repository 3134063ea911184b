"""Peers that nobody can dial, over real sockets: through a relay, or coming to their callers themselves."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from swarmnet.errors import PeerGone, PeerTimeout, SwarmError
from swarmnet.ids import PeerId, RunId
from swarmnet.messages import Accepted, Answer, Busy, Fetched, Rejected, Request
from swarmnet.net import network
from swarmnet.net.address import Address
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_options import CHANNEL_OPTIONS, GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.nat import circuits, hidden, relay, relay_book
from swarmnet.net.nat.circuits import CallEnd, splice
from swarmnet.net.nat.relay import ARRIVE, CONNECT, RESERVE
from swarmnet.net.nat.relay_book import RelayCaps
from swarmnet.net.tls import Leaf
from swarmnet.pacing import Rate
from swarmnet.testing.doubles import FakeService
from swarmnet.transport import ReadPayload
from swarmnet.wire.convert import NONCE_BYTES, GreetFirst, Ping, Pong
from swarmnet.wire.relay import (
    MAX_BYTES,
    Arrive,
    Ask,
    Connect,
    Reply,
    Reserve,
    Reserved,
    Summon,
    read_reply,
    write_ask,
    write_reply,
)
from tests.contracts.transport_contract import (
    CHECKS,
    FETCH,
    LIMIT_S,
    End,
    Pair,
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
        service, identity = FakeService(), options.pop("identity", None) or Identity.generate()
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
            return [peer for peer, transport in self.transports.items() if not transport.network.hidden]

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
        b.service.answering = FakeService().answering
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
        while len(hidden.transport.network.relays) < 2:
            world.news.clear()
            await world.news.wait()
        assert lost.peer not in hidden.transport.network.relays and await answers(caller, hidden)

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

    def pull(self, *, for_good: bool = True) -> None:
        """for_good: for connections that are made afterwards, too."""
        self._whole.clear()
        if not for_good:
            self._whole = asyncio.Event()
            self._whole.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("127.0.0.1", self._to)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, far[1]), self._pass_on(far[0], writer))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        whole = self._whole
        while data := await source.read(1 << 16):
            await whole.wait()
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
            assert home.transport.network.relays == (far.peer,) and set(far.transport.network.relay.book.places) == {
                home.peer
            }
            cable.pull()
            (lost,) = await said(world, "relay_lost", 1)
            assert lost["relay"] == far.peer and "silent for" in str(lost["reason"])
            while True:
                if not far.transport.network.relay.book.places:
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
        assert (
            one.transport.addresses == before and not one.transport.network.hidden and one.transport.network.relay.open
        )
        assert not world.said

    play(scenario)


def test_a_relay_that_is_hidden_itself_lets_go_whom_it_has() -> None:
    async def scenario(world: World) -> None:
        one, _ = await world.member(), await world.member()
        hidden = await world.hidden()
        await said(world, "relay_reserved", 2)
        assert await one.transport.hide(lambda: [p for p in world.transports if p != one.peer], world.say(one.peer))
        lost = await said(world, "relay_lost", 1)
        assert lost[0]["relay"] == one.peer and one.peer not in hidden.transport.network.relays

    play(scenario)


def test_a_caller_that_can_be_dialled_has_the_peer_come_and_the_relay_carries_nothing() -> None:
    async def scenario(world: World) -> None:
        relay, caller, hidden = await world.member(), await world.member(), await world.hidden()
        assert await answers(caller, hidden) and not caller.transport.relayed(hidden.peer)
        assert not len(relay.transport.network.relay.book)
        assert await answers(relay, hidden), "the relay calls it, too"
        other = await world.hidden()
        assert await answers(other, hidden) and other.transport.relayed(hidden.peer)
        assert len(relay.transport.network.relay.book) + len(caller.transport.network.relay.book)
        assert not other.transport.relayed(caller.peer)

    play(scenario)


# ---------------------------------------------------------------- hostile ones


def asks(who: End, relay: End, method: str, ask: Ask):
    """A stream from one to the other that begins with this question."""
    return who.transport._channels_to(relay.peer).asked(
        method, write_ask(ask), limit_s=LIMIT_S, calls=method != RESERVE
    )


async def reply(end: CallEnd) -> Reply | None:
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
            book = relay.transport.network.relay.book
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
            assert isinstance(await reply(end), Rejected), "it has no reservation there"
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
        ungreeted = CallEnd(channel.stream_stream(RESERVE)())
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
                    assert sent < 64 << 20 and not len(relay.transport.network.relay.book)

    play(scenario)


def test_who_summons_a_peer_without_end_keeps_nobody_elses_calls_from_it() -> None:
    async def main() -> None:
        async with World() as world:
            relay = (await world.member()).transport.network.relay
            peer = (await world.hidden()).peer

            def pause_s(home: str) -> float:
                return relay.request_connect_back(relay.me, peer, secrets.token_bytes(16), reverse=True, home=home)

            assert max(pause_s("2600:44::/64") for _ in range(1000)) <= 0.5, "what is refused costs nothing"
            assert pause_s("203.0.113.7") == 0 and pause_s("") == 0

    asyncio.run(main())


def test_a_caller_with_too_many_streams_is_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_book, "COMING_OF_CALLER", 2)

    async def scenario(world: World) -> None:
        via, flooder = await world.member(), await world.member()
        peer, caller = await world.hidden(), await world.member()
        async with AsyncExitStack() as stack:
            replies = []
            for at in range(3):
                ask = Connect(peer.peer, bytes([at]) * 16)
                replies.append(await reply(await stack.enter_async_context(asks(flooder, via, CONNECT, ask))))
            assert replies[:2] == [Accepted(), Accepted()]
            assert isinstance(replies[2], Rejected) and "too many callers" in replies[2].reason
            (refused,) = await said(world, "callers_refused", 1)
            assert refused["caller"] == flooder.peer and refused["relay"] == via.peer
            assert await answers(caller, peer)

    play(scenario)


def test_callers_that_a_relay_makes_up_take_nothing_of_what_they_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_book, "COMING_OF_CALLER", 2)
    monkeypatch.setattr(network.Network, "verified_hosts", lambda network, peer: [peer])

    async def scenario(world: World) -> None:
        liar, honest, caller = await world.member(), await world.member(), await no_relay(world)
        peer, came = await world.hidden(), asyncio.Queue[Arrive]()

        async def arrive(_: PeerId, ask: Arrive, context: grpc.aio.ServicerContext) -> None:
            came.put_nowait(ask)
            await asyncio.Event().wait()

        caller.transport.network.relay._arrive = arrive
        await said(world, "relay_reserved", 2)
        for via, full in ((liar, False), (liar, False), (liar, True), (honest, False)):
            via.transport.network.relay._summons[peer.peer].put_nowait(Summon(caller.peer, bytes(16), reverse=True))
            assert (await came.get()).full == full

    play(scenario)


def test_a_caller_that_can_be_dialled_hears_at_once_that_the_peer_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "REVERSE_S", 10 * LIMIT_S)
    monkeypatch.setattr(hidden, "too_many", lambda coming, one: "too many")

    async def scenario(world: World) -> None:
        await world.member()
        peer, caller = await world.hidden(), await world.member()
        with pytest.raises(PeerGone):
            await answers(caller, peer)

    play(scenario)


def test_a_relay_that_summons_without_end_loses_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "SUMMONS_OF_RELAY", Rate(1.0, burst_s=5.0))

    async def scenario(world: World) -> None:
        via, stranger = await world.member(), await no_relay(world)
        peer = await world.hidden()
        for at in range(9):
            via.transport.network.relay._summons[peer.peer].put_nowait(
                Summon(stranger.peer, bytes([at]) * 16, reverse=True)
            )
        (lost,) = await said(world, "relay_lost", 1)
        assert lost["relay"] == via.peer and "without end" in str(lost["reason"])

    play(scenario)


def ping_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (relay, hidden):
        monkeypatch.setattr(module, "PING_S", 0.1)


async def no_relay(world: World) -> End:
    return await world.member(relay_caps=RelayCaps(peers=0))


class Bans:
    """Admissions of a run that is open but for these."""

    def __init__(self) -> None:
        self.banned: set[PeerId] = set()

    def show(self, peer: PeerId, text: str, *, now: float) -> str:
        return ""

    def why_not(self, peer: PeerId, *, now: float) -> str:
        return "it is banned" if peer in self.banned else ""

    def proof_against(self, peer: PeerId) -> None: ...


def test_who_is_banned_loses_its_place_and_its_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_LOOK_S", 0.02)
    ping_often(monkeypatch)

    async def scenario(world: World) -> None:
        bans = Bans()
        greeter = Greeter(RUN, 60.0, admissions=bans)  # type: ignore[arg-type]
        via, caller, other = await world.member(greeter=greeter), await no_relay(world), await no_relay(world)
        peer = await world.hidden()
        async with asks(caller, via, CONNECT, Connect(peer.peer, bytes(16))) as end:
            assert isinstance(await reply(end), Accepted) and len(via.transport.network.relay.book) == 1
            bans.banned.add(caller.peer)
            with contextlib.suppress(SwarmError):
                assert not await end.read()
        async with asks(other, via, CONNECT, Connect(peer.peer, bytes(16))) as end:
            assert isinstance(await reply(end), Accepted)
            bans.banned.add(peer.peer)
            with contextlib.suppress(SwarmError):
                assert not await end.read()
        assert via.peer in [fields["relay"] for fields in await said(world, "relay_lost", 1)]
        assert not via.transport.network.relay.book.places

    play(scenario)


def test_pings_that_come_together_after_a_stall_cost_no_place_and_a_flood_does() -> None:
    async def scenario(world: World) -> None:
        via, peer = await world.member(), await world.member()
        async with asks(peer, via, RESERVE, Reserve()) as place:
            assert isinstance(await reply(place), Reserved)
            for _ in range(3):
                await place.write(write_ask(Ping(bytes(NONCE_BYTES))))
            assert [await reply(place) for _ in range(3)] == [Pong(bytes(NONCE_BYTES))] * 3
            with contextlib.suppress(SwarmError):
                for _ in range(50):
                    await place.write(write_ask(Ping(bytes(NONCE_BYTES))))
                while await reply(place):
                    pass
            assert not via.transport.network.relay.book.places

    play(scenario)


def test_arrivals_that_nobody_waits_for_are_soon_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RELAY_SUMMONS", Rate(0.01, burst_s=200.0))

    async def scenario(world: World) -> None:
        via, stranger = await world.member(), await world.member()

        async def answer(at: int) -> type:
            async with asks(stranger, via, ARRIVE, Arrive(bytes([at]) * 16)) as end:
                return type(await reply(end))

        assert [await answer(0), await answer(1)] == [Accepted, Accepted]
        refused: type | None = None
        while refused is None:  # gRPC may end a call that is refused at once before its answer is read
            with contextlib.suppress(PeerGone):
                refused = await answer(2)
        assert refused is Busy

    play(scenario)


# ---------------------------------------------------------------- relays that cheat


async def answers_at_last(caller: End, callee: End) -> None:
    while True:
        with contextlib.suppress(PeerGone, PeerTimeout):
            if await answers(caller, callee):
                return


async def a_cheat_and_others(world: World, *, callers: int = 1) -> tuple[GrpcTransport, End, list[End]]:
    """A relay that a hidden peer has chosen, the peer, and callers, whom the cheat's addresses tell to try it first."""
    for _ in range(3):
        await world.member(relay_bytes_per_s=1e10)
    peer = await world.hidden()
    await said(world, "relay_reserved", hidden.WANTED)
    found = [await world.hidden(config=GrpcConfig(stall_s=1.0)) for _ in range(callers)]
    return world.transports[peer.transport.network.relays[0]], peer, found


class Garbling:
    """An end whose bytes come out wrong, one in each message."""

    def __init__(self, end: CallEnd) -> None:
        self._end, self.times = end, 0

    async def read(self) -> bytes:
        data = await self._end.read()
        self.times += bool(data)
        return data[:-1] + bytes([data[-1] ^ 1]) if data else data

    async def write(self, data: bytes) -> None:
        await self._end.write(data)


def test_a_relay_that_garbles_costs_that_connection_and_another_is_taken() -> None:
    async def scenario(world: World) -> None:
        cheat, peer, (caller,) = await a_cheat_and_others(world)
        ends: list[Garbling] = []

        async def join(who: PeerId, ask: Connect, home: str, near: CallEnd, far: CallEnd) -> None:
            ends.append(Garbling(far))
            await splice(near, ends[-1])

        cheat.network.relay._join = join
        await answers_at_last(caller, peer)
        assert ends and ends[0].times, "the cheat was tried first"
        assert peer.service.told.empty()
        assert await answers(caller, peer), "on the other relay from then on"

    play(scenario)


def test_a_relay_that_garbles_in_the_middle_breaks_a_call_and_no_answer_is_wrong() -> None:
    async def scenario(world: World) -> None:
        cheat, peer, (caller,) = await a_cheat_and_others(world)
        wrong = asyncio.Event()

        class Later(Garbling):
            async def read(self) -> bytes:
                return await (super().read() if wrong.is_set() else self._end.read())

        async def join(who: PeerId, ask: Connect, home: str, near: CallEnd, far: CallEnd) -> None:
            await splice(near, Later(far))

        cheat.network.relay._join = join
        assert await answers(caller, peer)
        wrong.set()
        with pytest.raises(PeerGone):
            await answers(caller, peer)
        await answers_at_last(caller, peer)

    play(scenario)


def test_a_relay_that_accepts_and_passes_nothing_on_is_left_by_callers_and_by_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hidden, "_PROBE_S", 0.1)
    ping_often(monkeypatch)
    monkeypatch.setattr(hidden, "SILENCE_S", 2.0)

    async def scenario(world: World) -> None:
        cheat, peer, (caller,) = await a_cheat_and_others(world)
        tried: list[PeerId] = []

        async def join(who: PeerId, ask: Connect, home: str, near: CallEnd, far: CallEnd) -> None:
            tried.append(who)
            await asyncio.gather(near.over.wait(), far.over.wait())

        cheat.network.relay._join = join
        await answers_at_last(caller, peer)
        # On a slow machine the peer may have given it a second chance by now.
        lost = {fields["relay"] for fields in await said(world, "relay_lost", 1)}
        assert lost == {cheat.peer} and caller.peer in tried
        while len(peer.transport.network.relays) < hidden.WANTED:
            world.news.clear()
            await world.news.wait()
        assert cheat.peer not in peer.transport.network.relays

    play(scenario)


def test_a_relay_that_answers_the_peers_probes_itself_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "_PROBE_S", 0.1)

    async def scenario(world: World) -> None:
        cheat, *_ = await a_cheat_and_others(world, callers=0)

        async def answer(_: PeerId, ask: Connect, context: grpc.aio.ServicerContext) -> None:
            await context.write(write_reply(Accepted()))
            await CallEnd(context).write(ask.id)

        cheat.network.relay._connect = answer
        (lost,) = await said(world, "relay_lost", 1)
        assert lost["relay"] == cheat.peer and "leads nowhere" in str(lost["reason"])

    play(scenario)


def test_a_relay_that_summons_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "_PROBE_S", 0.1)
    monkeypatch.setattr(relay, "COME_S", 0.5)

    async def scenario(world: World) -> None:
        cheat, peer, (caller,) = await a_cheat_and_others(world)
        cheat.network.relay.request_connect_back = lambda *_, **__: 0.0
        lost = await said(world, "relay_lost", 1)
        assert lost[0]["relay"] == cheat.peer and "leads nowhere" in str(lost[0]["reason"])
        await answers_at_last(caller, peer)

    play(scenario)


def test_a_relay_that_does_not_answer_is_no_word_about_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    ping_often(monkeypatch)
    monkeypatch.setattr(hidden, "COME_S", 1.0)
    monkeypatch.setattr(network, "COME_S", 1.0)
    monkeypatch.setattr(hidden, "SILENCE_S", 2.0)

    async def scenario(world: World) -> None:
        cheat, peer, _ = await a_cheat_and_others(world, callers=0)
        caller = await world.member()

        async def hang(*_: object) -> None:
            await asyncio.Event().wait()

        cheat.network.relay._connect = hang
        await answers_at_last(caller, peer)
        assert not caller.transport.relayed(peer.peer), "it came to us, sent by the other"

    play(scenario)


def test_a_peer_counts_as_relayed_until_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "REVERSE_S", 0.0)
    monkeypatch.setattr(network, "IN_VAIN", Rate.every(1e-3))

    async def scenario(world: World) -> None:
        via, caller, peer = await world.member(relay_bytes_per_s=1e10), await no_relay(world), await world.hidden()
        assert (
            await answers(caller, peer)
            and caller.transport.relayed(peer.peer)
            and len(via.transport.network.relay.book)
        )
        monkeypatch.setattr(network, "REVERSE_S", LIMIT_S)
        caller.transport._channels_to(peer.peer).leave_relays()
        assert caller.transport.relayed(peer.peer), "nothing has come yet"
        assert await answers(caller, peer) and not caller.transport.relayed(peer.peer)
        assert await answers(caller, peer)
        assert not caller.transport._channels_to(peer.peer)._retired, "nothing uses the circuits any more"

    play(scenario)


def test_a_peer_that_never_comes_costs_its_caller_a_while_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "COME_S", 0.1)

    async def scenario(world: World) -> None:
        via, mute, caller = await world.member(), await world.member(), await world.member()
        async with asks(mute, via, RESERVE, Reserve()) as place:
            assert isinstance(await reply(place), Reserved)
            async with asks(caller, via, CONNECT, Connect(mute.peer, bytes(16))) as end:
                assert await end.read() == b""
            assert not len(via.transport.network.relay.book)
            assert set(via.transport.network.relay.book.places) == {mute.peer}

    play(scenario)


def test_circuits_do_not_lead_through_circuits() -> None:
    async def scenario(world: World) -> None:
        await world.member()
        middle, far, caller = await world.hidden(), await world.hidden(), await world.member()
        lookup = world.addresses
        through = str(Address.circuit(middle.peer, far.peer))
        caller.transport.network._lookup = lambda peer: (through,) if peer == far.peer else lookup(peer)
        with pytest.raises(PeerGone):
            await answers(caller, far)
        # Nor does a peer come to one that says it can be dialled, and cannot.
        via = world.transports[far.transport.network.relays[0]]
        assert via.network.relay.request_connect_back(middle.peer, far.peer, bytes(16), reverse=True, home="") == 0
        assert await answers(caller, middle), "time for it to have come"
        assert not far.transport.network.places._coming

    play(scenario)


def test_a_connection_that_stalls_is_replaced() -> None:
    async def scenario(world: World) -> None:
        async with AsyncExitStack() as stack:
            cable, identity = Cable(), Identity.generate()
            await cable.lay(stack)
            far = await world.member(announce=(Address.of("127.0.0.1", cable.port, identity.peer),), identity=identity)
            cable.lead_to(far.transport.port)
            caller = await world.member(config=GrpcConfig(stall_s=0.5))
            assert await answers(caller, far)
            cable.pull(for_good=False)
            with pytest.raises(PeerTimeout, match="stalls"):
                await answers(caller, far)
            await answers_at_last(caller, far)

    play(scenario)


def test_closing_does_not_mind_who_is_looked_up_meanwhile() -> None:
    async def scenario(world: World) -> None:
        one, other, third = [await world.member() for _ in range(3)]
        assert await answers(one, other)
        channels = one.transport._channels_to(other.peer)
        close = channels.close

        async def looks_up_and_closes() -> None:
            one.transport._channels_to(third.peer)
            await close()

        channels.close = looks_up_and_closes
        await one.transport.__aexit__(None, None, None)

    play(scenario)
