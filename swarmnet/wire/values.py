"""Does what came hold usable numbers? Looked at in the bytes as they came: no copy, no decoding, no torch.

What passes here decodes without BadMessage. It knows nothing of what the numbers mean.
"""

from __future__ import annotations

import numpy as np

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.messages import Packed
from swarmnet.wire.codecs import check_packed, find, num_elements


def check_values(packed: Packed) -> None:
    """Raise BadMessage: MALFORMED (length, unknown codec, a code no encoder writes), BAD_SHAPE, TOO_LARGE,
    NON_FINITE (NaN, infinity, or a scale that is)."""
    check_packed(packed)
    find(packed.codec).check(np.frombuffer(packed.data, np.uint8), num_elements(packed.shape))


def check_range(packed: Packed, *, below: int) -> None:
    """Raise BadMessage(MALFORMED) unless all numbers of an int32 tensor are in [0, below)."""
    numbers = np.frombuffer(packed.data, "<i4")
    if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < below):
        raise BadMessage(RejectCode.MALFORMED, "a number outside its range", below=below)
