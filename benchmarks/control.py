"""What the control plane of one stage costs: its leader's CPU, everybody's messages, one tick's heartbeats.

    python benchmarks/control.py [--json FILE]                            ten sizes up to 1000 x 10,000: five minutes
    python benchmarks/control.py --replicas 32 --microbatches 2048        one row

R production step machines (`step.member`) of one stage live through two steps of M microbatches; the second is
measured, on virtual time, without compute, tensors or network. Claims come in twenty heartbeats, then the round is
exchanged, and at the end everybody acks, commits and applies. What is said between two machines is counted as the
production wire writes it; votes are signed and checked as peers do. Beside it quiet heartbeats are measured, in which
nothing is claimed: a step of a minute has as many of them as are left of its 120.

claims_per_s: claims that the leader's process handles per second of CPU, with the reading of each and the writing of
its answer. report_ms: CPU of one report there, with its reading. leader_cpu: CPU seconds of the leader's process in a
step of a minute: machine, and reading and writing of messages, but not the network below. leader_share: of one core.
bytes_per_peer: what a peer sends in that step, on average. leader_sends, leader_hears: bytes of the leader.
heartbeat_ms: CPU of one tick's heartbeats, built and written, as the median of several; heartbeat_share: of one core.
messages: what all members send in the measured step of 24 heartbeats, without heartbeats; by_kind: of which kind.
round_bytes, certificate_bytes, quiet_report_bytes: one such message.

exponents: n in cost ~ size^n of bytes_per_peer and leader_cpu, fitted by least squares over the rows that share the
largest M (in R), or an R with several M (in M).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Benchmark, progress, write

from swarmnet.bounds import Bounds
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Control, Finished, Heartbeat, MemberState, Round, StagePlan, Stamp, StateHeader
from swarmnet.net.grpc_link import MessageWriter
from swarmnet.net.identity import Identity
from swarmnet.step.commits import commit_of
from swarmnet.step.gate import Shape
from swarmnet.step.host import Call
from swarmnet.step.member import Member
from swarmnet.wire.convert import Ping, Reader

CHAIN = Chain("11" * 32)
TICKS, CLAIM_TICKS, ROUND_TICKS, QUIET_TICKS = 24, 20, 2, 4
"""Heartbeats of a step; in which claims come; how long the exchange takes; and those that are measured without any."""

STEP_S = 60.0
"""A step's time, by which CPU and bytes are said."""

