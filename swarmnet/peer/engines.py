"""Builds what a replica of a stage computes with: an engine on a backend, and the sums that the run asks for."""

from __future__ import annotations

import torch

from swarmnet.engine.compute_thread import ComputeThread, StageJobs
from swarmnet.engine.payloads import Payloads
from swarmnet.engine.torch_engine import StageSums, TorchEngine
from swarmnet.manifest.codec_names import named_by
from swarmnet.manifest.schema import Manifest
from swarmnet.ranks.backend import MeshBackend
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.layout import MeshLayout
from swarmnet.stage.backend import StageBackend
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.sums.local_sum import LocalSum
from swarmnet.sums.step_sum import StepSum
from swarmnet.wire import codecs

_HOST = torch.device("cpu")
"""Where sums are while they travel, also those of a GPU: `DeviceBackend.sum_memory`."""


def backend_of(
    manifest: Manifest, stage: int, layout: MeshLayout, initial: Initial | None, memory: MemoryPolicy
) -> StageBackend:
    """What computes one stage here: this process on one device, or a process on each device of `layout`.

    Args:
        initial: reads the weights of version 0; None: they are drawn from the run's seed.
        memory: how each device spends its own.

    Raises:
        UsageError: these ranks cannot share the stage.
    """
    spec = manifest.of_stage(stage)
    if layout.ranks == 1:
        return DeviceBackend(spec, device=layout.devices[0], initial=initial, memory=memory)
    return MeshBackend(spec, layout, initial=initial, memory=memory)


def torch_engine(manifest: Manifest, stage: int, threads: ComputeThread, backend: StageBackend) -> TorchEngine:
    """The engine of one stage of `manifest`, with its sums, computed by `backend`: on a device, or on ranks."""
    codecs.use_all(named_by(manifest))  # refuses early what nobody here can encode
    jobs = StageJobs(threads, stage, backend.device, reproducible=manifest.numerics.mode == "deterministic")

    def snapshot_bytes(other: int) -> int:
        canonical = backend.state.canonical if other == stage else Canonical.of(manifest.of_stage(other))
        return canonical.layout.num_bytes

    payloads = Payloads(manifest.of_stage(stage), manifest.wire, device=backend.device)
    return TorchEngine(backend, sums_of(backend, jobs), jobs, payloads, snapshot_bytes=snapshot_bytes)


def sums_of(backend: StageBackend, jobs: StageJobs) -> StageSums:
    """The sums that this run's rounds make of what `backend` accumulates."""
    if backend.state.canonical.spec.averaging.sync == "local":
        return LocalSum(jobs, backend.state, backend.sums[0], device=_HOST)
    return StepSum(jobs, backend.state, backend.sums, memory=backend.sum_memory())
