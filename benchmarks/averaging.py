"""One averaging round among processes on this machine: ours, hivemind's DecentralizedAverager and gloo, in turns.

    python benchmarks/averaging.py [--full] [--json FILE]        2, 4, 8 peers x 10M and 4 x 50M, then a kill, then
                                                                 uneven lines: 5 minutes
    python benchmarks/averaging.py --peers 2,4 --parameters 10M,50M [--codec small,int64] [--turns N]
    python benchmarks/averaging.py --kill [--peers 4] [--parameters 20M]
    python benchmarks/averaging.py --links 2x200,4x200,2x500 [--rtt 50]
    python benchmarks/averaging.py --uneven 4x5 [--parameters 10M]
    python benchmarks/averaging.py --arithmetic int64,small [--peers 4] [--parameters 10M]

Every peer is a process with one torch thread. Ours goes over the real transport (gRPC, mutual TLS, identities) and does
all a round of a run does, group forming included: reports, the leader's round, the butterfly, checks, digest and norm,
reports of the finished sum, the commit. hivemind matches a group over its DHT and then runs its all-reduce. The whole
round is from the first member that is ready to the last that may go on; the all-reduce in it is counted apart. gloo's
all_reduce is the floor: no TLS, no checks, no failures. Turns are interleaved, and a ratio is the median over turns of
two neighbours.

int64 is compared with hivemind's fp32, small with its fp16, the smallest that runs: hivemind 1.1.12 cannot decode its
8-bit codecs with numpy >= 2.4. Bytes are payload and headers as the transport counts them, on average over peers, and
of the peer that sent the most (a round is cut by what lines have carried: some send more, others less), in the turn
with the most of either, against 2 (N - 1) / N times the vector at 4.4 bytes an element (int64), or at 0.7 (small, whose
numbers have 4 steps rms here). The share of the check of sums is of the all-reduce.

For the kill a member's processes are killed in the middle of a round; what counts is how long after that the survivors
hold a good sum, or that they do not within --patience: hivemind's step can block beyond any timeout it is given.

With --links peers stand behind emulated lines (links.py; root), PEERSxMBIT each way; what our all-reduce is set against
there is plain TCP that carries, between all pairs at once, as many bytes as ours sent.

With --uneven, PEERSxRATIO, and at the end of the default's rows, one of whole simulated peers under the production
leader has 1/RATIO of the others' line: what members send in all against the bound, how many of the exchanges that began
came to their end, and a round's time as cut by lines beside evenly cut ones.

With --arithmetic, nothing is sent: CPU time of what one member of a round computes, by the compiled kernels and by the
reference, in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from averaging_arithmetic import measure_arithmetic, show_arithmetic
from averaging_asked import ELEMENT_BYTES, read
from averaging_place import Place
from averaging_uneven import measure_uneven, show_uneven
from averaging_ways import live
from harness import cpu_seconds, progress, write
from links import Links

HIVEMINDS = {"int64": "fp32", "small": "fp16"}
"""What ours is compared with."""

TOLERANCE = {"fp32": 1e-5, "fp16": 0.01, "int64": 1e-5, "small": 0.1}
"""Of the largest element: what a sum of rounded contributions may be off."""

ROWS = [(2, 10**7), (4, 10**7), (8, 10**7), (4, 5 * 10**7)]
FULL = [(peers, parameters) for parameters in (10**7, 5 * 10**7) for peers in (2, 4, 8)]
KILL = (4, 2 * 10**7)
"""Peers and parameters."""

UNEVEN = (4, 5)
"""Peers, and how many times the narrow line fits into the others'."""

PATIENCE_S, SLACK_S = 240.0, 5.0
Found = dict[str, Any]


