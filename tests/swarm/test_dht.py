"""Discovery over real DHT nodes on loopback: what is read, what is refused, and what survives whose death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2, p2pd_pb2

from swarmnet.clock import MOST_APART_S, WallClock, boot_time, wall_time
from swarmnet.directory import ReadPace, Record, StageStatus
from swarmnet.errors import UsageError
from swarmnet.ids import RunId, first_chain, mark_of
from swarmnet.net.dht import KNOWN_PEERS_FILE, DhtDirectory
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.dht_node import RPC_TIMEOUT_S, DhtNode, Entry
from swarmnet.net.identity import Identity
from swarmnet.net.records import MAX_AHEAD_S, WHOLE_RUN, Announcement, dht_key, places_of, seal
from swarmnet.peer.status import run_status
from swarmnet.telemetry.events import EventReader

RUN = RunId("ab" * 32)
STAGES = 3
PATIENCE_S = 60.0


def record(who: Identity, *stages: int, **changes: Any) -> Record:
    statuses = tuple(StageStatus(stage, 0, first_chain(RUN, stage), synced=True, slots=4) for stage in stages)
    return replace(Record(RUN, who.peer, 1, ("/ip4/127.0.0.1/tcp/4000",), statuses), **changes)


class VirtualSwarm:
    """Starts directories and closes all of them; the first one is everybody's bootstrap."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self.stack = stack
        self.directories: list[DhtDirectory] = []

    async def start(self, who: Identity | None = None, **options: Any) -> tuple[Identity, DhtDirectory]:
        who = who or Identity.generate()
        options.setdefault("bootstrap", self.directories[0].maddrs if self.directories else ())
        options.setdefault("num_stages", STAGES)
        directory = await self.stack.enter_async_context(DhtDirectory(who, options.pop("run", RUN), **options))
        self.directories.append(directory)
        return who, directory


@contextlib.asynccontextmanager
async def swarm() -> AsyncIterator[VirtualSwarm]:
    async with contextlib.AsyncExitStack() as stack:
        yield VirtualSwarm(stack)


@contextlib.asynccontextmanager
async def running(*directories: DhtDirectory) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(directory.run()) for directory in directories]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.05)


async def peers_seen(directory: DhtDirectory) -> set[str]:
    return {found.peer for found in await directory.records()}


# ---------------------------------------------------------------- a child process to kill


