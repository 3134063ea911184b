"""Does what came hold usable numbers? Looked at in the bytes as they came: no copy, no decoding, no torch.

What passes here decodes without BadMessage. It knows nothing of what the numbers mean.
"""

from __future__ import annotations

import numpy as np

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire.codecs import INT8_BLOCK, check_packed, num_elements

_BF16_EXPONENT = 0x7F80


def check_values(packed: Packed) -> None:
    """Raise BadMessage: MALFORMED (length, unknown codec, an int8 code outside [-127, 127]), BAD_SHAPE, TOO_LARGE,
    NON_FINITE (NaN, infinity, or an int8 scale below zero)."""
    check_packed(packed)
    match packed.codec:
        case "fp32":
            finite = bool(np.isfinite(np.frombuffer(packed.data, "<f4")).all())
        case "bf16":
            bits = np.frombuffer(packed.data, "<u2")
            finite = bool(((bits & _BF16_EXPONENT) != _BF16_EXPONENT).all())
        case "int8":
            num_scales = -(-num_elements(packed.shape) // INT8_BLOCK)
            scales = np.frombuffer(packed.data, "<f4", count=num_scales)
            codes = np.frombuffer(packed.data, "i1", offset=4 * num_scales)
            finite = bool((np.isfinite(scales) & (scales >= 0.0)).all())
            if finite and bool((codes == -128).any()):
                raise BadMessage(RejectCode.MALFORMED, "-128 is no int8 code")
        case _:
            return
    if not finite:
        raise BadMessage(RejectCode.NON_FINITE, "NaN or infinity in a tensor", shape=packed.shape)


def check_range(packed: Packed, *, below: int) -> None:
    """Raise BadMessage(MALFORMED) unless all numbers of an int32 tensor are in [0, below)."""
    numbers = np.frombuffer(packed.data, "<i4")
    if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < below):
        raise BadMessage(RejectCode.MALFORMED, "a number outside its range", below=below)
