"""One identity in two processes, a start that finds its twin ends, a restart after a crash goes on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnet.config.peer import PeerConfig
from swarmnet.directory import Record, StageStatus
from swarmnet.errors import UsageError, leaves
from swarmnet.ids import RunId, first_chain
from swarmnet.manifest.file import run_id
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net import twins
from swarmnet.net.endpoint import Endpoint, open_endpoint
from swarmnet.net.greeting import Greeter
from swarmnet.net.identity import IDENTITY_FILE, Identity
from swarmnet.net.twins import TWIN_REFUSED, Twins
from swarmnet.peer import bootstrap
from swarmnet.wire.convert import Hello
from tests.contracts.transport_contract import FETCH, HEARTBEAT, LIMIT_S
from tests.swarm.test_prepare_join import HONEST, gives, link, newcomer, placed
from tests.swarm.test_relay import World

RUN = RunId("ab" * 32)
MANIFEST = Manifest(name="genuine")
TERMS = RunTerms.of(MANIFEST)


def greeter(boot_id: int) -> Greeter:
    return Greeter(RUN, 60.0, boot_id=boot_id)


# ---------------------------------------------------------------- what an address answers


async def test_only_another_process_under_the_same_key_answers_as_me() -> None:
    """Whatever else is at the address in an old record: nobody, somebody else, somebody mute, or this process."""
    async with asyncio.timeout(LIMIT_S), World() as world:
        met: list[tuple[int, bool]] = []

        def on_twin(hello: Hello, host: str, clocks_agree: bool) -> None:
            met.append((hello.boot_id, clocks_agree))

        me = Identity.generate()
        first = (await world.member(identity=me, greeter=greeter(5), on_twin=on_twin)).transport
        stranger = (await world.member()).transport
        second = (await world.member(identity=me, greeter=greeter(9))).transport
        assert await second.answers_as_me(first.addresses[0], limit_s=LIMIT_S) == (5, True)
        assert met == [(9, True)]  # and it has heard of me
        assert await second.answers_as_me(second.addresses[0], limit_s=LIMIT_S) == (9, True)
        other = stranger.addresses[0].replace(stranger.peer, me.peer)
        assert await second.answers_as_me(other, limit_s=LIMIT_S) is None
        with socket.create_server(("127.0.0.1", 0)) as mute:
            at = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}"
            assert await second.answers_as_me(at, limit_s=0.5) is None
        assert await second.answers_as_me(at, limit_s=LIMIT_S) is None  # refused: nothing is waited for


@pytest.mark.parametrize("crashed", [False, True], ids=["alive", "crashed"])
async def test_a_twin_behind_a_relay_is_asked_there(crashed: bool) -> None:
    async with asyncio.timeout(LIMIT_S), World() as world:
        relay = await world.member(relay_bytes_per_s=1e10)
        me = Identity.generate()
        first = (await world.hidden(identity=me, greeter=greeter(5))).transport
        (at,) = first.addresses
        assert "/p2p-circuit/" in at
        if crashed:
            await first.__aexit__(None, None, None)
        second = (await world.member(identity=me, greeter=greeter(9))).transport
        found = await second.answers_as_me(at, limit_s=LIMIT_S)
        assert found == (None if crashed else (5, True))
        assert relay.peer in at


# ---------------------------------------------------------------- what other peers do


async def test_other_peers_serve_the_process_that_they_hear() -> None:
    async with asyncio.timeout(LIMIT_S), World() as world:
        me, peer = Identity.generate(), await world.member(greeter=greeter(1))
        first = (await world.member(identity=me, greeter=greeter(5))).transport
        second = (await world.member(identity=me, greeter=greeter(9))).transport
        record = {boot_id: _record(me, boot_id) for boot_id in (5, 9)}
        first.tell(peer.peer, HEARTBEAT)
        await peer.service.told.get()
        refused = [answer async for answer in second.call(peer.peer, FETCH, deadline=_in(LIMIT_S))]
        assert refused == [TWIN_REFUSED]
        believes = peer.transport.believes
        assert believes(record[5]) and not believes(record[9])
        # The next process of a peer that ended waits for nothing.
        await first.__aexit__(None, None, None)
        await peer.service.gone.get()
        assert believes(record[9])
        answers = [answer async for answer in second.call(peer.peer, FETCH, deadline=_in(LIMIT_S))]
        assert answers != [TWIN_REFUSED]


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def _record(me: Identity, boot_id: int) -> Record:
    return Record(RUN, me.peer, boot_id, (), ())


# ---------------------------------------------------------------- processes that start


@contextlib.asynccontextmanager
async def member(directory: Path, *bootstrap: str, role: str = "stage") -> AsyncIterator[Endpoint]:
    """One that serves stage 0, or a trainer, and announces it."""
    config = PeerConfig(dir=directory, host="127.0.0.1", bootstrap=bootstrap)
    async with open_endpoint(TERMS, config.network, numerics="", role=role) as end, end.serve(gives(HONEST)):
        status = StageStatus(0, 3, first_chain(run_id(MANIFEST), 0), synced=True, slots=4)
        stages = {"trainer": True} if role == "trainer" else {"stages": (status,)}
        await end.directory.publish(replace(end.record(), **stages))
        yield end


def copy_of(directory: Path) -> Path:
    """A second directory with the same key, as on a cloned machine."""
    copy = directory.with_name("copy")
    copy.mkdir()
    shutil.copy(directory / IDENTITY_FILE, copy)
    return copy


@pytest.mark.parametrize("role", ["stage", "trainer"])
async def test_a_start_that_finds_its_twin_ends_and_says_what_to_do(tmp_path: Path, role: str) -> None:
    """Whatever either of the two is in the run."""
    async with (
        member(tmp_path / "other") as other,
        member(tmp_path / "first", *other.directory.maddrs, role=role) as first,
    ):
        copy = copy_of(tmp_path / "first")
        assert f"another --dir, or delete {copy}" in await _ending(member(copy, *other.directory.maddrs))
        with pytest.raises(UsageError, match=f"another --dir, or delete {copy}"):
            await placed(newcomer(copy), link(other), lambda name, text: None)
        first.twins.check()  # it stays


async def test_a_restart_goes_on_though_the_record_of_the_crashed_process_is_alive(tmp_path: Path) -> None:
    async with member(tmp_path / "other") as other:
        async with member(tmp_path / "first", *other.directory.maddrs) as crashed:
            record = crashed.record()
        async with member(tmp_path / "first", *other.directory.maddrs) as again:
            found = again.directory.elsewhere
            assert found is not None and found.record.incarnation == record.incarnation
            assert again.transport.addresses == record.addresses  # it asked its own port
            again.twins.check()


async def test_of_two_that_start_at_the_same_moment_the_later_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither finds a record of the other at its start."""
    monkeypatch.setattr("swarmnet.net.endpoint.LOOK_S", 0.05)
    async with member(tmp_path / "other") as other, asyncio.timeout(LIMIT_S):
        Identity.load_or_create(tmp_path / "first" / IDENTITY_FILE)
        copy = copy_of(tmp_path / "first")
        async with member(tmp_path / "first", *other.directory.maddrs) as first:
            monkeypatch.setattr("swarmnet.net.dht.DhtDirectory.look_for_myself", _finds_nothing)
            assert f"another --dir, or delete {copy}" in await _ending(member(copy, *other.directory.maddrs))
            first.twins.check()