class VirtualSwarm:
    """N processes on orders."""

    def __init__(
        self,
        stack: ExitStack,
        peers: int,
        parameters: int,
        *,
        hivemind: bool,
        gloo: bool,
        lines: Sequence[tuple[str, str]] = (),
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["averaging_ways"])
        self.peers, self.pipes, self.processes = peers, list[Connection](), list[Any]()
        for rank in range(peers):
            ours, theirs = context.Pipe()
            place = Place(
                rank,
                peers,
                parameters,
                f"{folder}/gloo",
                hivemind,
                gloo,
                namespace=lines[rank][0] if lines else "",
                hosts=tuple(host for _, host in lines),
            )
            process = context.Process(target=live, args=(place, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        stack.callback(self._end)
        if hivemind:
            first = receive(self.pipes[0])
            for pipe in self.pipes[1:]:
                pipe.send(first)
        told = [receive(pipe) for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send({peer: addresses for peer, addresses, _ in told})
        self.samples = [sample for _, _, sample in told]

    def order(self, *order: Any) -> list[Found]:
        """The same to all; what each answers."""
        for pipe in reversed(self.pipes):  # who opens the round is last
            pipe.send(order)
        return [receive(pipe) for pipe in self.pipes]

    def turn(self, *order: Any) -> Found:
        """A turn of all: seconds of the slowest, and CPU seconds of all, with their children."""
        before = cpu_seconds((process.pid for process in self.processes), groups=True)
        found = self.order(*order)
        cpu_s = cpu_seconds((process.pid for process in self.processes), groups=True) - before
        began, ended = min(each["began"] for each in found), max(each["ended"] for each in found)
        phases = [each["phase"] for each in found if "phase" in each]
        phase_s = max(p[1] for p in phases) - min(p[0] for p in phases) if phases else ended - began
        return {"whole_s": ended - began, "phase_s": phase_s, "cpu_s": cpu_s, "each": found}

    def _end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(1.0)
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # each leads a group of its own: hivemind's daemons too
            process.join()


def receive(pipe: Connection) -> Any:
    """What a peer says. Raises TimeoutError if it says nothing for too long, EOFError if it died."""
    if not wait([pipe], PATIENCE_S):
        raise TimeoutError("a peer does not answer")
    return pipe.recv()


def check(samples: list[torch.Tensor], found: torch.Tensor, codec: str, *, what: str, mean: bool = False) -> None:
    """Raise unless what came out is the sum (or mean) of what went in, as far as this codec can tell."""
    total = torch.stack(samples).sum(0) / (len(samples) if mean else 1)
    error = float((total - found).abs().max() / total.abs().max())
    if not error <= TOLERANCE[codec]:
        raise ValueError(f"{what}: a sum of {len(samples)} in {codec} is off by {error:.3g}")


def measure(args: argparse.Namespace, peers: int, parameters: int) -> list[Found]:
    """One row per codec."""
    rows = []
    with ExitStack() as stack:
        swarm = VirtualSwarm(stack, peers, parameters, hivemind=not args.no_hivemind, gloo=not args.no_gloo)
        number = 0
        for codec in args.codec:
            theirs = HIVEMINDS[codec]
            swarm.order("prepare", codec)
            turns: dict[str, list[Found]] = {"ours": [], "gloo": [], "hivemind": []}
            for turn in range(args.turns + 1):
                number += 1
                ours = swarm.turn("ours", number)
                digests = {each["digest"] for each in ours["each"]}
                if len(digests) != 1:
                    raise ValueError("members hold different sums")
                check(swarm.samples, ours["each"][-1]["sample"], codec, what="ours")
                if not turn:  # the first of ours opens connections and memory
                    continue
                turns["ours"].append(ours)
                if not args.no_gloo:
                    turns["gloo"].append(swarm.turn("gloo"))
                    check(swarm.samples, turns["gloo"][-1]["each"][-1]["sample"], "fp32", what="gloo")
                if not args.no_hivemind:
                    found = swarm.turn("hivemind", theirs, peers, 60.0)
                    if min(each["members"] for each in found["each"]) == peers:
                        turns["hivemind"].append(found)
                        check(swarm.samples, found["each"][-1]["sample"], theirs, what="hivemind", mean=True)
            rows.append(summary(codec, theirs, peers, parameters, turns))
            show(rows[-1])
    return rows


def measure_links(args: argparse.Namespace, peers: int, mbit: int, parameters: int) -> list[Found]:
    """One row per codec: ours against plain TCP, in turns, through the same lines."""
    rows = []
    with Links(peers, mbit=mbit, rtt_ms=args.rtt) as lines, ExitStack() as stack:
        swarm = VirtualSwarm(stack, peers, parameters, hivemind=False, gloo=False, lines=lines)
        swarm.order("connect")
        number = 0
        for codec in args.codec:
            swarm.order("prepare", codec)
            turns: list[tuple[Found, Found]] = []
            for turn in range(args.turns + 2):
                number += 1
                ours = swarm.turn("ours", number)
                check(swarm.samples, ours["each"][-1]["sample"], codec, what="ours")
                sent = max(each["sent"] for each in ours["each"])
                raw = swarm.turn("raw", sent // (peers - 1))
                if turn >= 2:  # before that windows grow, and lines are measured
                    turns.append((ours, raw))
            row: Found = {
                "peers": peers,
                "mbit": mbit,
                "rtt_ms": args.rtt,
                "parameters": parameters,
                "codec": codec,
                "megabytes": round(sent / 1e6, 1),
                "measured_mbit": [round(8e-6 * each["line"]) for each in ours["each"]],
                "ours_s": round(statistics.median(ours["phase_s"] for ours, _ in turns), 3),
                "raw_s": round(statistics.median(raw["whole_s"] for _, raw in turns), 3),
                "vs_raw": round(statistics.median(ours["phase_s"] / raw["whole_s"] for ours, raw in turns), 3),
                "ours_cpu_s": round(statistics.median(ours["cpu_s"] for ours, _ in turns), 3),
                "raw_cpu_s": round(statistics.median(raw["cpu_s"] for _, raw in turns), 3),
                **check_of([ours for ours, _ in turns]),
            }
            ideal_s = sent * 8e-6 / mbit
            print(
                f"{peers} peers at {mbit} Mb/s, {args.rtt:g} ms, {parameters / 1e6:g}M {codec}: {row['vs_raw']:.2f} "
                f"of raw TCP ({row['ours_s']:.2f} s, {row['raw_s']:.2f} s; the line alone {ideal_s:.2f} s; "
                f"{row['megabytes']:.0f} MB each way; measured {row['measured_mbit']} Mb/s){said_of_check(row)}",
                flush=True,
            )
            rows.append(row)
    return rows


def summary(codec: str, theirs: str, peers: int, parameters: int, turns: dict[str, list[Found]]) -> Found:
    """Medians of the turns, and of the ratios within a turn."""
    ours = turns["ours"]
    bound = 2 * (peers - 1) / peers * parameters * ELEMENT_BYTES[codec]
    sent = max(statistics.fmean(each["sent"] for each in turn["each"]) for turn in ours)
    most = max(each["sent"] for turn in ours for each in turn["each"])
    row: Found = {
        "peers": peers,
        "parameters": parameters,
        "codec": codec,
        "hivemind_codec": theirs,
        "bytes_vs_bound": round(sent / bound, 4),
        "bytes_vs_bound_most": round(most / bound, 4),
    }
    for other in ("gloo", "hivemind"):
        pairs = list(zip(ours, turns[other], strict=False))
        for key, kind in (("", "phase_s"), ("_whole", "whole_s"), ("_cpu", "cpu_s")):
            if pairs:
                ratio = statistics.median(a[kind] / max(b[kind], 1e-3) for a, b in pairs)
                row[f"vs_{other}{key}"] = round(ratio, 3)
    row |= check_of(ours)
    for name, found in turns.items():
        if found:
            row[name] = {
                kind: round(statistics.median(turn[kind] for turn in found), 3)
                for kind in ("phase_s", "whole_s", "cpu_s")
            }
    return row


def check_of(ours: Sequence[Found]) -> Found:
    """What the check of sums (`averaging.round_check`) takes of a round.

    check: of the member that waits longest for it, for slower members, too. check_alone: after the last member has all
    of the sum.
    """
    found: Found = {}
    for name, seconds in (
        ("check", [max(each["checked_s"] for each in turn["each"]) for turn in ours]),
        ("check_alone", [_last(turn, "ended_at") - _last(turn, "summed_at") for turn in ours]),
    ):
        shares = [each / turn["phase_s"] for each, turn in zip(seconds, ours, strict=True)]
        found |= {
            f"{name}_s": round(statistics.median(seconds), 4),
            f"{name}_share": round(statistics.median(shares), 4),
        }
    return found


def _last(turn: Found, what: str) -> float:
    latest: float = max(each[what] for each in turn["each"])
    return latest


def said_of_check(row: Found) -> str:
    """Nothing where sums are not checked."""
    shares = f"{row['check_share']:.1%} ({1e3 * row['check_s']:.0f} ms)"
    alone = f"{row['check_alone_share']:.1%} ({1e3 * row['check_alone_s']:.0f} ms)"
    return f", the check of sums {shares}, after the last member has its sum {alone}" if row["check_s"] else ""


def show(row: Found) -> None:
    """A line of ratios, then what they are ratios of."""
    ratios = [
        f"{row[key]:6.2f} {what}"
        for key, what in (
            ("vs_hivemind", f"of hivemind's all-reduce ({row['hivemind_codec']})"),
            ("vs_hivemind_whole", "of its round"),
            ("vs_hivemind_cpu", "of its CPU"),
            ("vs_gloo", "of gloo"),
        )
        if key in row
    ]
    bytes_sent = f"bytes {row['bytes_vs_bound']:.3f} of the bound, the most of a peer {row['bytes_vs_bound_most']:.3f}"
    print(
        f"{row['peers']} peers x {row['parameters'] / 1e6:g}M {row['codec']}: "
        + ", ".join([*ratios, bytes_sent])
        + said_of_check(row),
        flush=True,
    )
    for name in ("ours", "hivemind", "gloo"):
        if name in row:
            found = row[name]
            print(
                f"    {name:9} {found['phase_s']:7.3f} s   whole round {found['whole_s']:7.3f} s   "
                f"CPU {found['cpu_s']:7.2f} s",
                flush=True,
            )


def kill(args: argparse.Namespace, peers: int, parameters: int) -> Found:
    """Kill a member in the middle of a round of ours, then of hivemind's; seconds until the others hold a good sum.

    Where they did not within --patience, that is said: `NAME` is None and `NAME_at_least` the seconds waited.
    """
    found: Found = {"peers": peers, "parameters": parameters}
    for way in ["ours"] + ["hivemind"] * (not args.no_hivemind):
        with ExitStack() as stack:
            swarm = VirtualSwarm(stack, peers, parameters, hivemind=way == "hivemind", gloo=False)
            if way == "ours":
                swarm.order("prepare", "int64")
                swarm.turn("ours", 1)
                typical_s = swarm.turn("ours", 2)["phase_s"]
                order: tuple[Any, ...] = ("ours", 3)
            else:
                typical_s = swarm.turn("hivemind", "fp32", peers, 60.0)["phase_s"]
                order = ("hivemind", "fp32", peers - 1, args.patience)
            swarm.pipes[-1].send(("die", typical_s / 2))
            for pipe in reversed(swarm.pipes):
                pipe.send(order)
            killed = died(swarm.processes[-1].pid)
            each = heard_within(swarm.pipes[:-1], killed + args.patience)
            good = len(each) == peers - 1 and all(one["members"] == peers - 1 for one in each)
            took_s = max(one["ended"] for one in each) - killed if good else None
            if good and way == "ours":
                check(swarm.samples[:-1], each[-1]["sample"], "int64", what="ours, one fewer")
            found[way] = took_s and round(took_s, 3)
            if took_s is None:
                found[f"{way}_at_least"] = args.patience
            print(
                f"{way:9} killed one of {peers} after {typical_s / 2:.2f} s of a round: the others' next good sum "
                + (f"{took_s:.2f} s later" if took_s else f"not within {args.patience:.0f} s"),
                flush=True,
            )
    return found


def died(pid: int) -> float:
    """When that process was gone. Raises ValueError if it lives on. (Its pipe may stay open in a child of its own.)"""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return time.monotonic()
        if stat.rpartition(")")[2].split()[0] == "Z":
            return time.monotonic()
        time.sleep(0.002)
    raise ValueError("the victim outlived its round: try more parameters")


def heard_within(pipes: list[Connection], deadline: float) -> list[Found]:
    """What these peers say until then; whoever is silent or broken is left out."""
    found = []
    for pipe in pipes:
        with suppress(EOFError, ConnectionError):
            if wait([pipe], max(0.0, deadline - time.monotonic()) + SLACK_S):
                found.append(pipe.recv())
    return found


def plan(args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """What to measure, in order."""
    chosen = bool(args.peers or args.parameters)
    sizes = args.parameters or [10**7, 5 * 10**7]
    if args.links:
        return [("links", peers, mbit, parameters) for parameters in sizes for peers, mbit in args.links]
    if args.arithmetic:
        members = (args.peers or [4])[0]
        return [("arithmetic", codec, members, parameters) for parameters in sizes[:1] for codec in args.arithmetic]
    if args.uneven:
        return [("uneven", peers, ratio, parameters) for parameters in sizes[:1] for peers, ratio in args.uneven]
    if chosen:
        rows = [(peers, parameters) for parameters in sizes for peers in args.peers or [2, 4, 8]]
    else:
        rows = FULL if args.full else ROWS
    if args.kill:
        return [("kill", *row) for row in (rows if chosen else [KILL])]
    more = [] if chosen else [("kill", *KILL), ("uneven", *UNEVEN, sizes[0])]
    return [*(("peers", *row) for row in rows), *more]


def main() -> None:
    """Measure, print, write."""
    args = read(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nobody's processes are left behind
    written: Found = {"load": os.getloadavg()[0], "turns": args.turns, "rows": []}
    print(f"load average {written['load']:.1f} on {os.cpu_count()} cores, {args.turns} turns a row", flush=True)
    for job in progress(plan(args), lambda job: " ".join(map(str, job))):
        match job:
            case ("links", peers, mbit, parameters):
                written["rows"] += measure_links(args, peers, mbit, parameters)
            case ("kill", peers, parameters):
                written.setdefault("kill", []).append(kill(args, peers, parameters))
            case ("arithmetic", codec, peers, parameters):
                written.setdefault("arithmetic", []).append(measure_arithmetic(codec, peers, parameters, args.turns))
                show_arithmetic(written["arithmetic"][-1])
            case ("uneven", peers, ratio, parameters):
                written.setdefault("uneven", []).append(measure_uneven(peers, ratio, parameters))
                show_uneven(written["uneven"][-1])
            case ("peers", peers, parameters):
                written["rows"] += measure(args, peers, parameters)
    write(args.json, written)


if __name__ == "__main__":
    main()
