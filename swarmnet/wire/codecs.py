"""Turn tensors into bytes and back: the codecs a tensor may travel under.

    fp32    exact                          4 bytes an element
    bf16    round to nearest even          2 bytes, relative error at most 2^-8
    int8    square-root companded blocks   1 byte + 4 per 256 elements (see `codec_int8`)
    int64   fixed-point sums, exact        8 bytes
    int32   token ids, exact               4 bytes
    uint8   opaque bytes, exact            1 byte

Data is little endian and carries no header: codec and shape travel beside it in a `Packed`. Decoders are total: bytes
in, a tensor or BadMessage out. No NaN or infinity crosses in either direction. Every operation is elementwise IEEE
arithmetic (or a maximum), so results depend neither on the number of threads nor on the machine that decodes.

Sizes are computed without torch, which is imported on the first tensor. Knows no transport and no limits of a run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmnet.errors import BadMessage, Overflow, RejectCode
from swarmnet.messages import Packed

if TYPE_CHECKING:
    import torch

if sys.byteorder != "little":
    raise ImportError("swarmnet sends little-endian memory as it is and does not run on big-endian machines")

NAMES = ("int64", "fp32", "bf16", "int8", "int32", "uint8")
FLOATS = ("fp32", "bf16", "int8")

MAX_RANK = 8
MAX_ELEMENTS = 1 << 40
"""More than any tensor we know how to send; framing applies the run's own, far lower limit in bytes."""

INT8_BLOCK = 256
_ELEMENT_BYTES = {"int64": 8, "fp32": 4, "bf16": 2, "int8": 1, "int32": 4, "uint8": 1}
_CHUNK = 1 << 17
"""Elements handled at a time where several passes are made: small enough to stay in a core's cache."""


# ---------------------------------------------------------------- sizes: no torch


def num_elements(shape: Sequence[int]) -> int:
    """Elements of `shape`. Raises BadMessage: BAD_SHAPE (rank, negative, not an integer), TOO_LARGE."""
    if len(shape) > MAX_RANK:
        raise BadMessage(RejectCode.BAD_SHAPE, "too many dimensions", rank=len(shape), max_rank=MAX_RANK)
    extent = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise BadMessage(RejectCode.BAD_SHAPE, "dimensions must be integers >= 0", shape=tuple(shape))
        extent *= max(size, 1)          # (0, 2^60) holds nothing, yet its strides overflow
        if extent > MAX_ELEMENTS:
            raise BadMessage(RejectCode.TOO_LARGE, "too many elements", max_elements=MAX_ELEMENTS)
    return math.prod(shape)


