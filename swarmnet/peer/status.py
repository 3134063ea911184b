"""`swarmnet status`: what the DHT says about a run, what looks wrong, and what to do about it.

`assess` is pure: records in, an `Assessment` out, which is also the JSON (docs/discovery.md). Records are what peers
say of themselves, up to a TTL old; this is an overview, not a proof.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from swarmnet.errors import UsageError
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.manifest.canonical import run_id
from swarmnet.manifest.file import load
from swarmnet.net.directory import Record

READS = 3                           # a newcomer's first lookup may meet nodes that are already gone
BETWEEN_READS_S = 0.3

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """One replica's claims about one stage. queue, slots: microbatches in flight, and how many it takes."""

    peer: PeerId
    version: int
    chain: Chain
    synced: bool
    queue: int
    slots: int
    numerics: str
    finished: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage and who serves it, sorted by peer."""

    stage: int
    replicas: tuple[ReplicaLine, ...]


@dataclass(frozen=True, slots=True)
class TrainerLine:
    """A trainer."""

    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossAt:
    """Mean loss in nats per token at a step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to know. kind: one word for scripts; text: what, and what to do. stage: which, if it is about one."""

    severity: Severity
    kind: str
    text: str
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Assessment:
    """A run at a glance. version: the weights that every stage has at a synced replica, None while one has none.

    tokens_per_second: of the whole run, the median of what its peers measure.
    """

    run: RunId
    seen: bool
    num_stages: int
    version: int | None
    finished: bool
    loss: LossAt | None
    eval_loss: LossAt | None
    tokens_per_second: float
    stages: tuple[StageLine, ...]
    trainers: tuple[TrainerLine, ...]
    problems: tuple[Problem, ...]


def run_status(manifest_or_run_id: str, bootstrap: tuple[str, ...], output: str) -> int:
    """Print the state of a run, as a table or (`output` "json") as one JSON object. 0 if it was seen, else 1.

    Raises UsageError if the manifest cannot be read or `bootstrap` is empty or malformed.
    """
    run, num_stages = _which(manifest_or_run_id)
    if not bootstrap:
        raise UsageError("status needs to know a peer: give --bootstrap with the address that a running peer printed")
    assessment = asyncio.run(_ask(run, num_stages, bootstrap))
    if output == "json":
        print(json.dumps(asdict(assessment), indent=2))
    elif assessment.seen:
        _show(assessment)
    if not assessment.seen:
        print(f"swarmnet status: {assessment.problems[0].text}", file=sys.stderr)
    return 0 if assessment.seen else 1


def assess(run: RunId, records: Sequence[Record], num_stages: int) -> Assessment:
    """Arrange `records` of `run` by stage and say what looks wrong. num_stages 0: unknown."""
    stages = tuple(StageLine(stage, tuple(_replicas(stage, records))) for stage in range(num_stages))
    synced = [[replica.version for replica in line.replicas if replica.synced] for line in stages]
    trainers = tuple(TrainerLine(r.peer, r.addresses) for r in records if r.trainer)
    finished = bool(stages) and all(any(replica.finished for replica in line.replicas) for line in stages)
    if records:
        by_stage = (problem for line in stages for problem in _stage_problems(line, finished))
        problems = (*_halts(records), *_run_problems(trainers, finished), *by_stage)
    else:
        problems = (_nobody(run),)
    return Assessment(
        run=run,
        seen=bool(records),
        num_stages=num_stages,
        version=min(map(max, synced)) if stages and all(synced) else None,
        finished=finished,
        loss=_newest([record.loss for record in records]),
        eval_loss=_newest([record.eval_loss for record in records]),
        tokens_per_second=statistics.median([r.tokens_per_second for r in records if r.tokens_per_second] or [0.0]),
        stages=stages,
        trainers=trainers,
        problems=tuple(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity))),
    )


# ---------------------------------------------------------------- what looks wrong


def _nobody(run: RunId) -> Problem:
    text = (
        f"nobody announces run {run[:12]}: check that this is the manifest the peers were started with, that they "
        "bootstrap from the same swarm, and that one has been up for a few seconds"
    )
    return Problem("error", "nobody_seen", text)


def _halts(records: Sequence[Record]) -> Iterator[Problem]:
    for step in sorted({record.halted for record in records if record.halted is not None}):
        text = (
            f"the run stopped at step {step}: more microbatches than training.max_void gave no gradient that can be "
            "counted; start a new run with a lower learning rate (`swarmnet init --set optimizer.learning_rate=...`)"
        )
        yield Problem("error", "halted", text)


def _run_problems(trainers: Sequence[TrainerLine], finished: bool) -> Iterator[Problem]:
    if not trainers and not finished:
        text = (
            "no trainer feeds the run: peers of stage 0 that hold the data feed it themselves, slowly; start one with "
            "`swarmnet trainer`"
        )
        yield Problem("warning", "no_trainer", text)


def _stage_problems(line: StageLine, finished: bool) -> Iterator[Problem]:
    stage, replicas = line.stage, line.replicas
    if not replicas:
        text = f"nobody serves stage {stage}, so no step can finish: start a peer with `swarmnet peer --stage {stage}`"
        yield Problem("error", "stage_empty", text, stage)
        return
    if not any(replica.synced for replica in replicas):
        text = f"no replica of stage {stage} has the weights yet: wait for one to catch up, or bring back one that had"
        yield Problem("error", "stage_not_synced", text, stage)
    for version, chains in _forks(replicas):
        text = (
            f"replicas of stage {stage} disagree about version {version} ({', '.join(chains)}): the stage was "
            "partitioned; restart the replicas of the smaller side, they take the others' snapshot"
        )
        yield Problem("error", "fork", text, stage)
    if len({replica.numerics for replica in replicas}) > 1:
        text = f"stage {stage} mixes numerics classes: its replicas agree up to rounding, not bit by bit"
        yield Problem("note", "mixed_numerics", text, stage)
    if finished:                                     # nothing waits for anybody any more
        return
    if len(replicas) == 1:
        text = f"stage {stage} has a single replica: if it goes, the run waits; start one more"
        yield Problem("note", "single_replica", text, stage)
    if len(replicas) == 2:
        text = (
            f"stage {stage} has two replicas: if one hangs (a crash is seen at once), a step waits out the long "
            "silence limit, since two cannot tell silence from death; a third replica removes that"
        )
        yield Problem("note", "two_replicas", text, stage)


def _forks(replicas: Sequence[ReplicaLine]) -> Iterator[tuple[int, list[str]]]:
    """Versions at which synced replicas have different chains, with the first digits of each."""
    chains: dict[int, set[str]] = {}
    for replica in replicas:
        if replica.synced:
            chains.setdefault(replica.version, set()).add(replica.chain)
    for version, different in sorted(chains.items()):
        if len(different) > 1:
            yield version, sorted(chain[:12] for chain in different)


# ---------------------------------------------------------------- asking and showing


async def _ask(run: RunId, num_stages: int, bootstrap: tuple[str, ...]) -> Assessment:
    from swarmnet.net.dht import DhtDirectory  # hivemind takes a second to import
    from swarmnet.net.dht_node import NobodyAnswered
    from swarmnet.net.identity import Identity

    try:
        directory = await DhtDirectory.start(
            Identity.generate(), run, num_stages=num_stages, bootstrap=bootstrap, client=True
        )
    except NobodyAnswered:
        tried = ", ".join(bootstrap)
        text = f"no bootstrap peer answered; tried {tried}: check that one is running and reachable from here"
        problem = Problem("error", "no_bootstrap", text)
        return Assessment(run, False, num_stages, None, False, None, None, 0.0, (), (), (problem,))
    try:
        for attempt in range(READS):
            if attempt:
                await asyncio.sleep(BETWEEN_READS_S)
            if records := await directory.records():
                break
        return assess(run, records, directory.num_stages)
    finally:
        await directory.close()


def _which(manifest_or_run_id: str) -> tuple[RunId, int]:
    """The run, and its number of stages (0: unknown)."""
    if re.fullmatch(r"[0-9a-f]{64}", manifest_or_run_id):
        return RunId(manifest_or_run_id), 0
    manifest = load(Path(manifest_or_run_id))
    return run_id(manifest), manifest.cut.stages


def _replicas(stage: int, records: Sequence[Record]) -> Iterator[ReplicaLine]:
    for record in sorted(records, key=lambda record: record.peer):
        for status in record.stages:
            if status.stage == stage:
                yield ReplicaLine(
                    record.peer, status.version, status.chain, status.synced, status.queue, status.slots,
                    record.numerics, record.finished, record.addresses,
                )


def _newest(losses: Sequence[tuple[int, float] | None]) -> LossAt | None:
    known = [loss for loss in losses if loss is not None]
    return LossAt(*max(known)) if known else None


def _show(assessment: Assessment) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    loss = f", loss {assessment.loss.value:.4f} at step {assessment.loss.step}" if assessment.loss else ""
    held_out = assessment.eval_loss
    evaluated = f", held-out {held_out.value:.4f} at version {held_out.step}" if held_out else ""
    state = "finished" if assessment.finished else f"version {'?' if (v := assessment.version) is None else v}"
    pace = f", {assessment.tokens_per_second:,.0f} tokens/s" if assessment.tokens_per_second else ""
    console.print(f"run {assessment.run[:12]}: {state}{loss}{evaluated}{pace}", markup=False)
    table = Table("stage", "peer", "version", "synced", "load", "numerics")
    for line in assessment.stages:
        for replica in line.replicas:
            table.add_row(
                str(line.stage), _short(replica.peer), str(replica.version), "yes" if replica.synced else "no",
                f"{replica.queue}/{replica.slots}", replica.numerics.replace("[", r"\["),
            )
        if not line.replicas:
            table.add_row(str(line.stage), "nobody", "", "", "", "")
    console.print(table)
    names = ", ".join(_short(trainer.peer) for trainer in assessment.trainers) or "none"
    console.print(f"trainers: {names}", markup=False)
    for problem in assessment.problems:
        console.print(f"{problem.severity}: {problem.text}", markup=False)


def _short(peer: PeerId) -> str:
    return f"...{peer[-8:]}"
