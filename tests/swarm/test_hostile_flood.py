"""A flood against a peer in a process of its own: it does not exit, does not hang, does not grow, and serves others.

Over every method of services.proto an identity with a proven key says what is well-formed, damaged or plain noise; and
identities that cost nothing fill the DHT node with records, genuine ones and others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
import torch
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from running import PATIENCE_S, Running
from test_dht import Gullible
from tiny_run import write_tiny_run

from swarmnet.directory import Record, StageStatus
from swarmnet.errors import SwarmError
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.file import load, run_id
from swarmnet.manifest.schema import Manifest, Protocol
from swarmnet.messages import Answer, Gradient, ManifestRequest, Packed, Process, Request, Stamp
from swarmnet.net.address import Address
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.dht_node import DhtNode
from swarmnet.net.greeting import HELLO, Greeter
from swarmnet.net.grpc_caller import METHODS
from swarmnet.net.grpc_link import LINK
from swarmnet.net.grpc_options import CHANNEL_OPTIONS
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.records import TRAINERS, Announcement, dht_key, seal
from swarmnet.net.tls import Leaf, trust_anchor
from swarmnet.testing.doubles import FakeService
from swarmnet.wire.codecs import encode
from swarmnet.wire.convert import Hello, write_control, write_hello, write_request
from swarmnet.wire.deflate import Deflater
from tests.unit import test_wire_messages as messages
from tests.unit.message_strategies import of

RATE, GROWTH_BYTES, SHARE = 200.0, 64 << 20, 0.9
"""Hostile messages a second, what a peer may grow by meanwhile, and of their rate what honest callers must keep."""

HONEST_EVERY_S = 0.05

OPEN_AT_ONCE = 64
"""Of the attacker's streams."""


# ---------------------------------------------------------------- the victim


@dataclass(frozen=True)
class Victim:
    """A live peer: its process, and how it is reached."""

    process: Running | None  # None in the process that attacks
    manifest: Manifest
    run: RunId
    peer: PeerId
    addresses: tuple[str, ...]
    dht: tuple[str, ...]

    @property
    def resident(self) -> int:
        """Bytes of memory that its processes hold, its DHT daemon's apart: who supervises, and who serves."""
        (serves,) = [pid for pid in _children(self.running.process.pid) if _name(pid) != "p2pd"]
        return sum(_resident(pid) for pid in (self.running.process.pid, serves))

    @property
    def running(self) -> Running:
        assert self.process is not None
        return self.process

    @property
    def log(self) -> str:
        return self.running.log.read_text()

    @property
    def alive(self) -> bool:
        return self.running.process.poll() is None


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _resident(pid: int) -> int:
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


@contextlib.contextmanager
def victim(folder: Path) -> Iterator[Victim]:
    """One peer that serves the whole of a tiny run, which stands at version 0 for want of trainers."""
    manifest = write_tiny_run(folder, protocol=Protocol(long_silence_s=10800.0))
    # Whoever leaves waits for the peers that records name. Nobody is there.
    words = ("--stage", "0", "--device", "cpu", "--set", "drain_s=2.0")
    with Running(folder / "victim", "peer", "--manifest", str(manifest), *words) as process:
        listening = process.says("listening")
        process.says("synced", stage=0)
        read = load(manifest)
        yield Victim(
            process,
            read,
            run_id(read),
            PeerId(listening["peer"]),
            tuple(listening["addresses"]),
            tuple(listening["dht"]),
        )


@contextlib.asynccontextmanager
async def transport_to(of: Victim) -> AsyncIterator[GrpcTransport]:
    """An honest caller's line to the victim."""
    identity = Identity.generate()
    async with GrpcTransport(
        identity, of.run, addresses=lambda peer: of.addresses if peer == of.peer else (), service=FakeService()
    ) as transport:
        yield transport


