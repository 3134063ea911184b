"""How fast a state travels from donors to a joiner, beside one raw TCP stream over the same capped link.

    python benchmarks/join.py [--donors 1,2,4] [--megabytes 64] [--rate-mbit 200] [--rounds 3] [--json FILE]
    python benchmarks/join.py --home

Every donor is a process of its own behind an uplink of `--rate-mbit`: a veth pair between network namespaces, with a
token bucket (`tbf`) on the donor's side (root). Real gRPC, real TLS, the product's source and fetch, descriptions and
digests included. Raw and ours take turns in every round, and a ratio is the median over rounds.

With `--home` a stage of 1B parameters is joined over home lines instead, on virtual time (`join_home.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from harness import Benchmark, listed, write
from join_home import SCENES
from join_home import report as report_home

from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.messages import StateHeader
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.state.snapshot_fetch import SnapshotFetch
from swarmnet.state.snapshot_source import SnapshotSource
from swarmnet.testing.doubles import FakeService

RUN = RunId("00" * 32)
CUT = StateHeader(7, Chain("11" * 32), Chain("10" * 32), Chain("22" * 32))
MB = 1_000_000


# ---------------------------------------------------------------- the processes at the ends of the links


def serving(num_bytes: int) -> FakeService:
    """A donor's service, whose state never moves: its bytes follow from their number alone, equal on all donors."""
    data = bytes(memoryview(bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes])

    async def snapshot() -> bytes:
        return data

    engine: Any = SimpleNamespace(snapshot=snapshot)
    source = SnapshotSource(0, engine, lambda: CUT, leads_on=lambda header: True)
    return FakeService(lambda caller, request, payload: source.serve(request))


def make_transport(book: dict[PeerId, tuple[str, ...]], num_bytes: int, host: str) -> GrpcTransport:
    """A transport with a fresh identity."""
    identity = Identity.generate()
    return GrpcTransport(identity, RUN, addresses=lambda p: book.get(p, ()), service=serving(num_bytes), host=host)


async def commands() -> AsyncIterator[dict[str, Any]]:
    """What the main process asks for, a line each."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


def say(**fields: object) -> None:
    """Answer the main process."""
    print(json.dumps(fields), flush=True)


async def child(host: str, num_bytes: int) -> None:
    """One process: serves state and raw bytes; fetches or reads when it is told to."""
    book: dict[PeerId, tuple[str, ...]] = {}
    listener = socket.create_server((host, 0))
    threading.Thread(target=serve_raw, args=(listener, num_bytes), daemon=True).start()
    async with make_transport(book, num_bytes, host) as transport:
        say(peer=transport.peer, address=transport.addresses[0], raw=list(listener.getsockname()))
        async for command in commands():
            book.update({PeerId(peer): (address,) for peer, address in command.get("book", {}).items()})
            match command["do"]:
                case "raw":
                    say(seconds=await asyncio.to_thread(read_raw, tuple(command["at"]), num_bytes))
                case "fetch":
                    say(seconds=await fetch(transport, [PeerId(peer) for peer in command["donors"]], num_bytes))


def serve_raw(listener: socket.socket, num_bytes: int) -> None:
    """Send so many bytes to whoever connects."""
    data = bytes(num_bytes)
    while True:
        link, _ = listener.accept()
        with link, contextlib.suppress(OSError):
            link.sendall(data)


def read_raw(at: tuple[str, int], num_bytes: int) -> float:
    """Seconds that one TCP stream takes."""
    buffer = memoryview(bytearray(1 << 20))
    began = time.perf_counter()
    with socket.create_connection(at) as link:
        left = num_bytes
        while left:
            got = link.recv_into(buffer)
            assert got, "the stream ends early"
            left -= got
    return time.perf_counter() - began


async def fetch(transport: GrpcTransport, donors: list[PeerId], num_bytes: int) -> float:
    """Seconds that a copy takes, from the first question to the last verified byte."""

    def failed(donor: PeerId, error: Exception) -> None:
        raise AssertionError(f"{donor}: {error}")

    fetcher = SnapshotFetch(transport, 0, max_bytes=num_bytes, failed=failed)
    began = time.perf_counter()
    _, data = await fetcher.fetch(lambda: donors)
    took = time.perf_counter() - began
    assert len(data) == num_bytes
    return took


# ---------------------------------------------------------------- links


@dataclass
class End:
    """A process at one end, and where the joiner reaches it."""

    process: subprocess.Popen[str]
    peer: str
    address: str
    raw: list[Any]

    def ask(self, **command: object) -> dict[str, Any]:
        """Send a command and wait for what it says."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "a process of the benchmark died"
        found: dict[str, Any] = json.loads(line)
        return found


