"""Layers through torch.compile, one by one: equal layers share what was compiled for the first.

A compiled layer knows no tape: its backward computes all gradients at once, autograd leaves those of parameters in
`.grad`, and from there each goes to the microbatch's tape the moment it is whole. What is beside layers (embedding,
norm, head, loss) runs as ever. Knows no device; `--compile` is for CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from swarmnet.model.activations import RunLayer
from swarmnet.model.split import Tape


class CompiledLayers:
    """Compiles layers as they come. backend: torch.compile's. Compute thread only."""

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
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(self._hand_over)  # type: ignore[no-untyped-call]
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
        if tape is None or gradient is None:
            return
        assert isinstance(parameter, nn.Parameter)
        parameter.grad = None

        def write(out: Tensor) -> None:
            out.copy_(gradient)

        tape.owe(parameter, write)
