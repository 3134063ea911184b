"""Turn options into a manifest: build or load it, lay `--set` over it, fill in the data's digests; then write it.

And `--ranks` with the related flags into tables of the peer config, by what they are for: a stage ("s1") or one
replica of it ("s1-r0"), which wins. What a peer would refuse is refused here, before a process starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swarmnet.config import toml
from swarmnet.config.check import layer
from swarmnet.config.peer import Mesh, PeerConfig
from swarmnet.data.documents import split_column
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import verify
from swarmnet.data.windows import with_digests
from swarmnet.errors import UsageError
from swarmnet.host import available_memory
from swarmnet.ids import RunId
from swarmnet.local.options import MOST, LocalOptions
from swarmnet.manifest import file
from swarmnet.manifest.codec_names import named_by
from swarmnet.manifest.file import run_id
from swarmnet.manifest.implied import implied
from swarmnet.manifest.presets import preset_fields
from swarmnet.manifest.schema import Admission, Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.admission_files import new_owner, write_invitation, write_owner
from swarmnet.net.identity import Identity
from swarmnet.peer.devices import choose_layout
from swarmnet.ranks.layout import MeshLayout
from swarmnet.telemetry.text import counted
from swarmnet.testing.fault import stage_of
from swarmnet.wire import codecs

_INVITED_S = 10 * 365 * 24 * 3600.0
"""A run may be resumed as long as it is kept."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The manifest of one local run, as every child will read it once `write` has been called.

    owner: of a new run by invitation.
    """

    manifest: Manifest
    run_id: RunId
    path: Path
    owner: Identity | None = None

    @property
    def exact(self) -> bool:
        """Deterministic mode: only bit-equality with one process will do."""
        return self.manifest.numerics.deterministic

    @property
    def lossless(self) -> bool:
        """No codec rounds what crosses a stage boundary."""
        return {*self.manifest.wire.codecs} == {"fp32"}

    @property
    def pure(self) -> bool:
        """Do losses not depend on which replica computed what, but for rounding? With local sync they do."""
        return self.manifest.averaging.equal_bits

    def write(self) -> None:
        """Put it at `path`. Raises UsageError for a directory that cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(file.to_toml(self.manifest), encoding="utf-8")
            if self.owner is not None:
                write_owner(self.path, self.owner)
                write_invitation(self.path, RunTerms.of(self.manifest), life_s=_INVITED_S)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written ({error.strerror}): choose another --out") from error


FIELDS = {
    "stages": "cut.stages",
    "steps": "training.total_steps",
    "seed": "training.seed",
    "data": "data.source",
    "numerics": "numerics.mode",
    "checkpoint_every": "training.checkpoint_every",
    "admission": "admission.policy",
}
"""Options of `swarmnet local` that are fields of its manifest."""

AUDITED = 0.2
"""The share of the work in a swarm with Byzantine replicas that is audited, unless the manifest or `--set` sets it."""

Change = tuple[str, str, object]
"""(Who says so, dotted name of a field, its value.)"""


def choose(options: LocalOptions) -> Manifest:
    """The manifest the options ask for, data digests not filled in yet. Raises UsageError in the name of the flag.

    A manifest file keeps its own stages, steps, seed, data and numerics; what was typed in addition overrides it.
    """
    described: list[Change] = []
    if options.manifest is None:
        manifest, usual = Manifest(name="local"), LocalOptions()
        # Each stage has a layer at least.
        described.append(("manifest", "model.num_layers", max(manifest.model.num_layers, options.stages)))
        if options.preset is not None:
            fields = preset_fields(options.preset, options.steps)
            # A run's step of half a million tokens would take hours here.
            fields.pop("training.microbatches", None)
            described += [("--preset", name, value) for name, value in fields.items()]
        for name in ("stages", "steps", "seed", "data"):
            value = getattr(options, name)
            described.append((f"--{name}" if value != getattr(usual, name) else "manifest", FIELDS[name], value))
    else:
        manifest = file.load(options.manifest)
    typed: list[Change] = [(flag, *_assignment(flag, text)) for flag, text in options.typed]
    if options.checkpoint_every is not None:
        typed.append(("--checkpoint-every", FIELDS["checkpoint_every"], options.checkpoint_every))
    typed += [("--set", *_assignment("--set", text)) for text in options.set]
    said = {name: value for _, name, value in typed}
    if options.numerics is not None:
        described.append((f"--numerics {options.numerics}", "numerics.mode", options.numerics))
        said.setdefault("numerics.mode", options.numerics)
    follows = implied(said, new=options.manifest is None)
    # The Byzantine replicas are to be named.
    if options.liars is not None and options.manifest is None:
        follows = {**follows, "audit.microbatches": AUDITED, "audit.contributions": AUDITED}
    laid: list[Change] = [("manifest", name, value) for name, value in follows.items()]
    return _laid(manifest, [*described, *laid, *typed])


