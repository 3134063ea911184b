"""4-bit NormalFloat: a matrix in half a byte a number (QLoRA, arXiv:2305.14314, without double quantisation).

Each block of 64 consecutive numbers of a row is divided by its largest magnitude, and each quotient replaced by the
number of the nearest of 16 values. A number comes back as one fp32 product, value times magnitude, so it has the same
bits on every device. bitsandbytes does it where a check at first use finds its bits equal to these, a table else.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from swarmnet.manifest.schema import NF4_BLOCK as BLOCK
from swarmnet.wire.codec_blocks import NF4, NORMAL_FLOAT


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, largest magnitudes) of an fp32 matrix [R, C] with C a multiple of `BLOCK`, on the CPU: uint8 [R, C / 2],
    two a byte, the first one in the upper half; fp32 [R, C / 64]."""
    rows, columns = matrix.shape
    blocks = matrix.detach().reshape(-1, BLOCK)
    most = blocks.abs().amax(1)
    # Subnormal numbers are zeros: not every processor computes with them, and their inverse is no number.
    most = torch.where(most >= torch.finfo(torch.float32).tiny, most, 0.0)
    scaled = blocks * torch.where(most > 0, 1 / most, 0.0).unsqueeze(1)
    values = torch.tensor(NORMAL_FLOAT)
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8).view(rows, -1)
    return codes[:, 0::2] << 4 | codes[:, 1::2], most.view(rows, columns // BLOCK)


def dequantise(codes: Tensor, most: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [R, C] that `quantise` has made these of, in `dtype`; fresh memory."""
    found = _bitsandbytes(codes.device.type)
    if found is not None:
        return _by_bitsandbytes(found, codes, most).to(dtype)
    return _by_table(codes, most).to(dtype)


def _by_table(codes: Tensor, most: Tensor) -> Tensor:
    """fp32."""
    found = NF4.values(codes.reshape(-1)).view(-1, BLOCK)
    return found.mul_(most.reshape(-1, 1)).view(len(codes), -1)


# ---------------------------------------------------------------- bitsandbytes


@functools.cache
def _bitsandbytes(device_type: str) -> Any:
    """Its functions, if it is installed and gives the bits of the table on that kind of device; else None."""
    try:
        import bitsandbytes.functional as found
    except Exception:  # without a matching driver its import raises what it likes
        return None
    device, generator = torch.device(device_type), torch.Generator().manual_seed(0)
    for shape in ((3, 64), (70, 192), (64, 1024)):
        codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator, dtype=torch.uint8).to(device)
        most = torch.rand(shape[0], shape[1] // BLOCK, generator=generator).to(device)
        try:
            same = torch.equal(_by_bitsandbytes(found, codes, most), _by_table(codes, most))
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
            return None
        if not same:
            return None
    return found


def _by_bitsandbytes(found: Any, codes: Tensor, most: Tensor) -> Tensor:
    """fp32."""
    # Flat: for the last dimension of a matrix its CPU kernel is wrong unless that is a multiple of its block.
    flat = torch.Size([2 * codes.numel()])
    state = found.QuantState(
        absmax=most.reshape(-1),
        shape=flat,
        code=torch.tensor(NORMAL_FLOAT, device=codes.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=torch.float32,
    )
    matrix: Tensor = found.dequantize_4bit(codes.reshape(-1, 1), state)
    return matrix.view(len(codes), -1)
