"""A run's manifest as a TOML file: read it, change it, write it; and the run id, which is the hash of what it says.

A file names every field, so that a later release with other defaults changes no run id. What is hashed is canonical
JSON (RFC 8785), which prints one form for one value: `1` and `1.0` in a field of floats are the same number and the
same bytes, and the order of keys, the comments and the layout of the file do not show. Knows no network and no data:
`swarmnet init` fills in the digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import rfc8785

from swarmnet.config import toml
from swarmnet.config.check import SettingsLayer, check, layer, resolve
from swarmnet.ids import RunId
from swarmnet.manifest.schema import Manifest


def load(source: Path | str, *, where: str = "manifest") -> Manifest:
    """Read a manifest from a path, or from text (a str with a line break), named `where` in errors.

    Raises UsageError, one line: unreadable, not TOML, an unknown key, a missing field, a wrong type or range.
    """
    if isinstance(source, str) and "\n" in source:
        # A path has no line break in it, and a manifest has several.
        data = toml.parse(source, where=where)
    else:
        where, data = str(source), toml.read(Path(source))
    return check(Manifest, data, origin=lambda _: where, complete=True)


def override(manifest: Manifest, assignments: Sequence[str], *, where: str = "--set") -> Manifest:
    """`manifest` with `section.key=value` assignments laid over it: another run, with another run id.

    Raises UsageError in the name of the assignment.
    """
    changes = [layer(where, *toml.assignment(text, where=where)) for text in assignments]
    return change(manifest, changes, where=where)


def change(manifest: Manifest, changes: Sequence[SettingsLayer], *, where: str) -> Manifest:
    """`manifest` with `changes` laid over it. Raises UsageError in the name of the change, or of `where`."""
    return resolve(Manifest, [SettingsLayer(where, manifest.model_dump(mode="json")), *changes], where=where)


def to_toml(manifest: Manifest) -> str:
    """`manifest` as a commented file that names every field. `load` of it gives an equal manifest."""
    return toml.write(manifest)


# ------------------------------------------------------------ the run id


def canonical_bytes(manifest: Manifest) -> bytes:
    """Canonical JSON (RFC 8785) of every field of `manifest`, in UTF-8."""
    return rfc8785.dumps(manifest.model_dump(mode="json"))


def run_id(manifest: Manifest) -> RunId:
    """SHA-256 of the canonical bytes, 64 hex digits."""
    return RunId(hashlib.sha256(canonical_bytes(manifest)).hexdigest())