def _assignment(flag: str, text: str) -> tuple[str, object]:
    path, value = toml.assignment(text, where=flag)
    return ".".join(path), value


def _laid(manifest: Manifest, changes: Sequence[Change]) -> Manifest:
    """`manifest` with `changes`, weakest first. Of a rule about several fields, all flags that were typed are named."""
    flags = dict.fromkeys(flag for flag, _, _ in changes if flag != "manifest")
    layers = [layer(flag, tuple(name.split(".")), value) for flag, name, value in changes]
    return file.change(manifest, layers, where=", ".join(flags) or "manifest")


def prepare(options: LocalOptions, directory: Path) -> Prepared:
    """What is to become `directory`/run.toml; writes nothing.

    Raises UsageError for bad options, an unreadable file, a codec that is not installed, or other data than agreed.
    """
    chosen = choose(options)
    codecs.use_all(named_by(chosen))
    manifest = with_data(chosen, base=options.manifest.parent if options.manifest else Path())
    if options.preset is not None:
        _check_memory(options, manifest)
    path, owner = directory / "run.toml", None
    policy = options.admission or manifest.admission.policy
    if policy == "invite":  # an owner of its own: a manifest's may be far away
        owner = new_owner(path)
    admission = Admission(policy=policy, key=owner.peer if owner else "")
    manifest = manifest.model_copy(update={"admission": admission})
    return Prepared(manifest, run_id(manifest), path, owner)


_LEAST_BYTES = 16
"""Of a parameter: weight, gradient, moments."""


def _check_memory(options: LocalOptions, manifest: Manifest) -> None:
    """Raises UsageError, one line, if the replicas of a preset need more memory together than is free here."""
    import torch

    from swarmnet.peer import memory_fit
    from swarmnet.plan.memory import shown

    free, of = available_memory(), "this machine has"
    if options.device == "cuda":
        free, of = sum(memory_fit.free_on_gpus(range(torch.cuda.device_count()))), "the GPUs here have"
    need = _LEAST_BYTES * manifest.model.num_parameters * options.replicas
    # What is far too large is not planned, which takes a while.
    if free is not None and need <= free:
        layout = MeshLayout(devices=("cuda:0" if options.device == "cuda" else "cpu",))
        config = PeerConfig(slots=options.slots or 1)
        setup = memory_fit.setup_of(config, manifest, layout)
        each = (memory_fit.judge(setup, [stage], None).need for stage in range(manifest.cut.stages))
        need = sum(each) * options.replicas
    if free is not None and need > free:
        which = f"{counted(options.replicas, 'replica')} of {counted(manifest.cut.stages, 'stage')}"
        raise UsageError(
            f"--preset {options.preset}: {which} together need {shown(need)} of memory or more, {of} {shown(free)} "
            "free: choose a smaller preset, or fewer --replicas"
        )


def with_data(manifest: Manifest, *, base: Path) -> Manifest:
    """`manifest` with its data found, paths made absolute (children read the copy in another directory) and digests
    filled in. Raises UsageError for data that is not there, not the one the digests name, too
    short for a microbatch, or has more tokens than the model's vocabulary.
    """
    source, tokenizer = (absolute(text, base) for text in (manifest.data.source, manifest.data.tokenizer))
    tokens = load_tokens(source, tokenizer)
    if manifest.data.tokens_sha256:  # else it has not been prepared: whatever is there is the run's
        verify(tokens, manifest.data)
    if tokens.vocab_size > manifest.model.vocab_size:
        raise UsageError(
            f"the tokenizer knows {tokens.vocab_size} tokens, the model {manifest.model.vocab_size}: "
            f"add --set model.vocab_size={tokens.vocab_size}"
        )
    # Also where it has digests: --set may have changed the windows.
    named = manifest.data.model_copy(update={"source": source, "tokenizer": tokenizer})
    data = with_digests(named, tokens, manifest.training)
    initial = manifest.initial.model_copy(
        update={"source": manifest.initial.source and absolute(manifest.initial.source, base)}
    )
    return manifest.model_copy(update={"data": data, "initial": initial})


def absolute(name: str, base: Path) -> str:
    """A path that exists below `base`, for processes that run elsewhere; any other name as it is. A column stays."""
    found, _ = split_column(name, lambda path: os.path.exists(base / os.path.expanduser(path)))
    path = base / os.path.expanduser(found)
    # A link is not followed: what it leads to may have another ending, and other files around it.
    return str(path.absolute()) + name[len(found) :] if os.path.exists(path) else name


def resume(directory: Path) -> Prepared:
    """What was written into `directory` for the run that is to go on. Raises UsageError if there is none, or if
    a codec of its is not installed any more."""
    path = directory / "run.toml"
    if not path.is_file():
        raise UsageError(f"{directory} holds no run that could be resumed: there is no run.toml")
    manifest = file.load(path)
    codecs.use_all(named_by(manifest))
    return Prepared(manifest, run_id(manifest), path)


