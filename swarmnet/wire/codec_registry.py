"""Codecs by name: our own, and those that other distributions bring (`config.plug_in`).

An entry point of the group `swarmnet.codecs` leads to a callable that takes the parameter and returns a
`wire.codec.Codec` of that full name.

What a peer sends can name a codec but not have one loaded: `find` knows ours and those that this process's own manifest
asked for with `use`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from swarmnet.config import plug_in
from swarmnet.config.plug_in import is_plug_in, split
from swarmnet.errors import BadMessage, UsageError
from swarmnet.manifest.codec_names import Named
from swarmnet.wire.codec import MAX_BLOCK, Codec, malformed
from swarmnet.wire.codec_casts import CASTS
from swarmnet.wire.codec_fp16 import Fp16
from swarmnet.wire.codec_int8 import Int8
from swarmnet.wire.codec_mixed import Mixed
from swarmnet.wire.codec_sparse import Sparse, topk
from swarmnet.wire.codec_table import BNB8, NF4

_PLAIN: dict[str, Codec] = {codec.name: codec for codec in (*CASTS, Fp16(), Int8(), BNB8, NF4, Sparse(), Mixed())}
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
    if name not in _used:
        _used[name] = _load(name)
    return _used[name]


def use_all(named: Iterable[Named]) -> None:
    """Load what a run asks of other distributions, so that what is not installed is said before anything starts.

    Raises UsageError as `use` does, in the name of the field.
    """
    for field, kind, name in named:
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
    if family != "topk":
        return None
    try:
        return topk(parameter)
    except ValueError:
        return None


def _load(name: str) -> Codec:
    """Raises UsageError unless it is all that a codec must be."""
    codec: Codec
    codec, where = plug_in.load(
        "codec",
        name,
        needs=("name", "dtype", "reduced", "feedback", "block", "sizes", "check", "encode", "decode", "bound"),
    )
    if codec.name != name or codec.dtype != "float32":
        raise UsageError(f"{where} is no such codec: it is {codec.name!r} for {codec.dtype!r}, not for 'float32'")
    if codec.reduced != name and codec.reduced not in _PLAIN:
        raise UsageError(f"{where}: its sums travel under {codec.reduced!r}, which is no codec")
    if type(codec.block) is not int or not 1 <= codec.block <= MAX_BLOCK or codec.block & (codec.block - 1):
        raise UsageError(f"{where} has blocks of {codec.block!r} elements: not a power of two up to {MAX_BLOCK}")
    for size in (0, 1, 1000):
        sizes = codec.sizes(size)
        low, high = sizes if isinstance(sizes, tuple) and len(sizes) == 2 else (-1, -1)
        if not (type(low) is type(high) is int and 0 <= low <= high <= 64 + 8 * size):
            raise UsageError(f"{where} takes {sizes!r} bytes for {size} elements: not (shortest, longest)")
    return codec
