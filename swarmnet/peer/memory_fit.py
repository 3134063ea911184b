"""Do the stages of a peer fit in the memory there is, and with how many slots? Plans of `plan.memory`, added up."""

from __future__ import annotations

import bisect
import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from swarmnet.config.fleet import MachineKind
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import DeviceFull, UsageError
from swarmnet.host import available_memory
from swarmnet.manifest.schema import Manifest
from swarmnet.peer.devices import check_memory, choose_layout, computed_here, refuse_useless
from swarmnet.pipeline.depth import held_s, slots_enough
from swarmnet.plan.cost import mesh_bytes
from swarmnet.plan.members import MachineFit
from swarmnet.plan.memory import GIB, MIB, Setup, StageMemory, plan_stage, shown, together
from swarmnet.ranks.layout import MeshLayout, Shard
from swarmnet.stage.canonical import Canonical, layers_of
from swarmnet.stage.passes import MemoryPolicy

RESERVE = {"cuda": GIB, "cpu": 256 * MIB}
"""What is kept free for each process that computes: for torch itself, kernels, communication, and gaps in memory."""

_LEVERS = {
    "cuda": "fewer --slots or --stage, --activations selective, recompute or offload, memory.offload_optimizer, more "
    '--gpus; for the run, numerics.compute = "bf16", optimizer.state = "8bit", more cut.stages',
    "cpu": "fewer --slots or --stage, --activations selective or recompute, a smaller caps.output_cache_bytes; "
    'for the run, numerics.compute = "bf16", optimizer.state = "8bit", more cut.stages',
}
"""What takes less memory, by the kind of device."""


@dataclass(frozen=True, slots=True)
class PlanFit:
    """Whether the stages of one peer fit. The amounts of memory and `fits` are None where they are unknown."""

    plans: tuple[StageMemory, ...]
    need: int
    """Bytes of one device, of the machine if ranks compute on the CPU."""
    room: int | None
    host_need: int
    """Bytes of the machine in addition to its devices; 0 if ranks compute on the CPU."""
    host_room: int | None

    @property
    def missing(self) -> int:
        """Bytes of `need` that are not there."""
        return 0 if self.room is None else max(self.need - self.room, 0)

    @property
    def host_missing(self) -> int:
        """Bytes of `host_need` that are not there."""
        return 0 if self.host_room is None else max(self.host_need - self.host_room, 0)

    @property
    def fits(self) -> bool:
        """Is nothing missing?"""
        return not (self.missing or self.host_missing)

    def lines(self) -> Iterator[str]:
        """What to tell the operator."""
        stages, on_host = [plan.stage for plan in self.plans], self.plans[0].on_host
        who = f"stage {stages[0]}" if len(stages) == 1 else f"one peer with stages {listed(stages)}"
        where = "the machine" if on_host else "each device"
        if self.room is None:
            yield f"{who} needs {shown(self.need)} of {where}; --memory says what there is"
        elif not self.missing:
            yield f"{who} fits: {shown(self.need)} of {where}'s {shown(self.room)}"
        else:
            yield (
                f"{who} does not fit: it needs {shown(self.need)} of {where}, and may use {shown(self.room)}: "
                f"{shown(self.missing)} are missing"
            )
            yield f"what takes less: {_LEVERS['cpu' if on_host else 'cuda']}"
        if self.host_missing:
            yield (
                f"{who} does not fit the memory outside its devices: it needs {shown(self.host_need)} there, and may "
                f"use {shown(self.host_room or 0)}: {shown(self.host_missing)} are missing"
            )
            yield "what takes less there: a smaller caps.output_cache_bytes, fewer --slots, no memory.offload_optimizer"


@contextlib.contextmanager
def full_in_words() -> Iterator[None]:
    """A device that is full where nothing can be given up raises UsageError, with advice: another start would end as
    this one did."""
    try:
        yield
    except (torch.OutOfMemoryError, DeviceFull) as full:
        words = str(full).partition(". ")[0]
    else:
        return
    raise UsageError(f"{words}; what takes less: {_LEVERS['cuda']}, a smaller training.microbatch_size")


def listed(stages: Sequence[int]) -> str:
    """As `--stage` takes them."""
    return ",".join(map(str, stages))


def judge(setup: Setup, stages: Sequence[int], room: int | None, host_room: int | None = None) -> PlanFit:
    """Plan the stages of one peer. Raises UsageError: they cannot be split."""
    plans, layout = tuple(plan_stage(setup, stage) for stage in stages), setup.layout
    on_host = layout.kind == "cpu"
    # Ranks on the CPU share one memory. Several ranks are processes of each stage.
    processes = (layout.ranks if on_host else 1) * (len(plans) if layout.ranks > 1 else 1)
    need = together(plans) + RESERVE[layout.kind] * processes
    host_need = 0 if on_host else sum(plan.host_total for plan in plans) + RESERVE["cpu"]
    return PlanFit(plans, need, room, host_need, None if on_host else host_room)


