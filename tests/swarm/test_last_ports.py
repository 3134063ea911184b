"""Whoever comes back listens where it was listening, so that a link printed earlier still leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet.config.peer import PeerConfig
from swarmnet.manifest.schema import Data, Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.endpoint import open_endpoint
from swarmnet.net.identity import Identity
from swarmnet.net.ports import FILE, LastPorts
from swarmnet.testing.doubles import FakeService

MANIFEST = Manifest(data=Data(num_tokens=1000))


async def life(config: PeerConfig) -> tuple[LastPorts, tuple[str, ...]]:
    """Open and close an endpoint: where it listened, and the links it gave."""
    async with (
        open_endpoint(RunTerms.of(MANIFEST), config.network, numerics="") as endpoint,
        endpoint.serve(FakeService()),
    ):
        return LastPorts(endpoint.transport.port, endpoint.directory.port), endpoint.links


def without_bulk(ports: LastPorts) -> LastPorts:
    """The port of bulk connections may be another each time."""
    assert ports.bulk_port
    return replace(ports, bulk_port=0)


def test_the_next_life_listens_where_the_last_one_did(tmp_path: Path) -> None:
    config = PeerConfig(dir=tmp_path, host="127.0.0.1")
    first = asyncio.run(life(config))
    assert first[0].port and first[0].dht_port and first[0] == without_bulk(LastPorts.read(tmp_path))
    assert asyncio.run(life(config)) == first


def test_ports_that_others_have_by_now_are_no_error(tmp_path: Path) -> None:
    config = PeerConfig(dir=tmp_path, host="127.0.0.1")
    first, _ = asyncio.run(life(config))
    with socket.create_server(("127.0.0.1", first.port)), socket.create_server(("127.0.0.1", first.dht_port)):
        second, links = asyncio.run(life(config))
    assert not {second.port, second.dht_port} & {first.port, first.dht_port}
    assert without_bulk(LastPorts.read(tmp_path)) == second and f"/tcp/{second.dht_port}/" in links[0]


def test_a_fixed_port_is_not_pushed_aside_by_a_remembered_one(tmp_path: Path) -> None:
    first, _ = asyncio.run(life(PeerConfig(dir=tmp_path, host="127.0.0.1")))
    moved, _ = asyncio.run(life(PeerConfig(dir=tmp_path, host="127.0.0.1", port=first.dht_port)))
    assert moved.port == first.dht_port != moved.dht_port


def test_two_that_want_the_same_port_at_the_same_moment_get_two() -> None:
    """The libp2p daemon shares a taken port without a word; a look beforehand alone would find it free twice."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    async def both() -> tuple[int, ...]:
        directories = [DhtDirectory(Identity.generate(), None, listen=Listen(first=port)) for _ in range(2)]
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.gather(*map(stack.enter_async_context, directories))
            return tuple(directory.port for directory in directories)

    ports = asyncio.run(both())
    assert port in ports and len(set(ports)) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"port": "80", "dht_port": 0}', '{"port": 65536}', '{"port": true, "dht_port": -1}']
)
def test_whatever_is_no_port_is_no_hint(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert LastPorts.read(tmp_path) == LastPorts()


def test_what_is_kept_is_read_and_a_disk_that_cannot_take_it_costs_only_the_hint(tmp_path: Path) -> None:
    LastPorts(1, 2).keep(tmp_path)
    assert LastPorts.read(tmp_path) == LastPorts(1, 2)
    assert json.loads((tmp_path / FILE).read_text()) == {"port": 1, "dht_port": 2, "bulk_port": 0}
    LastPorts(3, 4).keep(tmp_path / "nowhere")
