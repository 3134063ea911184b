"""Do the stages of a peer fit in the memory there is, and with how many slots? Plans of `plan.plan`, added up."""

from __future__ import annotations

import bisect
import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from swarmnet.config.fleet import MachineKind
from swarmnet.config.peer import Caps, PeerConfig
from swarmnet.errors import DeviceFull, UsageError
from swarmnet.host import available_memory
from swarmnet.manifest.schema import Manifest
from swarmnet.peer.devices import choose_layout, computed_here
from swarmnet.pipeline.depth import held_s, slots_enough
from swarmnet.plan.budget import GIB, MIB, StageBudget, shown, together
from swarmnet.plan.choice import MachineFit
from swarmnet.plan.plan import Setup, plan_stage
from swarmnet.ranks.layout import MeshLayout, Shard
from swarmnet.stage.passes import MemoryPolicy

RESERVE = {"cuda": GIB, "cpu": 256 * MIB}
"""What is kept free beside each process that computes: for torch itself, kernels, communication, and gaps in memory."""

_LEVERS = {
    "cuda": "fewer --slots or --stage, --activations selective, recompute or offload, memory.offload_optimizer, more "
    '--gpus; for the run, numerics.compute = "bf16", optimizer.state = "8bit", more cut.stages',
    "cpu": "fewer --slots or --stage, --activations selective or recompute, a smaller caps.memo_bytes; for the run, "
    'numerics.compute = "bf16", optimizer.state = "8bit", more cut.stages',
}
"""What takes less memory, by the kind of device."""


@dataclass(frozen=True, slots=True)
class PlanFit:
    """Whether one peer's stages fit."""

    plans: tuple[StageBudget, ...]
    need: int
    """Bytes of one device, of the machine if ranks compute on the CPU."""
    room: int | None
    """Bytes that it has; None if nobody said."""
    host_room: int | None = None
    """Bytes that the machine has beside devices that are none of it; None if nobody said, or there are none."""

    @property
    def host_need(self) -> int:
        """Bytes of the machine beside its devices; 0 if ranks compute on the CPU."""
        return 0 if self.plans[0].on_host else sum(plan.host.total for plan in self.plans) + RESERVE["cpu"]

    @property
    def host_missing(self) -> int:
        """As `missing`, of the machine's memory beside its devices."""
        return 0 if self.host_room is None else max(self.host_need - self.host_room, 0)

    @property
    def missing(self) -> int:
        """Bytes that the stages need beyond `room`; 0 if they fit, and where nobody said how much there is."""
        return 0 if self.room is None else max(self.need - self.room, 0)

    @property
    def fits(self) -> bool:
        """Do they? Also where nobody said how much there is."""
        return not (self.missing or self.host_missing)

    def lines(self) -> Iterator[str]:
        """What to tell whoever asked."""
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
                f"{who} does not fit the machine beside its devices: it needs {shown(self.host_need)} there, and may "
                f"use {shown(self.host_room or 0)}: {shown(self.host_missing)} are missing"
            )
            yield "what takes less there: a smaller caps.memo_bytes, fewer --slots, no memory.offload_optimizer"


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
    plans = tuple(plan_stage(setup, stage) for stage in stages)
    return PlanFit(plans, needed(plans, setup.layout), room, host_room if setup.layout.kind != "cpu" else None)


def needed(plans: Sequence[StageBudget], layout: MeshLayout) -> int:
    """What has to be there for one peer with these stages: the plans' peak together, and a reserve."""
    processes = layout.ranks if layout.kind == "cpu" else 1  # beside each other in one memory
    if layout.ranks > 1:
        processes *= len(plans)  # ranks of several are processes of each stage
    return together(plans) + RESERVE[layout.kind] * processes


MOST_SLOTS = 128
"""Nobody calls a replica more often at once, over two open steps (`GrpcConfig.calls`)."""

_DRIVER_S = 20.0
"""A driver that nobody has used yet takes seconds to begin."""

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
        memo_bytes=config.caps.memo_bytes,
        memory=MemoryPolicy(memory.activations, memory.offload_optimizer, memory.compile),
        audited=manifest.audited,
    )


def lent_bytes(caps: Caps, layout: MeshLayout) -> int:
    """Of the memory that `layout` computes in: what the operator lends of it, 0 for all that is free."""
    return int(GIB * (caps.host_gib if layout.kind == "cpu" else caps.gpu_gib))


def room_here(layout: MeshLayout) -> int | None:
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


def room_for_copy() -> int | None:
    """Bytes of this machine's memory that a copy of a state may take for a while, beside all that runs here."""
    free = available_memory()
    return None if free is None else free - RESERVE["cpu"]


# ------------------------------------------------------------ how many slots


def room_of(setup: Setup, room: int | None) -> int | None:
    """What a peer takes of `room` bytes at most: the CPU memory of a peer that chooses its slots is not its alone."""
    return int(_SHARE * room) if room is not None and leaves_half(setup) else room


def leaves_half(setup: Setup) -> bool:
    """Does a peer leave half of the memory that is free to others?"""
    return setup.slots == 0 and setup.layout.kind == "cpu"


def with_slots(setup: Setup, stages: Sequence[int], room: int | None) -> Setup:
    """`setup` with as many slots as keep a peer with `stages` busy beside its neighbours, if it is to choose, and no
    more than fit; at least one."""
    if setup.slots:
        return setup
    training = setup.specs[0].training
    enough = slots_enough(held_s(len(setup.specs), 1.0), 1.0, training.microbatches)
    return replace(setup, slots=max(min(enough, MOST_SLOTS if room is None else _slots_in(setup, stages, room)), 1))