# ---------------------------------------------------------------- ranks

Meshes = Mapping[str, Mesh]
"""By "s1" or "s1-r0"; who is not named is one rank."""


def parse_meshes(options: LocalOptions, manifest: Manifest, replicas: Iterable[str]) -> dict[str, Mesh]:
    """The meshes that the options ask for. replicas: names of those at the start. Raises UsageError with the text at
    fault, or with why the model cannot be split so."""
    if options.device == "cuda":
        return _on_gpus(manifest, sorted(replicas))
    shared = {name: getattr(options, name) for name in ("shard", "tensor", "sequence_parallel")}
    for name, value in shared.items():
        if not options.ranks and value != getattr(Mesh(), name):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} says how ranks share a stage: add --ranks STAGE=N")
    found: dict[str, Mesh] = {}
    names = set(replicas)
    for text in (part.strip() for part in ",".join(options.ranks).split(",") if options.ranks):
        try:
            whom, ranks = _entry(text, names, manifest.cut.stages)
            # A stage and one replica of it are two: the replica wins.
            if whom in found:
                raise UsageError(f"it is said twice how many ranks {whom} has")
            found[whom] = Mesh() if ranks == 1 else Mesh(ranks=ranks, **shared)
            # Said now, before anything starts, and not by each of its peers.
            _layout(found[whom], manifest)
        except UsageError as error:
            raise UsageError(f"--ranks {text}: {error}") from error
    return found


def _on_gpus(manifest: Manifest, replicas: Sequence[str]) -> dict[str, Mesh]:
    """One GPU for each replica, the next one for the next. Raises UsageError if there is none."""
    import torch

    cuda = torch.cuda.device_count()
    choose_layout(Mesh(), "cuda", manifest, cuda=cuda)
    # A stage has one as well, for peers that join it later.
    names = [*replicas, *(f"s{stage}" for stage in range(manifest.cut.stages))]
    return {name: Mesh(gpus=f"{number % cuda},") for number, name in enumerate(names)}


def device_of(mesh: Mesh) -> Literal["cpu", "cuda"]:
    """Where a process of a local swarm computes."""
    return "cpu" if mesh.gpus == Mesh().gpus else "cuda"


def _entry(text: str, names: Collection[str], stages: int) -> tuple[str, int]:
    """("s1" or "s1-r0", number of ranks)."""
    if not (match := re.fullmatch(r"(\d{1,18})(?:\.(\d{1,18}))?\s*=\s*(\d{1,18})", text)):
        raise UsageError("write STAGE=N, or STAGE.REPLICA=N, for example 1=2")
    stage, replica, ranks = int(match[1]), match[2], int(match[3])
    if stage >= stages:
        raise UsageError(f"there is no stage {stage}, stages are 0 to {stages - 1}")
    if not 1 <= ranks <= MOST:
        raise UsageError(f"a replica has at {'least one rank' if ranks < 1 else f'most {MOST} ranks'}")
    if replica is None:
        return f"s{stage}", ranks
    if (name := f"s{stage}-r{int(replica)}") not in names:
        others = sum(stage_of(other) == stage for other in names)
        raise UsageError(f"there is no replica {replica} in stage {stage}, they are 0 to {others - 1}")
    return name, ranks


def _layout(mesh: Mesh, manifest: Manifest) -> MeshLayout:
    return choose_layout(mesh, "cpu", manifest, cuda=0)


def mesh_of(meshes: Meshes, name: str) -> Mesh:
    """That of the process `name`; of a replica that joins later, its stage's."""
    return meshes.get(name) or meshes.get(f"s{stage_of(name)}") or Mesh()


def meshed(meshes: Meshes, replicas: Iterable[str]) -> frozenset[str]:
    """Who of `replicas` has more than one rank."""
    return frozenset(name for name in replicas if mesh_of(meshes, name).ranks > 1)


def in_words(meshes: Meshes, manifest: Manifest) -> str:
    """For the terminal: "ranks: s1 2 (tp2), s2-r0 4 (zero3x4)", or how many GPUs they share; "" if every peer is one
    rank on the CPU."""
    if gpus := {mesh.gpus for mesh in meshes.values() if device_of(mesh) == "cuda"}:
        return f"on {len(gpus)} GPU{'s' * (len(gpus) > 1)}"
    said = [
        f"{whom} {mesh.ranks}" + (f" ({_layout(mesh, manifest).label})" if mesh.ranks > 1 else "")
        for whom, mesh in sorted(meshes.items())
    ]
    return f"ranks: {', '.join(said)}" if any(mesh.ranks > 1 for mesh in meshes.values()) else ""
