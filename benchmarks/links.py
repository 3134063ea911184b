"""Lines of a given width and length between network namespaces on this machine, for benchmarks and tests. Linux, root.

    with Links(peers=4, mbit=200, rtt_ms=50) as places: ...     # [(namespace, address), ...]

Every peer has a namespace whose only way out is a TUN device. One process (this file, run as a program) reads what they
send and writes it to whom it is for: no faster than the sender's line and the receiver's carry it, half a round trip
later, and not at all if it would wait in a queue for longer than `QUEUE_S`. Packets are up to 64 KiB, segmented by
nobody, so that emulating a gigabit costs little CPU. The kernel's own TCP runs at both ends. Whoever is firewalled
opens connections and takes none: what would open one to it is dropped without a word, as home routers do. While the
lines are open, `block` does so for one caller and one called, `only_port` for all ports of a peer but one, `down` takes
a peer's cable out and `up` puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

QUEUE_S = 0.2
"""As deep as home lines' queues are."""

_NETWORK, _DEVICE = "10.77.0", "tun0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_HEADER, _WITH_OFFLOADS = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS, _SEGMENTS6 = 1, 2, 4
_OFFLOADS_BYTES = 10
"""Before each packet: what is left for the receiver to do with it (checksums, segments)."""

_MOST = 1 << 17
_AT_ONCE = 32
_ORDERS = 0
"""The file descriptor that orders arrive at, one a line; each is answered with `_DONE`, as is a good beginning."""

_DONE = "done"

_opened = itertools.count()
"""`Links` of this process, which may be open at once."""