MOST_SLOTS = 128
"""No peer calls a replica more often at the same time, over two open steps (`GrpcConfig.calls`)."""

_DRIVER_S = 20.0
"""A driver takes seconds to start when it is first used."""

_SHARE = 0.5
"""Of a machine's free memory, for a peer on the CPU that chooses: others are there, too."""


def setup_of(config: PeerConfig, manifest: Manifest, layout: MeshLayout) -> Setup:
    """How a peer with that config serves stages on `layout`."""
    memory = config.memory
    return Setup(
        manifest.specs,
        manifest.wire,
        layout,
        slots=config.slots,
        output_cache_bytes=config.caps.output_cache_bytes,
        memory=MemoryPolicy(memory.activations, memory.offload_optimizer, memory.compile),
        audited=manifest.audited,
    )


def memory_here(layout: MeshLayout) -> int | None:
    """Bytes free on the fullest device of `layout` here; of CPU memory what this process may take. None: unknown."""
    # On the CPU the machine's memory is the device's.
    if layout.kind == "cpu":
        return available_memory()
    if not torch.cuda.is_available():
        return None
    return min(free_on_gpus([torch.device(device).index for device in layout.devices]))


def free_on_gpus(numbers: Sequence[int]) -> list[int]:
    """Bytes free on these CUDA devices, as their driver says: CUDA itself would first open a context on each, half a
    GiB that would stay this process's."""
    try:
        command = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
        told = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=True).stdout
        rows = [line.split(", ") for line in told.splitlines()]
        free = {uuid.removeprefix("GPU-"): int(mebibytes) * MIB for uuid, mebibytes in rows}
    except (OSError, ValueError, subprocess.SubprocessError):
        free = {}
    found = []
    for number in numbers:
        known = torch.cuda.get_device_properties(number)
        # The driver names no parts of a device (MIG).
        if str(known.uuid) in free:
            found.append(free[str(known.uuid)])
        elif len(numbers) == 1:
            found.append(torch.cuda.mem_get_info(number)[0])
        else:
            found.append(known.total_memory)
    return found


# ------------------------------------------------------------ how many slots


def usable(setup: Setup, room: int | None) -> int | None:
    """What a peer takes of `room` bytes at most: on the CPU a peer that chooses its slots leaves a half to others."""
    return int(_SHARE * room) if room is not None and setup.slots == 0 and setup.layout.kind == "cpu" else room


def slots_that_fit(setup: Setup, stages: Sequence[int], room: int | None, host_room: int | None = None) -> int:
    """The most slots, per stage and open step, for which `room` bytes are enough to serve `stages` together, and
    `host_room` of the machine's memory outside its devices: at most `setup.slots` if that is not 0, a step's
    microbatches, and MOST_SLOTS. 0: not even one."""
    most = min(setup.slots or MOST_SLOTS, setup.specs[0].training.microbatches, MOST_SLOTS)

    def too_many(slots: int) -> bool:
        return not judge(replace(setup, slots=slots), stages, room, host_room).fits

    return bisect.bisect_left(range(1, most + 1), True, key=too_many)


def slots_within(setup: Setup, stages: Sequence[int], room: int | None, host_room: int | None = None) -> int:
    """As `slots_that_fit`. Raises UsageError, with advice, if one is too many."""
    if not (slots := slots_that_fit(setup, stages, room, host_room)):
        raise UsageError("; ".join(judge(replace(setup, slots=1), stages, room, host_room).lines()))
    return slots


def with_slots(setup: Setup, stages: Sequence[int], room: int | None, host_room: int | None = None) -> Setup:
    """`setup` with a number of slots. A peer that chooses takes as many as keep it busy if no peer is far, and fit; at
    least one."""
    slots = setup.slots or max(min(_busy(setup), slots_that_fit(setup, stages, room, host_room)), 1)
    return replace(setup, slots=slots)


def _busy(setup: Setup) -> int:
    return slots_enough(held_s(len(setup.specs), 1.0), 1.0, setup.specs[0].training.microbatches)


