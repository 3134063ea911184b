"""What an operator announces is published as typed, or refused in words that say what to type."""

from __future__ import annotations

import re

import pytest

from swarmnet.errors import UsageError
from swarmnet.net.address import announced_at
from swarmnet.net.identity import Identity

ME, OTHER = Identity.generate().peer, Identity.generate().peer


def test_every_address_goes_to_the_port_it_names_as_typed() -> None:
    announce = (
        "/ip4/203.0.113.7/tcp/40000",
        "/dns6/gpu.example.org/tcp/40000",
        "/ip4/203.0.113.7/tcp/40001",
        f"/ip6/2001:db8::1/tcp/40001/p2p/{ME}",
    )
    found = announced_at(announce, ME, port=40000, dht_port=40001)
    assert {option: [str(address) for address in addresses] for option, addresses in found.items()} == {
        "port": [f"/ip4/203.0.113.7/tcp/40000/p2p/{ME}", f"/dns6/gpu.example.org/tcp/40000/p2p/{ME}"],
        "dht_port": [f"/ip4/203.0.113.7/tcp/40001/p2p/{ME}", f"/ip6/2001:db8::1/tcp/40001/p2p/{ME}"],
    }


def test_nothing_announced_asks_for_no_fixed_port() -> None:
    assert announced_at((), ME, port=0, dht_port=0) == {"port": (), "dht_port": ()}


def test_a_bootstrap_node_has_one_port() -> None:
    found = announced_at(("/ip4/203.0.113.7/tcp/31337",), ME, dht_port=31337)
    assert [str(address) for address in found["dht_port"]] == [f"/ip4/203.0.113.7/tcp/31337/p2p/{ME}"]


DATA, DHT = "/ip4/203.0.113.7/tcp/40000", "/ip4/203.0.113.7/tcp/40001"


@pytest.mark.parametrize(
    ("announce", "port", "dht_port", "words"),
    [
        ((DATA, DHT), 0, 40001, "needs a fixed --port"),
        ((DATA, DHT), 40000, 0, "needs a fixed --dht-port"),
        ((DATA, DHT), 40000, 40000, "--port and --dht-port are the same port"),
        ((DATA, DHT, "/ip4/203.0.113.7/tcp/42785"), 40000, 40001, "must be 40000 (--port) or 40001 (--dht-port)"),
        ((DATA,), 40000, 40001, "no address with port 40001 (--dht-port)"),
        ((DHT,), 40000, 40001, "no address with port 40000 (--port)"),
        ((DATA, f"{DHT}/p2p/{OTHER}"), 40000, 40001, "another peer's id"),
        (("/ip4/203.0.113.7/udp/40000",), 40000, 40001, "is not an address"),
    ],
)
def test_what_leads_nowhere_is_refused(announce: tuple[str, ...], port: int, dht_port: int, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        announced_at(announce, ME, port=port, dht_port=dht_port)
