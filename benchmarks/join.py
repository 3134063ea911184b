"""How fast a state travels from donors to a joiner, beside one raw TCP stream over the same capped link.

    python benchmarks/join.py [--donors 1,2,4] [--megabytes 64] [--rate-mbit 200] [--rounds 3] [--json FILE]
    python benchmarks/join.py --home

Every donor is a process of its own behind an uplink of `--rate-mbit`; real gRPC, real TLS, the product's source and
fetch, descriptions and digests included. As root the links are veth pairs between network namespaces
with a token bucket (`tbf`) on the donor's side; otherwise, or with `--relay`, a throttling relay in user space.

Raw and ours take turns in every round, and a ratio is the median over rounds. Last, a donor sends microbatch payloads
to a neighbour over the same uplink, first alone, then while a joiner fetches: the neighbour should lose no more than
the joiner gets.

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
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from join_home import SCENES
from join_home import report as report_home

from swarmnet.errors import PeerGone, PeerTimeout
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.messages import Answer, Control, Gradient, Packed, Process, Request, SnapshotRequest, StateHeader
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.state.snapshot_fetch import SnapshotFetch
from swarmnet.state.snapshot_source import SnapshotSource
from swarmnet.transport import ReadPayload

RUN = RunId("00" * 32)
CUT = StateHeader(7, Chain("11" * 32), Chain("10" * 32), Chain("22" * 32))
MB = 1_000_000
PAYLOAD_BYTES = 8 << 20


# ---------------------------------------------------------------- the processes at the ends of the links


class Serving:
    """A donor's service, and a sink of payloads. Stands for engine and step machine: the state never moves."""

    def __init__(self, num_bytes: int) -> None:
        self.received = 0
        # Equal on all donors: the bytes follow from the version alone.
        self._data = bytes(memoryview(bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes])
        self._source = SnapshotSource(0, self, lambda: CUT, leads_on=lambda header: True)  # type: ignore[arg-type]

    async def snapshot(self) -> bytes:
        """See Engine."""
        return self._data

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """Nothing is told here."""

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """State to joiners, an acknowledgement to those who send payloads."""
        if isinstance(request, SnapshotRequest):
            async for answer in self._source.serve(request):
                yield answer
        else:
            self.received += sum(tensor.num_bytes for tensor in await payload())
            yield Gradient(0.0, 0)

    def on_reached(self, peer: PeerId) -> None:
        """Nobody is told anything."""

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """The benchmark is over."""


def make_transport(book: dict[PeerId, tuple[str, ...]], service_bytes: int, host: str) -> tuple[GrpcTransport, Serving]:
    """A transport with a fresh identity, and what it serves."""
    identity = Identity.generate()
    service = Serving(service_bytes)
    transport = GrpcTransport(identity, RUN, addresses=lambda p: book.get(p, ()), service=service, host=host)
    return transport, service


