"""Which replicas of a local swarm have several ranks: `--ranks` and the flags beside it, as tables of the peer config.

Pure: text and a manifest in, tables out, by what they are for: a stage ("s1") or one replica of it ("s1-r0"), which
wins. Everything that a peer would refuse is refused here, before a process starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from swarmnet.config.peer import Mesh
from swarmnet.errors import UsageError
from swarmnet.local.fault import stage_of
from swarmnet.local.options import MOST, LocalOptions
from swarmnet.manifest.schema import Manifest
from swarmnet.peer.devices import choose_layout
from swarmnet.ranks.layout import MeshLayout

Meshes = Mapping[str, Mesh]
"""By "s1" or "s1-r0"; who is not named is one rank."""


def parse_meshes(options: LocalOptions, manifest: Manifest, replicas: Iterable[str]) -> dict[str, Mesh]:
    """The meshes that the options ask for. replicas: names of those at the start. Raises UsageError with the text at
    fault, or with why the model cannot be split so."""
    if not options.ranks:
        for flag, given in (
            ("--shard", options.shard != "none"),
            ("--tensor", options.tensor > 0),
            ("--sequence-parallel", options.sequence_parallel),
        ):
            if given:
                raise UsageError(f"{flag} says how ranks share a stage: add --ranks STAGE=N")
    found: dict[str, Mesh] = {}
    names = set(replicas)
    for text in _entries(options.ranks):
        whom, ranks = _entry(text, names, manifest.cut.stages)
        # A stage and one replica of it are two: the replica wins.
        if whom in found:
            raise UsageError(f"--ranks {text}: it is said twice how many ranks {whom} has")
        found[whom] = (
            Mesh()
            if ranks == 1
            else Mesh(
                ranks=ranks, tensor=options.tensor, shard=options.shard, sequence_parallel=options.sequence_parallel
            )
        )
        # Said now, before anything starts, and not by each of its peers.
        try:
            _layout(found[whom], manifest)
        except UsageError as error:
            raise UsageError(f"--ranks {text}: {error}") from error
    return found


def mesh_of(meshes: Meshes, name: str) -> Mesh:
    """That of the process `name`; of a replica that joins later, its stage's."""
    return meshes.get(name) or meshes.get(f"s{stage_of(name)}") or Mesh()


def meshed(meshes: Meshes, replicas: Iterable[str]) -> frozenset[str]:
    """Who of `replicas` has more than one rank."""
    return frozenset(name for name in replicas if mesh_of(meshes, name).ranks > 1)


def in_words(meshes: Meshes, manifest: Manifest) -> str:
    """For the terminal: "ranks: s1 2 (tp2), s2-r0 4 (zero3x4)"; "" if every peer is one rank."""
    said = [
        f"{whom} {mesh.ranks} ({_layout(mesh, manifest).label})" if mesh.ranks > 1 else f"{whom} 1"
        for whom, mesh in sorted(meshes.items())
    ]
    return f"ranks: {', '.join(said)}" if any(mesh.ranks > 1 for mesh in meshes.values()) else ""


def record(meshes: Meshes) -> dict[str, Any]:
    """As JSON, for a run that goes on."""
    return {whom: mesh.model_dump(mode="json") for whom, mesh in sorted(meshes.items())}


def meshes_of(fields: Mapping[str, Any]) -> dict[str, Mesh]:
    """What `record` wrote."""
    return {whom: Mesh.model_validate(fields[whom]) for whom in sorted(fields)}


def _entries(texts: Iterable[str]) -> Iterator[str]:
    return (part.strip() for text in texts for part in text.split(","))


def _entry(text: str, names: set[str], stages: int) -> tuple[str, int]:
    """("s1" or "s1-r0", number of ranks)."""
    if not (match := re.fullmatch(r"(\d{1,18})(?:\.(\d{1,18}))?\s*=\s*(\d{1,18})", text)):
        raise UsageError(f"--ranks {text}: write STAGE=N, or STAGE.REPLICA=N, for example 1=2")
    stage, ranks = int(match[1]), int(match[3])
    if stage >= stages:
        raise UsageError(f"--ranks {text}: there is no stage {stage}, stages are 0 to {stages - 1}")
    if ranks < 1:
        raise UsageError(f"--ranks {text}: a replica has at least one rank")
    if ranks > MOST:
        raise UsageError(f"--ranks {text}: a replica has at most {MOST} ranks")
    if match[2] is None:
        return f"s{stage}", ranks
    name = f"s{stage}-r{int(match[2])}"
    if name not in names:
        mates = sum(stage_of(other) == stage for other in names)
        raise UsageError(f"--ranks {text}: there is no replica {match[2]} in stage {stage}, they are 0 to {mates - 1}")
    return name, ranks


def _layout(mesh: Mesh, manifest: Manifest) -> MeshLayout:
    return choose_layout(mesh, "cpu", manifest, cuda=0)
