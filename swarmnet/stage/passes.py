"""One microbatch through the module of a stage: forward, and the backward of its input. Compute thread only.

Tensors in, tensors out: payloads, versions and what may be counted are the engine's business. A stage that is first
reads token ids, one that is last returns the summed loss. What the weight pass needs stays on the `ForwardPass`'s tape.

What is kept between forward and backward is a policy (`model.activations`), with the same bits under each. Under every
one but "save", and where layers are compiled, backward writes the weight gradients too: between backward and weight
pass a microbatch then holds one gradient per parameter, and never the operands of all its products, which are as large
as its saved activations.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarmnet.model.activations import CompiledLayers, Offload, Policy, run_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.precision import Compute, products_in
from swarmnet.model.split import Casts, Tape, WritingTape

_ALIGN = 16  # fp32 elements


def aligned(shapes: Sequence[torch.Size], device: torch.device) -> list[Tensor]:
    """One buffer, cut into contiguous fp32 tensors of these shapes, each on a 64-byte boundary.

    Matrix kernels pick their summation order by alignment, so a parameter's gradient must not depend on what precedes
    it in the stage.
    """
    # Each start is rounded up to the next boundary; the last one is the length of the buffer.
    starts = [0, *itertools.accumulate(-(-shape.numel() // _ALIGN) * _ALIGN for shape in shapes)]
    buffer = torch.zeros(starts[-1], dtype=torch.float32, device=device)
    return [buffer[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """How an operator spends a device's memory. activations: kept for backward how; changes no bit. offload_optimizer:
    moments in host memory, updates on the CPU, which rounds in its own way. compile: layers by torch.compile, and so do
    they."""

    activations: Policy = "save"
    offload_optimizer: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.activations not in ("save", "recompute", "recompute_layers", "selective", "offload"):
            raise ValueError(f"no such policy: {self.activations}")

    @property
    def writes_at_once(self) -> bool:
        """Does backward write weight gradients, so that the weight pass only adds them?"""
        return self.compile or self.activations != "save"


@dataclass(slots=True, eq=False)
class ForwardPass:
    """What a forward leaves behind. Backward takes `leaf`, and `output` or what computes it `again`, and fills `tape`;
    the weight pass takes that. versions: of the weights, which must not change before backward. gradients: left by a
    fused backward (`ranks.fully_sharded`) instead of a tape."""

    passes: Passes
    module: StageModule
    leaf: Tensor | None
    output: Tensor | None
    again: Callable[[], Tensor] | None
    tape: Tape | None
    versions: int
    gradients: list[Tensor] | None = None

    @property
    def went_back(self) -> bool:
        """Has backward run?"""
        return self.output is None and self.again is None


def attention_kernels(
    compute: Compute, *, reproducible: bool, capability: tuple[int, int] | None
) -> list[SDPBackend] | None:
    """The kernels that attention may use, of which torch takes the fastest that it can; None: any.

    Flash attention's backward has a fixed order once torch is told to keep to deterministic algorithms. It takes bf16
    only, from Ampere on; the math kernel takes everything, and keeps T x T scores.

    Args:
        capability: of a CUDA device; None: a CPU, where all kernels are reproducible.
    """
    if not reproducible or capability is None:
        return None
    fused = compute == "bf16" and capability >= (8, 0)
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else [SDPBackend.MATH]


class Passes:
    """Forward and backward of one stage on one device.

    reproducible: only kernels with a backward that gives the same bits again. tapes: backward leaves weight gradients
    to a weight pass; without, it leaves them where autograd does. compute: `numerics.compute` of the manifest.
    compiler: the backend of torch.compile, if `memory` asks for it.
    """

    def __init__(
        self,
        *,
        last: bool,
        device: torch.device,
        reproducible: bool,
        tapes: bool = True,
        memory: MemoryPolicy | None = None,
        compute: Compute = "fp32",
        compiler: str = "inductor",
    ) -> None:
        self._last, self._device, self._tapes = last, device, tapes
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self._attention = attention_kernels(compute, reproducible=reproducible, capability=capability)
        if self._attention and SDPBackend.FLASH_ATTENTION in self._attention:
            _keep_to_deterministic_algorithms()
        self.memory, self._compute, self._casts = memory or MemoryPolicy(), compute, Casts()
        self._offload = Offload(device) if self.memory.activations == "offload" else None
        self._run_layer = run_layers(self.memory.activations)
        self._compiled = CompiledLayers(self._run_layer, backend=compiler) if self.memory.compile else None
        if self._compiled is not None:
            self._run_layer = self._compiled.run

    def forward(
        self, module: StageModule, tokens: Tensor, hidden: Tensor | None, *, train: bool
    ) -> tuple[Tensor, ForwardPass | None]:
        """Run `module` on tokens [B, T + 1] (the last one of each row is a label only) and hidden [B, T, D], which is
        ours to keep, None in the first stage.

        Returns hidden [B, T, D], in the last stage the loss summed over tokens; and what backward needs, None for an
        evaluation.
        """
        # Keep nothing: an evaluation has no backward, and under "recompute" backward runs forward again.
        if not train or self.memory.activations == "recompute":
            with torch.no_grad():
                output = self._run(module, tokens, hidden, None)
            if not train:
                return output, None
            tape = self._tape(module)
            leaf = None if hidden is None else hidden.requires_grad_()
            again = lambda: self._run(module, tokens, leaf, tape)  # noqa: E731
            return output, ForwardPass(self, module, leaf, None, again, tape, _versions(module))
        with torch.enable_grad(), self._saving(module):
            tape = self._tape(module)
            # Its gradient goes to the stage before; token ids have none.
            leaf = None if hidden is None else hidden.requires_grad_()
            output = self._run(module, tokens, leaf, tape)
        return output, ForwardPass(self, module, leaf, output, None, tape, _versions(module))

    def backward(self, saved: ForwardPass, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input, None in the first stage; once per pass. gradient: of the output, None of a loss.

        Raises ValueError the second time, RuntimeError if the weights are not those of forward any more.
        """
        if saved.went_back:
            raise ValueError("backward of this pass has run already")
        output, again, leaf = saved.output, saved.again, saved.leaf
        # Before anything can raise: a second call must find nothing.
        saved.output = saved.again = saved.leaf = None
        if self._tapes and saved.versions != _versions(saved.module):
            raise RuntimeError("the weights of this pass have been modified since forward")
        with self._kernels():
            if again is not None:
                with torch.enable_grad():
                    output = again()
            assert output is not None
            with contextlib.nullcontext() if self._compiled is None else self._compiled.writing(saved.tape):
                torch.autograd.backward(output, gradient)
        return None if leaf is None else leaf.grad

    def _run(self, module: StageModule, tokens: Tensor, hidden: Tensor | None, tape: Tape | None) -> Tensor:
        with self._kernels(), products_in(self._compute, self._device):
            # The last token of a row is a label only.
            x = tokens[:, :-1].to(self._device) if hidden is None else hidden
            output: Tensor = module(x, tape, self._run_layer)
            return module.loss_sum(output, tokens[:, 1:].to(self._device)) if self._last else output

    def _tape(self, module: StageModule) -> Tape | None:
        if not self._tapes:
            return None
        # The weight pass computes the gradients later, from operands that the tape keeps.
        if not self.memory.writes_at_once:
            return Tape(self._casts)
        # Backward writes the gradients itself, and no operands are kept.
        parameters = list(module.trained().values())
        return WritingTape(parameters, lambda: aligned([p.shape for p in parameters], self._device), self._casts)

    def _saving(self, module: StageModule) -> contextlib.AbstractContextManager[object]:
        """Around the forward that backward comes back to."""
        return contextlib.nullcontext() if self._offload is None else self._offload.saving(module.lasting())

    def _kernels(self) -> contextlib.AbstractContextManager[object]:
        """Attention kernels with a reproducible backward."""
        return sdpa_kernel(self._attention) if self._attention else contextlib.nullcontext()


def _keep_to_deterministic_algorithms() -> None:
    """In all of this process; its stages are of one run. The first call has to come before cuBLAS is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses matrix products without
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
    torch.use_deterministic_algorithms(True)


def _versions(module: StageModule) -> int:
    """Grows with every in-place change of a weight."""
    return sum(parameter._version for parameter in module.trained().values())
