"""The gRPC transport on real sockets: the common contract, hostile peers, and real deaths."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from swarmnet import PROTOCOL_VERSION
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, RejectCode, UsageError
from swarmnet.ids import Ballot, Generation, PeerId, RunId
from swarmnet.manifest.file import load
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import (
    Accepted,
    Answer,
    Fetched,
    Gradient,
    ManifestData,
    ManifestRequest,
    Packed,
    Process,
    Rejected,
    Request,
    StagePlan,
)
from swarmnet.net import tls
from swarmnet.net.address import Address
from swarmnet.net.greeting import HELLO, Greeter
from swarmnet.net.grpc_caller import METHODS
from swarmnet.net.grpc_link import LINK
from swarmnet.net.grpc_options import CHANNEL_OPTIONS, GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.tls import Leaf, trust_anchor
from swarmnet.testing.doubles import FakeService
from swarmnet.transport import ReadPayload
from swarmnet.wire.convert import (
    MAX_FILLED_IN_CHARS,
    NONCE_BYTES,
    GreetFirst,
    Hello,
    Ping,
    TensorHeader,
    read_answer,
    read_hello,
    write_control,
    write_hello,
    write_request,
)
from swarmnet.wire.framing import CHUNK_BYTES
from tests.contracts.transport_contract import CHECKS, FETCH, HEARTBEAT, LIMIT_S, PROCESS, End, Pair, execute, packed


def claim_of(peer: PeerId) -> StagePlan:
    return StagePlan(HEARTBEAT.stamp, Ballot(0, peer), Generation(1, 0), frozenset({3}))


RUN = RunId("ab" * 32)
ALICE = Identity.generate().peer


def make_transport(
    book: dict[PeerId, tuple[str, ...]], *, run: RunId | None = RUN, identity: Identity | None = None, **options
) -> tuple[GrpcTransport, FakeService]:
    """A transport that looks peers up in `book`."""
    identity = identity or Identity.generate()
    service = FakeService()
    transport = GrpcTransport(identity, run, addresses=lambda peer: book.get(peer, ()), service=service, **options)
    return transport, service


@asynccontextmanager
async def grpc_pair(config: GrpcConfig = GrpcConfig()) -> AsyncIterator[Pair]:  # noqa: B008
    """Two transports in this process, over TLS on loopback."""
    book: dict[PeerId, tuple[str, ...]] = {}
    a, service_a = make_transport(book, config=config)
    b, service_b = make_transport(book, config=config)
    async with a, b:
        book |= {a.peer: a.addresses, b.peer: b.addresses}
        yield Pair(End(a.peer, a, service_a), End(b.peer, b, service_b), lambda: b.__aexit__(None, None, None))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            await check(pair)

    asyncio.run(main())


def run(scenario: Callable[[Pair], Awaitable[None]], config: GrpcConfig = GrpcConfig()) -> None:  # noqa: B008
    """Play a scenario on a fresh pair."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair(config) as pair:
            await scenario(pair)

    asyncio.run(main())


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_breaks_no_call(by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pair: Pair) -> None:
        pair.b.service.answering, real = fetched, time.time
        for offset_s in (0.0, by_s):
            monkeypatch.setattr(time, "time", lambda offset_s=offset_s: real() + offset_s)
            assert [x async for x in pair.a.transport.call(pair.b.peer, FETCH, deadline=in_s(10))] == [Fetched()]

    run(scenario)


# ---------------------------------------------------------------- greetings


def refusal_of(greeter_a: Greeter, greeter_b: Greeter) -> Rejected:
    """What a call from one greeter to the other is answered."""

    async def main() -> Answer:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book, greeter=greeter_a)
        b, service = make_transport(book, greeter=greeter_b)
        service.answering = never_asked
        async with asyncio.timeout(LIMIT_S), a, b:
            book |= {b.peer: b.addresses}
            (answer,) = [answer async for answer in a.call(b.peer, PROCESS, (packed(10_000_000),), deadline=in_s(10))]
            return answer

    answer = asyncio.run(main())
    assert isinstance(answer, Rejected)
    return answer


