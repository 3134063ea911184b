"""Backward in two halves: the input gradient now, the weight gradients later (zero bubble, arXiv:2401.10241).

The neighbour waits for the input gradient only, and a replica that may not count a microbatch needs nothing else. So
linear, scale (of RMSNorm) and embedding answer backward with the gradient of their input and leave what the gradient
of their parameter needs on a `Tape`; `Tape.weight_pass` finishes the work with the kernels that autograd would have
used, on the same operands, so the bits are those of an ordinary backward. Autograd runs once.

Until then the operands of every product wait. Where activations are computed again that would bring back the memory it
saves, so there the tape is a `WritingTape`: each gradient is written in backward and its operands are gone, layer by
layer. Without a tape the three functions are torch's own.

Under `model.precision` linear takes its operands in bf16. Its weight gradient is then rounded to bf16 before it is
written as fp32, as autograd would have it. Knows no model and no accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from swarmnet.model.precision import operand_dtype

Write = Callable[[Tensor], object]
"""Writes one gradient over the tensor it is given (the parameter's shape, contiguous)."""


class Casts:
    """Weights in another dtype, cast once per change of the weight: 2 bytes per parameter in bf16."""

    def __init__(self) -> None:
        self._casts: dict[Parameter, tuple[int, Tensor]] = {}

    def of(self, weight: Parameter, dtype: torch.dtype) -> Tensor:
        """`weight` in `dtype`. Do not change it."""
        if weight.dtype == dtype:
            return weight
        version, cast = self._casts.get(weight, (-1, None))
        if cast is None or version != weight._version or cast.dtype != dtype:  # an optimizer step counts versions up
            cast = weight.detach().to(dtype)
            self._casts[weight] = weight._version, cast
        return cast


class Tape:
    """The weight gradients one microbatch still owes. Filled by one backward, emptied by one weight pass.

    casts: shared by the microbatches of one module.
    """

    def __init__(self, casts: Casts | None = None) -> None:
        self._owed: list[tuple[Parameter, Write]] = []
        self.casts = casts or Casts()

    def __len__(self) -> int:
        return len(self._owed)

    def owe(self, parameter: Parameter, write: Write) -> None:
        """Queue one gradient of `parameter`, unless it is frozen; `write` holds what it needs."""
        if parameter.requires_grad:
            self._owed.append((parameter, write))

    def weight_pass(
        self, out: Callable[[Parameter], Tensor], whole: Callable[[Parameter], None] | None = None
    ) -> set[Parameter]:
        """Write every owed gradient over `out(parameter)` and forget it; returns the parameters written.

        A parameter used twice (tied embeddings) gets the sum. whole: called with each parameter as soon as its gradient
        is whole.
        """
        written: dict[Parameter, None] = {}
        owed, self._owed = self._owed, []
        owed.reverse()
        with torch.no_grad():
            while owed:  # popping frees the operands one by one
                parameter, write = owed.pop()
                _write(parameter, write, out, written)
                if whole is not None and all(later is not parameter for later, _ in owed):
                    whole(parameter)
        return set(written)


class WritingTape(Tape):
    """Writes every gradient as soon as it is owed, into memory that the microbatch has until its weight pass.

    parameters: of the module. borrow: memory for one gradient of each, in the same order.
    """

    def __init__(
        self, parameters: Sequence[Parameter], borrow: Callable[[], Sequence[Tensor]], casts: Casts | None = None
    ) -> None:
        super().__init__(casts)
        self._parameters, self._borrow = parameters, borrow
        self._memory: dict[Parameter, Tensor] = {}
        self._written: dict[Parameter, None] = {}

    def __len__(self) -> int:
        return len(self._written)

    def owe(self, parameter: Parameter, write: Write) -> None:
        """Write the gradient of `parameter` now, unless it is frozen."""
        if not parameter.requires_grad:
            return
        if not self._memory:  # borrowed with the first gradient: forward needs none
            self._memory = dict(zip(self._parameters, self._borrow(), strict=True))
        with torch.no_grad():
            _write(parameter, write, self._memory.__getitem__, self._written)

    def weight_pass(
        self, out: Callable[[Parameter], Tensor], whole: Callable[[Parameter], None] | None = None
    ) -> set[Parameter]:
        """Copy every gradient over `out(parameter)`, in the order of backward, and forget it."""
        written, self._written, memory, self._memory = self._written, {}, self._memory, {}
        for parameter in written:
            out(parameter).copy_(memory[parameter])
            if whole is not None:
                whole(parameter)
        return set(written)


def _write(
    parameter: Parameter, write: Write, out: Callable[[Parameter], Tensor], written: dict[Parameter, None]
) -> None:
    """The first gradient of a parameter is written, others are added."""
    if parameter in written:
        again = torch.empty_like(parameter)
        write(again)
        out(parameter).add_(again)
    else:
        write(out(parameter))
        written[parameter] = None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, tape: Tape) -> Tensor:
        ctx.save_for_backward(x, weight)  # saved, not merely held: autograd notices if an optimizer step intervenes
        ctx.weight, ctx.bias, ctx.tape = weight, bias, tape
        return F.linear(x, tape.casts.of(weight, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        # The tape gets x without its autograd graph, which leads back to the tape: if no weight pass empties the tape,
        # that circle, which Python's collector does not see, keeps the microbatch for ever.
        x_NI, grad_NO = x.detach().flatten(0, -2), grads[0].flatten(0, -2)
        if x.dtype == weight.dtype:  # straight into the gradient's memory
            ctx.tape.owe(ctx.weight, lambda out_OI: torch.mm(grad_NO.t(), x_NI, out=out_OI))
        else:  # a product in bf16 has a bf16 result
            ctx.tape.owe(ctx.weight, lambda out_OI: out_OI.copy_(torch.mm(grad_NO.t(), x_NI)))
        if ctx.bias is not None:
            ctx.tape.owe(ctx.bias, lambda out_O: out_O.copy_(torch.sum(grad_NO, 0)))
        if not ctx.needs_input_grad[0]:  # no stage before the first waits for it
            return None, None, None, None
        return grad_NO.mm(ctx.tape.casts.of(ctx.weight, x.dtype)).view_as(x), None, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, tape: Tape) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.tape = weight, tape
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        x, grad = x.detach(), grads[0]  # as above
        ctx.tape.owe(ctx.weight, lambda out_D: out_D.copy_((grad * x).sum_to_size(out_D.shape)))
        return (grad * weight if ctx.needs_input_grad[0] else None), None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Parameter, tape: Tape) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.tape = weight, tape
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        grad, rows, summed = grads[0], ctx.weight.shape[0], torch.ops.aten.embedding_dense_backward
        ctx.tape.owe(ctx.weight, lambda out_VD: out_VD.copy_(summed(grad, ids, rows, -1, False)))
        return None, None, None


def linear(x: Tensor, weight: Parameter, bias: Parameter | None, tape: Tape | None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O], in the dtype of operands. With a tape, weight gradients
    are owed."""
    dtype = operand_dtype(x.device)
    if dtype is not None:
        x = x.to(dtype)
    if tape is not None:
        return _apply(_Linear, x, weight, bias, tape)
    if dtype is None:
        return F.linear(x, weight, bias)
    return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))


def scale(x: Tensor, weight: Parameter, tape: Tape | None) -> Tensor:
    """x [..., D] times weight [D], elementwise. With a tape, the weight gradient is owed."""
    return _apply(_Scale, x, weight, tape) if tape is not None and weight.requires_grad else x * weight


def embedding(ids: Tensor, weight: Parameter, tape: Tape | None) -> Tensor:
    """Rows `ids` of weight [V, D], fp32 also where that rests in bf16. With a tape, the weight gradient is owed."""
    if tape is not None and weight.requires_grad:
        return _apply(_Embedding, ids, weight, tape)
    found = F.embedding(ids, weight)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    y: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return y
