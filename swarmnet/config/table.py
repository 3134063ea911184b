"""The base of every table in a file of ours: frozen, strict, closed.

Knows no file and no precedence. Numbers are bounded by what RFC 8785 can print exactly: integers by 2^53 - 1, and no
NaN or infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

LARGEST_INTEGER = 2**53 - 1

Positive = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class CliOption:
    """Part of a field's type (`Annotated`): commands have an option for it, and its description is the help."""

    metavar: str | None = None
    """What stands for the value in the help; None: the choices, or nothing."""
    name: str = ""
    """Without its dashes; by default the field's own."""
    default: str = ""
    """What the help says the default is, where the field's own does not say it."""
    variable: bool = True
    """May the environment say it, too?"""
    help: str = ""
    """The description, of a field that has no other."""
    live: bool = False
    """Can `swarmnet control limits` change it while the peer runs?"""


class Table(BaseModel):
    """A frozen, strict table: unknown keys, wrong types and non-finite numbers are errors.

    The class docstring and each field's `description` are the comments of the file that `config.toml.write` makes, and
    descriptions are the help of the options that a `CliOption` declares.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def says(default: Any, description: str, **more: Any) -> Any:
    """A field of a table: pydantic's `Field` with its default, and what it is in words."""
    return Field(default=default, description=description, **more)