async def never_asked(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
    raise AssertionError("a stranger's call reached the service")
    yield


def in_s(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


GREETER = Greeter(RUN, 60.0)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run": RunId("cd" * 32)}, RejectCode.WRONG_RUN),
        ({"run": None}, RejectCode.WRONG_RUN),
        ({"version": (PROTOCOL_VERSION[0] + 1, 0)}, RejectCode.WRONG_VERSION),
        ({"clock": lambda: time.time() + 75}, RejectCode.CLOCK),
        ({"clock": lambda: time.time() - 75}, RejectCode.CLOCK),
    ],
    ids=["run", "no-run", "version", "clock-ahead", "clock-behind"],
)
def test_peers_that_do_not_fit_are_refused_in_words(changes: dict, code: RejectCode) -> None:
    odd = dataclasses.replace(GREETER, **changes)
    refusals = [refusal_of(GREETER, odd)] + ([refusal_of(odd, GREETER)] if odd.run else [])
    for refusal in refusals:
        assert refusal.code is code and len(refusal.reason) > 20


def test_either_end_refuses() -> None:
    """A callee that greets everybody is refused by the caller."""
    hello = Hello(RunId("cd" * 32), *PROTOCOL_VERSION, time.time())
    refusal = GREETER.judge(hello, ALICE, sent=time.time())
    assert refusal is not None and refusal.code is RejectCode.WRONG_RUN
    hello = dataclasses.replace(hello, run=RUN)
    assert GREETER.judge(hello, ALICE, sent=time.time()) is None
    late = dataclasses.replace(hello, clock=time.time() - 70)
    assert GREETER.judge(late, ALICE, sent=time.time() - 20) is None  # 20 s of it may have been the journey
    assert GREETER.judge(late, ALICE) is not None


def completing(text: str) -> Greeter:
    """One that completes the run's manifest so."""
    return dataclasses.replace(GREETER, completed=hashlib.sha256(text.encode()).digest(), filled_in=text)


def test_a_manifest_that_two_versions_complete_differently_is_refused_by_its_field() -> None:
    here, there = (
        completing('averaging.codec = "int64"\ntraining.max_discarded = 0'),
        completing("training.max_discarded = 7"),
    )
    said = (
        "manifests differ, training.max_discarded, which run.toml leaves out, is {} for the caller "
        "and {} for the callee"
    )
    for caller, callee in ((here, there), (there, here)):
        words = said.format(caller.filled_in[-1], callee.filled_in[-1])
        refusal = refusal_of(caller, callee)
        assert refusal.code is RejectCode.WRONG_RUN
        assert refusal.reason == f"{words}: run one version of swarmnet (docs/manifest.md)"
        assert caller.judge(callee.hello(), ALICE, sent=caller.clock()) == refusal, "a callee that does not look"

    def judged(caller: Greeter, callee: Greeter) -> list[Rejected | None]:
        return [callee.judge(caller.hello(), ALICE), caller.judge(callee.hello(), ALICE, sent=caller.clock())]

    # A field that only one of them knows has the default that means: as before.
    later = completing("training.max_discarded = 0")
    for fits in (here, later, GREETER):  # the last one is of a version before, which says nothing
        assert judged(here, fits) == judged(fits, here) == [None, None]
    unnamed = judged(dataclasses.replace(here, completed=b"x" * 32), here)[0]
    assert unnamed is not None and "in a field that neither peer names" in unnamed.reason
    hostile = judged(completing("training.max_discarded = " + "[" * 9000), here)[0]
    assert hostile is not None and len(hostile.reason) < 300


def test_what_hello_says_of_a_manifest_is_read_as_it_was_written() -> None:
    least = RunTerms.of(load("format = 1\n"))
    assert least.filled_in.count("\n") > 80 and 'data.source = "stdlib"' in least.filled_in.splitlines()
    assert 3 * len(least.filled_in) < MAX_FILLED_IN_CHARS, "room for the fields of later versions"
    whole = RunTerms.of(Manifest())
    assert whole.filled_in == "" and whole.completed == least.completed and whole.run != least.run
    hello = dataclasses.replace(GREETER, completed=least.completed, filled_in=least.filled_in).hello()
    assert read_hello(write_hello(hello)) == hello


