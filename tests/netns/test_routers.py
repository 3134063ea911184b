"""Emulated routers are what their kinds say: how they map ports, and whom they let in. By plain sockets."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from benchmark_modules import load

routers = load("routers")

pytestmark = pytest.mark.netns

SILENCE_S, PATIENCE_S = 0.1, 10.0
"""What is not answered so soon inside one machine was dropped; what must be answered gets its time."""

PORT, AMOUNT = 4711, 200_000


@pytest.fixture(scope="module")
def world() -> Iterator[object]:
    try:
        with routers.internet() as net:
            yield net
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))


def bound(host, port: int = 0, *, v6: bool = False) -> socket.socket:
    """A socket of that host, which others may share the port with."""
    with routers.inside(host.namespace):
        sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.settimeout(PATIENCE_S)
    sock.bind((host.address6 if v6 else host.address, port))
    return sock


def listening(host, port: int = 0, *, v6: bool = False) -> socket.socket:
    sock = bound(host, port, v6=v6)
    sock.listen()
    return sock


def seen(host, port: int, at: socket.socket) -> tuple[str, int]:
    """The address that a listener sees when the host calls it from that port."""
    with bound(host, port) as sock:
        sock.connect(at.getsockname())
        came, address = at.accept()
        came.close()
        return address


def gets_in(caller, address: tuple[str, int], *, within_s: float = SILENCE_S) -> bool:
    """Is a connection accepted there? If not, it is dropped without a word: another answer raises OSError."""
    with bound(caller, v6=":" in address[0]) as sock, contextlib.suppress(TimeoutError):
        sock.settimeout(within_s)
        sock.connect(address)
        return True
    return False


def test_who_gets_in_from_outside(world) -> None:
    one, other = world.host(), world.host()
    with listening(one) as first, listening(other) as second:
        for kind in routers.KINDS:
            router = world.router(kind)
            host = router.host()
            with listening(host, PORT):
                inner = (host.address, PORT)
                outer = inner if kind == "firewall" else (router.wan, PORT)
                assert not gets_in(one, outer), f"{kind}: a port that has called nobody"
                assert not gets_in(one, inner), f"{kind}: the private address"
                address = seen(host, PORT, first)
                again = seen(host, PORT, second)
                assert (address == again == outer) == (kind != "symmetric"), kind
                assert address[0] == outer[0], kind
                with listening(host, PORT + 1):  # an open port that has called nobody is closed to those called
                    assert not gets_in(one, (outer[0], PORT + 1)), kind
                third = world.host()
                for caller, lets_in in ((third, ["full"]), (one, ["full", "address"])):  # the host has called `one`
                    right = kind in lets_in
                    assert gets_in(caller, address, within_s=PATIENCE_S if right else SILENCE_S) == right, kind


def test_a_symmetric_router_takes_another_port_for_every_connection(world) -> None:
    host, member = world.router("symmetric").host(), world.host()
    with listening(member) as first, listening(member) as second:
        assert len({seen(host, PORT, first), seen(host, PORT, second)}) == 2


def test_two_behind_one_router_call_each_other_inside_and_look_alike_outside(world) -> None:
    home, member = world.router("port"), world.host()
    one, other = home.host(), home.host()
    with listening(other) as inner, listening(member) as outer:
        assert gets_in(one, inner.getsockname(), within_s=PATIENCE_S)
        (host, _), (same, _) = seen(one, 0, outer), seen(other, 0, outer)
        assert host == same == home.wan


def test_carriers_translate_twice_and_homes_use_the_same_addresses(world) -> None:
    carrier, member = world.router("port", carrier=True), world.host()
    first, second = carrier.router("port"), carrier.router("port")
    one, other = first.host(), second.host()
    assert one.address == other.address and first.wan != second.wan
    with listening(member) as outer, listening(other, PORT):
        assert seen(one, PORT, outer)[0] == carrier.wan
        assert not gets_in(one, (second.wan, PORT))
        assert not gets_in(member, (carrier.wan, PORT))


def test_a_firewall_lets_out_and_not_in_by_ipv6_too(world) -> None:
    host, member = world.router("firewall").host(), world.host()
    with listening(member, v6=True) as outer, listening(host, PORT, v6=True):
        assert gets_in(host, outer.getsockname()[:2], within_s=PATIENCE_S)
        assert not gets_in(member, (host.address6, PORT))


def test_an_upload_is_as_slow_as_said(world) -> None:
    home, member = world.router("port"), world.host()
    home.upload(mbit=8.0)
    one_way = {}
    with listening(member) as outer, bound(home.host()) as caller:
        caller.connect(outer.getsockname())
        called, _ = outer.accept()
        with called:
            called.settimeout(PATIENCE_S)
            for way, sender, receiver in (("up", caller, called), ("down", called, caller)):
                began, left = time.monotonic(), AMOUNT
                sending = threading.Thread(target=sender.sendall, args=[bytes(AMOUNT)])
                sending.start()
                while left:
                    left -= len(receiver.recv(left))
                sending.join()
                one_way[way] = AMOUNT * 8e-6 / (time.monotonic() - began)
    assert one_way["up"] < 14.0 and one_way["down"] > 2 * one_way["up"], one_way  # what fits into its bucket is quicker
