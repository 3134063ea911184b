"""On which devices a peer computes, and what these can do: what its operator asked for, the machine and the run allow.

Pure: knows neither torch nor a process; the number of CUDA devices is told. Everything that cannot work is said here,
in one line, before a rank starts: inside a collective it would be an abort or a hang.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from swarmnet.config.peer import Caps, Memory, Mesh
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Manifest
from swarmnet.ranks.layout import MeshLayout, MeshSplit

Device = Literal["cpu", "cuda", "auto"]
Compute = Literal["run", "fp32", "bf16"]


def choose_layout(mesh: Mesh, device: Device, manifest: Manifest, *, cuda: int) -> MeshLayout:
    """The ranks that `mesh` means on a machine on which torch sees `cuda` CUDA devices. Raises UsageError, with advice,
    if there are too few, or if they cannot share `manifest`'s stages.

    One rank is the peer process itself: `shard` and `sequence_parallel` then mean nothing (`meaningless`).
    """
    layout = _shaped(mesh, _devices(mesh, device, cuda))
    # Raises what the run's model and microbatches do not allow.
    MeshSplit(manifest.of_stage(0), layout)
    return layout


def meaningless(mesh: Mesh, layout: MeshLayout) -> str:
    """What of `mesh` says how ranks share a stage where there is only one, which has all of it; "" if nothing does.

    It is not refused: a file written for a box of GPUs serves a machine with one of them too.
    """
    if layout.ranks > 1:
        return ""
    typed = (f"--shard {mesh.shard}" * (mesh.shard != "none"), "--sequence-parallel" * mesh.sequence_parallel)
    return " and ".join(filter(None, typed))


def refuse_useless(caps: Caps, before: Caps, layout: MeshLayout) -> None:
    """Raise UsageError if `caps` limits, other than `before`, memory that this peer does not compute in.

    What it was started with is not refused: a file written for another machine serves this one, too.
    """
    other, name, used, works = "gpu_gib", "--gpu-memory", "--host-memory", "the CPU"
    if layout.devices[0] != "cpu":
        other, name, used, works = "host_gib", "--host-memory", "--gpu-memory", "GPUs"
    if getattr(caps, other) not in (0.0, getattr(before, other)):
        raise UsageError(f"{name} does nothing here: this peer computes on {works}; use {used}")


def _devices(mesh: Mesh, device: Device, cuda: int) -> tuple[str, ...]:
    if mesh.ranks > 1:
        return ("cpu",) * mesh.ranks
    if device == "cpu" or (cuda == 0 and device == "auto" and mesh.gpus in ("1", "auto")):
        return ("cpu",)
    if cuda == 0:
        if mesh.gpus in ("1", "auto"):
            raise UsageError(
                "--device cuda: torch sees no CUDA device here; use --device cpu, or auto"
                + (", and --ranks N for N processes" if mesh.gpus != "1" else "")
            )
        raise UsageError(
            f"--gpus {mesh.gpus}: torch sees no CUDA device here; leave --gpus out, and use --ranks N "
            "for ranks on the CPU" + (", without --device cuda" if device == "cuda" else "")
        )
    if mesh.gpus == "auto":
        chosen = list(range(cuda))
    elif "," in mesh.gpus:
        chosen = [int(part) for part in mesh.gpus.strip(",").split(",")]
    else:
        chosen = list(range(int(mesh.gpus)))
    # torch would say it later, from within a rank.
    if max(chosen) >= cuda:
        there = "one CUDA device here, number 0" if cuda == 1 else f"{cuda} CUDA devices here, 0 to {cuda - 1}"
        raise UsageError(f"--gpus {mesh.gpus}: torch sees {there}")
    return tuple(f"cuda:{number}" for number in chosen)


def _shaped(mesh: Mesh, devices: tuple[str, ...]) -> MeshLayout:
    ranks = len(devices)
    tensor = mesh.tensor or (ranks if mesh.shard == "none" else 1)
    # Each rank has coordinates in a mesh of tensor by data.
    if ranks % tensor:
        possible = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
        raise UsageError(f"--tensor {tensor}: tensor x data must be {ranks}, the ranks there are. Possible: {possible}")
    if ranks == 1:
        return MeshLayout(devices=devices)
    data = ranks // tensor
    if data > 1 and mesh.shard == "none":
        raise UsageError(
            f"--tensor {tensor} of {ranks} ranks leaves {data} to split each microbatch: say how they "
            "share a stage, by --shard dp, zero1, zero2 or zero3, or leave --tensor out"
        )
    if data == 1 and mesh.shard != "none":
        raise UsageError(
            f"--shard {mesh.shard}: --tensor {tensor} leaves no ranks to shard over; leave either out, "
            "or choose a smaller --tensor"
        )
    if tensor == 1 and mesh.sequence_parallel:
        raise UsageError("--sequence-parallel is for ranks that split layers: add --tensor 2 or more")
    return MeshLayout(tensor, data, mesh.shard, mesh.sequence_parallel, devices)


def computed_here(manifest: Manifest, compute: Compute) -> Manifest:
    """`manifest` as a peer computes it, with the `compute` that its operator asks for. Raises UsageError if the run
    does not let a peer choose, because a microbatch's gradient would then depend on the peer that computes it."""
    numerics = manifest.numerics
    if compute in ("run", numerics.compute):
        return manifest
    if numerics.deterministic:
        raise UsageError(
            f"--compute {compute}: this run computes in {numerics.compute} and promises the bits of one process "
            '(numerics.mode = "deterministic"): leave --compute out, which is for runs with numerics.mode = "fast"'
        )
    return manifest.model_copy(update={"numerics": numerics.model_copy(update={"compute": compute})})


