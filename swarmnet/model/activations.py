"""What a forward keeps of a stage's layers for its backward, and what is computed again instead.

| policy | kept of a layer | done again in backward |
|---|---|---|
| stash | all that backward reads | nothing |
| selective | results of matrix products and of attention | norms, rotation, SwiGLU's product |
| recompute_layers | its input (arXiv:1604.06174) | the layer |
| recompute | nothing: the stage's input is enough | the stage (by `stage.passes`) |
| offload | all that backward reads, in host memory (`Offload`) | nothing; copies come back |

The same kernels run on the same operands in the same order, collectives included, so every policy gives the same bits.
Knows layers only as functions of tensors, and no weights but to leave them where they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from swarmnet.model.split import Tape

Policy = Literal["save", "recompute", "recompute_layers", "selective", "offload"]

RunLayer = Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor, Tape | None], Tensor]
"""Runs layer(x, cos, sin, tape)."""

_aten = torch.ops.aten
# What costs more to compute than to keep. Not the products inside attention's math kernel: they are T x T.
_KEPT = frozenset(
    [
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ]
)


def plainly(layer: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
    """Run a layer."""
    return layer(x, cos, sin, tape)


def run_layers(policy: Policy) -> RunLayer:
    """How to run each layer under `policy`. What is done around all of them is not part of it."""
    if policy == "selective":
        return functools.partial(_again, context_fn=functools.partial(create_selective_checkpoint_contexts, _keep))
    return _again if policy == "recompute_layers" else plainly


def _again(
    layer: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None, **options: Any
) -> Tensor:
    # An evaluation has no backward that could compute anything again.
    if not torch.is_grad_enabled():
        return layer(x, cos, sin, tape)
    y: Tensor = checkpoint(layer, x, cos, sin, tape, use_reentrant=False, preserve_rng_state=False, **options)
    return y


def _keep(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


# ---------------------------------------------------------------- offload


class Offload:
    """What autograd saves of a forward waits for backward in host memory (as in arXiv:2101.06840, of activations).

    The copy to the host runs in parallel to the compute that follows, on a stream of its own; the way back on the
    stream of backward. Host memory is pinned, and torch keeps freed pinned blocks for the next microbatch. What has
    fewer than `least` bytes stays on `device`.

    On the CPU it copies from host memory to host memory, which is good for tests only.
    """

    def __init__(self, device: torch.device, *, least: int = 1 << 16) -> None:
        self._device, self._least = device, least
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def saving(self, stay: Iterable[Tensor]) -> Iterator[None]:
        """For one forward. stay: what lives on anyway (weights, tables) and is not moved.

        A tensor that several operations save is moved out once.
        """
        staying = frozenset(tensor.untyped_storage()._cdata for tensor in stay)
        moved: dict[tuple[object, ...], tuple[StorageWeakRef, _Moved]] = {}

        def pack(tensor: Tensor) -> Tensor | _Moved:
            storage = tensor.untyped_storage()
            # Weights live on anyway, and small tensors are not worth a copy.
            if storage._cdata in staying or tensor.numel() * tensor.element_size() < self._least:
                return tensor.detach()  # an operation that saves its own output, graph and all, is never freed
            place = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
            key = (*place, tensor.dtype, tensor._version)
            found = moved.get(key)
            # Where its storage is freed, the address may be another tensor's.
            if found is None or found[0].expired():  # type: ignore[no-untyped-call]
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                found = moved[key] = weak, _Moved(tensor, self._stream)
            return found[1]

        with saved_tensors_hooks(pack, lambda kept: kept.back() if isinstance(kept, _Moved) else kept):
            yield


class _Moved:
    """One tensor in host memory, with the strides it had, where they have no gaps."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._device, self._ready = tensor.device, None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(tensor)
            return
        # The copy may not begin before the kernel that writes the tensor has ended.
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not given out again before it is copied
        self._ready = stream.record_event()

    def back(self) -> Tensor:
        """A copy on the device it came from."""
        if self._ready is None:
            return self._host.clone()
        torch.cuda.current_stream(self._device).wait_event(self._ready)
        return self._host.to(self._device, non_blocking=True)


# ---------------------------------------------------------------- torch.compile


class CompiledLayers:
    """Layers through torch.compile, one by one: equal layers share what was compiled for the first.

    A compiled layer knows no tape: its backward computes all gradients at once, autograd leaves those of parameters in
    `.grad`, and from there each goes to the microbatch's tape the moment it is whole. What is outside of layers
    (embedding, norm, head, loss) runs as ever. backend: torch.compile's. Compute thread only.
    """

    def __init__(self, run: RunLayer, *, backend: str = "inductor") -> None:
        self._run, self._backend = run, backend
        self._compiled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
        self._tape: Tape | None = None

    @property
    def num_layers(self) -> int:
        """How many were compiled so far."""
        return len(self._compiled)

    def run(self, layer: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
        """Run `layer` as `model.activations` says; its gradients go to the tape that is open in backward."""
        compiled = self._compiled.get(layer)
        if compiled is None:
            compiled = self._compiled[layer] = torch.compile(layer, dynamic=False, backend=self._backend)
            assert isinstance(layer, nn.Module)
            for parameter in filter(lambda each: each.requires_grad, layer.parameters()):
                parameter.register_post_accumulate_grad_hook(self._hand_over)  # type: ignore[no-untyped-call]
        # Without a tape: autograd computes all gradients inside the compiled graph.
        return self._run(compiled, x, cos, sin, None)

    @contextlib.contextmanager
    def writing(self, tape: Tape | None) -> Iterator[None]:
        """Around the backward of the microbatch that `tape` is of."""
        self._tape = tape
        try:
            yield
        finally:
            self._tape = None

    def _hand_over(self, parameter: Tensor) -> None:
        gradient, tape = parameter.grad, self._tape
        if tape is None or gradient is None:  # not our backward: leave it where autograd does
            return
        assert isinstance(parameter, nn.Parameter)
        parameter.grad = None
        tape.owe(parameter, lambda out: out.copy_(gradient))