def start(stack: contextlib.ExitStack, num_bytes: int, host: str, namespace: str) -> End:
    """Start a process and wait until it listens."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, __file__, "--child", host, str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    stack.callback(process.wait)
    assert process.stdin is not None and process.stdout is not None
    stack.callback(process.stdin.close)
    return End(process, **json.loads(process.stdout.readline()))


def run_ip(*words: str) -> None:
    """One command of iproute2."""
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def namespaces(num_donors: int, rate_mbit: float) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(the joiner's namespace, a namespace and an address for each donor): donors' uplinks are capped."""
    tag = f"swj{os.getpid()}"
    made: list[str] = []
    try:
        for name in [f"{tag}j", *(f"{tag}d{number}" for number in range(num_donors))]:
            run_ip("ip", "netns", "add", name)
            made.append(name)
            run_ip("ip", "-n", name, "link", "set", "lo", "up")
        joiner, *donors = made
        places = []
        for number, donor in enumerate(donors):
            near, far = f"{tag}a{number}", f"{tag}b{number}"
            run_ip("ip", "link", "add", near, "netns", joiner, "type", "veth", "peer", "name", far, "netns", donor)
            for name, device, place in ((joiner, near, 1), (donor, far, 2)):
                run_ip("ip", "-n", name, "address", "add", f"10.77.{number}.{place}/24", "dev", device)
                run_ip("ip", "-n", name, "link", "set", device, "up")
            bucket = f"rate {rate_mbit}mbit burst 128kb latency 50ms".split()
            run_ip("ip", "netns", "exec", donor, "tc", "qdisc", "add", "dev", far, "root", "tbf", *bucket)
            places.append((donor, f"10.77.{number}.2"))
        yield joiner, places
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


# ---------------------------------------------------------------- measuring


def measure(args: argparse.Namespace, num_bytes: int) -> dict[str, Any]:
    """Ratios to one raw stream, by number of donors."""
    ratios: dict[int, list[float]] = {number: [] for number in args.donors}
    raw_mbit: list[float] = []
    with contextlib.ExitStack() as stack:
        inside, places = stack.enter_context(namespaces(max(args.donors), args.rate_mbit))
        donors = [start(stack, num_bytes, host, namespace) for namespace, host in places]
        joiner, book = start(stack, num_bytes, "10.77.0.1", inside), {donor.peer: donor.address for donor in donors}
        for turn in range(args.rounds + 1):
            raw_s = joiner.ask(do="raw", at=donors[0].raw)["seconds"]
            ours = {
                number: joiner.ask(do="fetch", donors=[d.peer for d in donors[:number]], book=book)["seconds"]
                for number in args.donors
            }
            if turn:  # the first round warms up
                raw_mbit.append(8 * num_bytes / raw_s / 1e6)
                for number, seconds in ours.items():
                    ratios[number].append(raw_s / seconds)
    return {
        "raw_mbit": statistics.median(raw_mbit),
        "vs_raw": {number: statistics.median(each) for number, each in ratios.items()},
        "worst_vs_raw": {number: min(each) for number, each in ratios.items()},
    }


def report(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table."""
    print(f"{args.megabytes} MB of state, uplinks of {args.rate_mbit:g} Mbit/s, {args.rounds} rounds")
    print(f"one raw TCP stream: {found['raw_mbit']:.0f} Mbit/s")
    for number, ratio in found["vs_raw"].items():
        worst = found["worst_vs_raw"][number]
        print(f"{number} donor{'s' * (number > 1)}: {ratio:.2f}x of it, median; {worst:.2f}x worst")


def main() -> None:
    """Measure, print, write."""
    parser = Benchmark(__doc__)
    parser.add_argument("--donors", type=listed(int), default=[1, 2, 4])
    parser.add_argument("--megabytes", type=int, default=64, help="of state")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of every donor's uplink")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", action="store_true", help="1B parameters over home lines, on virtual time")
    args = parser.asked()
    if args.home:
        home = [report_home(scene) for scene in SCENES]
        write(args.json, {"home": home})
        return
    if os.geteuid() != 0:
        parser.error("the links are network namespaces, which takes root")
    found = measure(args, args.megabytes * MB)
    report(found, args)
    write(args.json, {**found, "rate_mbit": args.rate_mbit})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        asyncio.run(child(sys.argv[2], int(sys.argv[3])))
    else:
        main()