def test_minor_versions_work_together() -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book, greeter=dataclasses.replace(GREETER, version=(PROTOCOL_VERSION[0], 7)))
        b, service = make_transport(book)
        service.answering = fetched
        async with a, b:
            book |= {b.peer: b.addresses}
            assert [answer async for answer in a.call(b.peer, FETCH, deadline=in_s(10))] == [Fetched()]
            hello = b._callee.greeted.get(a.peer)
            assert hello is not None and hello.minor == 7
            assert a._callee.greeted.get(b.peer) is None

    asyncio.run(main())


async def fetched(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
    yield Fetched()


def test_a_manifest_needs_no_greeting() -> None:
    async def manifest(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield ManifestData("format = 1")

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        joiner, _ = make_transport(book, run=None)
        b, service = make_transport(book)
        service.answering = manifest
        async with joiner, b:
            book |= {b.peer: b.addresses}
            answers = [answer async for answer in joiner.call(b.peer, ManifestRequest(), deadline=in_s(10))]
            assert answers == [ManifestData("format = 1")]

    asyncio.run(main())


def test_a_restarted_callee_is_greeted_again() -> None:
    """The new process at the old address does not know the caller; the caller notices and repeats by itself."""

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, heard = make_transport(book)
        b, service = make_transport(book)
        service.answering = fetched
        async with a, b:
            book |= {b.peer: b.addresses}
            assert [x async for x in a.call(b.peer, FETCH, deadline=in_s(10))] == [Fetched()]
            del b._callee.greeted[a.peer]
            assert [x async for x in a.call(b.peer, FETCH, deadline=in_s(10))] == [Fetched()]
            del b._callee.greeted[a.peer]
            a.tell(b.peer, execute(5, a.peer))
            assert (await service.told.get())[1].execute == {5}
            assert heard.gone.empty()

    asyncio.run(main())


def test_several_addresses_are_tried() -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, heard = make_transport(book)
        b, service = make_transport(book)
        service.answering = fetched
        async with a, b:
            book |= {b.peer: ("/ip4/127.0.0.1/tcp/1", "/nonsense", *b.addresses)}
            assert [x async for x in a.call(b.peer, FETCH, deadline=in_s(10))] == [Fetched()]
            while not heard.gone.empty():
                assert not heard.gone.get_nowait()[1], "one of its addresses listens"

    asyncio.run(main())


def test_a_peer_without_address_is_gone_for_now() -> None:
    async def main() -> None:
        a, _ = make_transport({})
        async with a:
            with pytest.raises(PeerGone) as caught:
                async for _ in a.call(Identity.generate().peer, FETCH, deadline=in_s(10)):
                    raise AssertionError("nobody answered")
            assert not caught.value.definite

    asyncio.run(main())


def test_a_taken_port_is_a_usage_error() -> None:
    async def main() -> None:
        a, _ = make_transport({})
        async with a:
            b, _ = make_transport({}, port=a.port)
            with pytest.raises(UsageError, match="--port"):
                await b.__aenter__()

    asyncio.run(main())


# ---------------------------------------------------------------- bad input


@asynccontextmanager
async def raw_channel(target: GrpcTransport, key: bytes, chain: bytes) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of somebody who speaks gRPC, but not through our transport."""
    credentials = grpc.ssl_channel_credentials(trust_anchor(target.peer), key, chain)
    where = Address.parse(target.addresses[0]).target
    async with grpc.aio.secure_channel(where, credentials, options=CHANNEL_OPTIONS) as channel:
        yield channel


def hostile(identity: Identity | None = None) -> Leaf:
    """TLS material of an admitted peer."""
    identity = identity or Identity.generate()
    return Leaf(identity)


async def say_hello(channel: grpc.aio.Channel) -> None:
    await channel.unary_unary(HELLO)(write_hello(GREETER.hello()), timeout=5)


async def first_answer(channel: grpc.aio.Channel, *messages: bytes, method: str = METHODS[Process]) -> Answer:
    """What the callee says to these messages of one stream."""
    stream = channel.stream_stream(method)(timeout=5)
    for message in messages:
        await stream.write(message)
    answer, _, _ = read_answer(await stream.read())
    stream.cancel()
    return answer


def with_victim(scenario: Callable[[GrpcTransport, FakeService], Awaitable[None]], **options) -> None:
    """Play a scenario against one transport, which must still serve afterwards."""

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        victim, service = make_transport(book, **options)
        friend, _ = make_transport(book)
        async with asyncio.timeout(LIMIT_S), victim, friend:
            book |= {victim.peer: victim.addresses}
            await scenario(victim, service)
            service.answering = fetched
            assert [x async for x in friend.call(victim.peer, FETCH, deadline=in_s(10))] == [Fetched()], "unharmed"

    asyncio.run(main())


def test_strangers_are_told_to_greet_before_their_payload() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        service.answering = never_asked
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            header = write_request(PROCESS, (TensorHeader("uint8", (1 << 20,), 1 << 20),))
            assert await first_answer(channel, header) == GreetFirst()
            assert await first_answer(channel, method=LINK) == GreetFirst()

    with_victim(scenario)


BIG = 1 << 40


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ((b"\xff\xff\xff",), RejectCode.MALFORMED),
        ((b"",), RejectCode.MALFORMED),
        ((write_request(FETCH),), RejectCode.MALFORMED),
        ((write_request(PROCESS, (TensorHeader("uint8", (BIG,), BIG),)),), RejectCode.TOO_LARGE),
        ((write_request(PROCESS, (TensorHeader("uint8", (2**20 + 1,), 2**20 + 1),)),), RejectCode.TOO_LARGE),
        ((write_request(PROCESS, (TensorHeader("uint8", (2**19 + 1,), 2**19 + 1),)),), RejectCode.TOO_LARGE),
        ((write_request(PROCESS, (TensorHeader("fp32", (4,), 15),)),), RejectCode.BAD_SHAPE),
        ((write_request(PROCESS, (TensorHeader("zip", (4,), 4),)),), RejectCode.MALFORMED),
        ((write_request(PROCESS, (TensorHeader("uint8", (4,), 4),)), b"12345"), RejectCode.MALFORMED),
        ((write_request(PROCESS, (TensorHeader("uint8", (4,), 4),)), b"123"), RejectCode.MALFORMED),
    ],
    ids=[
        "junk",
        "empty",
        "other-method",
        "huge",
        "oversize",
        "microbatch",
        "length",
        "codec",
        "long-chunk",
        "short-chunk",
    ],
)
def test_bad_calls_are_refused(messages: tuple[bytes, ...], code: RejectCode) -> None:
    async def reading(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Gradient(0.0, len(await payload()))

    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        service.answering = reading
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            await say_hello(channel)
            answer = await first_answer(channel, *messages)
            assert isinstance(answer, Rejected) and answer.code is code

    with_victim(scenario, config=GrpcConfig(max_payload_bytes=1 << 20, max_microbatch_bytes=1 << 19))


def test_a_message_over_the_frame_limit_fails_alone() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            await say_hello(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first_answer(channel, bytes(8 << 20))
            assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)

    with_victim(scenario)


def test_junk_on_a_link_closes_it_with_a_reason() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            await say_hello(channel)
            stream = channel.stream_stream(LINK)(timeout=5)
            assert read_answer(await stream.read())[0] == Accepted()
            await stream.write(b"\xff\xff")
            answer, _, _ = read_answer(await stream.read())
            assert isinstance(answer, Rejected) and answer.code is RejectCode.MALFORMED
            assert service.told.empty()

    with_victim(scenario)


def test_a_caller_that_ends_its_upload_early_is_gone() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        outcome: asyncio.Queue[Exception] = asyncio.Queue()

        async def reading(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            try:
                await payload()
            except PeerGone as error:
                outcome.put_nowait(error)
                raise
            yield Fetched()

        service.answering = reading
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            await say_hello(channel)
            stream = channel.stream_stream(METHODS[Process])(timeout=5)
            await stream.write(write_request(PROCESS, (TensorHeader("uint8", (2 * CHUNK_BYTES,), 2 * CHUNK_BYTES),)))
            await stream.write(bytes(CHUNK_BYTES))
            await stream.done_writing()  # what a dying caller looks like
            assert isinstance(await outcome.get(), PeerGone)

    with_victim(scenario)


def test_a_caller_that_stops_uploading_times_out() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        outcome: asyncio.Queue[Exception] = asyncio.Queue()

        async def reading(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            try:
                await payload()
            except PeerGone as error:
                outcome.put_nowait(error)
                raise
            yield Fetched()

        service.answering = reading
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            await say_hello(channel)
            stream = channel.stream_stream(METHODS[Process])(timeout=10)
            await stream.write(write_request(PROCESS, (TensorHeader("uint8", (2 << 20,), 2 << 20),)))
            assert "stalls" in str(await outcome.get())
            stream.cancel()

    with_victim(scenario, config=GrpcConfig(stall_s=0.4))


def test_a_bug_in_the_service_costs_one_call() -> None:
    async def buggy(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Accepted()
        raise KeyError("a bug")

    async def scenario(pair: Pair) -> None:
        pair.b.service.answering = buggy
        with pytest.raises(PeerGone) as caught:
            async for answer in pair.call_b(PROCESS):
                assert answer == Accepted()
        assert not caught.value.definite
        pair.b.service.answering = fetched
        assert [answer async for answer in pair.call_b(FETCH)] == [Fetched()]
        assert pair.a.service.gone.empty()

    run(scenario)


def test_who_calls_but_cannot_be_called_is_told_on_its_own_link_and_not_reached() -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, service_a = make_transport(book, config=GrpcConfig(stall_s=0.3))
        b, service_b = make_transport(book)
        silence = await asyncio.start_server(_say_nothing, "127.0.0.1", 0)  # as a firewall: no answer, no refusal
        port = silence.sockets[0].getsockname()[1]
        async with asyncio.timeout(LIMIT_S), a, b, silence:
            book |= {a.peer: a.addresses, b.peer: (str(Address.of("127.0.0.1", port)),)}
            b.tell(a.peer, HEARTBEAT)
            assert await service_b.reached.get() == a.peer
            assert await service_a.told.get() == (b.peer, HEARTBEAT)
            a.tell(b.peer, HEARTBEAT)
            with pytest.raises(PeerTimeout):
                async for _ in a.call(b.peer, FETCH, deadline=in_s(10)):
                    raise AssertionError("nobody can call b")
            assert await service_b.told.get() == (a.peer, HEARTBEAT), "it came back on the link of b"
            a.tell(b.peer, claim_of(a.peer))
            assert await service_b.told.get() == (a.peer, claim_of(a.peer))
            assert service_a.reached.empty()

    asyncio.run(main())


def test_what_is_wrong_on_the_way_back_ends_that_link_and_nothing_else() -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, service_a = make_transport(book)
        b, service_b = make_transport(book)
        async with asyncio.timeout(LIMIT_S), a, b:
            book |= {a.peer: a.addresses}
            b.tell(a.peer, HEARTBEAT)
            assert await service_a.told.get() == (b.peer, HEARTBEAT)
            links = a._callee._back
            for wrong in (b"no message", write_control(Ping(bytes(NONCE_BYTES)))):
                link = links[b.peer]
                link._write = lambda _, wrong=wrong: wrong
                link.put(HEARTBEAT)
                while links.get(b.peer) in (None, link):  # it ends, and the next message opens another
                    b.tell(a.peer, HEARTBEAT)
                    await asyncio.sleep(0.01)
            assert a._callee.tell_back(b.peer, claim_of(a.peer)) and service_b.told.empty()
            assert await service_b.told.get() == (a.peer, claim_of(a.peer))

    asyncio.run(main())


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def test_a_dial_says_who_can_be_connected_to_and_what_stood_in_the_way() -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book)
        b, _ = make_transport(book)
        c, _ = make_transport(book)
        silence = await asyncio.start_server(_say_nothing, "127.0.0.1", 0)
        mute = Address.of("127.0.0.1", silence.sockets[0].getsockname()[1])

        async def stood_in_the_way(address: object, *, within_s: float = 5.0) -> PeerGone | PeerTimeout:
            with pytest.raises((PeerGone, PeerTimeout)) as caught:
                await a.dial(b.peer, str(address), deadline=in_s(within_s))
            return caught.value

        async with asyncio.timeout(LIMIT_S), a, c, silence:
            async with b:
                await a.dial(b.peer, b.addresses[0], deadline=in_s(5))
                closed = b.addresses[0]
                # Where it has called from it may be dialled without a record.
                await b.dial(a.peer, a.addresses[0], deadline=in_s(5))
                await a.dial(b.peer, f"/ip4/0.0.0.0/tcp/{b.port}", deadline=in_s(5))
                # It has seen who came in; from this machine that proves nothing for others.
                assert list(b._dialling.dials.callers) == ["127.0.0.1"] and not b.came_from()
                b._dialling.dials.called(c.peer, "44.0.0.7")
                assert b.came_from() == {b.network_of(c.peer)} == {"44.0.0.0/24"} and not b.network_of(a.peer)
                b.mapped = Address.of("44.0.0.200", 1)
                assert not b.came_from(), "one of its own network"
            assert (await stood_in_the_way(closed)).message == "refused"
            assert (await stood_in_the_way(Address.of("127.0.0.1", c.port))).message == "another peer answers there"
            assert (await stood_in_the_way(c.addresses[0])).message == "the address of another peer"
            assert (await stood_in_the_way("somewhere")).message == "no TCP address"
            assert isinstance(await stood_in_the_way(mute, within_s=0.3), PeerTimeout)

    asyncio.run(main())


def test_bad_answers_are_bad_messages() -> None:
    """The callee's declared answer is checked like a caller's payload."""

    async def large(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Gradient(0.0, 1, payload=(packed(2 << 20),))

    async def nonsense(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Gradient(0.0, 1, payload=(Packed("fp32", (3,), b"12345"),))

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book, config=GrpcConfig(max_payload_bytes=1 << 20))
        b, service = make_transport(book)
        async with a, b:
            book |= {b.peer: b.addresses}
            for answering, code in [(large, RejectCode.TOO_LARGE), (nonsense, RejectCode.BAD_SHAPE)]:
                service.answering = answering
                with pytest.raises(BadMessage) as caught:
                    async for _ in a.call(b.peer, PROCESS, deadline=in_s(10)):
                        raise AssertionError("a bad answer was believed")
                assert caught.value.code is code

    asyncio.run(main())


def test_a_slow_service_is_not_a_stalled_peer() -> None:
    async def slow(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Accepted()
        await asyncio.sleep(1.0)  # more than three stalls long
        yield Gradient(0.0, (await payload())[0].num_bytes)

    async def scenario(pair: Pair) -> None:
        pair.b.service.answering = slow
        answers = [answer async for answer in pair.call_b(PROCESS, (packed(20_000_000),))]
        assert answers == [Accepted(), Gradient(0.0, 20_000_000)]

    run(scenario, GrpcConfig(stall_s=0.3))


# ---------------------------------------------------------------- identity inside the channel


def _certificate(**parts) -> bytes:
    """A certificate of the attacker's own making."""
    return tls._pem(tls._certificate(**parts))


def test_impostors_and_outsiders_do_not_get_in() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        async def refused(key: bytes, chain: bytes) -> bool:
            async with raw_channel(victim, key, chain) as channel:
                try:
                    await say_hello(channel)
                except grpc.aio.AioRpcError as error:
                    return error.code() is grpc.StatusCode.UNAVAILABLE
            return False

        alice, mallory = Identity.generate(), Identity.generate()
        leaf = hostile(mallory)
        valid = tls._window(time.time(), 3600.0)
        alices_pass = tls.admit(alice.peer)
        session = leaf._session
        forged = _certificate(
            subject=tls.TLS_NAME,
            subject_key=session.public_key(),
            issuer=alice.peer,
            key=mallory.key,
            is_ca=False,
            valid=valid,
            dns_name=tls.TLS_NAME,
        )
        outsiders_pass = _certificate(
            subject=mallory.peer,
            subject_key=mallory.key.public_key(),
            issuer="somebody else",
            key=session,
            is_ca=True,
            valid=valid,
            path_length=0,
        )
        own_leaf = leaf.chain.removesuffix(leaf._intermediate)
        expired = Leaf(mallory, clock=lambda: time.time() - 30 * 24 * 3600)
        assert not await refused(leaf.key, leaf.chain)
        assert await refused(leaf.key, forged + alices_pass), "a leaf the identity key did not sign"
        assert await refused(leaf.key, own_leaf + outsiders_pass), "another admission authority"
        assert await refused(expired.key, expired.chain), "an expired leaf"
        async with grpc.aio.secure_channel(
            Address.parse(victim.addresses[0]).target,
            grpc.ssl_channel_credentials(trust_anchor(victim.peer)),
            options=CHANNEL_OPTIONS,
        ) as anonymous:
            with pytest.raises(grpc.aio.AioRpcError):
                await say_hello(anonymous)

    with_victim(scenario)


def test_a_stuffed_chain_names_the_attacker_or_nobody() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        callers: list[PeerId] = []

        async def who(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            callers.append(caller)
            yield Fetched()

        service.answering = who
        alice, mallory = Identity.generate(), Identity.generate()
        leaf = hostile(mallory)
        own_leaf, own_pass = (
            part + b"-----END CERTIFICATE-----\n" for part in leaf.chain.split(b"-----END CERTIFICATE-----\n")[:2]
        )
        alices_pass = tls.admit(alice.peer)
        async with raw_channel(victim, leaf.key, own_leaf + alices_pass + own_pass) as channel:
            await say_hello(channel)
            assert await first_answer(channel, write_request(FETCH), method=METHODS[type(FETCH)]) == Fetched()
        assert callers == [mallory.peer]
        valid = tls._window(time.time(), 3600.0)
        as_alice = {"issuer": alice.peer, "key": mallory.key, "is_ca": False, "valid": valid}
        evil_leaf = _certificate(
            subject=tls.TLS_NAME, subject_key=leaf._session.public_key(), dns_name=tls.TLS_NAME, **as_alice
        )
        evil_pass = _certificate(
            subject=alice.peer,
            subject_key=mallory.key.public_key(),
            issuer=tls._ADMISSION,
            key=tls._admission_key(),
            is_ca=True,
            valid=valid,
            path_length=0,
        )
        async with raw_channel(victim, leaf.key, evil_leaf + evil_pass + alices_pass) as channel:
            answer = await first_answer(channel, write_request(FETCH), method=METHODS[type(FETCH)])
            assert isinstance(answer, Rejected) and answer.code is RejectCode.UNKNOWN_IDENTITY
        assert callers == [mallory.peer]

    with_victim(scenario)


def test_another_peer_at_the_address_is_not_talked_to() -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book)
        b, service = make_transport(book)
        service.answering = never_asked
        expected = Identity.generate().peer
        async with a, b:
            book |= {expected: (str(Address.of("127.0.0.1", b.port)),)}
            with pytest.raises(PeerGone) as caught:
                async for _ in a.call(expected, PROCESS, deadline=in_s(10)):
                    raise AssertionError("an impostor answered")
            assert not caught.value.definite

    asyncio.run(main())


# ---------------------------------------------------------------- real processes


@asynccontextmanager
async def child(tmp_path: Path, *, port: int = 0, stall_s: float = 10.0) -> AsyncIterator[tuple]:
    """A peer in its own process: (process, peer id, addresses)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("grpc_child.py")),
        RUN,
        str(tmp_path / "key"),
        str(port),
        str(stall_s),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout is not None
        peer, *addresses = (await process.stdout.readline()).decode().split()
        yield process, PeerId(peer), tuple(addresses)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_sigkill_is_definite_and_fast(tmp_path: Path) -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, heard = make_transport(book)
        async with a, child(tmp_path) as (process, peer, addresses):
            book[peer] = addresses
            a.tell(peer, execute(0, a.peer))
            with pytest.raises(PeerGone) as caught:
                async for answer in a.call(peer, PROCESS, (packed(100),), deadline=in_s(20)):
                    assert answer == Accepted()
                    process.send_signal(signal.SIGKILL)
                    killed = time.perf_counter()
            seconds = time.perf_counter() - killed
            assert caught.value.definite
            assert await heard.gone.get() == (peer, True)
            print(f"SIGKILL of the callee was definite after {seconds:.3f} s")
            with pytest.raises(PeerGone) as caught:
                async for _ in a.call(peer, FETCH, deadline=in_s(20)):
                    raise AssertionError("the dead answered")
            assert caught.value.definite
            assert heard.gone.empty(), "said once"

    asyncio.run(main())


def test_a_stopped_process_is_a_timeout_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, heard = make_transport(book, config=GrpcConfig(stall_s=0.5))
        async with a, child(tmp_path, stall_s=0.5) as (process, peer, addresses):
            book[peer] = addresses
            with pytest.raises(PeerTimeout, match="stalls"):
                async for answer in a.call(peer, PROCESS, (packed(40_000_000),), deadline=in_s(20)):
                    assert answer == Accepted()
                    process.send_signal(signal.SIGSTOP)
            with pytest.raises(PeerTimeout, match="stalls"):
                async for _ in a.call(peer, FETCH, deadline=in_s(20)):
                    raise AssertionError("a stopped process answered")
            process.send_signal(signal.SIGCONT)
            assert [answer async for answer in a.call(peer, FETCH, deadline=in_s(20))] == [Fetched()]
            assert heard.gone.empty(), "silence is not death"

    asyncio.run(main())


def test_a_stopped_process_is_not_reached_until_it_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, heard = make_transport(book, config=GrpcConfig(stall_s=0.5))
        async with asyncio.timeout(LIMIT_S), a, child(tmp_path, stall_s=0.5) as (process, peer, addresses):
            book[peer] = addresses

            async def reached() -> None:
                while True:
                    a.tell(peer, HEARTBEAT)
                    with contextlib.suppress(TimeoutError):
                        return await asyncio.wait_for(_is(heard.reached, peer), 0.2)

            await reached()
            process.send_signal(signal.SIGSTOP)
            a.tell(peer, HEARTBEAT)
            with pytest.raises(PeerTimeout):
                async for _ in a.call(peer, FETCH, deadline=in_s(20)):
                    raise AssertionError("a stopped process answered")
            assert heard.reached.empty()
            process.send_signal(signal.SIGCONT)
            await reached()

    asyncio.run(main())


async def _is(heard: asyncio.Queue[PeerId], peer: PeerId) -> None:
    assert await heard.get() == peer


def test_a_restarted_process_is_found_at_its_new_address(tmp_path: Path) -> None:
    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, heard = make_transport(book)
        async with a:
            peers = []
            for _ in range(2):
                async with child(tmp_path) as (process, peer, addresses):
                    peers.append(peer)
                    book[peer] = addresses
                    assert [answer async for answer in a.call(peer, FETCH, deadline=in_s(20))] == [Fetched()]
                    a.tell(peer, execute(0, a.peer))
                    process.kill()
                    assert (await heard.gone.get())[1] or (await heard.gone.get())[1]
            assert peers[0] == peers[1]

    asyncio.run(main())


def test_the_libp2p_daemon_runs_under_the_same_peer_id(tmp_path: Path) -> None:
    from hivemind.p2p import P2P

    async def main() -> None:
        identity = Identity.load_or_create(tmp_path / "identity.key")
        p2p = await P2P.create(identity_path=str(tmp_path / "identity.key"), host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        try:
            assert str(p2p.peer_id) == identity.peer
        finally:
            await p2p.shutdown()

    asyncio.run(main())
