"""Turn tensors into bytes and back: what the rest of the package calls, for any codec by name.

    fp32     exact                              4 bytes an element         codec_casts
    bf16     round to nearest even              2                          codec_casts
    fp16     a power of two per block           2 + 4 per 65536            codec_blocks
    int8     square-root companded blocks       1 + 4 per 256              codec_blocks
    bnb8     bitsandbytes' dynamic map          1 + 4 per 256              codec_blocks
    nf4      4-bit NormalFloat                  1/2 + 4 per 64             codec_blocks
    sparse:F the largest of each block          about 1.5 F                codec_sparse
    sparse   all but zeros, in 4 bits           at most 5/8                codec_sparse
    int64, int32, uint8                         exact integers             codec_casts
    small    exact integers, by blocks          bits of the largest in 64   codec_planes

and those of other distributions. Data is little endian and carries no header of its own: codec and shape travel in the
same `Packed`. Decoders are total: bytes in, a tensor or BadMessage out. No NaN or infinity crosses in either
direction. Every decoding operation is elementwise IEEE arithmetic, so results depend neither on the number of threads
nor on the machine that decodes.

Sizes are computed without torch, which is imported on the first tensor. Knows no transport and no limits of a run.

Codecs of other distributions are entry points of the group `swarmnet.codecs` (`config.plug_in`): each leads to a
callable that takes the parameter and returns a `wire.codec.Codec` of that full name. What a peer sends can name a codec
but not have one loaded: `find` knows ours and those that this process's own manifest asked for with `use`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from swarmnet.config import plug_in
from swarmnet.config.plug_in import is_plug_in, split
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.manifest.codec_names import Named
from swarmnet.messages import Packed
from swarmnet.wire.codec import MAX_BLOCK, Codec, malformed, memory, non_finite, num_elements
from swarmnet.wire.codec_blocks import BLOCKWISE
from swarmnet.wire.codec_casts import CASTS
from swarmnet.wire.codec_planes import Planes
from swarmnet.wire.codec_sparse import Sparse, sparse

if TYPE_CHECKING:
    import torch

# ---------------------------------------------------------------- by name


_PLAIN: dict[str, Codec] = {codec.name: codec for codec in (*CASTS, *BLOCKWISE, Sparse(), Planes())}
_MAX_CHARACTERS = 32
_used: dict[str, Codec] = {}

NAMES = tuple(_PLAIN)
"""All of ours that have no parameter."""


def find(name: str) -> Codec:
    """The codec of that name. Raises BadMessage(MALFORMED) if there is none in this process."""
    codec = _PLAIN.get(name) or _used.get(name) or (_with_parameter(name) if len(name) <= _MAX_CHARACTERS else None)
    if codec is None:
        raise malformed("unknown codec", codec=str(name)[:32])
    return codec


def use(name: str) -> Codec:
    """The codec of that name, loaded if another distribution brings it. For names from a manifest only.

    Raises UsageError: nothing installed has it, more than one does, or what has it is no codec.
    """
    if not is_plug_in(name):
        try:
            return find(name)
        except BadMessage as error:
            raise UsageError(f"{name}: no codec of swarmnet's") from error
    # Only names of our own manifest come here: no peer can have code loaded.
    if name not in _used:
        _used[name] = _load(name)
    return _used[name]


def use_all(named: Iterable[Named]) -> None:
    """Load what a run asks of other distributions, so that what is not installed is said before anything starts.

    Raises UsageError as `use` does, in the name of the field.
    """
    for field, kind, name in named:
        # Reducers and optimizers have names of their own; here they are only loaded.
        if kind != "codec":
            if is_plug_in(name):
                plug_in.load(kind, name, field=field)
            continue
        try:
            use(name)
        except UsageError as error:
            raise UsageError(f"{field}: {error}") from error


@functools.lru_cache(maxsize=64)
def _with_parameter(name: str) -> Codec | None:
    family, parameter = split(name)
    with contextlib.suppress(ValueError):
        return sparse(parameter) if family == "sparse" else None
    return None


def _load(name: str) -> Codec:
    """Raises UsageError unless it is all that a codec must be."""
    needs = ("name", "dtype", "reduced", "feedback", "block", "sizes", "check", "encode", "decode", "bound")
    codec: Codec
    codec, where = plug_in.load("codec", name, needs=needs)
    # An entry point may lead anywhere; what it returns is checked before a run depends on it.
    if codec.name != name or codec.dtype != "float32":
        raise UsageError(f"{where} is no such codec: it is {codec.name!r} for {codec.dtype!r}, not for 'float32'")
    # Every member must be able to read sums, so they travel under a codec of ours.
    if codec.reduced != name and codec.reduced not in _PLAIN:
        raise UsageError(f"{where}: its sums travel under {codec.reduced!r}, which is no codec")
    if type(codec.block) is not int or not 1 <= codec.block <= MAX_BLOCK or codec.block & (codec.block - 1):
        raise UsageError(f"{where} has blocks of {codec.block!r} elements: not a power of two up to {MAX_BLOCK}")
    # A codec with false sizes would be refused by every peer.
    for size in (0, 1, 1000):
        sizes = codec.sizes(size)
        low, high = sizes if isinstance(sizes, tuple) and len(sizes) == 2 else (-1, -1)
        if not (type(low) is type(high) is int and 0 <= low <= high <= 64 + 8 * size):
            raise UsageError(f"{where} takes {sizes!r} bytes for {size} elements: not (shortest, longest)")
    return codec


if sys.byteorder != "little":
    raise ImportError("swarmnet sends little-endian memory as it is and does not run on big-endian machines")


# ---------------------------------------------------------------- sizes: no torch


def encoded_sizes(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """Shortest and longest encoding of `shape` under codec `name`: what framing checks before it takes memory.

    Equal for most codecs; where they are not, decoding checks the rest. Raises BadMessage: MALFORMED (unknown codec),
    BAD_SHAPE, TOO_LARGE.
    """
    return find(name).sizes(num_elements(shape))


def encoded_bytes(name: str, shape: Sequence[int]) -> int:
    """The longest encoding of `shape` under codec `name`. Raises what `encoded_sizes` raises."""
    return encoded_sizes(name, shape)[1]


def check_packed(packed: Packed, *, expect_shape: Sequence[int] | None = None) -> None:
    """Raise BadMessage unless codec, shape and length fit together, and the shape is the expected one, if one is."""
    shortest, longest = encoded_sizes(packed.codec, packed.shape)
    if expect_shape is not None and tuple(packed.shape) != tuple(expect_shape):
        raise BadMessage(RejectCode.BAD_SHAPE, "unexpected shape", shape=packed.shape, expected=tuple(expect_shape))
    # Checked before decoding takes memory for the tensor.
    if not shortest <= packed.num_bytes <= longest:
        facts = {"num_bytes": packed.num_bytes, "shortest": shortest, "longest": longest}
        raise malformed("wrong length", codec=packed.codec, shape=packed.shape, **facts)


# ---------------------------------------------------------------- encode


def encode(name: str, tensor: torch.Tensor, *, apart: bool = False) -> Packed:
    """Encode `tensor`, from any device. The float codecs take any float dtype, the others exactly their own.

    The data is a view of the tensor's own memory where its bytes are already the encoding (contiguous, on the CPU, of
    the codec's dtype): do not change the tensor while the Packed lives, or ask for it `apart`. Finite values beyond the
    codec's range become its largest value. Raises BadMessage(NON_FINITE) if a float is NaN or infinite, TypeError for a
    wrong dtype.
    """
    codec, source = find(name), tensor.detach()
    shape = tuple(source.shape)
    num_elements(shape)
    if not (source.is_floating_point() if codec.dtype == "float32" else source.dtype == _dtype(codec)):
        raise TypeError(f"codec {codec.name} does not take {source.dtype}")
    data = memory(codec.encode(source.reshape(-1)))
    # The encoding is the tensor itself, which its owner goes on writing to.
    if apart and data.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        data = data.clone()
    return Packed(codec.name, shape, data.numpy().data)


# ---------------------------------------------------------------- decode


def decode(
    packed: Packed, *, expect_shape: Sequence[int] | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """Decode into a fresh, contiguous tensor that shares no memory with `packed`.

    fp32 for the float codecs, else the codec's own dtype. Raises BadMessage: MALFORMED (codec, length, a code that no
    encoder writes), BAD_SHAPE, TOO_LARGE, NON_FINITE.
    """
    import torch

    check_packed(packed, expect_shape=expect_shape)
    codec = find(packed.codec)
    out = torch.empty(packed.shape, dtype=_dtype(codec), device=device)
    codec.decode(_bytes(packed), out.view(-1))
    return out


def decode_integers(out: torch.Tensor, packed: Packed, *, add: bool) -> int:
    """Decode `small` over `out` (contiguous int64, any shape of as many elements), or add to it.

    Returns the largest magnitude of the numbers that were decoded. Raises what `decode` raises, and Overflow if a sum
    would leave int64; where it adds, `out` is then unchanged. BAD_SHAPE if the number of elements differs.
    """
    check_packed(packed)
    codec = find(packed.codec)
    if not isinstance(codec, Planes) or out.dtype != _dtype(codec):
        raise TypeError(f"codec {packed.codec} is not small, or {out.dtype} not int64")
    # Shapes may differ: a sum is cut and joined flat.
    if out.numel() != num_elements(packed.shape):
        raise BadMessage(RejectCode.BAD_SHAPE, "unexpected size", shape=packed.shape, expected=tuple(out.shape))
    return codec.decode_integers(_bytes(packed), out.view(-1), add=add)


def _bytes(packed: Packed) -> torch.Tensor:
    """The packed bytes as a uint8 tensor that is never written to, without a copy if they are aligned to 8 bytes."""
    import torch

    # frombuffer refuses an empty buffer.
    if not packed.num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    _allow_read_only()
    held = torch.frombuffer(packed.data, dtype=torch.uint8)
    return held.clone() if held.data_ptr() % 8 else held


@functools.cache
def _allow_read_only() -> None:
    """torch warns of read-only memory, once per process, since it cannot keep a tensor from being written to."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


