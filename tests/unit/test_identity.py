"""Key file, peer id, signatures, certificates and multiaddrs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.net.address import Address, announced_at, operator_of, peer_in
from swarmnet.net.identity import Identity, verify
from swarmnet.net.tls import CLOCK_SLACK_S, LEAF_LIFE_S, TLS_NAME, Leaf, caller_of, trust_anchor
from swarmnet.wire.peer_ids import is_peer_id, peer_id_from_public_bytes, public_bytes_of


def test_the_key_file_is_private_and_made_once(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "identity.key"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load_or_create(path).peer == first.peer
    assert os.listdir(path.parent) == ["identity.key"]


def test_a_lost_race_takes_the_winners_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    winner = Identity.load_or_create(path)
    monkeypatch.setattr(Path, "exists", lambda self: False)  # we looked just before the winner wrote
    assert Identity.load_or_create(path).peer == winner.peer
    assert os.listdir(tmp_path) == ["identity.key"]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x01\x12\x40" + bytes(64), b"\x08\x01\x12\x40" + bytes(99)])
def test_garbage_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="remove it"):
        Identity.load_or_create(path)


def test_a_readable_key_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        Identity.load_or_create(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose a file"):
        Identity.load_or_create(tmp_path)


def test_a_known_key_has_its_known_peer_id() -> None:
    """The Ed25519 vector of the libp2p peer-id specification."""
    data = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    identity = Identity.from_bytes(data)
    assert identity.to_bytes() == data
    public = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert public_bytes_of(identity.peer) == public


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_embed_their_key(raw: bytes) -> None:
    peer = peer_id_from_public_bytes(raw)
    assert peer.startswith("12D3KooW") and public_bytes_of(peer) == raw


@given(st.text(max_size=60))
def test_other_text_is_no_peer_id(text: str) -> None:
    assert not is_peer_id(text)


def test_only_the_signer_verifies() -> None:
    me, other = Identity.generate(), Identity.generate()
    signature = me.sign(b"record")
    assert verify(me.peer, b"record", signature)
    assert not verify(me.peer, b"Record", signature)
    assert not verify(other.peer, b"record", signature)
    assert not verify(me.peer, b"record", b"short")
    assert not verify(PeerId("nobody"), b"record", signature)


# ---------------------------------------------------------------- certificates


def _leaf(clock: list[float]) -> tuple[Identity, Leaf]:
    identity = Identity.generate()
    return identity, Leaf(identity, clock=lambda: clock[0])


def _split(chain: bytes) -> tuple[bytes, bytes]:
    """The two certificates of a chain, as gRPC shows them."""
    marker = b"-----END CERTIFICATE-----\n"
    first, second, rest = chain.split(marker)
    assert not rest
    return first + marker, second + marker


def test_leaves_reach_a_day_into_the_past() -> None:
    identity, leaf = _leaf([1.8e9])
    certificate = x509.load_pem_x509_certificate(_split(leaf.chain)[0])
    assert certificate.not_valid_before_utc.timestamp() == 1.8e9 - CLOCK_SLACK_S
    assert certificate.not_valid_after_utc.timestamp() == 1.8e9 + LEAF_LIFE_S
    assert TLS_NAME not in identity.peer


def test_a_leaf_is_reissued_at_half_its_life() -> None:
    clock = [1.8e9]
    _, leaf = _leaf(clock)
    first = leaf.chain
    clock[0] += LEAF_LIFE_S / 2 - 1
    assert leaf.chain == first
    clock[0] += 2
    assert leaf.chain != first


def _context(leaf: bytes, *others: bytes) -> dict[str, list[bytes]]:
    return {"x509_pem_cert": [leaf], "x509_pem_cert_chain": [leaf + b"".join(others)]}


def test_the_caller_is_who_signed_the_leaf() -> None:
    victim, victims = _leaf([1.8e9])
    attacker, attackers = _leaf([1.8e9])
    leaf, intermediate = _split(attackers.chain)
    foreign = _split(victims.chain)[1]
    assert caller_of(_context(leaf, intermediate)) == attacker.peer
    assert caller_of(_context(leaf, foreign, intermediate)) == attacker.peer
    assert caller_of(_context(leaf, foreign)) is None
    assert caller_of(_context(leaf, intermediate, *[intermediate] * 260)) is None, "each costs a check: none is made"
    assert caller_of({}) is None
    assert caller_of(_context(b"junk")) is None
    assert victim.peer != attacker.peer


def test_an_anchor_is_made_from_the_peer_id_alone() -> None:
    identity = Identity.generate()
    anchor = x509.load_pem_x509_certificate(trust_anchor(identity.peer))
    assert anchor.public_key() == identity.key.public_key()
    with pytest.raises(ValueError, match="peer id"):
        trust_anchor(PeerId("nobody"))


# ---------------------------------------------------------------- addresses

PEER = PeerId("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("/ip4/127.0.0.1/tcp/31337", "ipv4:127.0.0.1:31337"),
        (f"/ip4/203.0.113.7/tcp/1/p2p/{PEER}", "ipv4:203.0.113.7:1"),
        (f"/ip6/2001:db8::1/tcp/65535/p2p/{PEER}", "ipv6:[2001:db8::1]:65535"),
        ("/dns4/peer.example.org/tcp/80", "dns:///peer.example.org:80"),
        ("/dns6/peer.example.org/tcp/80", "dns:///peer.example.org:80"),
    ],
)
def test_multiaddrs_survive(text: str, target: str) -> None:
    address = Address.parse(text)
    assert str(address) == text and address.target == target
    assert address.peer == (PEER if "p2p" in text else None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not an address"),
        ("203.0.113.7:31337", "not an address"),
        ("/ip4/203.0.113.7/udp/1/quic", "not an address"),
        ("/unix/socket/tcp/1", "cannot dial"),
        ("/ip4/999.1.1.1/tcp/1", "not an IPv4"),
        ("/ip6/1.2.3.4/tcp/1", "not an IPv6"),
        ("/dns4/-bad-/tcp/1", "host name"),
        ("/dns4/" + "a" * 300 + "/tcp/1", "host name"),
        ("/ip4/1.2.3.4/tcp/0", "TCP port"),
        ("/ip4/1.2.3.4/tcp/65536", "TCP port"),
        ("/ip4/1.2.3.4/tcp/-1", "TCP port"),
        ("/ip4/1.2.3.4/tcp/1/p2p/QmFoo", "peer id"),
    ],
)
def test_bad_addresses_say_why(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Address.parse(text)


def test_a_circuit_names_its_relay_and_whom_it_leads_to_and_is_no_place_to_join_or_announce() -> None:
    relay = Identity.generate().peer
    text = f"/p2p/{relay}/p2p-circuit/p2p/{PEER}"
    address = Address.parse(text)
    assert str(address) == text and (address.relay, address.peer) == (relay, PEER)
    assert peer_in(text) is None and Address.parse("/ip4/127.0.0.1/tcp/31337").relay is None
    with pytest.raises(UsageError, match="finds its relays itself"):
        announced_at((text,), PEER, port=1, dht_port=2)
    with pytest.raises(UsageError, match="peer id"):
        Address.parse(f"/p2p/nobody/p2p-circuit/p2p/{PEER}")


def test_an_address_is_made_from_a_host() -> None:
    assert str(Address.of("127.0.0.1", 5, PEER)) == f"/ip4/127.0.0.1/tcp/5/p2p/{PEER}"
    assert str(Address.of("::1", 5)) == "/ip6/::1/tcp/5"
    assert str(Address.of("localhost", 5)) == "/dns4/localhost/tcp/5"


@pytest.mark.parametrize(
    ("addresses", "operator"),
    [
        (["/ip4/44.1.2.3/tcp/1"], "44.1.0.0/16"),
        (["/ip4/44.1.200.3/tcp/2"], "44.1.0.0/16"),
        (["/ip4/44.2.2.3/tcp/1"], "44.2.0.0/16"),
        (["/ip6/2600:44:1:2::3/tcp/1"], "2600:44::/32"),
        (["/ip6/::ffff:44.1.2.3/tcp/1"], "44.1.0.0/16"),
        (["/ip4/192.168.1.2/tcp/1", "/ip4/44.1.2.3/tcp/1", "/ip4/44.2.2.3/tcp/1"], "44.1.0.0/16"),
        *(
            ([address], "")
            for address in (
                "/ip4/127.0.0.1/tcp/1",
                "/ip4/10.1.2.3/tcp/1",
                "/ip4/169.254.1.2/tcp/1",
                "/ip4/100.64.0.1/tcp/1",
                "/ip6/::1/tcp/1",
                "/ip6/fe80::1/tcp/1",
                "/ip6/fd00::1/tcp/1",
                "/dns4/example.org/tcp/1",
                f"/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
                "memory",
            )
        ),
        ([], ""),
    ],
)
def test_the_operator_of_a_peer_is_its_public_network(addresses: list[str], operator: str) -> None:
    assert operator_of(PEER, addresses) == (operator or PEER)
    # A record proves who signed it, not that its addresses are the signer's.
    assert operator_of(PEER, addresses, "45.6.7.0/24") == "45.6.0.0/16"
    assert operator_of(PEER, addresses, "2601:44:1::/48") == "2601:44::/32"