class Honest:
    """Somebody who evaluates microbatches and asks for the manifest by turns, one call after the other."""

    def __init__(self, of: Victim, transport: GrpcTransport) -> None:
        self._of, self._transport = of, transport
        self.answered = 0
        training = of.manifest.training
        shape = (training.microbatch_size, training.sequence_length + 1)
        self._tokens = encode("int32", torch.zeros(shape, dtype=torch.int32))

    async def run(self) -> None:
        """Until cancelled; a call that fails is not counted."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for number in range(1 << 30):
            evaluates = number % 2
            with contextlib.suppress(SwarmError):
                wanted = await (
                    self._last(Process(0, 0, 0, purpose="eval"), self._tokens)
                    if evaluates
                    else self._last(ManifestRequest())
                )
                self.answered += isinstance(wanted, Gradient) if evaluates else wanted is not None
            due = max(due + HONEST_EVERY_S, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _last(self, request: Request, *payload: Packed) -> Answer | None:
        last = None
        deadline = asyncio.get_running_loop().time() + 10.0
        async with contextlib.aclosing(
            self._transport.call(self._of.peer, request, payload, deadline=deadline)
        ) as answers:
            async for answer in answers:
                last = answer
        return last

    async def rate(self, during: Awaitable[object]) -> float:
        """Calls a second that are answered while something else is done."""
        before, began = self.answered, time.monotonic()
        await during
        return (self.answered - before) / (time.monotonic() - began)


# ---------------------------------------------------------------- what is said


def drawn(strategy: st.SearchStrategy[bytes], number: int) -> list[bytes]:
    """So many examples, the same ones each time."""
    found: list[bytes] = []

    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def note(data: bytes) -> None:
        found.append(data)

    note()
    return found


def corpus(victim: Victim, number: int) -> list[tuple[str, bytes]]:
    """(method, message) of every method in turn: well-formed ones, many of the open step; damaged ones; noise."""
    here = Stamp(0, 0, first_chain(victim.run, 0))

    def placed(message: object) -> object:
        if hasattr(message, "stamp") and message.stamp.step % 2:
            return replace(message, stamp=here)  # type: ignore[type-var]
        if isinstance(message, Process) and message.index % 2:
            return replace(message, step=0, stage=0, index=0)
        return message

    strategies: dict[str, st.SearchStrategy[bytes]] = {
        HELLO: of(Hello).map(write_hello),
        LINK: st.one_of(*messages.controls.values()).map(placed).map(write_control),
        **{
            method: st.builds(write_request, messages.requests[kind].map(placed), messages.tensors)
            for kind, method in METHODS.items()
        },
    }
    rng, found = random.Random(1), []
    drawn_of = {method: drawn(strategy, min(number // 20, 100)) for method, strategy in strategies.items()}
    for at in range(number):
        method = list(strategies)[at % len(strategies)]
        whole = rng.choice(drawn_of[method])
        message = rng.choice((whole, whole, _damaged(whole, rng), rng.randbytes(rng.randrange(400))))
        if method == LINK and rng.random() < 0.8:
            message = Deflater()(message)  # else nothing of it would be read
        found.append((method, message))
    return found


def _damaged(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged[: rng.randint(1, len(damaged))]) if rng.random() < 0.3 else bytes(damaged)


class Flood:
    """Says all of it from one identity, so many a second, and never waits long for an answer."""

    def __init__(self, of: Victim, rate: float) -> None:
        self._of, self._rate = of, rate

    async def run(self, said: Sequence[tuple[str, bytes]]) -> None:
        """Say it all; returns when the last stream has ended."""
        identity = Identity.generate()
        leaf = Leaf(identity)
        credentials = grpc.ssl_channel_credentials(trust_anchor(self._of.peer), leaf.key, leaf.chain)
        where = Address.parse(self._of.addresses[0]).target
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(OPEN_AT_ONCE)
        async with grpc.aio.secure_channel(where, credentials, options=CHANNEL_OPTIONS) as channel:
            greeting = write_hello(Greeter(self._of.run, 60.0).hello())
            await channel.unary_unary(HELLO)(greeting, timeout=10)
            due = loop.time()
            async with asyncio.TaskGroup() as group:
                for method, message in said:
                    await room.acquire()
                    group.create_task(self._say(channel, method, message, room))
                    due = max(due + 1 / self._rate, loop.time())
                    await asyncio.sleep(due - loop.time())
                    if method == HELLO:  # what it said last was a bad greeting: be in the run again
                        group.create_task(self._say(channel, HELLO, greeting, None))

    async def _say(
        self, channel: grpc.aio.Channel, method: str, message: bytes, room: asyncio.Semaphore | None
    ) -> None:
        try:
            if method == HELLO:
                await channel.unary_unary(HELLO)(message, timeout=2)
            else:
                stream = channel.stream_stream(method)(timeout=2)
                await stream.write(message)
                await stream.write(message[::-1])  # a chunk of what it may have declared
                await stream.read()
                stream.cancel()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # refused, or ended before all was written
        finally:
            if room is not None:
                room.release()


Entry = tuple[DHTID, bytes, float, str]
"""Key, value, expiry and subkey, as DHT nodes store them."""


def records(of: Victim, number: int) -> list[Entry]:
    """Announcements of as many identities in every place of the run, a third of them damaged. Nobody listens at the
    addresses: whoever dials is refused."""
    rng = random.Random(2)
    found: list[Entry] = []
    expiry_ms = int(time.time() * 1000) + 110_000
    for _ in range(number):
        who, place = Identity.generate(), rng.choice(("0", TRAINERS, "run"))
        stages = () if place == TRAINERS else (StageStatus(0, rng.randrange(9), first_chain(of.run, 0), True),)
        address = f"/ip4/127.0.0.1/tcp/{rng.randrange(1, 9)}"
        record = Record(of.run, who.peer, 1, (address,), stages, place == TRAINERS)
        value = seal(Announcement(record, place, expiry_ms, 1), who.sign)
        if rng.random() < 1 / 3:
            value = _damaged(value, rng)
        found.append((DHTID.generate(source=dht_key(of.run, place)), value, expiry_ms / 1000, who.peer))
    return found


async def fill(of: Victim, entries: Sequence[Entry], *, at_once: int = 100) -> int:
    """Store all of it at the victim's DHT node; returns how many it took."""
    taken = 0
    evil = await DhtNode.open(Identity.generate(), Gullible(), Listen(), own_keys=())
    try:
        assert await evil.join(of.dht)
        protocol, target = evil._dht.protocol, PeerID.from_base58(of.peer)
        for begin in range(0, len(entries), at_once):
            stored = await protocol.call_store(target, *map(list, zip(*entries[begin : begin + at_once], strict=True)))
            taken += sum(map(bool, stored or ()))
    finally:
        await evil.close()
    return taken


