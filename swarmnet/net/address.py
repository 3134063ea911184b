"""Where a peer is reached: multiaddrs of TCP ports and circuits, as text and back; what an announced address means.

    /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...      ip6, dns4 and dns6 likewise; the /p2p part is optional
    /p2p/RELAY/p2p-circuit/p2p/12D3Koo...          a circuit: through a relay, to an unreachable peer

Only the subset that the gRPC data plane needs. Behind a router, or with several networks, the operator says what
others see: every announced address is published as typed, and its port says what answers there. Resolves nothing, dials
nothing.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.wire.peer_ids import is_peer_id

Kind = Literal["ip4", "ip6", "dns4", "dns6", "p2p"]
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Address:
    """One TCP endpoint and its peer, if that is known; or one circuit to `peer`."""

    kind: Kind
    host: str
    """Of a circuit: the peer id of its relay."""
    port: int
    """Of a circuit: 0."""
    peer: PeerId | None = None

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Address:
        """Read a multiaddr. Raises UsageError with what is wrong about it."""
        match text.split("/"):
            case ["", kind, host, "tcp", port]:
                return cls(_kind(text, kind), _host(text, kind, host), _port(text, port))
            case ["", kind, host, "tcp", port, "p2p", peer]:
                return cls(_kind(text, kind), _host(text, kind, host), _port(text, port), _peer(text, peer))
            case ["", "p2p", relay, "p2p-circuit", "p2p", peer]:
                return cls.circuit(_peer(text, relay), _peer(text, peer))
        raise UsageError(f"{text!r} is not an address like /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...")

    @classmethod
    def of(cls, host: str, port: int, peer: PeerId | None = None) -> Address:
        """The address of a numeric host or a host name."""
        if (ip := ip_of(host)) is None:
            return cls("dns4", _host(host, "dns4", host), port, peer)
        return cls("ip4" if ip.version == 4 else "ip6", str(ip), port, peer)

    @classmethod
    def circuit(cls, relay: PeerId, peer: PeerId) -> Address:
        """To `peer` through `relay`."""
        return cls("p2p", relay, 0, peer)

    @property
    def relay(self) -> PeerId | None:
        """Through whom a circuit leads; None for a TCP endpoint."""
        return PeerId(self.host) if self.kind == "p2p" else None

    @property
    def direct(self) -> bool:
        """Is it a TCP endpoint?"""
        return self.kind != "p2p"

    def __str__(self) -> str:
        if self.relay:
            return f"/p2p/{self.relay}/p2p-circuit/p2p/{self.peer}"
        tail = f"/p2p/{self.peer}" if self.peer else ""
        return f"/{self.kind}/{self.host}/tcp/{self.port}{tail}"

    @property
    def target(self) -> str:
        """As gRPC wants it; it cannot dial a circuit."""
        assert not self.relay, "a circuit is no TCP endpoint"
        match self.kind:
            case "ip4":
                return f"ipv4:{self.host}:{self.port}"
            case "ip6":
                return f"ipv6:[{self.host}]:{self.port}"
        # gRPC resolves the name at every connection: it may move.
        return f"dns:///{self.host}:{self.port}"


def _kind(text: str, kind: str) -> Kind:
    match kind:
        case "ip4" | "ip6" | "dns4" | "dns6":
            return kind
    raise UsageError(f"{text!r}: cannot dial /{kind}; use /ip4, /ip6, /dns4 or /dns6")


def _host(text: str, kind: str, host: str) -> str:
    if kind in ("dns4", "dns6"):
        # The longest name that DNS knows.
        if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split(".")):
            raise UsageError(f"{text!r}: {host!r} is not a host name")
        return host
    try:
        # Such as fe80::1%eth0: the part after % names an interface of one machine.
        if "%" in host:
            raise ValueError("a scope is of one machine only")
        return str(ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host))
    except ValueError as error:
        raise UsageError(f"{text!r}: {host!r} is not an IPv{kind[-1]} address") from error


def _port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise UsageError(f"{text!r}: {port!r} is not a TCP port (1 to 65535)")
    return int(port)


def _peer(text: str, peer: str) -> PeerId:
    # Other key types are peer ids of libp2p too, but cannot sign our certificates.
    if not is_peer_id(peer):
        raise UsageError(
            f"{text!r}: {peer!r} is not an Ed25519 peer id (12D3Koo...): copy the whole line that the peer printed"
        )
    return PeerId(peer)


def bootstrap_address(address: str) -> str:
    """A bootstrap address as given. Raises UsageError unless it names the peer to expect there."""
    # One that is no address says itself what is wrong.
    if Address.parse(address).relay:
        raise UsageError(f"{address!r} leads through a relay: give the address of a peer that can be dialled")
    if peer_in(address) is None:
        raise UsageError(f"{address!r} does not end in /p2p/<peer id>: copy the whole line that the peer printed")
    return address


def check_addresses(addresses: Iterable[str], flag: str = "--bootstrap") -> None:
    """Raises UsageError in the name of `flag` unless each is a `bootstrap_address`."""
    for address in addresses:
        try:
            bootstrap_address(address)
        except UsageError as error:
            raise UsageError(f"{flag}: {error}") from error


def peer_in(address: str) -> PeerId | None:
    """The peer id that the multiaddr of a TCP port ends in, or None."""
    found = _parsed(address)
    return None if found is None or found.relay else found.peer


# ---------------------------------------------------------------- the network of an address


def ip_of(host: str, *, unmapped: bool = False) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host's text is; None: it is a name. unmapped: of an IPv4 address inside IPv6 that one."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (getattr(ip, "ipv4_mapped", None) or ip) if unmapped else ip


def network_of(host: str, ip4: int, ip6: int) -> str:
    """The network of a host, of so many bits of IPv4 and of IPv6. "": it is a name, or no public address."""
    if (ip := ip_of(host, unmapped=True)) is None or not ip.is_global:
        return ""
    return str(ipaddress.ip_network((ip, ip4 if ip.version == 4 else ip6), strict=False))


def home_of(host: str) -> str:
    """One home's addresses count as one: of IPv6 it has 2**64."""
    if (ip := ip_of(host, unmapped=True)) is None:
        return host
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((int(ip), 64), strict=False))


