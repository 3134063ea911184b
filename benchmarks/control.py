"""What the control plane of one stage costs: its keeper's CPU, everybody's messages, one tick's heartbeats.

    python benchmarks/control.py [--json FILE]                            R in 4, 32, 128 and M in 64, 2048: a minute
    python benchmarks/control.py --replicas 32 --microbatches 2048        one row

R production step machines (`step.member`) of one stage live through two steps of M microbatches; the second is
measured, on virtual time, without compute, tensors or network. A step takes five seconds, ten heartbeats: claims come
one after the other in the first seven, then the round is exchanged, and at the end everybody acks, commits and applies.
What is said between two machines is counted as the production wire writes it; votes are signed and checked as peers do.

claims_per_s: claims that the keeper's machine handles per second of the CPU that it spends on claims. report_ms: CPU
of one report there. keeper_cpu: all CPU seconds of that machine in the step, of reports, heartbeats and ticks, too;
reading and writing of messages is not in it. keeper_share: of the step's time. bytes_per_peer: what a peer sends in the
step, on average. keeper_bytes: what comes in at the keeper. heartbeat_ms: one tick's heartbeats to all others, built
and written, as the median of several.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from swarmnet.ids import Chain, PeerId
from swarmnet.messages import Control, Finished, Heartbeat, Round
from swarmnet.net.grpc_caller import MessageWriter
from swarmnet.net.identity import Identity
from swarmnet.step import actions as act
from swarmnet.step.actions import Action, Broadcast, Send
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member
from swarmnet.step.view import Timers

CHAIN = Chain("11" * 32)
TICKS, CLAIM_TICKS, ROUND_TICKS = 10, 7, 2
"""Heartbeats of a step; in which claims come; and how long the exchange takes."""

BEATS = 9
"""Times that heartbeats are built and written."""

MAX_REPLICAS, MAX_MICROBATCHES = 1000, 1 << 16
Found = dict[str, Any]


class Stage:
    """Replicas that talk to each other: what a driver does for a machine, without anything that takes time."""

    def __init__(self, replicas: int, microbatches: int) -> None:
        self.now, self.timers = 0.0, Timers()
        shape = Shape(1, microbatches, total_steps=1000)
        keys = [Identity.from_seed(hashlib.sha256(str(number).encode()).digest()) for number in range(replicas)]
        names = [key.peer for key in keys]
        self.members = {
            key.peer: Member(
                key.peer, 0, shape, self.timers, incarnation=number + 1, chain=CHAIN, now=self.now, signer=key
            )
            for number, key in enumerate(keys)
        }
        self.wire: deque[tuple[PeerId, PeerId, Control]] = deque()
        self.rounds: dict[PeerId, Round] = {}
        self.cpu_s: dict[PeerId, Counter[str]] = {name: Counter() for name in names}
        self.calls: dict[PeerId, Counter[str]] = {name: Counter() for name in names}
        self.sent: Counter[PeerId] = Counter()
        self.received: Counter[PeerId] = Counter()
        self._written = MessageWriter()
        # All are heard of before anybody has state, so that one keeps and the others do not stand first.
        for name, member in self.members.items():
            for other, mate in self.members.items():
                if other != name:
                    member.receive(other, replace(mate.heartbeat(), synced=True), now=self.now)
        for name in names:
            self._call(name, "begin", lambda member: member.restored(0, CHAIN, CHAIN, CHAIN, None, (), now=self.now))
        self.settle()

    @property
    def keeper(self) -> PeerId:
        """Who keeps, if exactly one does."""
        (name,) = [name for name, member in self.members.items() if member.keeper is not None]
        return name

    def forget(self) -> None:
        """Count from now on."""
        self.sent.clear()
        self.received.clear()
        for counted in (*self.cpu_s.values(), *self.calls.values()):
            counted.clear()

    def step(self, microbatches: int) -> None:
        """One step, from its first claim to the last apply."""
        names, number = list(self.members), next(iter(self.members.values())).version
        for tick in range(TICKS):
            for index in range(microbatches * tick // CLAIM_TICKS, microbatches * (tick + 1) // CLAIM_TICKS):
                if index < microbatches:
                    self._claim(names[index % len(names)], number, index)
            if tick == CLAIM_TICKS + ROUND_TICKS:
                self._finish()
            self.tick()
        behind = [name for name, member in self.members.items() if member.version != number + 1]
        if behind:
            raise ValueError(f"step {number} does not end at {len(behind)} of {len(names)} replicas")

    def tick(self) -> None:
        """A heartbeat of everybody."""
        self.now += self.timers.heartbeat_s
        for name in self.members:
            self._beat(name)
            self._call(name, "tick", lambda member: member.tick(now=self.now))
        self.settle()

    def settle(self) -> None:
        """Deliver what is on the wire, and what that causes."""
        while self.wire:
            sender, receiver, message = self.wire.popleft()
            if isinstance(message, Heartbeat):
                self.members[sender].reached(receiver, now=self.now)
            self._call(
                receiver,
                type(message).__name__,
                lambda member, sender=sender, message=message: member.receive(sender, message, now=self.now),
            )

    def _claim(self, name: PeerId, step: int, index: int) -> None:
        self._call(name, "claim", lambda member: member.claim(step, index, now=self.now))
        self.settle()
        self._call(name, "add", lambda member: member.add(step, index))
        self.settle()

    def _finish(self) -> None:
        """The exchange that everybody takes part in is whole."""
        for name, current in list(self.rounds.items()):
            count = sum(len(indexes) for _, _, indexes in current.contributions)
            whole = Finished(current.id, bytes(32), count, 1.0, 1.0, current.contributions, current.voided)
            self._call(name, "whole", lambda member, whole=whole: member.sum_whole(whole, now=self.now))
        self.rounds.clear()
        self.settle()

    def _call(self, name: PeerId, kind: str, call: Callable[[Member], list[Action]]) -> None:
        began = time.thread_time()
        actions = call(self.members[name])
        self.cpu_s[name][kind] += time.thread_time() - began
        self.calls[name][kind] += 1
        for action in actions:
            self._do(name, action)

    def _do(self, name: PeerId, action: Action) -> None:
        match action:
            case Send(peer, message):
                self._send(name, peer, message)
            case Broadcast(Heartbeat()):
                self._beat(name)
            case Broadcast(message):
                for peer in self.members:
                    self._send(name, peer, message)
            case act.Sum(current):
                self.rounds[name] = current
            case act.StopSum():
                self.rounds.pop(name, None)
            case act.Apply():
                self._call(name, "applied", lambda member: member.applied(now=self.now))

    def _beat(self, name: PeerId) -> None:
        member = self.members[name]
        began = time.thread_time()
        beats = list(member.heartbeats.to_each(other for other in self.members if other != name))
        self.cpu_s[name]["beat"] += time.thread_time() - began
        for peer, beat in beats:
            self._send(name, peer, beat)

    def _send(self, sender: PeerId, receiver: PeerId, message: Control) -> None:
        if sender != receiver:
            num_bytes = len(self._written(message))
            self.sent[sender] += num_bytes
            self.received[receiver] += num_bytes
        self.wire.append((sender, receiver, message))


def measure(replicas: int, microbatches: int) -> Found:
    """One row."""
    stage = Stage(replicas, microbatches)
    stage.step(microbatches)  # the first keeper's term begins, and caches fill
    stage.forget()
    stage.step(microbatches)
    keeper = stage.keeper
    spent, heard = stage.cpu_s[keeper], stage.calls[keeper]
    step_s = TICKS * stage.timers.heartbeat_s
    return {
        "replicas": replicas,
        "microbatches": microbatches,
        "claims_per_s": round(heard["Claim"] / spent["Claim"]),
        "report_ms": round(1000 * spent["Report"] / heard["Report"], 3),
        "keeper_cpu": round(spent.total(), 4),
        "keeper_share": round(spent.total() / step_s, 4),
        "bytes_per_peer": round(stage.sent.total() / replicas),
        "keeper_bytes": stage.received[keeper],
        "heartbeat_ms": round(1000 * heartbeat_s(stage, keeper), 3),
    }


def show(row: Found) -> None:
    """One line."""
    print(
        f"R {row['replicas']:4} M {row['microbatches']:5}: {row['claims_per_s']:6} claims/s, "
        f"{row['report_ms']:.2f} ms a report, keeper {row['keeper_cpu']:.3f} s of CPU a step "
        f"({100 * row['keeper_share']:.1f} %), a peer sends {row['bytes_per_peer'] / 1e3:.0f} kB a step, the keeper "
        f"hears {row['keeper_bytes'] / 1e3:.0f} kB, heartbeats {row['heartbeat_ms']:.2f} ms a tick",
        flush=True,
    )


def heartbeat_s(stage: Stage, name: PeerId) -> float:
    """Seconds in which one member's heartbeats to all others are built and written."""
    member, others = stage.members[name], [other for other in stage.members if other != name]
    took = []
    for _ in range(BEATS):
        written, began = MessageWriter(), time.thread_time()
        for _, beat in member.heartbeats.to_each(others):
            written(beat)
        took.append(time.thread_time() - began)
    return statistics.median(took)


