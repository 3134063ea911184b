"""Builds what a replica of a stage computes with: weights to begin with, an engine on a backend, and its sums."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from swarmnet import telemetry
from swarmnet.config.peer import PeerConfig
from swarmnet.engine.compute_thread import ComputeThread, StageJobs
from swarmnet.engine.payloads import Payloads
from swarmnet.engine.torch_engine import StageSums, TorchEngine
from swarmnet.errors import NoReplica, UsageError
from swarmnet.manifest.codec_names import named_by
from swarmnet.manifest.schema import Manifest, Optimizer
from swarmnet.model.base_file import BaseLayout, content_of, write_base
from swarmnet.model.decoder import Layer, loss_sum, rotary_tables
from swarmnet.model.huggingface.checkpoint import stage_shapes, stage_weights
from swarmnet.model.precision import products_in
from swarmnet.net.parent_death import same_python
from swarmnet.peer.devices import NumericsClass, adds_in_own_order
from swarmnet.ranks.backend import MeshBackend
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.layout import MeshLayout
from swarmnet.stage.backend import StageBackend
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.interfaces import KEPT_WEIGHTS
from swarmnet.stage.optimizer import probe
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.stage.snapshot import digest
from swarmnet.state.snapshot_source import KeptContent
from swarmnet.sums.local_sum import LocalSum
from swarmnet.sums.step_sum import StepSum
from swarmnet.wire import codecs

E = TypeVar("E")

_PROBE_WIDTH, _PROBE_TOKENS = 1024, 512
"""The widest layer that is probed, and the most tokens: a fraction of a second on one core."""

log = telemetry.get(__name__)

_HOST = torch.device("cpu")
"""Where sums are while they travel, also those of a GPU: `DeviceBackend.sum_memory`."""


FetchBase = Callable[[int, Path, str, int], None]
"""Puts the content with that root, of so many bytes, of a stage into a file. Raises NoReplica."""


def nobody_to_ask(stage: int, path: Path, root: str, num_bytes: int) -> None:
    """There is no swarm."""
    raise NoReplica("there is no peer to fetch it from", stage=stage)


class InitialWeights:
    """This peer's source of the weights of version 0, in a run that begins with a checkpoint (`manifest.initial`).

    A directory that the operator names has to hold them. One that only the manifest names may be absent or another:
    then the peer takes the weights from other replicas, as a late joiner does, and its engines hold the seed's until it
    has. missing: why this peer lacks some of them; empty: it lacks none.

    at_source: may files be read where the manifest says they are? fetch: gets frozen weights from other peers.
    """

    def __init__(
        self, config: PeerConfig, manifest: Manifest, *, at_source: bool, fetch: FetchBase = nobody_to_ask
    ) -> None:
        self._fetch = fetch
        self.bases: dict[int, KeptContent] = {}
        """The frozen weights of stages that have an engine, for other peers."""
        self._manifest, self._named, self.missing = manifest, config.initial is not None, ""
        self._dir = config.dir
        self._folder: Path | None = None
        if config.initial is not None and not manifest.initial.sha256:
            raise UsageError(f"--initial {config.initial}: this run begins with weights drawn from its seed")
        if not manifest.initial.sha256:
            return
        if config.initial is not None:
            self._folder = config.initial
        elif at_source:
            base = config.manifest.parent if config.manifest else Path()
            self._folder = base / Path(manifest.initial.source).expanduser()
        elif not manifest.lora.r:
            self._lack("a manifest from the network opens no files here")

    def engine(self, stage: int, build: Callable[[int, Initial | None, Path | None], E]) -> E:
        """Build the engine of `stage`. Raises UsageError if the operator's directory does not hold its weights."""
        if self._manifest.lora.r:
            return build(stage, None, self._base(stage))
        if self._folder is None:
            return build(stage, None, None)
        try:
            return build(stage, functools.partial(self._weights, stage, self._folder), None)
        except UsageError as error:
            # The operator named the directory: a mistake of theirs is not passed over.
            if self._named:
                raise
            self._lack(str(error))
            return build(stage, None, None)

    def _base(self, stage: int) -> Path | None:
        """The file of the frozen weights, made or fetched now if it is not here yet; None: they are drawn."""
        manifest = self._manifest
        if not manifest.initial.sha256:
            return None
        root, layout = manifest.initial.sha256[stage], BaseLayout.of(manifest.of_stage(stage))
        path = self._dir / "base" / root
        content = content_of(path, layout, agreed=root)
        if content is None:
            self._get_base(stage, path, layout, root)
            content = content_of(path, layout, agreed=root)
        if content is None:
            raise UsageError(f"{path}: was damaged as soon as it was written: check the disk")
        self.bases[stage] = KeptContent(content, np.memmap(path, np.uint8, mode="r").data)
        return path

    def _get_base(self, stage: int, path: Path, layout: BaseLayout, root: str) -> None:
        """From the checkpoint, else from other peers."""
        base, num_bytes = self._manifest.lora.base, layout.num_bytes
        free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
        if free < num_bytes:
            raise UsageError(
                f"{path}: the frozen weights of stage {stage} take {num_bytes:,} bytes, and {free:,} are free there: "
                "free some space, or name a --dir on another disk"
            )
        if self._folder is not None and (self._named or (self._folder / "config.json").is_file()):
            log.info("base_made", stage=stage, base=base, bytes=num_bytes, source=str(self._folder))
            try:
                write_base(path, self._folder, layout, agreed=root)
                return
            except UsageError as error:
                # What only the manifest names may be another checkpoint, or half of one.
                if self._named:
                    raise
                log.warning("no_initial_weights", reason=str(error), then="they come from other peers")
        log.info("base_fetched", stage=stage, base=base, bytes=num_bytes)
        try:
            self._fetch(stage, path, root, num_bytes)
        except NoReplica as error:
            raise UsageError(
                f"stage {stage} rests on a checkpoint ({self._manifest.initial.source!r} where the run was made) that "
                f"is not on this machine, and {error.message}: name its directory with --initial DIR, or start a peer "
                "of this stage that has it"
            ) from error

    def _weights(self, stage: int, folder: Path) -> Mapping[str, Tensor]:
        manifest = self._manifest
        shapes = stage_shapes(manifest.model, manifest.cut, manifest.training.sequence_length)[stage]
        return stage_weights(folder, shapes, stage=stage, agreed=manifest.initial.sha256[stage])

    def _lack(self, reason: str) -> None:
        self.missing = (
            f"the run begins with a checkpoint ({self._manifest.initial.source!r} in the manifest) that is not here, "
            "and no other replica of the stage is up: start a peer that has it, or name its directory with --initial"
        )
        log.warning("no_initial_weights", reason=reason, then="they come from another replica")