CELLS = (
    *((4, 64), (4, 2048), (32, 64), (32, 2048), (128, 64), (128, 2048), (128, 10_000)),
    *((300, 10_000), (1000, 1000), (1000, 10_000)),
)
"""(R, M) of the default run."""

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
        self._written, self._reader = MessageWriter(), Reader(Bounds(1, microbatches))
        self.kinds: dict[PeerId, Counter[str]] = {name: Counter() for name in names}
        self.longest: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.shortest: dict[str, int] = {}
        self._spent: PeerId | None = None
        self._names = frozenset(names)
        self._beat_at, self._known = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        self._beaten: dict[PeerId, set[PeerId]] = {name: set() for name in names}
        # One step is behind them: it says who counts.
        ids, parts = RoundId(Ballot(0, names[0]), 0), tuple((name, Generation(1, 0), frozenset({0})) for name in names)
        summed = Finished(ids, bytes(32), 1, 1.0, 1.0, parts)
        before = commit_of(Stamp(0, 0, CHAIN), summed)
        # All are heard of before anybody has state, so that one keeps and the others do not stand first.
        first = Stamp(1, 0, CHAIN)
        beats = {name: replace(member.heartbeat(), stamp=first, synced=True) for name, member in self.members.items()}
        for name, member in self.members.items():
            for other, beat in beats.items():
                if other != name:
                    member.view.hear(other, beat, now=self.now)
                    member.view.echo(other, now=self.now)
            member.membership.applied((before,), summed)
            self.neighbours(name)  # as on the ticks before a peer has state: whether the stage is a large one
        for name in names:
            self._call(
                name,
                "begin",
                lambda member: member.restored(StateHeader(1, CHAIN, CHAIN, CHAIN), None, (), (before,), now=self.now),
            )
        self.settle()

    @property
    def leader(self) -> PeerId:
        """Who keeps, if exactly one does."""
        (name,) = [name for name, member in self.members.items() if member.oldest.leader is not None]
        return name

    def forget(self) -> None:
        """Count from now on."""
        for counted in (
            self.sent,
            self.received,
            self.longest,
            self.messages,
            *self.cpu_s.values(),
            *self.calls.values(),
        ):
            counted.clear()
        self.shortest.clear()
        self._spent = self.leader

    def step(self, microbatches: int) -> None:
        """One step, from its first claim to the last apply."""
        names, number = list(self.members), next(iter(self.members.values())).version
        for tick in range(TICKS):
            self.tick()
            for index in range(microbatches * tick // CLAIM_TICKS, microbatches * (tick + 1) // CLAIM_TICKS):
                if index < microbatches:
                    self._claim(names[index % len(names)], number, index)
            if tick == CLAIM_TICKS + ROUND_TICKS:
                self._finish()
        behind = [name for name, member in self.members.items() if member.version != number + 1]
        if behind:
            raise ValueError(f"step {number} does not end at {len(behind)} of {len(names)} replicas")

    def tick(self) -> None:
        """A heartbeat of everybody."""
        self.now += self.timers.beat_s
        for name in self.members:
            self._beat(name, due_only=True)
            self._call(name, "tick", lambda member: member.tick(now=self.now))
        self.settle()

    def settle(self) -> None:
        """Deliver what is on the wire, and what that causes. A leader looks at everybody when its turn has ended."""
        while self.wire:
            came, self.wire = self.wire, deque()
            last = {receiver: place for place, (_, receiver, _) in enumerate(came)}
            for place, (sender, receiver, message) in enumerate(came):
                self._deliver(sender, receiver, message, more=last[receiver] != place)

    def _deliver(self, sender: PeerId, receiver: PeerId, message: Control, *, more: bool) -> None:
        kind = "claim" if isinstance(message, MemberState) and message.wants else type(message).__name__
        if isinstance(message, Heartbeat):
            self.members[sender].view.echo(receiver, now=self.now)
        if receiver == self._spent != sender:
            data = self._written(message)
            began = time.thread_time()
            read = self._reader.control(data)
            self.cpu_s[receiver][kind] += time.thread_time() - began
            assert not isinstance(read, Ping)
            message = read
        self._call(receiver, kind, lambda member: member.receive(sender, message, now=self.now, more=more))

    def _claim(self, name: PeerId, step: int, index: int) -> None:
        self._call(name, "begin", lambda member: member.claim(step, index, now=self.now))
        self.settle()
        self._call(name, "add", lambda member: member.add(step, index))
        self.settle()

    def _finish(self) -> None:
        """The exchange that everybody takes part in is whole."""
        for name, current in list(self.rounds.items()):
            count = sum(len(indexes) for _, _, indexes in current.contributions)
            whole = Finished(current.id, bytes(32), count, 1.0, 1.0, current.contributions, current.discarded)
            self._call(name, "whole", lambda member, whole=whole: member.oldest.sum_whole(whole, now=self.now))
        self.rounds.clear()
        self.settle()

    def _call(self, name: PeerId, kind: str, call: Callable[[Member], None]) -> None:
        member = self.members[name]
        began = time.thread_time()
        call(member)
        self.cpu_s[name][kind] += time.thread_time() - began
        self.calls[name][kind] += 1
        calls = [*member.calls.calls]
        member.calls.calls.clear()
        for each in calls:
            self._do(name, each)

    def _do(self, name: PeerId, call: Call) -> None:
        match call:
            case ("send", (peer, message), _):
                self._send(name, peer, message)
            case ("beat", _, _):
                self._beat(name)
            case ("publish", (message,), _):
                for peer in self.members:
                    self._send(name, peer, message)
            case ("aggregate", (attempt,), _):
                self.rounds[name] = attempt
            case ("stop", _, _):
                self.rounds.pop(name, None)
            case ("apply", _, _):
                self._call(name, "applied", lambda member: member.applied(now=self.now))

    def _beat(self, name: PeerId, *, due_only: bool = False) -> None:
        """What a driver does (`StepDriver._beat`); of the members that nobody measures only when it is time."""
        member, known = self.members[name], len(self.members[name].oldest.barrier.known)
        due = self.now + 0.5 * self.timers.beat_s >= self._beat_at[name] or known > self._known[name]
        self._known[name] = known
        if due_only and not due and name != self._spent:
            return
        began = time.thread_time()
        near = self.neighbours(name)
        if due or not due_only:
            if due_only or member.view.sparse:
                self._beat_at[name] = self.now + member.view.beat_s
        else:
            near = [peer for peer in near if peer not in self._beaten[name]]
        self._beaten[name] |= {*near}
        beats = list(member.heartbeats.to_each(near))
        self.cpu_s[name]["beat"] += time.thread_time() - began
        for peer, beat in beats:
            self._send(name, peer, beat, "beat")

    def neighbours(self, name: PeerId) -> list[PeerId]:
        """Who hears this member's heartbeats."""
        return list(self.members[name].heartbeats.neighbours({0: self._names - {name}}, now=self.now))

    def _send(self, sender: PeerId, receiver: PeerId, message: Control, kind: str = "") -> None:
        if sender != receiver:
            began = time.thread_time()
            num_bytes = len(self._written(message))
            is_answer = isinstance(message, StagePlan) and message.assigned
            self.cpu_s[sender][kind or ("write answer" if is_answer else "write")] += time.thread_time() - began
            self.sent[sender] += num_bytes
            self.received[receiver] += num_bytes
            what = type(message).__name__
            self.messages[what] += 1
            self.longest[what] = max(self.longest[what], num_bytes)
            self.shortest[what] = min(self.shortest.get(what, num_bytes), num_bytes)
        self.wire.append((sender, receiver, message))


def measure(replicas: int, microbatches: int) -> Found:
    """One row."""
    stage = Stage(replicas, microbatches)
    stage.step(microbatches)  # the first leader's term begins, and caches fill
    leader, beat_s = stage.leader, stage.timers.beat_s
    stage.tick()  # the next step's begins, and all report
    stage.forget()
    for _ in range(QUIET_TICKS):
        stage.tick()
    left = (round(STEP_S / beat_s) - TICKS) / QUIET_TICKS
    quiet_cpu, quiet_bytes = stage.cpu_s[leader].total(), stage.sent.total()
    quiet_sent, quiet_received = stage.sent[leader], stage.received[leader]
    quiet_report = stage.shortest["MemberState"]
    stage.forget()
    stage.step(microbatches)
    spent, heard = stage.cpu_s[leader], stage.calls[leader]
    cpu_s, beating_s = spent.total() + left * quiet_cpu, heartbeat_s(stage, leader)
    return {
        "replicas": replicas,
        "microbatches": microbatches,
        "claims_per_s": round(heard["claim"] / (spent["claim"] + spent["write answer"])),
        "report_ms": round(1000 * spent["MemberState"] / heard["MemberState"], 3),
        "leader_cpu": round(cpu_s, 4),
        "leader_share": round(cpu_s / STEP_S, 4),
        "bytes_per_peer": round((stage.sent.total() + left * quiet_bytes) / replicas),
        "leader_sends": round(stage.sent[leader] + left * quiet_sent),
        "leader_hears": round(stage.received[leader] + left * quiet_received),
        "heartbeat_ms": round(1000 * beating_s, 3),
        "heartbeat_share": round(beating_s / beat_s, 4),
        "messages": stage.messages.total() - stage.messages["Heartbeat"],
        "by_kind": dict(sorted(stage.messages.items())),
        "round_bytes": stage.longest["StagePlan"],
        "certificate_bytes": stage.longest["Committed"],
        "quiet_report_bytes": quiet_report,
    }


def show(row: Found) -> None:
    """One line."""
    print(
        f"R {row['replicas']:4} M {row['microbatches']:5}: {row['claims_per_s']:6} claims/s, "
        f"{row['report_ms']:.2f} ms a report; a step a minute: leader {row['leader_cpu']:.2f} s of CPU "
        f"({100 * row['leader_share']:.1f} %), hears {row['leader_hears'] / 1e6:.2f} MB, sends "
        f"{row['leader_sends'] / 1e6:.2f} MB, a peer sends {row['bytes_per_peer'] / 1e3:.0f} kB; "
        f"{row['messages']} messages in the step; heartbeats "
        f"{row['heartbeat_ms']:.2f} ms a tick ({100 * row['heartbeat_share']:.1f} %); a round {row['round_bytes']} B, "
        f"a certificate {row['certificate_bytes']} B, a report without news {row['quiet_report_bytes']} B",
        flush=True,
    )


def exponents(rows: list[Found]) -> Found:
    """How costs grow: of rows with the largest M that several R have, and of the R that has most M."""
    found: Found = {}
    for size, fixed in (("replicas", "microbatches"), ("microbatches", "replicas")):
        shared = Counter(row[fixed] for row in rows)
        most = max(shared, key=lambda value: (shared[value], value), default=0)
        some = [row for row in rows if row[fixed] == most]
        if len(some) > 1:
            sizes = [math.log(row[size]) for row in some]
            found[size] = {fixed: most} | {
                cost: round(statistics.linear_regression(sizes, [math.log(row[cost]) for row in some]).slope, 2)
                for cost in ("bytes_per_peer", "leader_cpu")
            }
    return found


def heartbeat_s(stage: Stage, name: PeerId) -> float:
    """Seconds in which one member's heartbeats are built and written."""
    member, others = stage.members[name], stage.neighbours(name)
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


def read() -> argparse.Namespace:
    """The command line's flags."""
    parser = Benchmark(__doc__)
    parser.add_argument("--replicas", type=numbers(2, MAX_REPLICAS), help="such as 4,32,128")
    parser.add_argument("--microbatches", type=numbers(1, MAX_MICROBATCHES), help="such as 64,2048")
    together = "--replicas and --microbatches go together: give both, or none for the default run"
    return parser.asked(lambda typed: together if (typed.replicas is None) != (typed.microbatches is None) else "")


def main() -> None:
    """Measure, print, write."""
    args = read()
    rows = []
    jobs = CELLS if args.replicas is None else [*itertools.product(args.replicas, args.microbatches)]
    for job in progress(jobs, lambda job: f"{job[0]} replicas x {job[1]} microbatches"):
        rows.append(row := measure(*job))
        show(row)
    found = exponents(rows)
    for size, of in found.items():
        print(f"with {size}: bytes a peer sends ~ n^{of['bytes_per_peer']}, leader's CPU ~ n^{of['leader_cpu']}")
    write(args.json, {"rows": rows, "exponents": found})


if __name__ == "__main__":
    main()
