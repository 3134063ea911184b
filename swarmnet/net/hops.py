"""The first routers on the way to a host, by what they answer to packets that may go no further. Linux, IPv4; no root.

Behind a home's router some providers have another one that translates addresses again; its own address says so.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from ipaddress import IPv4Network, ip_address

from swarmnet.clock import boot_time

MOST_HOPS = 4
_WAIT_S = 0.6
_FIRST_PORT = 33434  # where nobody listens, by custom
_RECVERR, _FROM_ROUTER, _TOO_FAR = 11, 2, 11
_ERROR = struct.Struct("=IBBBBII")  # of Linux: sock_extended_err; the address of who sent it follows

_CARRIERS = IPv4Network("100.64.0.0/10")


def hops(host: str) -> list[str]:
    """Addresses of routers, the nearest first; "" for one that does not answer. Blocks for less than a second."""
    found = [""] * MOST_HOPS
    with contextlib.suppress(OSError, AttributeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        probe.setsockopt(socket.IPPROTO_IP, _RECVERR, 1)
        for hop in range(MOST_HOPS):
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hop + 1)
            for _ in range(2):
                # The first attempt may only say that an earlier one has been answered, and send nothing.
                with contextlib.suppress(OSError):
                    probe.sendto(b"", (host, _FIRST_PORT + hop))
                    break
        until, waits = boot_time() + _WAIT_S, select.poll()
        waits.register(probe, 0)
        while not all(found) and (left_s := until - boot_time()) > 0 and waits.poll(1000 * left_s):
            _, more, _, (_, port) = probe.recvmsg(64, 512, socket.MSG_ERRQUEUE)
            for _, kind, data in more:
                if kind == _RECVERR and len(data) >= _ERROR.size + 8:
                    _, origin, what, *_ = _ERROR.unpack_from(data)
                    if (origin, what) == (_FROM_ROUTER, _TOO_FAR) and 0 <= port - _FIRST_PORT < MOST_HOPS:
                        found[port - _FIRST_PORT] = socket.inet_ntoa(data[_ERROR.size + 4 : _ERROR.size + 8])
    return found


def behind_a_carrier(found: list[str]) -> bool:
    """Is one of these routers, beyond the home's own, in the network that carriers have for their customers?"""
    return any(hop and ip_address(hop) in _CARRIERS for hop in found[1:])
