"""Plain TCP sockets in the event loop: connect one, read a fixed number of bytes."""

from __future__ import annotations

import asyncio
import socket
from typing import Any


async def connected(sock: socket.socket, place: Any) -> socket.socket:
    """Connect the socket to that address. It is closed if that fails. Raises OSError."""
    try:
        await asyncio.get_running_loop().sock_connect(sock, place)
    except BaseException:
        sock.close()
        raise
    return sock


async def fill_from(sock: socket.socket, into: memoryview, fill: int, least: int, most: int = 0) -> int:
    """Read until `least` bytes are there, and no more than `most`. Returns how many are. Raises OSError, also at an
    early end."""
    while fill < least:
        came = await asyncio.get_running_loop().sock_recv_into(sock, into[fill : max(least, most)])
        if not came:
            raise ConnectionResetError("the other end hung up")
        fill += came
    return fill


async def read_exactly(sock: socket.socket, num_bytes: int) -> memoryview:
    """So many bytes. Raises OSError, also at an early end."""
    data = memoryview(bytearray(num_bytes))
    await fill_from(sock, data, 0, num_bytes)
    return data
