"""What a replica sends and reads to know of the others, by the size of its stage: bytes a second, at a step a minute.

    python benchmarks/control_links.py [--json FILE]        a middle stage of R = 8 to 1000 replicas, seconds

The graph of heartbeats is made as in production, for a stage and two of the same size beside it. Messages are written
and packed as on one link (`wire.deflate`), in the order of a step: heartbeats when they are due, and one for each of
the ten ticks in which commits of the other stages become known; a certificate of each of 100 stages once, with the
question for it. reports: to the leader twice a second, and its plans. pings: those that go with heartbeats and
reports, and their answers. records: what a peer reads of others' records, by the production pace (`ReadPace`), of the
parts that lie near it. all_to_all: what heartbeats would be if all heard all twice a second, as they are written.
Claims and rounds are not in it (`benchmarks/control.py`), nor what gRPC, TLS and TCP add. exponents: of R, from 100
replicas to 1000. The last row is a fleet that `swarmnet simulate` can run: 4 stages of 50, a step in 9 s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarmnet.directory import RECORD_BYTES, SMALL_RUN, ReadPace, Record, StageStatus
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId, RunId, mark_of
from swarmnet.manifest.timers import Timers
from swarmnet.messages import (
    MAX_COUNTING,
    NONE,
    Commit,
    Committed,
    Control,
    Heartbeat,
    MemberState,
    StagePlan,
    Stamp,
    first_of,
    roll_of,
)
from swarmnet.net.identity import Identity
from swarmnet.net.records import Announcement, part_of, parts_seen, places_of
from swarmnet.step.commits import NAMED_EVERY, bits_of
from swarmnet.step.graph import Graph
from swarmnet.step.heartbeats import STRETCH
from swarmnet.wire.convert import NONCE_BYTES, Ping, Pong, write_answer, write_control
from swarmnet.wire.deflate import Deflater

REPLICAS = (8, 24, 100, 300, 1000)
PARTS = ("heartbeats", "reports", "pings", "dht", "commits")
RUN, CHAIN = RunId("ab" * 32), Chain("11" * 32)
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run."""

    replicas: int
    stages: int = 100
    step_s: float = 60.0

    @property
    def news(self) -> int:
        """Ticks of a step in which commits become known."""
        return min(self.stages, 10)


SIMULATED = Sizes(50, 4, 9.0)


def named(stage: int, replicas: int) -> frozenset[PeerId]:
    """The replicas of a stage."""
    seeds = (hashlib.sha256(f"{stage} {at}".encode()).digest() for at in range(replicas))
    return frozenset(Identity.from_seed(seed).peer for seed in seeds)


def links(stages: dict[int, frozenset[PeerId]]) -> dict[PeerId, set[PeerId]]:
    """Whom each replica of the middle stage beats, those that it answers included."""
    counting = {stage: frozenset(sorted(names, key=mark_of)[:MAX_COUNTING]) for stage, names in stages.items()}
    found: dict[PeerId, set[PeerId]] = {peer: set() for names in stages.values() for peer in names}
    for stage, names in stages.items():
        near = {at: others for at, others in stages.items() if abs(at - stage) <= 1}
        leader = min(counting[stage])
        for peer in names:
            graph = Graph(peer, stage)
            graph.choose(near, counting, names, leader=leader)
            for other in graph.chosen:
                found[peer].add(other)
                found[other].add(peer)
    return found


def random_bytes(*what: object) -> bytes:
    """32 that nobody can pack."""
    return hashlib.sha256(str(what).encode()).digest()


def chain_of(version: int) -> Chain:
    """The chain of a version."""
    return Chain(random_bytes("chain", version).hex())


def beat(leader: PeerId, version: int, known: int) -> Heartbeat:
    """A heartbeat of who knows so many stages' commits."""
    stamp, said = Stamp(version, 50, chain_of(version)), random_bytes(version, known)[:16] if known else b""
    return Heartbeat(
        stamp,
        1 << 61,
        True,
        Ballot(0, leader),
        numerics="cpu AVX512/torch-2.13.0/1/fp32",
        before=chain_of(version - 1),
        known=bits_of(range(known)),
        digest=said,
    )