def enter(namespace: str) -> None:
    """Move this process, as long as it has one thread, into a network namespace. Raises OSError."""
    with open(f"/var/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


class Links:
    """A namespace per peer while it is open. Raises PermissionError unless root, OSError where there is no TUN."""

    def __init__(self, peers: int, *, mbit: float, rtt_ms: float, firewalled: frozenset[int] = frozenset()) -> None:
        if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
            raise PermissionError("emulated links need root and /dev/net/tun")
        self._mbit, self._rtt_ms = mbit, rtt_ms
        self._blocked = [(caller, called) for caller in range(peers) for called in firewalled]
        self._names = [f"links{os.getpid()}-{next(_opened)}-{rank}" for rank in range(peers)]
        self._emulator: subprocess.Popen[str] | None = None

    def __enter__(self) -> list[tuple[str, str]]:
        try:
            for name in self._names:
                _ip("netns", "add", name)
            self._emulator = subprocess.Popen(
                [sys.executable, __file__, str(self._mbit), str(self._rtt_ms), *self._names],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            self._answered()
            for caller, called in self._blocked:
                self.block(caller, called)
            addresses = [f"{_NETWORK}.{rank + 1}" for rank in range(len(self._names))]
            for name, address in zip(self._names, addresses, strict=True):
                inside = ("-n", name)
                _ip(*inside, "link", "set", "lo", "up")
                _ip(*inside, "addr", "add", f"{address}/24", "dev", _DEVICE)
                _ip(*inside, "link", "set", _DEVICE, "up", "mtu", "1500", "txqueuelen", "10000")
            return list(zip(self._names, addresses, strict=True))
        except BaseException:
            self._close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def block(self, caller: int, called: int) -> None:
        """From now on `caller` opens no connection to `called`; those that are open stay."""
        self._order("block", caller, called)

    def only_port(self, peer: int, port: int) -> None:
        """From now on nobody opens a connection to `peer` at another port."""
        self._order("only_port", peer, port)

    def down(self, peer: int) -> None:
        """Take the cable of `peer` out: what it sends and what is for it is lost, and no connection hears of it."""
        self._order("down", peer)

    def up(self, peer: int) -> None:
        """Put the cable of `peer` back."""
        self._order("up", peer)

    def _order(self, word: str, *numbers: int) -> None:
        assert self._emulator is not None and self._emulator.stdin is not None
        self._emulator.stdin.write(" ".join([word, *map(str, numbers)]) + "\n")
        self._answered()

    def _answered(self) -> None:
        assert self._emulator is not None and self._emulator.stdout is not None
        if self._emulator.stdout.readline() != _DONE + "\n":
            raise OSError("the emulator of links has ended")

    def _close(self) -> None:
        if self._emulator is not None:
            self._emulator.terminate()
            self._emulator.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


# ---------------------------------------------------------------- the emulator


class Lane:
    """One direction of one line."""

    def __init__(self, mbit: float) -> None:
        self._seconds_per_byte = 8e-6 / mbit
        self._free_at = 0.0

    def passes(self, num_bytes: int, at: float) -> float | None:
        """When a packet that arrives at this line at `at` will be through; None: its queue is full."""
        begins = max(at, self._free_at)
        if begins - at > QUEUE_S:
            return None
        self._free_at = begins + num_bytes * self._seconds_per_byte
        return self._free_at


class Cuts:
    """Which packets are lost, as ordered."""

    def __init__(self) -> None:
        self._down: set[int] = set()
        self._blocked: set[tuple[int, int]] = set()
        self._only: dict[int, int] = {}

    def order(self, line: str) -> None:
        word, *numbers = line.split()
        peers = [int(number) for number in numbers]
        if word == "block":
            self._blocked.add((peers[0], peers[1]))
        elif word == "only_port":
            self._only[peers[0]] = peers[1]
        elif word == "down":
            self._down.add(peers[0])
        else:
            assert word == "up", line
            self._down.discard(peers[0])

    def lose(self, packet: bytes, sender: int, receiver: int) -> bool:
        if sender in self._down or receiver in self._down:
            return True
        if (port := _opens(packet)) is None:
            return False
        return (sender, receiver) in self._blocked or self._only.get(receiver, port) != port


def emulate(mbit: float, rtt_ms: float, namespaces: list[str]) -> None:
    """Carry packets and obey orders until SIGTERM, or until nobody is left who could give orders."""
    devices = [_device(name) for name in namespaces]
    up, down = [Lane(mbit) for _ in devices], [Lane(mbit) for _ in devices]
    place = {fd: rank for rank, fd in enumerate(devices)}
    cuts = Cuts()
    poll = select.poll()
    for fd in (_ORDERS, *devices):
        poll.register(fd, select.POLLIN)
    waiting: list[tuple[float, int, int, bytes]] = []
    tickets = itertools.count()
    with contextlib.suppress(PermissionError):
        os.nice(-15)  # late packets would be the machine's, not the line's
    print(_DONE, flush=True)
    while True:
        wait_ms = max((waiting[0][0] - time.monotonic()) * 1e3, 0.0) if waiting else 1000.0
        for fd, _ in poll.poll(wait_ms):
            if fd == _ORDERS:
                line = os.read(fd, _MOST)  # one: the next follows the answer
                if not line:
                    return
                cuts.order(line.decode())
                print(_DONE, flush=True)
                continue
            for _ in range(_AT_ONCE):
                try:
                    packet = os.read(fd, _MOST)
                except BlockingIOError:
                    break
                sender, receiver = place[fd], _receiver(packet)
                if receiver is None or not 0 <= receiver < len(devices):
                    continue
                if cuts.lose(packet, sender, receiver):
                    continue
                size = len(packet) - _OFFLOADS_BYTES
                sent = up[sender].passes(size, time.monotonic())
                # What is through one line is on its way through the next already: a packet is many segments.
                came = down[receiver].passes(size, sent + rtt_ms / 2e3 - size * 8e-6 / mbit) if sent else None
                if came is not None:
                    heapq.heappush(waiting, (came, next(tickets), devices[receiver], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, fd, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(fd, packet)


def _receiver(packet: bytes) -> int | None:
    """Whose packet it is, by the last number of its IPv4 destination."""
    if len(packet) < _OFFLOADS_BYTES + 20 or packet[_OFFLOADS_BYTES] >> 4 != 4:
        return None
    return packet[_OFFLOADS_BYTES + 19] - 1


def _opens(packet: bytes) -> int | None:
    """The port called by the first packet of a TCP connection (SYN without ACK); None: it is no such packet."""
    at = _OFFLOADS_BYTES
    tcp = at + 4 * (packet[at] & 0x0F)
    if packet[at + 9] == 6 and len(packet) > tcp + 13 and packet[tcp + 13] & 0x12 == 0x02:
        return int.from_bytes(packet[tcp + 2 : tcp + 4], "big")
    return None


def _device(namespace: str) -> int:
    enter(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _TUN | _NO_HEADER | _WITH_OFFLOADS))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS | _SEGMENTS6)
    return fd


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    emulate(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
