"""Any event as one line of valid JSON. What JSON has no word for is written as text; knows no file."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Set
from typing import Any


def encode(values: Mapping[str, Any]) -> str:
    """One line of JSON, ASCII only: no value can break the line or reach a terminal as a control character.

    NaN and infinities become "nan", "inf", "-inf"; bytes hex; sets sorted lists; enums their values; the rest `str`.
    """
    return json.dumps(plain(values), allow_nan=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """`value` in JSON's own types."""
    match value:
        case enum.Enum():
            return plain(value.value)
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case Mapping():
            return {str(key): plain(inner) for key, inner in value.items()}
        case Set():
            return sorted((plain(inner) for inner in value), key=lambda inner: (str(type(inner)), inner))
        case list() | tuple():
            return [plain(inner) for inner in value]
    return str(value)
