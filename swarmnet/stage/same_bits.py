"""Arithmetic that has the same bits on every machine: what an update is made of (docs/numerics.md).

IEEE 754 rounds +, -, *, / and the square root in one way. What libraries make of more than one of them is theirs to
choose: which root a kernel takes, in which order it sums, how a power or a cosine is approximated. So these are here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swarmnet.wire import kernels


def fp32(number: float) -> float:
    """`number` rounded to fp32: what a kernel would make of it, said here, so that no device has a say in it."""
    return float(np.float32(number))


def power(base: float, exponent: int) -> float:
    """base^exponent in fp64 by products alone, the exponent's lowest bit first."""
    found = 1.0
    while exponent:
        found = found * base if exponent & 1 else found
        base, exponent = base * base, exponent >> 1
    return found


def cosine(angle: float) -> float:
    """Of [0, pi], in fp64: 20 terms of the series, from the first to the last."""
    term = found = 1.0
    for n in range(2, 42, 2):
        term *= -angle * angle / (n * (n - 1))
        found += term
    return found


def root(values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Square roots of fp32. On a CPU torch's are MKL's, which are off by a digit for one number in five."""
    if values.device.type != "cpu":
        return torch.sqrt(values, out=out)
    found = torch.empty_like(values) if out is None else out
    np.sqrt(values.numpy(), out=found.numpy())
    return found


def squares(values: Tensor, unit: float = 1.0) -> float:
    """Sum of the squares of flat floats, or of int64, in that unit, a power of two: in fp64, of `summed`'s bits."""
    if (native := kernels.of(values)) is not None:
        return native.squares(values, unit)
    return summed((values.to(torch.float64) * unit).square_())


def summed(terms: Tensor) -> float:
    """Sum of flat `terms`, which are overwritten: the second half is added to the first, until one is left.

    A kernel that sums takes an order by the width of its vectors.
    """
    left = terms.numel()
    while left > 1:
        half = (left + 1) // 2
        terms[: left - half].add_(terms[half:left])
        left = half
    return float(terms[0].item()) if left else 0.0