class Child:
    """A bootstrap node as a real process."""

    def __init__(self, directory: Path, *, bootstrap: tuple[str, ...] = ()) -> None:
        self._events = EventReader(directory / "events.jsonl")
        program = (
            "import sys\n"
            "from swarmnet.config.peer import PeerConfig\n"
            "from swarmnet.peer.bootstrap import run_bootstrap\n"
            "sys.exit(run_bootstrap(PeerConfig.model_validate_json(sys.argv[1])))\n"
        )
        config = {
            "dir": str(directory),
            "host": "127.0.0.1",
            "events": str(directory / "events.jsonl"),
            "bootstrap": bootstrap,
            "roles": ["bootstrap"],
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def maddrs(self) -> tuple[str, ...]:
        found: list[str] = []

        async def listening() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            found.extend(a for event in self._events.read() if event["event"] == "listening" for a in event["dht"])
            return bool(found)

        await until(listening)
        return tuple(found)

    def daemon(self) -> int:
        """Process id of its p2pd."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"p2pd" in Path(f"/proc/{pid}/cmdline").read_bytes())


@contextlib.contextmanager
def child(directory: Path, **options: Any) -> Iterator[Child]:
    started = Child(directory, **options)
    try:
        yield started
    finally:
        started.process.send_signal(signal.SIGCONT)
        started.process.kill()
        started.process.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ---------------------------------------------------------------- reading and expiring


def test_what_is_published_is_read_by_all() -> None:
    async def story() -> None:
        async with swarm() as nodes:
            peers = [await nodes.start() for _ in range(4)]
            for number, (who, directory) in enumerate(peers):
                await directory.publish(record(who, number % STAGES, trainer=number == 3, loss=(number, 2.5)))
            trainer, its_directory = peers[3]
            await its_directory.publish(record(trainer, trainer=True, incarnation=7))  # left its stage
            for _, directory in peers:
                assert await peers_seen(directory) == {who.peer for who, _ in peers}
                mine = {found.peer: found for found in await directory.records()}
                assert mine[trainer.peer].stages == () and mine[trainer.peer].incarnation == 7

    asyncio.run(story())


def test_who_asks_again_soon_is_answered_from_memory() -> None:
    async def story() -> None:
        async with swarm() as nodes:
            who, directory = await nodes.start()
            _, reader = await nodes.start(listen=Listen(client=True), between_reads_s=3600.0)
            assert await reader.records() == ()
            await directory.publish(record(who, 0))
            assert await reader.records() == (), "it keeps nothing for others, and did not look"
            reader._pace = ReadPace(3600.0)  # as an hour later
            assert await peers_seen(reader) == {who.peer}

    asyncio.run(story())


def test_runs_share_a_dht_without_seeing_each_other() -> None:
    async def story() -> None:
        other_run = RunId("cd" * 32)
        async with swarm() as nodes:
            await nodes.start(run=None, num_stages=0)
            one, reads_one = await nodes.start()
            two, reads_two = await nodes.start(run=other_run)
            _, learns = await nodes.start(num_stages=0, listen=Listen(client=True))
            await reads_one.publish(record(one, 2))
            await reads_two.publish(record(two, 0, run=other_run))
            assert await peers_seen(reads_one) == await peers_seen(learns) == {one.peer}
            assert await peers_seen(reads_two) == {two.peer}
            assert learns.num_stages == STAGES and learns.maddrs == ()

    asyncio.run(story())


def test_a_record_is_renewed_while_its_peer_runs_and_expires_after() -> None:
    async def story() -> None:
        async with swarm() as nodes:
            _, reader = await nodes.start()
            who, writer = await nodes.start(ttl_s=1.5)
            started = time.monotonic()
            async with running(writer):
                await writer.publish(record(who, 1))
                while time.monotonic() < started + 2.5:  # well beyond one life
                    assert await peers_seen(reader) == {who.peer}
                    await asyncio.sleep(0.1)

            async def forgotten() -> bool:
                return await peers_seen(reader) == set()

            await until(forgotten)
            assert reader.known() == ()

    asyncio.run(story())


@pytest.mark.parametrize("size", [60, 70])
def test_of_a_large_stage_a_part_is_read_and_the_others_by_name(size: int) -> None:
    """Of 70 more lie in one part than should: readers expect four parts already while there are two."""

    async def story() -> None:
        async with swarm() as nodes:
            _, writer = await nodes.start()
            many = [Identity.from_seed(bytes([number]) * 32) for number in range(size)]
            expiry_ms = int(time.time() * 1000) + 60_000
            entries = [
                Entry(found.key, who.peer, seal(found, who.sign), expiry_ms / 1000)
                for who in many
                for place in places_of(record(who, 0), (1,))
                if place != WHOLE_RUN
                for found in (Announcement(record(who, 0), place, expiry_ms, STAGES, parts=(1,)),)
            ]
            deadline = asyncio.get_running_loop().time() + PATIENCE_S
            assert await writer._node.store(entries, deadline=deadline) == len(entries)
            # One whose part is the first, which lies under the stage's own key as well.
            me = next(who for who in iter(Identity.generate, None) if mark_of(who.peer) >> 63 == 0)
            _, reader = await nodes.start(me, listen=Listen(client=True), between_reads_s=3600.0)
            await reader._read((0,))
            near = {who.peer for who in many if mark_of(who.peer) >> 63 == 0}
            far = {who.peer for who in many} - near
            assert {found.peer for found in reader.known()} == near
            reader._near, called = (0,), min(far)
            assert reader.addresses(called) == ()
            await reader.look_up(called)
            assert reader.addresses(called) == ("/ip4/127.0.0.1/tcp/4000",)
            # Who is far away is looked for where it is known to count.
            reader._near, called = (1,), max(far)
            reader.serves = lambda peer: (0,) if peer == called else ()
            await reader.look_up(called)
            assert reader.addresses(called) == ("/ip4/127.0.0.1/tcp/4000",)
            _, whole = await nodes.start(listen=Listen(client=True))
            assert await peers_seen(whole) == near | far

    asyncio.run(story())


# ---------------------------------------------------------------- attacks


class Gullible(RecordValidatorBase):  # type: ignore[misc]
    """The validator of an attacker's own node."""

    def validate(self, record: DHTRecord) -> bool:
        return True


def test_nothing_forged_is_stored_and_an_evil_node_cannot_spoil_a_read() -> None:
    async def story() -> None:
        async with swarm() as nodes, contextlib.AsyncExitStack() as stack:
            victim, directory = await nodes.start()
            friend, friends = await nodes.start()
            mallory = Identity.generate()
            evil = await DhtNode.open(mallory, Gullible(), Listen(), own_keys=())
            stack.push_async_callback(evil.close)
            assert await evil.join(directory.maddrs)
            await directory.publish(record(victim, 0))
            await friends.publish(record(friend, 0))

            now_ms = int(time.time() * 1000)
            key, soon_ms = dht_key(RUN, "0"), now_ms + 60_000

            def sealed(who: Identity, stage: int = 0, *, by: Identity | None = None, expiry_ms: int = soon_ms) -> bytes:
                mine = record(who, stage)
                return seal(Announcement(mine, places_of(mine)[0], expiry_ms, STAGES), (by or who).sign)

            far_ms = now_ms + int(MAX_AHEAD_S * 1000) + 60_000
            genuine = sealed(mallory)
            attempts: dict[str, tuple[str, Any, Any, float]] = {
                "unsigned": (key, victim.peer, sealed(victim)[64:], soon_ms / 1000),
                "forged": (key, victim.peer, sealed(victim, by=mallory), soon_ms / 1000),
                "under the victim's name": (key, victim.peer, genuine, soon_ms / 1000),
                "without a subkey": (key, None, genuine, soon_ms / 1000),
                "under another stage's key": (key, mallory.peer, sealed(mallory, 1), soon_ms / 1000),
                "under a foreign key": ("anything", mallory.peer, genuine, soon_ms / 1000),
                "oversize": (key, mallory.peer, genuine + b" " * 900_000, soon_ms / 1000),
                "far future": (key, mallory.peer, sealed(mallory, expiry_ms=far_ms), far_ms / 1000),
                "longer than signed": (key, mallory.peer, genuine, soon_ms / 1000 + 30),
                "forever": (key, mallory.peer, genuine, float("inf")),
                "almost forever": (key, mallory.peer, genuine, 1e306),
            }
            protocol, target = evil._dht.protocol, PeerID.from_base58(victim.peer)
            for name, (at, subkey, value, expiry) in attempts.items():
                answer = await protocol.call_store(target, [DHTID.generate(source=at)], [value], [expiry], [subkey])
                assert answer == [False], name
            answer = await protocol.call_store(
                target, [DHTID.generate(source=key)], [genuine], [soon_ms / 1000], [mallory.peer]
            )
            assert answer == [True]  # the same road is open to what is genuine

            for name, (at, subkey, value, expiry) in attempts.items():  # now it serves them itself
                if expiry < 1e300 and subkey is not None:
                    protocol.storage.store_subkey(DHTID.generate(source=at), f"{subkey}{name}", value, expiry)
            poison = DictionaryDHTValue()
            poison.store(mallory.peer, b"x" * 900_000, soon_ms / 1000)
            poison.maxsize = "many"
            poison.frozen = True
            protocol.storage.data[DHTID.generate(source=dht_key(RUN, "1"))] = protocol.storage.data[
                DHTID.generate(source=key)
            ].__class__(poison, soon_ms / 1000)
            for reader in (directory, friends):
                seen = {found.peer: found for found in await reader.records()}
                assert set(seen) == {victim.peer, friend.peer, mallory.peer}
                assert seen[victim.peer].addresses == record(victim, 0).addresses

    asyncio.run(story())


def test_who_stores_more_than_its_allowance_is_refused_and_nobody_else() -> None:
    async def story() -> None:
        async with swarm() as nodes, contextlib.AsyncExitStack() as stack:
            victim, directory = await nodes.start()
            friend, friends = await nodes.start()
            evil = await DhtNode.open(Identity.generate(), Gullible(), Listen(), own_keys=())
            stack.push_async_callback(evil.close)
            assert await evil.join(directory.maddrs)
            key, soon_ms = dht_key(RUN, "0"), int(time.time() * 1000) + 60_000
            strangers = [Identity.generate() for _ in range(1200)]
            entries = [
                (
                    DHTID.generate(source=key),
                    seal(Announcement(record(who, 0), "0", soon_ms, STAGES), who.sign),
                    soon_ms / 1000,
                    who.peer,
                )
                for who in strangers
            ]
            kept, protocol, began = 0, evil._dht.protocol, time.monotonic()
            for begin in range(0, len(entries), 100):
                columns = map(list, zip(*entries[begin : begin + 100], strict=True))
                kept += sum(map(bool, await protocol.call_store(PeerID.from_base58(victim.peer), *columns) or ()))
            allowed = 400 + 100 * (time.monotonic() - began + 1)
            assert 0 < kept <= allowed, "four seconds' worth at once, and a second's worth each second"
            await friends.publish(record(friend, 1))
            await until(lambda: sees(directory, friend.peer))

    async def sees(directory: DhtDirectory, peer: str) -> bool:
        return peer in await peers_seen(directory)

    asyncio.run(story())


# ---------------------------------------------------------------- deaths


def test_the_swarm_outlives_its_bootstrap_node_and_leaves_no_orphan(tmp_path: Path) -> None:
    async def story() -> None:
        with child(tmp_path) as bootstrap:
            dead = await bootstrap.maddrs()
            async with swarm() as nodes:
                one, first = await nodes.start(bootstrap=dead)
                two, second = await nodes.start(bootstrap=dead)
                await first.publish(record(one, 0))
                daemon = bootstrap.daemon()
                bootstrap.process.kill()

                async def daemon_gone() -> bool:
                    return gone(daemon)

                await until(daemon_gone)
                await second.publish(record(two, 1))
                _, newcomer = await nodes.start(bootstrap=(*dead, *second.maddrs))
                for directory in (first, second, newcomer):
                    assert await peers_seen(directory) == {one.peer, two.peer}
                with pytest.raises(UsageError, match="no bootstrap peer answered; tried " + dead[0]):
                    await nodes.start(bootstrap=dead)

    asyncio.run(story())


def test_a_peer_that_lost_everybody_finds_the_swarm_again(tmp_path: Path) -> None:
    async def story() -> None:
        state = tmp_path / "state"
        async with swarm() as nodes:
            _, hub = await nodes.start(run=None, num_stages=0)
            other, there = await nodes.start()
            me, here = await nodes.start(state_dir=state, ttl_s=0.9)
            await there.publish(record(other, 0))
            await here.publish(record(me, 1))
            async with running(here):
                assert other.peer in await peers_seen(here)

                async def remembered() -> bool:
                    file = state / KNOWN_PEERS_FILE
                    return file.exists() and there.maddrs[0] in file.read_text()

                await until(remembered)
                await hub.__aexit__()
                await there.__aexit__()

                async def alone() -> bool:
                    return not here.neighbours

                await until(alone)
                port = int(there.maddrs[0].split("/")[4])
                _, back = await nodes.start(other, bootstrap=(), listen=Listen(port=port))  # knows nobody itself

                async def together() -> bool:
                    return here.peer in back.neighbours and me.peer in await peers_seen(back)

                await until(together)
            await here.__aexit__()
            _, again = await nodes.start(me, bootstrap=(), state_dir=state)  # a restart without being told
            assert again.neighbours == {other.peer}

    asyncio.run(story())


def test_an_answer_to_a_call_that_was_just_given_up_does_not_end_the_node() -> None:
    async def story() -> None:
        async with swarm() as nodes:
            _, here = await nodes.start()
            control, call, given_up = here._node._p2p._client.control, uuid4(), asyncio.Future[bytes]()
            control._pending_calls[call] = given_up
            given_up.cancel()
            answer = p2pd_pb2.PersistentConnectionResponse(callId=call.bytes)
            answer.callUnaryResponse.response = b"late"
            reader, told = asyncio.StreamReader(), answer.SerializeToString()
            reader.feed_data(bytes([len(told)]) + told)
            reader.feed_eof()
            await control._read_from_persistent_conn(reader)  # returns at the end of the stream

    asyncio.run(story())


def test_a_newcomer_waits_longer_for_the_only_node_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = DHTProtocol.rpc_find

    # hivemind reads the annotations
    async def late(of: DHTProtocol, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        await asyncio.sleep(1.5 * RPC_TIMEOUT_S)
        return await answer(of, request, context)

    monkeypatch.setattr(DHTProtocol, "rpc_find", late)

    async def story() -> None:
        async with swarm() as nodes:
            one, first = await nodes.start()
            await first.publish(record(one, 0))
            _, second = await nodes.start(bootstrap=first.maddrs, only_asks=True)
            looks = [await peers_seen(second) for _ in range(3)]
            assert looks[-1] == {one.peer}, looks

    asyncio.run(story())


def test_a_silent_neighbour_does_not_stall_reads(tmp_path: Path) -> None:
    async def story() -> None:
        with child(tmp_path) as silent:
            async with swarm() as nodes:
                maddrs = await silent.maddrs()
                one, first = await nodes.start(bootstrap=maddrs)
                two, second = await nodes.start(bootstrap=(*maddrs, *first.maddrs))
                await first.publish(record(one, 0))
                daemon = silent.daemon()
                silent.process.send_signal(signal.SIGSTOP)
                os.kill(daemon, signal.SIGSTOP)
                started = time.monotonic()
                assert await peers_seen(second) == {one.peer}
                assert time.monotonic() - started < 2 * RPC_TIMEOUT_S + 2.0  # slack for a busy machine
                await second.publish(record(two, 1))
                assert await peers_seen(first) == {one.peer, two.peer}
            os.kill(daemon, signal.SIGCONT)
            silent.process.send_signal(signal.SIGCONT)
            silent.process.terminate()  # asked to leave, it goes, and has said no word too many
            out, _ = silent.process.communicate()
            assert silent.process.returncode == 0 and out.splitlines() == list(maddrs) and gone(daemon)

    asyncio.run(story())


def test_a_lost_daemon_is_replaced_at_the_same_address() -> None:
    async def story() -> None:
        async with swarm() as nodes:
            _, other = await nodes.start()
            me, here = await nodes.start(ttl_s=0.9)
            await here.publish(record(me, 0))
            async with running(here):
                before, daemon = here.maddrs, here._node.daemon.pid
                os.kill(daemon, signal.SIGKILL)

                async def replaced() -> bool:
                    return here._node.daemon.pid != daemon and me.peer in await peers_seen(other)

                await until(replaced)
                assert here.maddrs == before

    asyncio.run(story())


# ---------------------------------------------------------------- what the person at the keyboard sees


def test_impossible_starts_say_why() -> None:
    async def story() -> None:
        async with swarm() as nodes:
            _, first = await nodes.start()
            port = int(first.maddrs[0].split("/")[4])
            for options, words in (
                ({"listen": Listen(port=port)}, r"cannot listen on .*: choose another with --dht-port$"),
                ({"listen": Listen("192.0.2.1")}, "--host must be the IP address of one of"),
                ({"bootstrap": ("/ip4/127.0.0.1/tcp/1",)}, "peer id"),
                ({"bootstrap": ("nonsense",)}, "nonsense"),
            ):
                with pytest.raises(UsageError, match=words):
                    await nodes.start(**options)
            for late_s, words in ((3e5, "clock is 300000 s behind"), (-3e5, "clock is 300000 s ahead of")):
                with pytest.raises(UsageError, match=words):
                    await nodes.start(clock=WallClock(system=lambda late_s=late_s: time.time() - late_s))

    asyncio.run(story())


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("late_s", [-3600.0, 3600.0])
def test_a_machine_that_starts_with_a_wrong_clock_accepts_the_others_time(late_s: float) -> None:
    """It reads their records, and they read its."""

    async def story() -> None:
        async with swarm() as nodes:
            who, first = await nodes.start()
            await first.publish(record(who, 0))
            clock = WallClock(system=lambda: time.time() - late_s)
            other, wrong = await nodes.start(clock=clock)
            await wrong.publish(record(other, 1))
            assert abs(clock.ahead_s() - late_s) < MOST_APART_S and abs(clock.time() - wall_time()) < MOST_APART_S
            assert await peers_seen(wrong) == await peers_seen(first) == {who.peer, other.peer}

    asyncio.run(story())


def test_a_paused_virtual_machine_finds_the_others_again(caplog: pytest.LogCaptureFixture) -> None:
    """All its clocks stand still for an hour, and it cannot know that: its neighbours' clocks say so."""

    async def story() -> None:
        async with swarm() as nodes:
            who, first = await nodes.start()
            await first.publish(record(who, 0))
            paused = [0.0]
            clock = WallClock(lambda: boot_time() - paused[0], lambda: time.time() - paused[0])
            other, virtual = await nodes.start(clock=clock, ttl_s=3.0)
            await virtual.publish(record(other, 1))

            async def agree() -> bool:
                return abs(clock.time() - wall_time()) < MOST_APART_S

            assert await agree()
            async with running(first, virtual):
                paused[0] = 3600.0
                assert not await agree()
                await until(agree)
                everybody = {who.peer, other.peer}
                await until(lambda: _sees(first, everybody))
                await until(lambda: _sees(virtual, everybody))

    asyncio.run(story())
    assert "clock_corrected" in caplog.text


def test_only_members_have_a_vote_on_the_time() -> None:
    """An identity in the DHT costs nothing, and a crowd of them would set a peer's clock."""

    async def story() -> None:
        async with swarm() as nodes:
            who, _ = await nodes.start()
            _, second = await nodes.start()
            node = second._node
            assert len(await node.clocks_ahead_s({who.peer})) == len(await node.clocks_ahead_s(None)) == 1
            assert await node.clocks_ahead_s(set()) == ()

    asyncio.run(story())


async def _sees(directory: DhtDirectory, peers: set[str]) -> bool:
    return await peers_seen(directory) == peers


def test_the_system_clock_is_set_in_mid_run(caplog: pytest.LogCaptureFixture) -> None:
    """A peer without neighbours accepts it: its machine may have started before its clock was set. Others go on."""

    async def story() -> None:
        async with swarm() as nodes:
            changed = {"alone": 0.0, "joined": 0.0}
            clocks = {name: WallClock(system=lambda name=name: time.time() + changed[name]) for name in changed}

            async def told() -> bool:
                return caplog.text.count("clock_changed") == 1

            async def accepted() -> bool:
                return abs(clocks["alone"].time() - time.time() - 3600.0) < MOST_APART_S

            _, alone = await nodes.start(clock=clocks["alone"])
            async with running(alone):
                changed["alone"] = 3600.0
                await until(accepted)
            caplog.clear()
            async with swarm() as others:
                await others.start()
                _, joined = await others.start(clock=clocks["joined"])
                async with running(joined):
                    changed["joined"] = -3600.0
                    await until(told)
            assert abs(clocks["joined"].time() - wall_time()) < MOST_APART_S

    asyncio.run(story())


def test_a_run_is_found_by_its_first_digits() -> None:
    """By a bare node, through a plain bootstrap node, also after many publications; what is ambiguous shows."""

    async def story() -> None:
        async with swarm() as nodes:
            await nodes.start(run=None, num_stages=0)
            who, directory = await nodes.start()
            trainer, feeding = await nodes.start()
            for step in range(3):
                await directory.publish(record(who, 0, loss=(step, 2.0)))
            await feeding.publish(record(trainer, trainer=True))
            _, asking = await nodes.start(run=None, num_stages=0, listen=Listen(client=True))
            assert await asking.runs(RUN[:12]) == await asking.runs(RUN) == (RUN,)
            assert await asking.runs(RUN[:12] + "0") == await asking.runs("0" * 12) == ()

            alike = RunId(RUN[:40] + "c" * 24)
            other, third = await nodes.start(run=alike)
            await third.publish(replace(record(other, 0), run=alike))
            assert await asking.runs(RUN[:12]) == (RUN, alike) and await asking.runs(RUN[:41]) == (RUN,)
            assert await peers_seen(directory) == {who.peer, trainer.peer}

    asyncio.run(story())


def test_status_tells_what_it_sees_and_fails_when_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    async def status(run: str, bootstrap: tuple[str, ...], as_json: bool = True) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run_status, run, bootstrap, as_json)
        return code, *capsys.readouterr()

    async def story() -> None:
        async with swarm() as nodes:
            who, directory = await nodes.start()
            await directory.publish(record(who, 0, loss=(4, 2.25), numerics="cpu"))
            code, out, said = await status(RUN, directory.maddrs)
            seen = json.loads(out)
            assert (code, said) == (0, "")
            assert (seen["run"], seen["num_stages"], seen["version"]) == (RUN, STAGES, None)
            assert seen["loss"] == {"step": 4, "value": 2.25}
            assert seen["links"] == [f"swarm:{RUN}@{directory.maddrs[0]}"]
            assert [replica["peer"] for replica in seen["stages"][0]["replicas"]] == [who.peer]

            code, out, said = await status(RUN, directory.maddrs, False)
            assert code == 0
            assert all(words in out for words in (who.peer[-8:], "no peer serves stage 2", "loss 2.2500 at step 4"))

            code, out, said = await status(RUN[:12], directory.maddrs)
            assert code == 0 and json.loads(out)["run"] == RUN
            code, out, said = await status("cd" * 6, directory.maddrs)
            assert code == 1 and "no peer announces run cdcdcdcdcdcd" in said
            code, out, said = await status("cd" * 32, directory.maddrs)
            assert code == 1 and not json.loads(out)["seen"] and "no peer announces run cdcdcdcdcdcd" in said

            await directory.__aexit__()
            code, out, said = await status(RUN, directory.maddrs)
            assert code == 2 and "no bootstrap peer answered" in said
            assert json.loads(out)["problems"][0]["kind"] == "no_bootstrap"

    asyncio.run(story())