def slots_here(setup: Setup, stages: Sequence[int], lent: int = 0) -> int:
    """The most slots: `setup.slots`, or where that is 0 those that fit here, on devices and in host memory; within
    `lent` bytes, if the operator lends no more. Raises UsageError, with advice, if one is too many."""
    room = room_of(setup, room_here(setup.layout))
    host_room = None if setup.layout.kind == "cpu" else available_memory()
    if lent:
        return slots_within(setup, stages, lent if room is None else min(lent, room), host_room)
    if setup.slots:
        if room is not None:
            check_fits(setup, stages, room, host_room)
        return setup.slots
    # Nobody knows what fits: as many as stages without latency need.
    if room is None:
        return with_slots(setup, stages, None).slots
    return slots_that_fit(setup, stages, room, host_room)


def slots_within(setup: Setup, stages: Sequence[int], room: int, host_room: int | None = None) -> int:
    """`setup.slots`, but no more than `slots_that_fit`."""
    fit = slots_that_fit(setup, stages, room, host_room)
    return min(setup.slots or fit, fit)


def slots_that_fit(setup: Setup, stages: Sequence[int], room: int, host_room: int | None = None) -> int:
    """Microbatches in flight, per stage and open step, for which `room` bytes are enough to serve `stages` together,
    and `host_room` beside devices.

    At most a step's, and MOST_SLOTS. Raises UsageError, with advice, if one is too many.
    """
    slots = _slots_in(setup, stages, room, host_room)
    if slots == 0:
        raise _refused(replace(setup, slots=1), stages, room, host_room)
    return slots


def _slots_in(setup: Setup, stages: Sequence[int], room: int | None, host_room: int | None = None) -> int:
    """The most slots that need no more than `room` bytes, and `host_room` beside; 0 if one is too many."""
    most = min(setup.specs[0].training.microbatches, MOST_SLOTS)

    def too_many(slots: int) -> bool:
        return not judge(replace(setup, slots=slots), stages, room, host_room).fits

    return bisect.bisect_left(range(1, most + 1), True, key=too_many)


SHARDS: tuple[Shard, ...] = ("dp", "zero1", "zero2", "zero3", "none")
"""How a machine's GPUs may share a stage; the first that fits is the fastest (docs/mesh.md)."""


def machine_fit(setup: Setup, stages: Sequence[int], kind: MachineKind) -> MachineFit:
    """How a machine of that kind holds these stages of one peer: with which mesh, and how many slots fit."""
    least: MachineFit | None = None
    gpus = kind.gpus if kind.device == "cuda" else 1
    devices = tuple(f"cuda:{number}" for number in range(gpus)) if kind.device == "cuda" else ("cpu",)
    for shard in SHARDS if gpus > 1 else ("none",):
        along = (gpus, 1) if shard == "none" else (1, gpus)
        layout = MeshLayout(*along, shard=shard, devices=devices)
        on = replace(setup, layout=layout, slots=0)
        try:
            slots = _slots_in(on, stages, kind.room, kind.host_room)
            found = judge(replace(on, slots=max(slots, 1)), stages, kind.room, kind.host_room)
        except UsageError:
            continue  # these ranks cannot share this model, or this microbatch
        fit = MachineFit(slots, found.need, found.host_need, shard)
        if slots:
            return fit
        if least is None or fit.need < least.need:
            least = fit
    return least or MachineFit(0)


def check_fits(setup: Setup, stages: Sequence[int], room: int, host_room: int | None = None) -> None:
    """Raises UsageError, with advice, if not even one microbatch in flight fits."""
    one = replace(setup, slots=1)
    if not judge(one, stages, room, host_room).fits:
        raise _refused(one, stages, room, host_room)


def stages_for(config: PeerConfig, manifest: Manifest) -> list[int]:
    """The stages of which a peer with that config could serve one on this machine. Raises UsageError, with advice, if
    there is none."""
    mine = computed_here(manifest, config.compute)
    layout = choose_layout(config.mesh, config.device, mine, cuda=torch.cuda.device_count())
    setup, lent = setup_of(config, mine, layout), lent_bytes(config.caps, layout)
    free = room_here(layout)
    room = room_of(setup, free) if not lent else lent if free is None else min(lent, free)
    found = stages_that_fit(setup, room)
    if not found and room is not None:
        least = min(
            (judge(replace(setup, slots=1), [stage], room) for stage in range(len(setup.specs))),
            key=lambda fit: fit.need,
        )
        raise UsageError("no stage of the run fits this machine; " + "; ".join(line.strip() for line in least.lines()))
    return found


def stages_that_fit(setup: Setup, room: int | None) -> list[int]:
    """The stages of the run of which this machine could serve one, with a microbatch in flight at least."""
    return [stage for stage in range(len(setup.specs)) if room is None or _fits(setup, stage, room)]


def _fits(setup: Setup, stage: int, room: int) -> bool:
    try:
        check_fits(setup, [stage], room)
    except UsageError:
        return False
    return True


def _refused(one: Setup, stages: Sequence[int], room: int, host_room: int | None) -> UsageError:
    return UsageError("; ".join(line.strip() for line in judge(one, stages, room, host_room).lines()))