async def commands() -> AsyncIterator[dict[str, Any]]:
    """What the main process asks for, a line each."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


def say(**fields: object) -> None:
    """Answer the main process."""
    print(json.dumps(fields), flush=True)


async def child(host: str, num_bytes: int) -> None:
    """One process: serves state and raw bytes, takes payloads; fetches, reads or pushes when it is told to."""
    book: dict[PeerId, tuple[str, ...]] = {}
    transport, service = make_transport(book, num_bytes, host)
    listener = socket.create_server((host, 0))
    threading.Thread(target=serve_raw, args=(listener, num_bytes), daemon=True).start()
    async with transport, asyncio.TaskGroup() as group:
        pushing: asyncio.Task[None] | None = None
        say(peer=transport.peer, address=transport.addresses[0], raw=list(listener.getsockname()))
        async for command in commands():
            book.update({PeerId(peer): (address,) for peer, address in command.get("book", {}).items()})
            match command["do"]:
                case "raw":
                    say(seconds=await asyncio.to_thread(read_raw, tuple(command["at"]), num_bytes))
                case "fetch":
                    say(seconds=await fetch(transport, [PeerId(peer) for peer in command["donors"]], num_bytes))
                case "push":
                    pushing = group.create_task(push(transport, PeerId(command["to"])))
                case "count":
                    say(bytes=service.received, at=time.monotonic())
        if pushing is not None:
            pushing.cancel()


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


async def push(transport: GrpcTransport, peer: PeerId, flight: int = 2) -> None:
    """Send payloads as a stage does, until the neighbour leaves."""
    tensor = Packed("uint8", (PAYLOAD_BYTES,), bytes(PAYLOAD_BYTES))

    async def lane() -> None:
        with contextlib.suppress(PeerGone, PeerTimeout):
            while True:
                deadline = asyncio.get_running_loop().time() + 60
                async for _ in transport.call(peer, Process(0, 0, 0), (tensor,), deadline=deadline):
                    pass

    async with asyncio.TaskGroup() as group:
        for _ in range(flight):
            group.create_task(lane())


# ---------------------------------------------------------------- links


@dataclass
class End:
    """A process at one end, and where the joiner reaches it."""

    process: subprocess.Popen[str]
    peer: str = ""
    address: str = ""
    raw: list[Any] = field(default_factory=list)

    def ask(self, **command: object) -> dict[str, Any]:
        """Send a command and wait for what it says."""
        self.tell(**command)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "a process of the benchmark died"
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, **command: object) -> None:
        """Send a command that says nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()


