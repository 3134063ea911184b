"""Peers behind real NAT on this machine, for benchmarks and tests: Linux routers in network namespaces. Root, nftables.

    with internet() as world:
        member = world.host()
        home = world.router("port")
        one, other = home.host(), home.host()
        mobile = world.router("symmetric", carrier=True).router("port").host()    # carrier-grade: NAT twice

Every host and router has a namespace of its own. Homes all use the same private network, as real ones do. Nothing gets
into a home unless its router's kind says so, and a packet for nobody is dropped without a word:

| kind | outside port of an inside one | who gets in through it |
|---|---|---|
| `full` | the same for everybody | everybody |
| `address` | the same for everybody | whom that port has called, from any port |
| `port` | the same for everybody | only answers (Linux's own masquerade; most home routers) |
| `symmetric` | another for every connection | only answers |
| `firewall` | no NAT: the hosts have public addresses, of IPv6 too | only answers |
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal

Kind = Literal["full", "address", "port", "symmetric", "firewall"]
KINDS: tuple[Kind, ...] = ("full", "address", "port", "symmetric", "firewall")

WORLD, WORLD6 = IPv4Network("44.0.0.0/16"), IPv6Network("2600:44::/64")
"""Addresses that count as public."""

ROUTED, ROUTED6 = IPv4Network("44.1.0.0/16"), IPv6Network("2600:45::/48")
"""Where the networks behind routers of kind `firewall` are."""

HOME, CARRIER = IPv4Network("192.168.1.0/24"), IPv4Network("100.64.0.0/10")

_MAC = "02:00:00:00:00:01"
_CLONE_NEWNET = 0x40000000
_opened = itertools.count()
"""Worlds of this process, several of which may be open at once."""

_FILTER = """
table inet filter {
  chain input {
    type filter hook input priority 0; policy accept;
    iifname "wan" meta l4proto tcp drop
  }
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "lan" accept
    ct status dnat accept
  }
}
"""

_MASQUERADE = """
table ip nat {
  %(sets)s
  chain out {
    type nat hook postrouting priority 100;
    %(remember)s
    oifname "wan" masquerade %(ports)s
  }
  chain in {
    type nat hook prerouting priority -100;
    %(let_in)s
  }
}
"""


def _rules(kind: Kind) -> str:
    """What nftables does in a router of that kind."""
    if kind == "firewall":
        return _FILTER
    words = {"sets": "", "remember": "", "let_in": "", "ports": "random,fully-random" if kind == "symmetric" else ""}
    if kind in ("full", "address"):
        # From outside ports (and who was called through them) to inside hosts; masquerade leaves ports as they are.
        beside = {"full": ("", "", ""), "address": (" . ipv4_addr", " . ip daddr", " . ip saddr")}[kind]
        words["sets"] = f"map mapped {{ type inet_service{beside[0]} : ipv4_addr; flags dynamic,timeout; timeout 5m; }}"
        words["remember"] = f'oifname "wan" update @mapped {{ tcp sport{beside[1]} : ip saddr }}'
        words["let_in"] = f'iifname "wan" dnat to tcp dport{beside[2]} map @mapped'
    return _FILTER + _MASQUERADE % words


def why_not() -> str:
    """Why none of this works here; "" if it should."""
    if os.geteuid() != 0:
        return "needs root"
    return "" if shutil.which("ip") and shutil.which("nft") else "needs iproute2 and nftables"


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets that this thread opens in the block, and processes that it starts, are in that network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        with open(path) as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {path}")

    with open("/proc/thread-self/ns/net") as before:
        enter(f"/var/run/netns/{namespace}")
        try:
            yield
        finally:
            enter(f"/proc/self/fd/{before.fileno()}")


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one way out. `address` is its own; others see it only if no NAT lies between."""

    namespace: str
    address: str
    address6: str = ""


