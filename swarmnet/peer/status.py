"""`swarmnet status`: ask the DHT about a run, and show what `assess` makes of it.

Records are what peers say of themselves, up to a TTL old; this is an overview, not a proof.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.canonical import run_id
from swarmnet.manifest.file import load
from swarmnet.peer.assess import NO_BOOTSTRAP, Assessment, ReplicaLine, assess, unanswered

_UNBOUNDED = 10_000                 # columns of a pipe

READS = 3                           # a newcomer's first lookup may meet nodes that are already gone
BETWEEN_READS_S = 0.3
WHOLE = 64                          # digits of a run id


def run_status(named: Path | str, bootstrap: tuple[str, ...], output: str) -> int:
    """Print the state of a run, as a table or (`output` "json") as one JSON object.

    named: its manifest, or its id, or the first digits of that (`FIRST_DIGITS` or more).

    The exit code: 0 if it was seen, 1 if nobody announces it, 2 if nobody answers at `bootstrap`.

    Raises UsageError if the manifest cannot be read, `bootstrap` is empty or malformed, or several runs begin so.
    """
    run, num_stages = _which(named)
    if not bootstrap:
        raise UsageError("status needs to know a peer: give --bootstrap with the address that a running peer printed")
    assessment = asyncio.run(_ask(run, num_stages, bootstrap))
    if output == "json":
        print(json.dumps(asdict(assessment), indent=2))
    elif assessment.seen:
        _show(assessment)
    if not assessment.seen:
        print(f"swarmnet status: {assessment.problems[0].text}", file=sys.stderr)
    if assessment.seen:
        return 0
    return 2 if assessment.problems[0].kind == NO_BOOTSTRAP else 1


async def _ask(run: RunId, num_stages: int, bootstrap: tuple[str, ...]) -> Assessment:
    from swarmnet.net.dht import DhtDirectory  # hivemind takes a second to import
    from swarmnet.net.dht_node import NobodyAnswered
    from swarmnet.net.identity import Identity

    async def start(run: RunId | None) -> DhtDirectory:
        return await DhtDirectory.start(
            Identity.generate(), run, num_stages=num_stages, bootstrap=bootstrap, client=True
        )

    try:
        if len(run) < WHOLE:
            from swarmnet.peer.joining import announced

            directory = await start(None)
            try:
                found = await announced(directory, run, READS * BETWEEN_READS_S, lambda *_: None)
            finally:
                await directory.close()
            if found is None:
                return assess(run, (), num_stages)
            run = found
        directory = await start(run)
    except NobodyAnswered:
        return unanswered(run, num_stages, bootstrap)
    try:
        for attempt in range(READS):
            if attempt:
                await asyncio.sleep(BETWEEN_READS_S)
            if records := await directory.records():
                break
        return assess(run, records, directory.num_stages)
    finally:
        await directory.close()


def _which(named: Path | str) -> tuple[RunId, int]:
    """The run, or the first digits of its id, and its number of stages (0: unknown)."""
    if isinstance(named, str):
        return RunId(named), 0
    manifest = load(named)
    return run_id(manifest), manifest.cut.stages


def _show(assessment: Assessment) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    wide = not console.is_terminal               # in a pipe nothing is cut, and a row is a line
    if wide:
        console.width = _UNBOUNDED
    loss = f", loss {assessment.loss.value:.4f} at step {assessment.loss.step}" if assessment.loss else ""
    held_out = assessment.eval_loss
    evaluated = f", held-out {held_out.value:.4f} at version {held_out.step}" if held_out else ""
    state = "finished" if assessment.finished else f"version {'?' if (v := assessment.version) is None else v}"
    pace = f", {assessment.tokens_per_second:,.0f} tokens/s" if assessment.tokens_per_second else ""
    twice = f", executions per index {assessment.executions_per_index:.3f}" if assessment.executions_per_index else ""
    console.print(f"run {assessment.run[:12]}: {state}{loss}{evaluated}{pace}{twice}", markup=False)
    kept = f"version {assessment.on_disk}" if assessment.on_disk is not None else "no version of all stages yet"
    console.print(f"on disk: {kept}", markup=False)
    table = Table(box=None if wide else box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "peer", "version", "state", "load", "on disk", "drift", "numerics"):
        table.add_column(name, overflow="fold", no_wrap=wide or name not in ("on disk", "drift", "numerics"))
    for line in assessment.stages:
        for replica in line.replicas:
            table.add_row(
                str(line.stage), _short(replica.peer), str(replica.version), replica.state,
                f"{replica.queue}/{replica.slots}", ", ".join(map(str, replica.disk)), _apart(replica),
                replica.numerics.replace("[", r"\["),
            )
        if not line.replicas:
            table.add_row(str(line.stage), "nobody")
    console.print(table)
    names = ", ".join(_short(trainer.peer) for trainer in assessment.trainers) or "none"
    console.print(f"trainers: {names}", markup=False)
    for problem in assessment.problems:
        console.print(f"{problem.severity}: {problem.text}", markup=False)


def _apart(replica: ReplicaLine) -> str:
    """How far its weights were from the stage's, relative to their norm, and at which version; "" if unknown."""
    if replica.drift is None:
        return ""
    version, distance = replica.drift
    return f"{f'{distance:.1e}' if distance else '0'} at {version}"


def _short(peer: PeerId) -> str:
    return f"...{peer[-8:]}"
