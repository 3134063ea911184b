"""`swarmnet status`: ask the DHT about a run, and show what `assess` makes of it.

Records are what peers say of themselves, up to a TTL old; this is an overview, not a proof.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.canonical import run_id
from swarmnet.manifest.file import load
from swarmnet.peer.assess import NO_BOOTSTRAP, Assessment, ReplicaLine, assess, unanswered

READS = 3                           # a newcomer's first lookup may meet nodes that are already gone
BETWEEN_READS_S = 0.3


def run_status(manifest_or_run_id: str, bootstrap: tuple[str, ...], output: str) -> int:
    """Print the state of a run, as a table or (`output` "json") as one JSON object.

    The exit code: 0 if it was seen, 1 if nobody announces it, 2 if nobody answers at `bootstrap`.

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
    if assessment.seen:
        return 0
    return 2 if assessment.problems[0].kind == NO_BOOTSTRAP else 1


async def _ask(run: RunId, num_stages: int, bootstrap: tuple[str, ...]) -> Assessment:
    from swarmnet.net.dht import DhtDirectory  # hivemind takes a second to import
    from swarmnet.net.dht_node import NobodyAnswered
    from swarmnet.net.identity import Identity

    try:
        directory = await DhtDirectory.start(
            Identity.generate(), run, num_stages=num_stages, bootstrap=bootstrap, client=True
        )
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


def _which(manifest_or_run_id: str) -> tuple[RunId, int]:
    """The run, and its number of stages (0: unknown)."""
    if re.fullmatch(r"[0-9a-f]{64}", manifest_or_run_id):
        return RunId(manifest_or_run_id), 0
    manifest = load(Path(manifest_or_run_id))
    return run_id(manifest), manifest.cut.stages


def _show(assessment: Assessment) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    loss = f", loss {assessment.loss.value:.4f} at step {assessment.loss.step}" if assessment.loss else ""
    held_out = assessment.eval_loss
    evaluated = f", held-out {held_out.value:.4f} at version {held_out.step}" if held_out else ""
    state = "finished" if assessment.finished else f"version {'?' if (v := assessment.version) is None else v}"
    pace = f", {assessment.tokens_per_second:,.0f} tokens/s" if assessment.tokens_per_second else ""
    twice = f", executions per index {assessment.executions_per_index:.3f}" if assessment.executions_per_index else ""
    console.print(f"run {assessment.run[:12]}: {state}{loss}{evaluated}{pace}{twice}", markup=False)
    kept = f"version {assessment.on_disk}" if assessment.on_disk is not None else "no version of all stages yet"
    console.print(f"on disk: {kept}", markup=False)
    table = Table("stage", "peer", "version", "state", "load", "on disk", "drift", "numerics")
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