def backend_of(
    manifest: Manifest,
    stage: int,
    layout: MeshLayout,
    initial: Initial | None,
    memory: MemoryPolicy,
    *,
    base: Path | None = None,
) -> StageBackend:
    """What computes one stage here: this process on one device, or a process on each device of `layout`.

    Args:
        initial: reads the weights of version 0; None: they are drawn from the run's seed.
        memory: how each device spends its own.
        base: the file of the frozen weights, in a run with adapters that begins with a checkpoint.

    Raises:
        UsageError: these ranks cannot share the stage.
    """
    spec = manifest.of_stage(stage)
    # One rank is the peer process itself, without messages between processes.
    if layout.ranks == 1:
        return DeviceBackend(spec, device=layout.devices[0], initial=initial, memory=memory, base=base)
    return MeshBackend(spec, layout, initial=initial, memory=memory, base=base)


def numerics_of(manifest: Manifest, layout: MeshLayout, memory: MemoryPolicy) -> NumericsClass:
    """This peer's numerics class. Measured on its devices: tens of milliseconds; on several GPUs seconds."""
    table, devices = manifest.optimizer, list(dict.fromkeys(layout.devices))
    versions = {"torch": torch.__version__.split("+")[0]}
    compared, mesh = manifest.numerics.deterministic, layout.label
    if layout.kind == "cpu":
        names = [f"cpu {torch.backends.cpu.get_cpu_capability()}"]
        # A peer with other bits is banned (docs/trust.md), and processors of one width have kernels of their own.
        names += [probe_layer(manifest, torch.device("cpu"))] if compared else []
    else:
        names = sorted({torch.cuda.get_device_name(device) for device in devices})
        # A verifier that finds other bits in work of its own class accuses, so such ranks are a class of their own.
        if adds_in_own_order(layout):
            ids = sorted(str(torch.cuda.get_device_properties(device).uuid) for device in devices)
            mesh += f"@{blake3(' '.join(ids).encode()).hexdigest()[:8]}"
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    if memory.offload_optimizer or layout.kind == "cpu":
        found = [probe(table, _HOST)]
    elif layout.ranks == 1:
        found = [probe(table, torch.device(devices[0]))]
    else:  # ranks have a process each: this one opens no context on their GPUs
        found = probed_apart(table, devices)
    # Blocks of 8 bits are those of what a rank holds.
    cut = f"-{layout.label}" if table.state == "8bit" and layout.ranks > 1 else ""
    return NumericsClass(
        _short("+".join(names)),
        " ".join(f"{library}-{version}" for library, version in versions.items()),
        mesh,
        manifest.numerics.compute,
        "compiled" if memory.compile else "eager",
        "+".join(sorted({*found})) + cut,
    )