class Net:
    """A network with addresses to give away, of which the first is its gateway's; hosts and routers are plugged in."""

    def __init__(
        self, spaces: _Spaces, namespace: str, bridge: str, net: IPv4Network, net6: IPv6Network | None = None
    ) -> None:
        self.namespace, self._bridge, self._spaces = namespace, bridge, spaces
        self._net, self._net6, self._numbers = net, net6, itertools.count(2)
        with inside(namespace):
            for switch in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
                Path("/proc/sys/net", switch).write_text("1")
            # What one host of a network sends to another is not the router's business.
            with contextlib.suppress(OSError):
                Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("0")
        # With an address of its own: else it takes the lowest of its ports', another whenever one is plugged in.
        _run(f"ip -n {namespace} link add {bridge} address {_MAC} type bridge forward_delay 0 mcast_snooping 0")
        self._give(namespace, bridge, 1)

    def host(self) -> Host:
        """One more host in this network."""
        namespace = self._spaces.add()
        return Host(namespace, *self._connect(namespace, "eth0"))

    def router(self, kind: Kind, *, carrier: bool = False) -> Router:
        """A home's router that is plugged into this network; carrier: one that homes are plugged into."""
        return Router(self, self._spaces, kind, CARRIER if carrier else HOME)

    def _connect(self, namespace: str, device: str) -> tuple[str, str]:
        """Lay a cable from that namespace to this network; its addresses there."""
        number = next(self._numbers)
        plug = f"port{number}"
        _run(f"ip -n {namespace} link add {device} type veth peer {plug} netns {self.namespace}")
        _run(f"ip -n {self.namespace} link set {plug} master {self._bridge} up")
        return self._give(namespace, device, number)

    def _give(self, namespace: str, device: str, number: int) -> tuple[str, str]:
        found = ["", ""]
        _run(f"ip -n {namespace} link set {device} up")
        for at, net, words in ((0, self._net, "-4"), (1, self._net6, "-6")):
            if net is None:
                continue
            found[at] = str(net[number])
            nodad = "nodad" if net.version == 6 else ""
            _run(f"ip -n {namespace} {words} addr add {found[at]}/{net.prefixlen} dev {device} {nodad}")
            if number > 1:
                _run(f"ip -n {namespace} {words} route add default via {net[1]}")
        return found[0], found[1]


class Router(Net):
    """A home's router, or a carrier's, and the network behind it. `wan`: its address outside."""

    def __init__(self, outside: Net, spaces: _Spaces, kind: Kind, net: IPv4Network) -> None:
        namespace, self.kind = spaces.add(), kind
        self.wan, wan6 = outside._connect(namespace, "wan")
        if kind == "firewall":
            number = next(spaces.routed)
            net, net6 = list(ROUTED.subnets(new_prefix=24))[number], list(ROUTED6.subnets(new_prefix=64))[number]
            super().__init__(spaces, namespace, "lan", net, net6)
            _run(f"ip -n {outside.namespace} route add {net} via {self.wan}")
            _run(f"ip -n {outside.namespace} -6 route add {net6} via {wan6}")
        else:
            super().__init__(spaces, namespace, "lan", net)
        with inside(namespace):
            subprocess.run(["nft", "-f", "-"], input=_rules(kind), text=True, check=True)

    def upload(self, mbit: float) -> None:
        """From now on no more than this leaves for the outside."""
        _run(f"tc -n {self.namespace} qdisc replace dev wan root tbf rate {mbit}mbit burst 64kb latency 200ms")


class _Spaces:
    """Network namespaces that end together."""

    def __init__(self, end: ExitStack) -> None:
        self._end, self._prefix = end, f"nat{os.getpid()}-{next(_opened)}"
        self._count = itertools.count()
        self.routed = itertools.count()
        """Numbers of networks that the world has routes to."""

    def add(self) -> str:
        name = f"{self._prefix}-{next(self._count)}"
        _run(f"ip netns add {name}")
        self._end.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
        with inside(name):
            # An address is used at once: nobody else has it.
            Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")
        _run(f"ip -n {name} link set lo up")
        return name


@contextlib.contextmanager
def internet() -> Iterator[Net]:
    """Where all can call each other. Raises OSError or CalledProcessError where that cannot be emulated."""
    if reason := why_not():
        raise OSError(f"no routers in namespaces here: {reason}")
    with ExitStack() as end:
        spaces = _Spaces(end)
        world = Net(spaces, spaces.add(), "world", WORLD, WORLD6)
        for version in (4, 6):  # private addresses lead nowhere
            _run(f"ip -n {world.namespace} -{version} route add blackhole default")
        yield world


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True)
