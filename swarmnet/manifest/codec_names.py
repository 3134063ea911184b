"""The names of codecs as a manifest writes them: which there are, how they are spelled, and where each makes sense.

A name is a family, and for some families a parameter after a colon: `sparse:0.05`. A parameter has one
spelling only, so that equal runs have equal ids. Families of our own contain no dot; those of other distributions do
(`config.plug_in`).

Knows names, no bytes: `swarmnet.wire.codecs` turns one into a codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from swarmnet.config.plug_in import is_plug_in, split

if TYPE_CHECKING:  # the schema checks names with this module
    from swarmnet.manifest.schema import Manifest

BOUNDARY = ("fp32", "bf16", "fp16", "int8", "bnb8", "nf4")
"""Codecs of activations and their gradients."""

INTEGERS = ("small", "int64")
"""Codecs of aggregates with `averaging.sync` "exact" and "overlap"."""

LOCAL = ("fp32", "fp16", "int8", "nf4")
"""Codecs of float vectors, with `averaging.sync = "local"`; so is `sparse:F`."""

DIFFERENCES = ("int8", "nf4")
"""Codecs of which gossip partners send the difference to the last vector they agreed on: they would spoil weights."""

LARGEST_FRACTION = 0.25


def fraction(parameter: str | None) -> float:
    """The parameter of `sparse`. Raises ValueError, in words."""
    advice = f"sparse:F sends a fraction F of the elements, above 0 and at most {LARGEST_FRACTION}, such as sparse:0.05"
    try:
        value = float(parameter or "")
    except ValueError:
        raise ValueError(advice) from None
    if not 0.0 < value <= LARGEST_FRACTION:
        raise ValueError(advice)
    # 0.010 and 0.01 would be two runs.
    if repr(value) != parameter:
        raise ValueError(f"write sparse:{value!r}: equal runs are spelled alike")
    return value


def check_boundary(name: str) -> str:
    """`name`, if activations and their gradients may cross a stage boundary under it. Raises ValueError, in words."""
    if name in BOUNDARY or is_plug_in(name):
        return name
    raise ValueError(f"must be one of {', '.join(BOUNDARY)}, or a plug-in's such as acme.ternary")


def check_averaging(name: str) -> str:
    """`name`, if it is a codec of aggregates, or of the float vectors of local sync. Raises ValueError, in words."""
    if name in (*INTEGERS, *LOCAL) or is_plug_in(name):
        return name
    family, parameter = split(name)
    if family == "sparse":
        fraction(parameter)
        return name
    raise ValueError(
        'must be "small" or "int64" (sync = "exact" or "overlap", numerics.mode = "fast"), or '
        f'{", ".join(LOCAL)}, sparse:0.05 or a plug-in\'s such as acme.ternary (sync = "local")'
    )


Named = tuple[str, Literal["codec", "reducer", "optimizer"], str]
"""(field of a manifest, what it names, the name)."""


def named_by(manifest: Manifest) -> tuple[Named, ...]:
    """What a manifest asks for by names that other distributions may bring."""
    return (
        ("averaging.reducer", "reducer", manifest.averaging.reducer),
        ("optimizer.name", "optimizer", manifest.optimizer.name),
        ("averaging.codec", "codec", manifest.averaging.codec),
        ("wire.activations", "codec", manifest.wire.activations),
        ("wire.gradients", "codec", manifest.wire.gradients),
        *((("wire.slow", "codec", manifest.wire.slow),) if manifest.wire.slow else ()),
    )
