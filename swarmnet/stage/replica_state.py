"""What one replica holds of a version: weights, moments, and the flat view of its gradients. No threads, no protocol.

The flat gradient is every parameter after the other in canonical order (that of `named_parameters`). Gradients are
computed into one scratch buffer whose pieces start on 64-byte boundaries: matrix kernels pick their summation order by
alignment, so a parameter's gradient must not depend on what precedes it in the stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Commit
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.split import Tape
from swarmnet.stage import snapshot
from swarmnet.stage.optimizer import MOMENTS, StageOptimizer, average, square_norm
from swarmnet.stage.schedule import gradient_scale, learning_rate

_ALIGN = 16          # fp32 elements


class ReplicaState:
    """Weights of one version of one stage, and the update to the next."""

    def __init__(self, manifest: Manifest, stage: int, *, device: torch.device) -> None:
        ranges = cut_layers(manifest.model, manifest.cut, manifest.training.sequence_length)
        self.manifest, self.stage, self.device = manifest, stage, device
        self.first, self.last = stage == 0, stage == len(ranges) - 1
        self.module = StageModule(manifest.model, ranges[stage], first=self.first, last=self.last).to(device)
        self._names = [name for name, _ in self.module.named_parameters()]
        self._parameters = [parameter for _, parameter in self.module.named_parameters()]
        self._optimizer = StageOptimizer(self._parameters, manifest.optimizer)
        self._scratch = _aligned_like(self._parameters, device)
        self._scratch_of = dict(zip(self._parameters, self._scratch, strict=True))
        self.edges = [0, *itertools.accumulate(parameter.numel() for parameter in self._parameters)]
        self.layout = snapshot.Layout({name: tensor.shape for name, tensor in self._tensors().items()}, stage=stage)
        self.version = 0

    @property
    def num_elements(self) -> int:
        """Length of the flat gradient."""
        return self.edges[-1]

    @property
    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every parameter, in canonical order."""
        return [(name, tuple(p.shape)) for name, p in zip(self._names, self._parameters, strict=True)]

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights, by name, on the CPU."""
        return {name: p.detach().to("cpu", copy=True) for name, p in zip(self._names, self._parameters, strict=True)}

    def gradients(self, tape: Tape) -> list[Tensor]:
        """Run a weight pass: one fp32 gradient per parameter, in canonical order, valid until the next call."""
        written = tape.weight_pass(self._scratch_of.__getitem__)
        if len(written) != len(self._parameters):
            raise ValueError(f"a weight pass wrote {len(written)} of {len(self._parameters)} parameters")
        return self._scratch

    def square_norm(self, total: Tensor) -> float:
        """Squared L2 norm of a flat sum: per parameter in fp64, added in canonical order."""
        squares = 0.0
        for start, stop in itertools.pairwise(self.edges):
            squares += square_norm(total[start:stop], numerics=self.manifest.numerics)
        return squares

    def apply(self, total: Tensor, commits: Sequence[Commit]) -> None:
        """Step to the next version with the flat sum `total` (see `stage.engine.Engine.apply`)."""
        stages = [(commit.stage, commit.step) for commit in commits]
        if stages != [(stage, self.version) for stage in range(self.manifest.cut.stages)]:
            raise ValueError(f"version {self.version} needs a commit of each stage, in order; got {stages}")
        num_tokens = commits[-1].num_tokens
        if num_tokens <= 0 or not all(0 <= commit.grad_sq_norm < math.inf for commit in commits):
            raise BadMessage(RejectCode.MALFORMED, "a commit without tokens or norm", step=self.version)
        table, training = self.manifest.optimizer, self.manifest.training
        scale = gradient_scale(
            [commit.grad_sq_norm for commit in commits], num_tokens=num_tokens, clip_norm=table.clip_norm
        )
        for gradient, (start, stop) in zip(self._scratch, itertools.pairwise(self.edges), strict=True):
            average(total[start:stop], gradient.view(-1), scale=scale, numerics=self.manifest.numerics)
        rate = learning_rate(table, self.version, total_steps=training.total_steps)
        self._optimizer.step(self._scratch, learning_rate=rate)
        self.version += 1

    def reset_to_seed(self) -> None:
        """Back to version 0."""
        self.module.reset(seed=self.manifest.training.seed)
        self._optimizer.reset()
        self.version = 0

    def copy(self, memory: Tensor) -> int:
        """Copy the state into `layout.memory()`; returns its version. `layout.seal` then makes a snapshot of it."""
        self.layout.copy(self._tensors(), memory)
        return self.version

    def unpack(self, data: bytes | memoryview, *, version: int) -> dict[str, Tensor]:
        """The tensors of a snapshot that fits this stage, checked. Touches no live tensor. Raises BadMessage."""
        shapes = {name: tensor.shape for name, tensor in self._tensors().items()}
        tensors = snapshot.unpack(data, shapes, stage=self.stage, version=version)
        for name in self._names:
            if bool((tensors[snapshot.moment_name("exp_avg_sq", name)] < 0).any()):
                raise BadMessage(RejectCode.MALFORMED, "a second moment is negative", name=name)
        return tensors

    @torch.no_grad()
    def take_over(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Become what `unpack` has read."""
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[name])
        self._optimizer.set_num_steps(version)
        self.version = version

    def _tensors(self) -> dict[str, Tensor]:
        """The live tensors under their snapshot names."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            tensors[name] = parameter
            for moment, tensor in zip(MOMENTS, self._optimizer.moments(parameter), strict=True):
                tensors[snapshot.moment_name(moment, name)] = tensor
        return tensors


def _aligned_like(parameters: Sequence[Parameter], device: torch.device) -> list[Tensor]:
    """One buffer, cut into contiguous fp32 tensors of the parameters' shapes, each on a 64-byte boundary."""
    starts = [0, *itertools.accumulate(-(-p.numel() // _ALIGN) * _ALIGN for p in parameters)]
    buffer = torch.zeros(starts[-1], dtype=torch.float32, device=device)
    return [buffer[start : start + p.numel()].view(p.shape) for start, p in zip(starts, parameters, strict=False)]