def operator_of(peer: PeerId, addresses: Iterable[str], home: str = "") -> str:
    """Who runs a peer, as far as addresses tell: the /16 of IPv4, or /32 of IPv6, of the first public one; else the
    peer itself.

    Args:
        addresses: multiaddrs that it announces. A relay is not its operator, and a name may lead anywhere.
        home: the network where it has been met, which counts before what it announces; "": none.
    """
    hosts = [home.partition("/")[0], *(address.host for address in map(_parsed, addresses) if address)]
    return next(filter(None, (network_of(host, 16, 32) for host in hosts)), peer)


def endpoint_of(target: str) -> tuple[str, int]:
    """Host and port in gRPC's words for the other end of a connection, such as `ipv6:%5B::1%5D:4711`. ("", 0): it is
    inside this machine, as what a relay passes on."""
    host, _, port = urllib.parse.unquote(target.partition(":")[2]).rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else ("", 0)


def _parsed(text: str) -> Address | None:
    try:
        return Address.parse(text)
    except UsageError:
        return None


# ---------------------------------------------------------------- announced addresses


def announced_at(announce: Sequence[str], me: PeerId, **ports: int) -> dict[str, tuple[Address, ...]]:
    """Sort the announced multiaddrs by the option that set their port. An empty list gives no address for any option.

    ports: the fixed port of every option (`dht_port=31337`); 0 is a port that is not known yet. Raises UsageError if an
    address names none of them or another peer, or if an option is named by no address.
    """
    found: dict[str, list[Address]] = {option: [] for option in ports}
    if announce:
        for option, port in ports.items():
            # Port 0 means any free one, which no router can be configured to forward.
            if not port:
                raise UsageError(
                    f"--announce needs a fixed {_flag(option)}: a port that is chosen at random at every start "
                    "cannot be announced"
                )
        # With one port for two options an address would not say which of them it is.
        if len(set(ports.values())) < len(ports):
            raise UsageError(f"{' and '.join(map(_flag, ports))} are the same port: choose two")
    choices = " or ".join(f"{port} ({_flag(option)})" for option, port in ports.items())
    for text in announce:
        # The operator types the address as others see it: the port alone says which of our listeners it is.
        address = Address.parse(text)
        if address.relay:
            raise UsageError(f"--announce {text}: a peer finds its relays itself; announce what others can dial")
        # Others would refuse to talk to it: another key answers there.
        if address.peer not in (None, me):
            raise UsageError(f"--announce {text}: that is another peer's id, this one is {me}: leave out /p2p/...")
        named = next((option for option, port in ports.items() if port == address.port), None)
        if named is None:
            raise UsageError(
                f"--announce {text}: nothing of this peer listens on port {address.port}: it must be {choices}; "
                "forward the same port number on your router"
            )
        found[named].append(Address(address.kind, address.host, address.port, me))
    for option, addresses in found.items():
        if announce and not addresses:
            raise UsageError(
                f"--announce names no address with port {ports[option]} ({_flag(option)}): give one for each port"
            )
    return {option: tuple(addresses) for option, addresses in found.items()}


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
