"""Bytes between all pairs of peers over plain TCP, all at once: what lines carry when nothing is done with the bytes.

One connection for each direction of each pair, opened once and kept. Threads, blocking sockets, no encryption.
"""

from __future__ import annotations

import socket
import threading
import time

_PORT = 40000
_AT_ONCE = 1 << 20


class RawPeer:
    """One peer of several. hosts: everybody's addresses, mine at `rank`."""

    def __init__(self, rank: int, hosts: list[str]) -> None:
        self._rank, self._hosts = rank, hosts
        self._listener = socket.create_server((hosts[rank], _PORT + rank), backlog=len(hosts))
        self._out: list[socket.socket] = []
        self._in: list[socket.socket] = []

    def connect(self) -> None:
        """Once everybody listens: open my half of the connections, take the others'."""
        taking = threading.Thread(target=self._take)
        taking.start()
        for rank, host in enumerate(self._hosts):
            if rank != self._rank:
                self._out.append(socket.create_connection((host, _PORT + rank)))
        taking.join()

    def _take(self) -> None:
        while len(self._in) < len(self._hosts) - 1:
            self._in.append(self._listener.accept()[0])

    def turn(self, num_bytes: int) -> dict[str, float]:
        """Send so many bytes to each of the others and receive as many from each; when that began and ended."""
        block = bytes(_AT_ONCE)

        def send(to: socket.socket) -> None:
            for sent in range(0, num_bytes, _AT_ONCE):
                to.sendall(block[: num_bytes - sent])

        def receive(of: socket.socket) -> None:
            buffer, left = bytearray(_AT_ONCE), num_bytes
            while left:
                left -= of.recv_into(buffer, min(left, _AT_ONCE))

        began = time.monotonic()
        threads = [
            threading.Thread(target=job, args=(each,))
            for job, sockets in ((send, self._out), (receive, self._in))
            for each in sockets
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"began": began, "ended": time.monotonic()}

    def close(self) -> None:
        """End the connections."""
        for each in (*self._out, *self._in, self._listener):
            each.close()