def probe_layer(manifest: Manifest, device: torch.device) -> str:
    """Eight hexadecimal digits of what a layer of the run's model makes here of a microbatch, forward and backward, and
    of a loss; of a narrower layer and fewer tokens where they are many. As replicas compute it: on one thread."""
    model, training = manifest.model, manifest.training
    if model.hidden_size > _PROBE_WIDTH:
        heads = max(_PROBE_WIDTH // model.head_dim, 1)
        groups = max(heads * model.num_kv_heads // model.num_heads, 1)
        narrow = {"hidden_size": _PROBE_WIDTH, "intermediate_size": 2 * _PROBE_WIDTH}
        model = model.model_copy(update={**narrow, "num_heads": heads // groups * groups, "num_kv_heads": groups})
    batch, length = training.microbatch_size, training.sequence_length
    while batch * length > _PROBE_TOKENS and (batch > 1 or length > 1):
        batch, length = (batch // 2, length) if batch > 1 else (1, length // 2)

    def numbers(*shape: int, salt: int) -> Tensor:
        """In [-1/2, 1/2), the same bits on every machine."""
        mixed = (torch.arange(math.prod(shape)) + salt) * 2654435761 % (1 << 32)
        return (((mixed ^ mixed >> 15) * 2246822519 >> 8) % (1 << 24)).float().div(1 << 24).sub(0.5).view(shape)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer = Layer(model)
        for salt, weight in enumerate(layer.parameters()):
            with torch.no_grad():
                weight.copy_(numbers(*weight.shape, salt=salt) / math.sqrt(weight.shape[-1]))
        layer = layer.to(device)
        hidden = numbers(batch, length, model.hidden_size, salt=1 << 20).to(device).requires_grad_()
        classes = min(model.vocab_size, model.hidden_size)
        labels = (torch.arange(batch * length) * 7 % classes).view(batch, length).to(device)
        with products_in(manifest.numerics.compute, device):
            output = layer(hidden, *rotary_tables(model, length, device), None)
            loss = loss_sum(output[..., :classes], labels)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad for weight in layer.parameters() if weight.grad is not None]
        assert hidden.grad is not None
        return digest([output.detach(), loss.detach(), hidden.grad, *gradients])[:4].hex()
    finally:
        torch.set_num_threads(before)


def _short(device: str) -> str:
    """A handshake holds 128 characters in all. Names that differ stay different."""
    device = device.replace("/", " ")  # it parts the fields of a class
    return device if len(device) <= 32 else f"{device[:23]}~{blake3(device.encode()).hexdigest()[:8]}"


_PROBE = """\
import sys, torch
from swarmnet.manifest.schema import Optimizer
from swarmnet.stage.optimizer import probe
table = Optimizer.model_validate_json(sys.argv[1])
print(*(probe(table, torch.device(device)) for device in sys.argv[2:]))
"""


def probed_apart(table: Optimizer, devices: Sequence[str]) -> list[str]:
    """`stage.optimizer.probe` of each device, in a separate process, so that its device contexts end with it. Raises
    UsageError: it failed."""
    command = [*same_python(), "-c", _PROBE, table.model_dump_json(), *devices]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise UsageError(f"an update could not be tried on {', '.join(devices)}: see above why")
    return child.stdout.split()


def torch_engine(manifest: Manifest, stage: int, threads: ComputeThread, backend: StageBackend) -> TorchEngine:
    """The engine of one stage of `manifest`, with its sums, computed by `backend`: on a device, or on ranks."""
    codecs.use_all(named_by(manifest))  # refuses early what this machine cannot encode
    jobs = StageJobs(threads, stage, backend.device, reproducible=manifest.numerics.deterministic)

    @functools.cache
    def snapshot_bytes(other: int) -> int:
        canonical = backend.state.canonical if other == stage else Canonical.of(manifest.of_stage(other))
        return canonical.layout.num_bytes

    if manifest.audited:
        backend.past.keep(KEPT_WEIGHTS)
    payloads = Payloads(manifest.of_stage(stage), manifest.wire, device=backend.device)
    return TorchEngine(backend, sums_of(backend, jobs), jobs, payloads, snapshot_bytes=snapshot_bytes)


def sums_of(backend: StageBackend, jobs: StageJobs) -> StageSums:
    """The sums that this run's rounds make of what `backend` accumulates."""
    # Replicas then train on their own and average their weights.
    if backend.state.canonical.spec.averaging.sync == "local":
        return LocalSum(jobs, backend.state, backend.sums[0], device=_HOST)
    return StepSum(jobs, backend.state, backend.sums, memory=backend.sum_memory())
