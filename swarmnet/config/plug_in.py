"""What other distributions bring, found by name: `acme.ternary`, or `acme.ternary:3` with a parameter.

The part before the colon is the name of an entry point in one of `GROUPS`. It contains a dot. Our own names contain
none, so an installed plug-in never replaces one of ours, now or in a later release. The entry point
leads to a callable that takes the parameter (None if there is no colon) and returns what its group is for.

Names come from this machine's manifest or peer config, never from what a peer sends. docs/extending.md shows each
group.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

from swarmnet.errors import UsageError

GROUPS = {
    "codec": "swarmnet.codecs",
    "reducer": "swarmnet.reducers",
    "optimizer": "swarmnet.optimizers",
    "routing rule": "swarmnet.routing_rules",
    "placement rule": "swarmnet.placement_rules",
}

_FAMILY = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")
_MAX_CHARACTERS = 32


def split(name: str) -> tuple[str, str | None]:
    """`sparse:0.05` as ("sparse", "0.05"), `fp32` as ("fp32", None)."""
    family, colon, parameter = name.partition(":")
    return family, parameter if colon else None


def is_plug_in(name: str) -> bool:
    """Is it spelled as a name of another distribution?"""
    family, parameter = split(name)
    return len(name) <= _MAX_CHARACTERS and _FAMILY.fullmatch(family) is not None and parameter != ""


def one_of(name: str, ours: Sequence[str]) -> str:
    """`name`, if it is one of ours or spelled as another distribution's. Raises ValueError, in words."""
    if name in ours or is_plug_in(name):
        return name
    raise ValueError(f"must be one of {', '.join(ours)}, or a plug-in's such as acme.mine")


def load(kind: str, name: str, *, field: str = "", needs: Sequence[str] = ("__call__",)) -> tuple[Any, str]:
    """Make what another distribution brings under `name`.

    Args:
        kind: a key of `GROUPS`.
        field: of a manifest or peer config, that has the name; errors begin with it.
        needs: attributes without which it is no such thing.

    Returns: the plug-in, and its source, in words for errors about it.

    Raises: UsageError, one line: nothing installed has it, more than one does, it cannot be loaded, or it lacks
        something.
    """
    family, parameter = split(name)
    head = f"{field}: " if field else ""
    found = list(importlib.metadata.entry_points(group=GROUPS[kind], name=family))
    if not found:
        raise UsageError(
            f"{head}{kind} {name}: no installed distribution has an entry point {family!r} in group {GROUPS[kind]!r}; "
            "install the one that brings it"
        )
    brought = sorted({entry.dist.name if entry.dist else entry.value for entry in found})
    # Which of two would be taken may differ between machines of one run.
    if len(found) > 1:
        raise UsageError(f"{head}{kind} {name}: brought by {' and by '.join(brought)}; uninstall all but one")
    where = f"{head}{kind} {name} of distribution {brought[0]}"
    try:
        # Code of another distribution runs from here on.
        made = found[0].load()(parameter)
    except Exception as error:  # foreign code: whatever it raises, its distribution is to blame
        raise UsageError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    # Found now, in words, and not by an AttributeError in the middle of a step.
    if lacking := [each for each in needs if not hasattr(made, each)]:
        raise UsageError(f"{where} is no {kind}: it has no {', no '.join(lacking)}")
    return made, where
