"""The base of every table in a file of ours: frozen, strict, closed.

Knows no file and no precedence. Numbers are bounded by what RFC 8785 can print exactly: integers by 2^53 - 1, and no
NaN or infinity.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST_INTEGER = 2**53 - 1

Positive = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Seconds = Annotated[float, Field(gt=0)]


class Table(BaseModel):
    """A frozen, strict table: unknown keys, wrong types and non-finite numbers are errors.

    The class docstring and each field's `description` are the comments of the file that `config.toml.write` makes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