def numbers(least: int, most: int) -> Callable[[str], list[int]]:
    """Whole numbers with commas between them."""

    def parsed(text: str) -> list[int]:
        found = [int(each) if each.isascii() and each.isdigit() else -1 for each in text.split(",")]
        if not all(least <= each <= most for each in found):
            raise argparse.ArgumentTypeError(f"{text}: write whole numbers from {least} to {most} with commas")
        return found

    return parsed


class Arguments(argparse.ArgumentParser):
    """Says what is wrong in one line, and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def read() -> argparse.Namespace:
    """The command line's flags."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=numbers(2, MAX_REPLICAS), default=[4, 32, 128], help="such as 4,32,128")
    parser.add_argument("--microbatches", type=numbers(1, MAX_MICROBATCHES), default=[64, 2048], help="such as 64,2048")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no such folder; make it first")
    return args


def main() -> None:
    """Measure, print, write."""
    args = read()
    began, rows = time.monotonic(), []
    jobs = [(replicas, microbatches) for replicas in args.replicas for microbatches in args.microbatches]
    for number, job in enumerate(jobs, 1):
        print(
            f"[{time.monotonic() - began:4.0f} s, {number} of {len(jobs)}] {job[0]} replicas x {job[1]} microbatches",
            file=sys.stderr,
            flush=True,
        )
        rows.append(row := measure(*job))
        show(row)
    print(f"[{time.monotonic() - began:4.0f} s] done", file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
