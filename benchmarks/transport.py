"""Bandwidth of the data plane between two processes on this machine, beside three others, all in one run.

    python benchmarks/transport.py [--json FILE] [--rounds N] [--sizes 1,4,16,64]

Push and acknowledge: a tensor goes over and the receiver, holding all of it, says so; up to `--flight` tensors are
under way at once, for every way alike. Ways: ours (bulk connections beside gRPC), ours by gRPC alone (as where one port
is open), hivemind's p2p stream (Noise), a blocking TCP socket, and the same socket under TLS. Rounds are interleaved: a
ratio is the median over rounds of what two ways did in the same round, so that a noisy moment hits both. The best of
each is shown too. Ratios mean something on any machine that is otherwise idle, gigabytes per second only on this one.

CPU seconds per GB are those of the sending and the receiving process, system calls included; hivemind's daemon and the
loopback's own work in softirq are counted where the system books them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import ssl
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from harness import Benchmark, cpu_seconds, listed, ratio, write

from swarmnet.ids import PeerId, RunId
from swarmnet.messages import Answer, Gradient, Packed, Process, Request
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.tls import Leaf
from swarmnet.testing.doubles import FakeService
from swarmnet.transport import ReadPayload

RUN = RunId("00" * 32)
MB = 1_000_000
Push = Callable[[bytes], Awaitable[None]]


async def take(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
    """Every payload, and say how long it was."""
    yield Gradient(0.0, sum(tensor.num_bytes for tensor in await payload()))


def make_transport(book: dict[PeerId, tuple[str, ...]], *, bulk_port: int | None = 0) -> GrpcTransport:
    """Our transport with a fresh identity."""
    identity = Identity.generate()
    return GrpcTransport(
        identity, RUN, addresses=lambda p: book.get(p, ()), service=FakeService(take), bulk_port=bulk_port
    )


# ---------------------------------------------------------------- the receiving process


def receive(pipe: Connection, ways: list[str]) -> None:
    """Listen in every way, tell the sender where, and stay until the pipe closes."""
    asyncio.run(_receive(pipe, ways))


async def _receive(pipe: Connection, ways: list[str]) -> None:
    async with AsyncExitStack() as stack:
        where: dict[str, object] = {}
        where["pid"] = os.getpid()
        for name, bulk_port in (("ours", 0), ("grpc", None)):
            transport = await stack.enter_async_context(make_transport({}, bulk_port=bulk_port))
            where[name] = (transport.peer, transport.addresses)
        if "hivemind" in ways:
            where["hivemind"] = await _listen_hivemind(stack)
        where["tcp"] = _listen_tcp(None)
        where["tls"] = _listen_tcp(_tls_context())
        pipe.send(where)
        await asyncio.to_thread(_until_closed, pipe)


def _until_closed(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return


async def _listen_hivemind(stack: AsyncExitStack) -> tuple[str, list[str]]:
    from hivemind.p2p import P2P
    from hivemind.proto import runtime_pb2

    async def take(requests: AsyncIterator, _: object) -> AsyncIterator:
        total = 0
        async for message in requests:
            total += len(message.tensors[0].buffer)
        yield runtime_pb2.ExpertResponse(metadata=struct.pack("<q", total))

    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    stack.push_async_callback(p2p.shutdown)
    await p2p.add_protobuf_handler("push", take, runtime_pb2.ExpertRequest, stream_input=True, stream_output=True)
    return str(p2p.peer_id), [str(address) for address in await p2p.get_visible_maddrs()]


def _listen_tcp(context: ssl.SSLContext | None) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_tcp, args=(listener, context), daemon=True).start()
    return int(listener.getsockname()[1])


def _serve_tcp(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    while True:
        link, _ = listener.accept()
        threading.Thread(target=_take_tcp, args=(link, context), daemon=True).start()


def _take_tcp(link: socket.socket, context: ssl.SSLContext | None) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        link = context.wrap_socket(link, server_side=True)
    while head := link.recv(8, socket.MSG_WAITALL) if context is None else link.recv(8):
        left = struct.unpack("<q", head)[0]
        data = memoryview(bytearray(left))
        while left:
            left -= link.recv_into(data[len(data) - left :])
        link.sendall(head)


def _tls_context() -> ssl.SSLContext:
    identity = Identity.generate()
    leaf = Leaf(identity)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(leaf.key + leaf.chain)
        file.flush()
        context.load_cert_chain(file.name)
    return context


# ---------------------------------------------------------------- the sending process


async def connect_ours(stack: AsyncExitStack, where: tuple[PeerId, tuple[str, ...]]) -> Push:
    """Our data plane."""
    peer, addresses = where
    transport = await stack.enter_async_context(make_transport({peer: addresses}))

    async def push(data: bytes) -> None:
        tensor = Packed("uint8", (len(data),), data)
        deadline = asyncio.get_running_loop().time() + 60
        answers = [a async for a in transport.call(peer, Process(0, 0, 0), (tensor,), deadline=deadline)]
        assert answers == [Gradient(0.0, len(data))]

    return push


async def connect_hivemind(stack: AsyncExitStack, where: tuple[str, list[str]]) -> Push:
    """A stream of 64 KiB protobuf parts, which is how hivemind sends a tensor."""
    from hivemind.p2p import P2P, PeerID
    from hivemind.proto import runtime_pb2
    from hivemind.utils.streaming import STREAMING_CHUNK_SIZE_BYTES as part

    peer, addresses = where
    p2p = await P2P.create(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    stack.push_async_callback(p2p.shutdown)

    async def parts(data: bytes) -> AsyncIterator:
        for start in range(0, len(data), part):
            tensor = runtime_pb2.Tensor(buffer=data[start : start + part])
            yield runtime_pb2.ExpertRequest(uid="bench", tensors=[tensor])

    async def push(data: bytes) -> None:
        stream = await p2p.iterate_protobuf_handler(
            PeerID.from_base58(peer), "push", parts(data), runtime_pb2.ExpertResponse
        )
        async for answer in stream:
            assert struct.unpack("<q", answer.metadata)[0] == len(data)

    return push


async def connect_tcp(stack: AsyncExitStack, port: int, flight: int, *, tls: bool) -> Push:
    """Blocking sockets, one connection and one thread per tensor in flight."""
    free: asyncio.Queue[socket.socket] = asyncio.Queue()
    for _ in range(flight):
        link = socket.create_connection(("127.0.0.1", port))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            link = context.wrap_socket(link)
        stack.callback(link.close)
        free.put_nowait(link)

    def send(link: socket.socket, data: bytes) -> None:
        link.sendall(struct.pack("<q", len(data)))
        link.sendall(data)
        assert link.recv(8) == struct.pack("<q", len(data))

    async def push(data: bytes) -> None:
        link = await free.get()
        await asyncio.to_thread(send, link, data)
        free.put_nowait(link)

    return push


async def rate(push: Push, data: bytes, *, count: int, flight: int) -> float:
    """GB/s of `count` pushes, `flight` at a time."""
    turns = iter(range(count))

    async def lane() -> None:
        for _ in turns:
            await push(data)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(flight):
            group.create_task(lane())
    return count * len(data) / 1e9 / (time.perf_counter() - began)


Found = dict[str, dict[int, list[float]]]
"""way -> size in MB -> one figure of every round."""


async def measure(where: dict, args: argparse.Namespace) -> tuple[Found, dict[str, dict[int, float]]]:
    """GB/s of every round, and CPU seconds per GB of both processes over all of them."""
    rates: Found = {}
    spent: Found = {}
    async with AsyncExitStack() as stack:
        ways: dict[str, Push] = {name: await connect_ours(stack, where[name]) for name in ("ours", "grpc")}
        if "hivemind" in where:
            ways["hivemind"] = await connect_hivemind(stack, where["hivemind"])
        ways["tcp"] = await connect_tcp(stack, where["tcp"], args.flight, tls=False)
        ways["tls"] = await connect_tcp(stack, where["tls"], args.flight, tls=True)
        for size in args.sizes:
            data = bytes(size * MB)
            count = max(args.flight, args.megabytes // size)
            pids = os.getpid(), where["pid"]
            for turn in range(args.rounds + 1):
                for name, push in ways.items():
                    share = max(args.flight, count // 4) if name == "hivemind" else count
                    before_s = cpu_seconds(pids)
                    speed = await rate(push, data, count=share, flight=args.flight)
                    cost_s = cpu_seconds(pids) - before_s
                    if turn:  # the first round warms up
                        rates.setdefault(name, {}).setdefault(size, []).append(speed)
                        spent.setdefault(name, {}).setdefault(size, []).append(1e9 * cost_s / (share * len(data)))
    return rates, {name: {s: statistics.mean(v) for s, v in sizes.items()} for name, sizes in spent.items()}


def report(rates: Found, cpu: dict[str, dict[int, float]], args: argparse.Namespace) -> dict[str, object]:
    """Print the table; return what --json writes."""
    middle = {name: {s: statistics.median(v) for s, v in sizes.items()} for name, sizes in rates.items()}
    print(f"GB/s, median (best) of {args.rounds} interleaved rounds, {args.flight} tensors in flight")
    print(f"{'':10}" + "".join(f"{f'{size} MB':>16}" for size in args.sizes))
    for name, sizes in rates.items():
        cells = (f"{middle[name][size]:.2f} ({max(sizes[size]):.2f})" for size in args.sizes)
        print(f"{name:10}" + "".join(f"{cell:>16}" for cell in cells))
    ratios: dict[str, dict[int, float]] = {}
    for name in ("grpc", "hivemind", "tcp", "tls"):
        if name in middle:
            ratios[name] = {size: ratio(rates["ours"][size], rates[name][size]) for size in args.sizes}
            print(f"{'vs ' + name:10}" + "".join(f"{f'{found:.2f}x':>16}" for found in ratios[name].values()))
    print("CPU seconds per GB, both processes")
    for name, sizes in cpu.items():
        print(f"{name:10}" + "".join(f"{sizes[size]:>16.2f}" for size in args.sizes))
    at = 16 if 16 in args.sizes else args.sizes[-1]
    found: dict[str, object] = {f"vs_{name}": by_size[at] for name, by_size in ratios.items()}
    best = {name: {size: max(values) for size, values in sizes.items()} for name, sizes in rates.items()}
    speeds = {"median_gb_per_s": middle, "best_gb_per_s": best}
    return {
        **found,
        "cpu_s_per_gb": cpu["ours"][at],
        "cpu_s": cpu,
        **speeds,
        "ratio_at_mb": at,
        "flight": args.flight,
        "rounds": args.rounds,
    }


def main() -> None:
    """Measure, print, write."""
    parser = Benchmark(__doc__)
    parser.add_argument("--sizes", type=listed(int), default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flight", type=int, default=2, help="tensors in flight")
    parser.add_argument("--megabytes", type=int, default=256, help="data per round and size")
    parser.add_argument("--no-hivemind", action="store_true")
    args = parser.asked()
    ways = [] if args.no_hivemind else ["hivemind"]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, ways), daemon=True)
    child.start()
    theirs.close()
    rates, cpu = asyncio.run(measure(ours.recv(), args))
    ours.close()
    child.join()
    found = report(rates, cpu, args)
    write(args.json, found)


if __name__ == "__main__":
    main()
