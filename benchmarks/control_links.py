"""What a replica sends and reads to know of the others, by the size of its stage: bytes a second, without a step.

    python benchmarks/control_links.py [--json FILE]        a middle stage of R = 8 to 1000 replicas, seconds

The graph of heartbeats is made as in production, for a stage and two of the same size beside it; a heartbeat is counted
as the wire writes it. all_to_all: what would be sent if all heard all twice a second. dht: what a peer reads of others'
records, by the production pace (`ReadPace`), of the parts that lie near it. commits: certificates of 100 stages in one
step a minute, if each comes once. No network overhead is in it. exponents: of R, from 100 replicas to 1000.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnet.directory import RECORD_BYTES, SMALL_RUN, ReadPace, Record, StageStatus
from swarmnet.ids import Ballot, Chain, PeerId, RoundId, RunId, mark_of
from swarmnet.messages import MAX_COUNTING, Commit, Committed, Heartbeat, Stamp, roll_of
from swarmnet.net.grpc_caller import MessageWriter
from swarmnet.net.identity import Identity
from swarmnet.net.records import Announcement, part_of, parts_seen, places_of
from swarmnet.step.commits import NAMED_EVERY, first_of
from swarmnet.step.graph import Graph
from swarmnet.step.heartbeats import STRETCH
from swarmnet.step.view import Timers

REPLICAS = (8, 24, 100, 300, 1000)
STAGES, STEP_S = 100, 60.0
RUN, CHAIN = RunId("ab" * 32), Chain("11" * 32)
Found = dict[str, Any]


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
        keeper = min(counting[stage])
        for peer in names:
            graph = Graph(peer, stage)
            graph.choose(near, counting, names, keeper=keeper)
            for other in graph.chosen:
                found[peer].add(other)
                found[other].add(peer)
    return found


def beat_bytes(keeper: PeerId) -> int:
    """Of a heartbeat when there are no commits to tell of."""
    stamp = Stamp(1000, 50, CHAIN)
    beat = Heartbeat(stamp, 1 << 61, True, Ballot(0, keeper), numerics="cpu AVX512/torch-2.13.0/1/fp32", before=CHAIN)
    return len(MessageWriter()(beat))


def commit_bytes(names: frozenset[PeerId]) -> float:
    """Of a certificate, on average: every eighth names who contributed."""
    counting = tuple(sorted(first_of(names)))
    seats = range(len(counting) // 2 + 1)
    of = RoundId(Ballot(0, min(names)), 1)
    sums = (50, 1000, CHAIN, of, b"d" * 32, 10**6, 1e6, 1.0, frozenset(), roll_of(counting))
    brief = Commit(*sums, seats=frozenset(seats), signatures=(b"s" * 64,) * len(seats))
    named = replace(brief, contributors=counting)
    told = (named, *[brief] * (NAMED_EVERY - 1))
    return statistics.mean(len(MessageWriter()(Committed(commit))) for commit in told)


def read_bytes_per_s(names: frozenset[PeerId]) -> float:
    """What a replica reads of records: all of a small run, else its parts of three stages."""
    bits = 0
    for _ in range(20):
        told = [
            Announcement(Record(RUN, peer, 1, (), (StageStatus(0, 0, CHAIN, True),)), 0, 1, 3, parts=(bits,))
            for peer in names
        ]
        bits = parts_seen([each for each in told if 0 in places_of(each.record, each.parts)], 0) or 0
    me = min(names)
    part = sum(part_of(mark_of(peer), 0, bits) == part_of(mark_of(me), 0, bits) for peer in names)
    records, pace, read, now = (4 if bits else 3) * part, ReadPace(2.0), 0, 0.0
    while now < 3600.0:
        if pace.may_read(whole=records <= SMALL_RUN, at_once=False, records=records, now=now):
            pace.has_read(whole=records <= SMALL_RUN, records=records, jitter=1.0, now=now)
            read += records
        now += 1.0
    return read * RECORD_BYTES / 3600.0


def measure(replicas: int) -> Found:
    """One row."""
    stages = {stage: named(stage, replicas) for stage in range(3)}
    found, timers = links(stages), Timers()
    middle = {peer: len(found[peer]) for peer in stages[1]}
    keeper = max(middle, key=lambda peer: middle[peer])
    large = replicas > 24
    size, every_s = beat_bytes(keeper), STRETCH * timers.suspect_s if large else timers.heartbeat_s
    return {
        "replicas": replicas,
        "neighbours": round(statistics.mean(middle.values()), 1),
        "most": sorted(middle.values())[-2],
        "keeper": middle[keeper],
        "heartbeats": round(statistics.mean(middle.values()) * size / every_s),
        "all_to_all": round((3 * replicas - 1) * size / timers.heartbeat_s),
        "dht": round(read_bytes_per_s(stages[1])),
        "commits": round(STAGES * commit_bytes(stages[1]) / STEP_S),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bytes a second that a replica spends on knowing the others, by the size of its stage.",
        epilog="example: python benchmarks/control_links.py --json links.json",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    rows = []
    for replicas in REPLICAS:
        rows.append(row := measure(replicas))
        print(
            f"R {replicas:4}: {row['neighbours']:6} neighbours (at most {row['most']}, the keeper {row['keeper']}), "
            f"heartbeats {row['heartbeats']:7} B/s (all to all {row['all_to_all']:8}), records {row['dht']:5} B/s, "
            f"commits {row['commits']:6} B/s",
            flush=True,
        )
    by = {row["replicas"]: row for row in rows}
    names = ("heartbeats", "all_to_all", "dht", "commits")
    exponents = {name: round(math.log10(by[1000][name] / by[100][name]), 2) for name in names}
    print("exponents: " + ", ".join(f"{name} {value}" for name, value in exponents.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "exponents": exponents}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