def start(stack: contextlib.ExitStack, num_bytes: int, host: str, namespace: str = "") -> End:
    """Start a process and wait until it listens."""
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    process = subprocess.Popen(
        [*inside, sys.executable, __file__, "--child", host, str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    stack.callback(process.wait)
    assert process.stdin is not None and process.stdout is not None
    stack.callback(process.stdin.close)
    end = End(process)
    said = json.loads(process.stdout.readline())
    end.peer, end.address, end.raw = said["peer"], said["address"], said["raw"]
    return end


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
            run_ip(
                "ip",
                "netns",
                "exec",
                donor,
                "tc",
                "qdisc",
                "add",
                "dev",
                far,
                "root",
                "tbf",
                "rate",
                f"{rate_mbit}mbit",
                "burst",
                "128kb",
                "latency",
                "50ms",
            )
            places.append((donor, f"10.77.{number}.2"))
        yield joiner, places
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


class Relay:
    """A capped uplink in user space: everything a donor sends passes through one bucket."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def listen(self, target: tuple[str, int]) -> int:
        """Relay to `target` from a port of this machine."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(listener, target), daemon=True).start()
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        while True:
            link, _ = listener.accept()
            onward = socket.create_connection(target)
            for source, sink, capped in ((link, onward, False), (onward, link, True)):
                threading.Thread(target=self._pump, args=(source, sink, capped), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, capped: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(32 << 10):
                if capped:
                    with self._lock:
                        now = time.monotonic()
                        self._free_at = max(self._free_at, now) + len(data) / self._bytes_per_s
                        wait_s = self._free_at - now
                    if wait_s > 0.002:
                        time.sleep(wait_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def relayed(end: End, relay: Relay) -> None:
    """Reach this end through a relay."""
    port = int(end.address.split("/")[4])
    end.address = f"/ip4/127.0.0.1/tcp/{relay.listen(('127.0.0.1', port))}"
    end.raw = ["127.0.0.1", relay.listen(tuple(end.raw))]


@contextlib.contextmanager
def swarm(num_donors: int, num_bytes: int, rate_mbit: float, *, relay: bool) -> Iterator[tuple[list[End], End, End]]:
    """(donors behind capped uplinks, a joiner, a neighbour who takes payloads)."""
    with contextlib.ExitStack() as stack:
        if relay:
            donors = [start(stack, num_bytes, "127.0.0.1") for _ in range(num_donors)]
            for donor in donors:
                relayed(donor, Relay(rate_mbit * 125_000))
            yield donors, start(stack, num_bytes, "127.0.0.1"), start(stack, num_bytes, "127.0.0.1")
        else:
            inside, places = stack.enter_context(namespaces(num_donors, rate_mbit))
            donors = [start(stack, num_bytes, host, namespace) for namespace, host in places]
            yield donors, start(stack, num_bytes, "10.77.0.1", inside), start(stack, num_bytes, "10.77.0.1", inside)


# ---------------------------------------------------------------- measuring


def measure(args: argparse.Namespace, num_bytes: int) -> dict[str, Any]:
    """Ratios to one raw stream by number of donors, and what a joiner takes from the swarm."""
    ratios: dict[int, list[float]] = {number: [] for number in args.donors}
    raw_mbit: list[float] = []
    with swarm(max(args.donors), num_bytes, args.rate_mbit, relay=args.relay) as (donors, joiner, neighbour):
        book = {donor.peer: donor.address for donor in donors}
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
        found: dict[str, Any] = {
            "raw_mbit": statistics.median(raw_mbit),
            "vs_raw": {number: statistics.median(each) for number, each in ratios.items()},
            "worst_vs_raw": {number: min(each) for number, each in ratios.items()},
        }
        if not args.relay:
            found["beside_traffic"] = beside_traffic(donors[0], joiner, neighbour, book, num_bytes)
    return found


def beside_traffic(donor: End, joiner: End, neighbour: End, book: dict[str, str], num_bytes: int) -> dict[str, float]:
    """Mbit/s that a donor's neighbour gets, alone and while a joiner fetches; and what the joiner gets."""
    donor.tell(do="push", to=neighbour.peer, book={neighbour.peer: neighbour.address})
    time.sleep(2.0)

    def rate(before: dict[str, Any], after: dict[str, Any]) -> float:
        return float(8e-6 * (after["bytes"] - before["bytes"]) / (after["at"] - before["at"]))

    began = neighbour.ask(do="count")
    time.sleep(5.0)
    alone = neighbour.ask(do="count")
    seconds = joiner.ask(do="fetch", donors=[donor.peer], book=book)["seconds"]
    together = neighbour.ask(do="count")
    return {
        "neighbour_alone": rate(began, alone),
        "neighbour_together": rate(alone, together),
        "joiner": 8e-6 * num_bytes / seconds,
    }


def report(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table."""
    link = "relay in user space" if args.relay else "network namespaces, tbf"
    print(f"{args.megabytes} MB of state, uplinks of {args.rate_mbit:g} Mbit/s ({link}), {args.rounds} rounds")
    print(f"one raw TCP stream: {found['raw_mbit']:.0f} Mbit/s")
    for number, ratio in found["vs_raw"].items():
        worst = found["worst_vs_raw"][number]
        print(f"{number} donor{'s' * (number > 1)}: {ratio:.2f}x of it, median; {worst:.2f}x worst")
    if beside := found.get("beside_traffic"):
        lost = beside["neighbour_alone"] - beside["neighbour_together"]
        print(
            f"a donor sends a neighbour payloads at {beside['neighbour_alone']:.0f} Mbit/s; at {lost:.0f} less while "
            f"a joiner fetches at {beside['joiner']:.0f}"
        )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donors", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--megabytes", type=int, default=64, help="of state")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of every donor's uplink")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--relay", action="store_true", help="throttle in user space also as root")
    parser.add_argument("--json", type=Path, help="write the ratios here")
    parser.add_argument("--home", action="store_true", help="1B parameters over home lines, on virtual time")
    parser.add_argument("--child", nargs=2, metavar=("HOST", "BYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        asyncio.run(child(args.child[0], int(args.child[1])))
        return
    if args.home:
        home = [report_home(scene) for scene in SCENES]
        if args.json:
            args.json.write_text(json.dumps({"home": home}, indent=2) + "\n")
        return
    args.relay = args.relay or os.geteuid() != 0
    found = measure(args, args.megabytes * MB)
    report(found, args)
    if args.json:
        args.json.write_text(json.dumps({**found, "rate_mbit": args.rate_mbit, "relay": args.relay}, indent=2) + "\n")


if __name__ == "__main__":
    main()