def _dtype(codec: Codec) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, codec.dtype)
    return dtype


# ---------------------------------------------------------------- looked at, not decoded


def check_values(packed: Packed) -> None:
    """Raise BadMessage: MALFORMED (length, unknown codec, a code no encoder writes), BAD_SHAPE, TOO_LARGE,
    NON_FINITE (NaN, infinity, or a scale that is)."""
    check_packed(packed)
    find(packed.codec).check(np.frombuffer(packed.data, np.uint8), num_elements(packed.shape))


MAX_VALUE = 2.0**40
"""No activation and no gradient of one has an element near this. Of greater ones honest peers would compute infinities,
and discard a microbatch that is good."""


def check_bounded(packed: Packed) -> None:
    """Raise what `check_values` raises; NON_FINITE also for an element beyond `MAX_VALUE`."""
    if find(packed.codec).dtype != "float32":
        return check_values(packed)
    if packed.codec == "fp32":  # the bytes as they are: nothing is decoded
        check_packed(packed)
        values = np.frombuffer(packed.data, "<f4")
    else:
        values = decode(packed).view(-1).numpy()
    # A NaN is its own least and greatest.
    if values.size and not -MAX_VALUE <= float(values.min()) <= float(values.max()) <= MAX_VALUE:
        raise non_finite(packed.shape)
    return None


def check_range(packed: Packed, *, below: int) -> None:
    """Raise BadMessage(MALFORMED) unless all numbers of an int32 tensor are in [0, below)."""
    numbers = np.frombuffer(packed.data, "<i4")
    if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < below):
        raise malformed("a number outside its range", below=below)
