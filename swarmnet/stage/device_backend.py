"""A stage on one device, computed in this process: `stage.backend` as module, accumulators and optimizer. No threads.

With `averaging.sync = "overlap"` step s is computed on the weights of version s - 1: two versions' weights rest in two
modules, and step s uses module s % 2. The update of step s reads the other one, which holds the newest weights, and
writes into the module of s, whose weights nobody needs any more. Before steps overlap both hold the same. The moments
exist once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Commit
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.split import Tape
from swarmnet.stage import snapshot
from swarmnet.stage.accumulator import Accumulator, sum_dtype
from swarmnet.stage.backend import Watcher
from swarmnet.stage.canonical import Canonical, Initial
from swarmnet.stage.gradients import WholeGradients
from swarmnet.stage.optimizer import MOMENTS, StageOptimizer, average
from swarmnet.stage.outer import Outer
from swarmnet.stage.passes import ForwardPass, MemoryPolicy, Passes


class DeviceBackend:
    """`stage.backend.StageBackend` on `device`."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        *,
        device: str | torch.device = "cpu",
        initial: Initial | None = None,
        memory: MemoryPolicy | None = None,
    ) -> None:
        device = torch.device(device)
        self.device, self._dtype = device, sum_dtype(manifest.numerics)
        self.writes_at_once = memory is not None and memory.writes_at_once
        offload = memory is not None and memory.offload_optimizer
        self.state = DeviceState(manifest, stage, device=device, initial=initial, offload=offload)
        self._passes = Passes(
            first=self.state.first,
            last=self.state.last,
            device=device,
            reproducible=manifest.numerics.mode == "deterministic",
            memory=memory,
            compute=manifest.numerics.compute,
        )
        # One accumulator for each open step.
        self.sums = [
            Accumulator(
                self.state.canonical.num_elements,
                manifest.numerics,
                max_microbatches=manifest.training.microbatches,
                device=device,
            )
            for _ in range(1 + self.state.delay.most)
        ]

    def watch(self, watcher: Watcher) -> None:
        """Nothing happens by itself here."""

    def start(self) -> None:
        """Everything is here."""

    def close(self) -> None:
        """Nothing was started."""

    def sum_memory(self) -> Tensor:
        """Memory for one finished sum: on the CPU, where pieces come from the network and are hashed. On a device each
        piece would wait for whatever the compute thread has queued there."""
        size, pinned = self.state.canonical.num_elements, self.device.type == "cuda"
        return torch.zeros(size, dtype=self._dtype, pin_memory=pinned)

    def forward(
        self, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool
    ) -> tuple[Tensor, ForwardPass | None]:
        return self._passes.forward(self.state.module(step), tokens, hidden, train=train)

    def backward(self, work: object, gradient: Tensor | None) -> Tensor | None:
        assert isinstance(work, ForwardPass)
        return self._passes.backward(work, gradient)

    def accumulate(self, work: object, *, step: int, index: int, voids: int) -> bool:
        assert isinstance(work, ForwardPass)
        if not work.went_back or work.tape is None:
            raise ValueError(f"no gradient to add: microbatch {step}/{index}")
        # The tape's operands are free as soon as the gradients are added.
        tape, work.tape = work.tape, None
        gradients = self.state.gradients(tape)
        return self.sums[step % len(self.sums)].add(gradients, step=step, index=index, voids=voids)