_ON_THE_CPU = {
    "offload": "--activations offload: the CPU's memory is host memory already, so a copy there frees nothing. Use "
    '"selective", "recompute_layers" or "recompute"',
    "offload_optimizer": "memory.offload_optimizer: the CPU's memory is host memory already. Leave it away; "
    'optimizer.state = "8bit" in the manifest takes a quarter',
    "compile": "--compile: on the CPU it costs some ten seconds a start and brings nothing that was measured (see "
    "docs/plan.md). Leave it away",
}


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """What the bits of a replica depend on. Peers of one class compute the same gradients, bit by bit."""

    device: str
    """The GPU's name, or "cpu", the width of its vectors and, where work is audited, what a layer makes there."""
    libraries: str
    """Versions of torch, and on a GPU of CUDA and cuDNN."""
    mesh: str
    """The layout of ranks; after an @ which GPUs these are, where `adds_in_own_order`."""
    compute: str
    """The manifest's `numerics.compute`, or what the operator chose instead."""
    kernels: str
    """"eager", or "compiled"."""
    apply: str
    """Replicas with equal ones make equal weights of equal aggregates, whatever else differs: what `probe` found, and
    the mesh where that shows."""

    def __str__(self) -> str:
        return "/".join(dataclasses.astuple(self)).rstrip("/")

    @classmethod
    def parse(cls, text: str) -> NumericsClass:
        """From what `str` has made of it; of anything else what there is. Total: strangers write it."""
        parts = text.split("/")
        return cls(*(*parts, *[""] * 6)[:6])


def adds_in_own_order(layout: MeshLayout) -> bool:
    """May other devices, as many and of the same kind, add in another order what ranks of `layout` have in part?

    NCCL goes by how devices are connected. Two numbers have one sum in any order, and on the CPU ranks add in the order
    of their numbers.
    """
    return layout.kind == "cuda" and max(layout.tensor, layout.data) > 2


def check_memory(memory: Memory, layout: MeshLayout) -> None:
    """Raises UsageError if the devices of `layout` cannot do what `memory` says."""
    if memory.compile and (layout.tensor > 1 or layout.shard == "zero3"):
        raise UsageError(
            "--compile: layers that ranks share (--tensor, --shard zero3) exchange tensors in their middle"
            ", which is not compiled. Leave it away, or share otherwise, by --shard dp, zero1 or zero2"
        )
    # The rest is about what a CPU cannot do.
    if "cpu" not in layout.devices:
        return
    asked = {
        "offload": memory.activations == "offload",
        "offload_optimizer": memory.offload_optimizer,
        "compile": memory.compile,
    }
    for name, words in _ON_THE_CPU.items():
        if asked[name]:
            raise UsageError(words)