async def _finds_nothing(directory: object) -> None:
    return None


async def _ending(starting: contextlib.AbstractAsyncContextManager[Endpoint]) -> str:
    """What it says when it ends."""
    try:
        async with starting as end:
            while True:
                await end.directory.records(at_once=True)
                await asyncio.sleep(0)
    except* UsageError as group:
        (found,) = leaves(group)
    return str(found)


async def test_a_bootstrap_node_says_that_a_peer_runs_with_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "LOOK_S", 0.0)
    async with asyncio.timeout(LIMIT_S), World() as world, asyncio.TaskGroup() as tasks:
        node, peer = Identity.generate(), Twins(5)

        def on_twin(hello: Hello, host: str, clocks_agree: bool) -> None:
            peer.met(hello.boot_id, host, clocks_agree=clocks_agree)

        said = asyncio.Event()
        twin = (await world.member(identity=node, greeter=greeter(5), on_twin=on_twin)).transport
        monkeypatch.setattr(twins.log, "warning", lambda event, **fields: said.set())
        record = replace(_record(node, 5), addresses=twin.addresses)
        directory = SimpleNamespace(elsewhere=SimpleNamespace(record=record))
        watching = tasks.create_task(bootstrap._watch_for_twins(directory, node, tmp_path / IDENTITY_FILE))
        await said.wait()
        peer.check()  # the peer goes on
        watching.cancel()