class DeviceState:
    """Weights of `version` of one stage (with a delay also of the version before), and the update to the next.

    offload: moments are in host memory, and the update is computed there.
    """

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        *,
        device: torch.device,
        initial: Initial | None = None,
        offload: bool = False,
    ) -> None:
        ranges = cut_layers(manifest.model, manifest.cut, manifest.training.sequence_length)
        self.manifest, self.stage, self.device = manifest, stage, device
        self.first, self.last = stage == 0, stage == len(ranges) - 1
        self.delay = manifest.averaging.delay
        with device:  # made where they rest: a stage that fits the device need not fit elsewhere
            self._modules = [
                StageModule(manifest.model, ranges[stage], first=self.first, last=self.last)
                for _ in range(1 + self.delay.most)
            ]
        self.version, self._initial = 0, initial
        self._names = [name for name, _ in self._modules[0].named_parameters()]
        self._parameters = [list(module.parameters()) for module in self._modules]
        self._optimizer = StageOptimizer(self._parameters[0], manifest.optimizer, offload=offload)
        self._offload = offload
        # The modules take turns, so their parameters share one scratch.
        places = {parameter: place for parameters in self._parameters for place, parameter in enumerate(parameters)}
        self._gradients = WholeGradients(places, [parameter.shape for parameter in self._parameters[0]], device)
        self.canonical = Canonical(
            manifest, stage, {name: p.shape for name, p in zip(self._names, self._parameters[0], strict=True)}
        )
        self.outer = Outer.of(manifest.averaging, self._parameters[0])

    def module(self, step: int) -> StageModule:
        """What `step` is computed on, which must be open."""
        return self._modules[step % len(self._modules)]

    def gradients(self, tape: Tape) -> list[Tensor]:
        """Run a weight pass: one fp32 gradient per parameter, in canonical order, valid until the next call."""
        return self._gradients.of(tape)

    def apply(self, total: Tensor, commits: Sequence[Commit], *, own_tokens: int | None = None) -> None:
        """Step to the next version with the flat sum `total` (see `Canonical.update`)."""
        update = self.canonical.update(self.version, total, commits, own_tokens=own_tokens)
        # Averaged gradients lie where the optimizer computes: on the host, or in scratch that is free now.
        gradients = self._optimizer.room() if self._offload else self._gradients.scratch
        if self.outer is not None:  # which may have changed the weights
            self._optimizer.take(self.newest)
        for gradient, piece in zip(gradients, self.canonical.pieces(total), strict=True):
            average(piece.to(gradient.device), gradient.view(-1), scale=update.scale, numerics=self.manifest.numerics)
        # Nobody computes on these weights any more: they are those of the step that is applied.
        into = self._parameters[self.version % len(self._modules)]
        # The update starts from the newest weights, which rest in the other module.
        if self.delay.most:
            _copy(self.newest, into)
        self._optimizer.step(gradients, learning_rate=update.rate, parameters=into)
        self.version += 1
        # Steps do not overlap yet, so both modules hold the newest weights.
        if not self.delay.behind(self.version) and self.delay.most:
            _copy(into, self._parameters[self.version % len(self._modules)])

    def stay(self, commits: Sequence[Commit]) -> None:
        """On to the next version with the same weights: there was no gradient for them."""
        self.canonical.check(self.version, commits)
        self.version += 1
        self._optimizer.set_num_steps(self.version)  # as where a snapshot of it is taken over

    def reset_to_seed(self) -> None:
        """Back to version 0; where two versions are held, both are that one."""
        # From the manifest's seed, or from the checkpoint that the run began with.
        if self._initial is None:
            self._modules[0].reset(seed=self.manifest.training.seed)
        else:
            tensors = self._initial()
            for name, parameter in zip(self._names, self._parameters[0], strict=True):
                parameter.detach().copy_(tensors[name])
        for parameters in self._parameters[1:]:
            _copy(self._parameters[0], parameters)
        self._optimizer.reset()
        self._optimizer.take(self._parameters[0])
        if self.outer is not None:
            self.outer.reset()
        self.version = 0

    def copy(self, memory: Tensor) -> int:
        """Copy the state into `canonical.layout.memory()`; returns its version."""
        places = self.canonical.layout.views(memory)
        for name, tensor in self._tensors().items():
            places[name].copy_(tensor.detach())
        for name, moments in zip(self._names, self._optimizer.moments, strict=True):
            for moment, value in zip(MOMENTS, moments.read(), strict=True):
                places[snapshot.moment_name(moment, name)].copy_(value)
        return self.version

    @torch.no_grad()
    def take_over(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Become what `Canonical.unpack` has read."""
        self.version = version  # first: it says which module holds what
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[name])
        for name, moments in zip(self._names, self._optimizer.moments, strict=True):
            moments.write(*(tensors[snapshot.moment_name(moment, name)] for moment in MOMENTS))
        self._optimizer.take(self.newest)
        self._optimizer.set_num_steps(version)

    @property
    def newest(self) -> list[Parameter]:
        """The weights of `version`."""
        # With a delay, module `version` still holds the weights that step `version` is computed on.
        return self._parameters[(self.version + self.delay.most) % len(self._modules)]

    def _tensors(self) -> dict[str, Tensor]:
        """The live tensors under their snapshot names, moments apart."""
        tensors: dict[str, Tensor] = dict(zip(self._names, self.newest, strict=True))
        if self.delay.most:
            # A joiner needs the weights that the open step is computed on.
            oldest = self._parameters[self.version % len(self._modules)]
            tensors |= {snapshot.previous_name(name): p for name, p in zip(self._names, oldest, strict=True)}
        if self.outer is not None:
            tensors |= self.outer.tensors(self._names)
        return tensors


@torch.no_grad()
def _copy(source: Sequence[Parameter], into: Sequence[Parameter]) -> None:
    for parameter, value in zip(into, source, strict=True):
        parameter.copy_(value)