class Capacity:
    """What this machine can serve of a run. It is made before the peer takes memory, and reads once what is free.

    manifest: as this peer computes it. Raises UsageError, with advice, for a peer config that this machine or the run
    does not allow.
    """

    def __init__(self, config: PeerConfig, manifest: Manifest) -> None:
        self.manifest = computed_here(manifest, config.compute)
        self.layout = choose_layout(config.mesh, config.device, self.manifest, cuda=torch.cuda.device_count())
        check_memory(config.memory, self.layout)
        on_host = self.layout.kind == "cpu"
        self.fits: Mapping[int, int] | None = None
        """`stages` within the limits in force; None: this peer stays in its stages."""
        self._began_with = config.caps
        self._free, self._free_on_host = memory_here(self.layout), None if on_host else available_memory()

    def setup(self, config: PeerConfig) -> Setup:
        """How a peer with that config serves stages here."""
        return setup_of(config, self.manifest, self.layout)

    def slots(self, config: PeerConfig, stages: Sequence[int]) -> int:
        """How many microbatches a peer that serves these stages has in flight, per stage and open step: as many as the
        operator wants, within the limits in force; else as many as fit. Raises UsageError, with advice, if one is too
        many, or if a limit was set that limits nothing here."""
        refuse_useless(config.caps, self._began_with, self.layout)
        setup = self.setup(config)
        fit = slots_within(setup, stages, *self._available(config))
        if setup.slots and not self._offered(config):
            return setup.slots
        return min(fit, self._most(setup))

    def stages(self, config: PeerConfig) -> dict[int, int]:
        """The stages of the run of which this machine could serve one within the limits in force, and with how many
        slots each."""
        setup, rooms = self.setup(config), self._available(config)
        found = {stage: slots_that_fit(setup, [stage], *rooms) for stage in range(len(setup.specs))}
        return {stage: min(slots, self._most(setup)) for stage, slots in found.items() if slots}

    def some_stages(self, config: PeerConfig) -> list[int]:
        """As `stages`. Raises UsageError, with advice, if there is none."""
        if found := [*self.stages(config)]:
            return found
        rooms, one = self._available(config), replace(self.setup(config), slots=1)
        least = min((judge(one, [stage], *rooms) for stage in range(len(one.specs))), key=lambda fit: fit.need)
        raise UsageError("no stage of the run fits this machine; " + "; ".join(line.strip() for line in least.lines()))

    def memory_for_copy(self) -> int | None:
        """Bytes of this machine's memory that a copy of a state may take now, in addition to all that runs here."""
        free = available_memory()
        return None if free is None else free - RESERVE["cpu"]

    def _offered(self, config: PeerConfig) -> int:
        """The operator's limit of bytes in the memory that the peer computes in; 0: all that is free."""
        return int(GIB * (config.caps.host_gib if self.layout.kind == "cpu" else config.caps.gpu_gib))

    def _available(self, config: PeerConfig) -> tuple[int | None, int | None]:
        """Bytes that a peer may take of each device, and of the machine in addition to devices; None: unknown, or none
        apart."""
        free, offered = usable(self.setup(config), self._free), self._offered(config)
        return (free if not offered else offered if free is None else min(offered, free)), self._free_on_host

    def _most(self, setup: Setup) -> int:
        # Where free memory is unknown, the peer takes what it needs if no peer is far.
        return MOST_SLOTS if self._free is not None else _busy(setup)


SHARDS: tuple[Shard, ...] = ("dp", "zero1", "zero2", "zero3", "none")
"""How a machine's GPUs may share a stage. Of those that fit and exchange as much the first is taken (docs/mesh.md)."""


def exchanged(setup: Setup, stages: Sequence[int]) -> float:
    """Bytes that each rank of `setup.layout` sends to the others for a microbatch of these stages."""
    layout, specs = setup.layout, [setup.specs[stage] for stage in stages]
    training = specs[0].training
    return mesh_bytes(
        layout.shard,
        tensor=layout.tensor,
        data=layout.data,
        parameters=sum(Canonical.of(spec).num_elements for spec in specs),
        layers=sum(len(layers_of(spec)) for spec in specs),
        boundary_elements=training.microbatch_size * training.sequence_length * specs[0].model.hidden_size,
    )


def machine_fit(setup: Setup, stages: Sequence[int], kind: MachineKind) -> MachineFit:
    """How a machine of that kind holds these stages of one peer: with the mesh that fits and exchanges least, and how
    many slots fit. If none fits, with the one that needs least."""
    found = []
    gpus = kind.gpus if kind.device == "cuda" else 1
    devices = tuple(f"cuda:{number}" for number in range(gpus)) if kind.device == "cuda" else ("cpu",)
    for shard in SHARDS if gpus > 1 else ("none",):
        along = (gpus, 1) if shard == "none" else (1, gpus)
        on = replace(setup, layout=MeshLayout(*along, shard=shard, devices=devices))
        try:
            slots = slots_that_fit(on, stages, kind.device_bytes, kind.host_bytes)
            need = judge(replace(on, slots=max(slots, 1)), stages, kind.device_bytes, kind.host_bytes)
        except UsageError:
            continue  # these ranks cannot share this model, or this microbatch
        found.append(MachineFit(slots, need.need, need.host_need, shard, exchanged(on, stages)))
    fitting = [fit for fit in found if fit.slots]
    least = min(fitting, key=lambda fit: fit.mesh_bytes, default=None)
    return least or min(found, key=lambda fit: fit.need, default=MachineFit(0))