# ---------------------------------------------------------------- who attacks


@dataclass(frozen=True)
class Attack:
    """So many messages or records against a peer, said by a process of its own: nobody waits for what it computes."""

    what: Literal["messages", "records"]
    number: int


@contextlib.contextmanager
def ready(attacks: Sequence[Attack], on: Victim) -> Iterator[Callable[[], Awaitable[object]]]:
    """Begins the next of the attacks. What is said is made first, for it takes time that nobody serves."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for attack in attacks:
            pool.submit(_make_ready, attack, replace(on, process=None)).result()
        yield lambda: asyncio.wrap_future(pool.submit(_attack))


_next: list[Callable[[], Coroutine[Any, Any, object]]] = []
"""In the process that attacks: what is ready, in order."""


def _make_ready(attack: Attack, on: Victim) -> None:
    if attack.what == "messages":
        _next.append(functools.partial(Flood(on, RATE).run, corpus(on, attack.number)))
    else:
        _next.append(functools.partial(fill, on, records(on, attack.number)))


def _attack() -> None:
    asyncio.run(_next.pop(0)())


# ---------------------------------------------------------------- the tests


@dataclass(frozen=True)
class Withstood:
    """Calls a second that an honest caller had answered before and during an attack, and what the peer grew by."""

    before: float
    meanwhile: float
    grown: int

    @property
    def share(self) -> float:
        return self.meanwhile / self.before


def withstand(folder: Path, *attacks: Attack, warm_up: int, quiet_s: float = 3.0) -> list[Withstood]:
    """Attack a live peer, in one way after the other. Checks that it does not exit, hang or grow. warm_up: messages
    that are said before."""

    async def story() -> list[Withstood]:
        found: list[Withstood] = []
        with victim(folder) as target, ready((Attack("messages", warm_up), *attacks), target) as attacking:
            async with transport_to(target) as line, asyncio.TaskGroup() as group:
                honest = Honest(target, line)
                calling = group.create_task(honest.run())
                await attacking()  # what is loaded or cached once is no growth
                rate = await honest.rate(asyncio.sleep(quiet_s))
                for _ in attacks:
                    resident, before = target.resident, rate
                    meanwhile = await honest.rate(attacking())
                    rate = await honest.rate(asyncio.sleep(quiet_s))
                    assert target.alive, target.log
                    assert before > 0 and rate > 0, "honest callers are answered before and after"
                    grown = target.resident - resident
                    assert grown <= GROWTH_BYTES, f"the peer grew by {grown >> 20} MiB"
                    found.append(Withstood(before, meanwhile, grown))
                calling.cancel()
            assert target.running.stop() == 0, target.log
            assert "Traceback" not in target.log, target.log[target.log.index("Traceback") - 400 :]
            return found

    async def bounded() -> list[Withstood]:
        async with asyncio.timeout(5 * PATIENCE_S):
            return await story()

    return asyncio.run(bounded())


def test_floods_harm_nobody(tmp_path: Path) -> None:
    found = withstand(tmp_path, Attack("messages", 600), Attack("records", 400), warm_up=80)
    assert min(each.meanwhile for each in found) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["messages", "records"])
def test_ten_thousand_cost_honest_callers_a_tenth(what: Literal["messages", "records"], tmp_path: Path) -> None:
    (found,) = withstand(tmp_path, Attack(what, 10_000), warm_up=400, quiet_s=10.0)
    assert found.share >= SHARE, found