def encoded_bytes(name: str, shape: Sequence[int]) -> int:
    """Exact length of `shape` under codec `name`: what framing checks before it takes memory.

    Raises BadMessage: MALFORMED (unknown codec), BAD_SHAPE, TOO_LARGE.
    """
    if name not in _ELEMENT_BYTES:
        raise BadMessage(RejectCode.MALFORMED, "unknown codec", codec=str(name)[:32])
    total = num_elements(shape)
    scales = 4 * -(-total // INT8_BLOCK) if name == "int8" else 0
    return scales + total * _ELEMENT_BYTES[name]


def check_packed(
    packed: Packed, *, expect_shape: Sequence[int] | None = None, expect_codec: str | None = None
) -> None:
    """Raise BadMessage unless codec, shape and length fit together and are the expected ones, where any are."""
    expected = encoded_bytes(packed.codec, packed.shape)
    if expect_codec is not None and packed.codec != expect_codec:
        raise BadMessage(RejectCode.MALFORMED, "unexpected codec", codec=packed.codec, expected=expect_codec)
    if expect_shape is not None and tuple(packed.shape) != tuple(expect_shape):
        raise BadMessage(RejectCode.BAD_SHAPE, "unexpected shape", shape=packed.shape, expected=tuple(expect_shape))
    if packed.num_bytes != expected:
        raise BadMessage(
            RejectCode.MALFORMED, "wrong length", codec=packed.codec, shape=packed.shape,
            num_bytes=packed.num_bytes, expected=expected,
        )


# ---------------------------------------------------------------- encode


def encode(name: str, tensor: torch.Tensor) -> Packed:
    """Encode `tensor`, from any device. The float codecs take any float dtype, the others exactly their own.

    The data is a view of the tensor's own memory where its bytes are already the encoding (contiguous, on the CPU, of
    the codec's dtype): do not change the tensor while the Packed lives. Finite values beyond bf16's range become its
    largest value. Raises BadMessage(NON_FINITE) if a float is NaN or infinite, TypeError for a wrong dtype.
    """
    import torch

    source = tensor.detach()
    shape = tuple(source.shape)
    encoded_bytes(name, shape)
    if not (source.is_floating_point() if name in FLOATS else source.dtype == _dtype(name)):
        raise TypeError(f"codec {name} does not take {source.dtype}")
    if name == "int8":
        from swarmnet.wire import codec_int8

        return Packed(name, shape, _memory(codec_int8.encode(source.to(torch.float32).reshape(-1))))
    encoded = source.to(_dtype(name)).contiguous()
    if name in FLOATS and not is_finite(encoded):
        check_finite(source)
        largest = torch.finfo(encoded.dtype).max
        encoded = source.clamp(-largest, largest).to(encoded.dtype).contiguous()
    return Packed(name, shape, _memory(encoded))


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor; keeps it alive. Copies only from a device."""
    import torch

    flat = tensor.cpu().as_strided((tensor.numel(),), (1,))    # stride 1 also where there are 0 or 1 elements
    return flat.view(torch.uint8).numpy().data


# ---------------------------------------------------------------- decode


def decode(
    packed: Packed,
    *,
    expect_shape: Sequence[int] | None = None,
    expect_codec: str | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Decode into a fresh, contiguous tensor that shares no memory with `packed`.

    fp32 for the float codecs, else the codec's own dtype. Raises BadMessage: MALFORMED (codec, length, an int8 code
    outside [-127, 127]), BAD_SHAPE, TOO_LARGE, NON_FINITE.
    """
    import torch

    check_packed(packed, expect_shape=expect_shape, expect_codec=expect_codec)
    dtype = torch.float32 if packed.codec in FLOATS else _dtype(packed.codec)
    out = torch.empty(packed.shape, dtype=dtype, device=device)
    _write(out.view(-1), packed)
    return out


def decode_into(out: torch.Tensor, packed: Packed) -> None:
    """Decode over `out` (contiguous, any shape of as many elements, the dtype `decode` would give).

    Raises what `decode` raises; what `out` then holds is undefined. BAD_SHAPE if the number of elements differs.
    """
    check_packed(packed)
    _write(_flat(out, packed), packed)


def add_decoded(accumulator: torch.Tensor, packed: Packed) -> None:
    """Add the decoded tensor to `accumulator` (as for `decode_into`) without building it: the reducer's inner loop.

    Bit-equal to `accumulator += decode(packed)`. Raises what `decode` raises, and Overflow if an int64 sum would
    leave int64; the accumulator is then unchanged. A float sum may overflow to infinity: `encode` refuses it later.
    """
    check_packed(packed)
    out = _flat(accumulator, packed)
    if packed.codec not in FLOATS:
        values = _elements(packed, out)
        if packed.codec == "int64":
            _check_sum(out, values)
        out.add_(values)
    elif packed.codec == "int8":
        from swarmnet.wire import codec_int8

        codec_int8.decode(_bytes(packed).to(out.device), out, add=True)
    else:
        values = _elements(packed, out)
        check_finite(values)
        out.add_(values)         # bf16 widens to fp32 inside the addition


def _write(out: torch.Tensor, packed: Packed) -> None:
    if packed.codec == "int8":
        from swarmnet.wire import codec_int8

        codec_int8.decode(_bytes(packed).to(out.device), out, add=False)
        return
    out.copy_(_elements(packed, out))
    if packed.codec in FLOATS:
        check_finite(out)


def _flat(out: torch.Tensor, packed: Packed) -> torch.Tensor:
    import torch

    dtype = torch.float32 if packed.codec in FLOATS else _dtype(packed.codec)
    if out.dtype != dtype:
        raise TypeError(f"codec {packed.codec} decodes to {dtype}, not {out.dtype}")
    if out.numel() != num_elements(packed.shape):
        raise BadMessage(RejectCode.BAD_SHAPE, "unexpected size", shape=packed.shape, expected=tuple(out.shape))
    return out.view(-1)


def _elements(packed: Packed, out: torch.Tensor) -> torch.Tensor:
    """The stored elements, flat, on `out`'s device; on the CPU a view of the packed bytes."""
    return _bytes(packed).view(_dtype(packed.codec)).to(out.device)


def _bytes(packed: Packed) -> torch.Tensor:
    """The packed bytes as a uint8 tensor, without a copy unless they are read-only or not aligned to 8 bytes."""
    import torch

    if not packed.num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    data = packed.data
    if memoryview(data).readonly:
        data = bytearray(data)
    held = torch.frombuffer(data, dtype=torch.uint8)
    return held.clone() if held.data_ptr() % 8 else held


def _dtype(name: str) -> torch.dtype:
    import torch

    return {
        "int64": torch.int64, "fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32,
        "uint8": torch.uint8, "int8": torch.int8,
    }[name]


# ---------------------------------------------------------------- checks


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or infinite. One reading pass: a sum is finite only if all its terms are."""
    import torch

    if math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())      # or finite terms overflowed


def check_finite(tensor: torch.Tensor) -> None:
    """Raise BadMessage(NON_FINITE) if any element is NaN or infinite."""
    if not is_finite(tensor):
        raise BadMessage(RejectCode.NON_FINITE, "NaN or infinity in a tensor", shape=tuple(tensor.shape))


def _check_sum(left: torch.Tensor, right: torch.Tensor) -> None:
    """Raise Overflow if an element of left + right leaves int64. Ranges first, elements only where ranges touch."""
    import torch

    for start in range(0, left.numel(), _CHUNK):
        a, b = left[start : start + _CHUNK], right[start : start + _CHUNK]
        low, high = (int(x) + int(y) for x, y in zip(torch.aminmax(a), torch.aminmax(b), strict=True))
        if low >= -(1 << 63) and high < 1 << 63:
            continue
        total = a + b
        if bool((((a ^ total) & (b ^ total)) < 0).any()):
            raise Overflow("a fixed-point sum would leave int64: lower numerics.grid_bits or the learning rate")