def beats(leader: PeerId, version: int, every_s: float, sizes: Sizes) -> list[Heartbeat]:
    """Those of one step on one link."""
    due, ticks = round(sizes.step_s / every_s), sizes.news
    news = [beat(leader, version, sizes.stages * tick // ticks) for tick in range(1, ticks + 1)]
    return [*[beat(leader, version, 0)] * due, *(news if every_s > 1.0 else [])]


def packed_bytes(steps: Sequence[Sequence[Control]]) -> int:
    """Of the last of these steps on a link that has carried the others."""
    packed, last = Deflater(), 0
    for step in steps:
        last = sum(len(packed(write_control(message))) for message in step)
    return last


def report_bytes(leader: PeerId, step_s: float) -> int:
    """Of a step's states of one member, and of the leader's plans, which say no more than their term."""
    ballot, ticks = Ballot(0, leader), round(step_s / Timers().beat_s)
    steps: list[list[Control]] = []
    plans: list[list[Control]] = []
    for step in (1000, 1001):
        stamp, generation = Stamp(step, 50, chain_of(step)), Generation(1 << 61, step)
        said = (stamp, ballot, generation, NONE, NONE, None, None)
        steps.append([MemberState(*said, progress, line=None, whole=False) for progress in range(ticks)])
        plans.append([StagePlan(stamp, ballot)] * ticks)
    return packed_bytes(steps) + packed_bytes(plans)


def commit_bytes(names: frozenset[PeerId]) -> float:
    """Of a certificate, on average: every eighth names who contributed."""
    counting = tuple(sorted(first_of(names)))
    seats = range(len(counting) // 2 + 1)
    of = RoundId(Ballot(0, min(names)), 1)
    sizes = []
    for step in range(NAMED_EVERY):
        sums: Any = (50, step, chain_of(step), of, random_bytes(step), 10**6, 1e6, 1.0, frozenset(), roll_of(counting))
        signed = tuple(random_bytes(step, seat) + random_bytes(seat, step) for seat in seats)
        commit = Commit(*sums)
        commit = replace(commit, contributors=() if step else counting, seats=frozenset(seats), signatures=signed)
        sizes.append(len(Deflater()(write_control(Committed(commit)))))
    return statistics.mean(sizes)


def read_bytes_per_s(names: frozenset[PeerId]) -> float:
    """What a replica reads of records: all of a small run, else its parts of three stages."""
    bits = 0
    for _ in range(20):
        told = [
            Announcement(Record(RUN, peer, 1, (), (StageStatus(0, 0, CHAIN, True),)), "0", 1, 3, parts=(bits,))
            for peer in names
        ]
        bits = parts_seen([each for each in told if "0" in places_of(each.record, each.parts)], 0) or 0
    me = min(names)
    part = sum(part_of(mark_of(peer), 0, bits) == part_of(mark_of(me), 0, bits) for peer in names)
    records, pace, read, now = (4 if bits else 3) * part, ReadPace(2.0), 0, 0.0
    while now < 3600.0:
        if pace.may_read(whole=records <= SMALL_RUN, at_once=False, records=records, now=now):
            pace.has_read(whole=records <= SMALL_RUN, records=records, jitter=1.0, now=now)
            read += records
        now += 1.0
    return read * RECORD_BYTES / 3600.0


def measure(sizes: Sizes) -> Found:
    """One row."""
    replicas, step_s = sizes.replicas, sizes.step_s
    stages = {stage: named(stage, replicas) for stage in range(3)}
    found, timers = links(stages), Timers()
    middle = {peer: len(found[peer]) for peer in stages[1]}
    leader = max(middle, key=lambda peer: middle[peer])
    large = replicas > 24
    every_s = STRETCH * timers.suspect_s if large else timers.beat_s
    each, whole = statistics.mean(middle.values()), len(write_control(beat(leader, 1000, 0)))
    on_link = packed_bytes([beats(leader, version, every_s, sizes) for version in (1000, 1001)]) / step_s
    # Who reports does so between two heartbeats; a ping goes with both.
    pinged = each * (1 / every_s + (sizes.news / step_s if large else 0.0)) + (2 / timers.beat_s if large else 0.0)
    ping = len(Deflater()(write_control(Ping(bytes(range(NONCE_BYTES)))))) + len(write_answer(Pong(bytes(NONCE_BYTES))))
    asking = sizes.news * len(Deflater()(write_control(beat(leader, 1000, sizes.stages // 2))))
    row: Found = {
        "replicas": replicas,
        "neighbours": round(each, 1),
        "most": sorted(middle.values())[-2],
        "leader": middle[leader],
        "heartbeats": round(each * on_link),
        "all_to_all": round((3 * replicas - 1) * whole / timers.beat_s),
        "reports": round(report_bytes(leader, step_s) / step_s),
        "pings": round(pinged * ping),
        "dht": round(statistics.mean(map(read_bytes_per_s, stages.values()))),
        "commits": round((sizes.stages * commit_bytes(stages[1]) + asking) / step_s),
    }
    return row | {"all": sum(row[name] for name in PARTS)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bytes a second that a replica spends on knowing the others, by the size of its stage.",
        epilog="example: python benchmarks/control_links.py --json links.json",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    rows = []
    for sizes in (*map(Sizes, REPLICAS), SIMULATED):
        rows.append(row := {"stages": sizes.stages, "step_s": sizes.step_s} | measure(sizes))
        print(
            f"R {sizes.replicas:4}, {sizes.stages:3} stages, {sizes.step_s:2.0f} s: {row['neighbours']:4} neighbours "
            f"(at most {row['most']}, the leader {row['leader']}); B/s: heartbeats {row['heartbeats']:5} "
            f"(all to all {row['all_to_all']:7}), reports {row['reports']:3}, pings {row['pings']:4}, "
            f"records {row['dht']:4}, commits {row['commits']:4}; all {row['all']:4}",
            flush=True,
        )
    by = {row["replicas"]: row for row in rows}
    names = (*PARTS, "all", "all_to_all")
    exponents = {name: round(math.log10(by[1000][name] / by[100][name]), 2) for name in names}
    print("exponents: " + ", ".join(f"{name} {value}" for name, value in exponents.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "exponents": exponents}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
