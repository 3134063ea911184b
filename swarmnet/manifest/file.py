"""A run's manifest as a TOML file: read it, change it, write it; and the run id, which is the hash of what it says.

The run id covers the fields that the file names. A field that it leaves out has the default of the file's `format`,
which never changes (`schema.FORMATS`), so that a later release with more fields, or with other defaults in a new
format, changes no run. What is hashed is canonical JSON (RFC 8785), which prints one form for one value: `1` and `1.0`
in a field of floats are the same number and the same bytes, and the order of keys, the comments and the layout of the
file do not show in it. Knows no network and no data: `swarmnet init` fills in the digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import rfc8785

from swarmnet.config import toml
from swarmnet.config.check import SettingsLayer, dotted, layer, leaves, resolve
from swarmnet.errors import UsageError
from swarmnet.ids import RunId
from swarmnet.manifest.schema import FORMATS, OPTIONAL, REMOVED, Manifest


def load(source: Path | str, *, where: str = "manifest") -> Manifest:
    """Read a manifest from a path, or from text (a str with a line break), named `where` in errors.

    Raises UsageError, one line: unreadable, empty, not TOML, an unknown key or format, a wrong type or range.
    """
    if isinstance(source, str) and "\n" in source:
        # A path has no line break in it, and a manifest has several.
        data = toml.parse(source, where=where)
    else:
        where, data = str(source), toml.read(Path(source))
    if not data:
        raise UsageError(f"{where}: names no field; `swarmnet init` writes a manifest")
    # The two files that `init` writes are in the same directory.
    if not data.keys() & Manifest.model_fields.keys() and {"slots", "device"} & data.keys():
        raise UsageError(f"{where}: is a peer config: --config takes it; a manifest is the other file of `init`")
    for name, instead in REMOVED.items():
        if _named(data, name.split(".")):
            raise UsageError(f"{where}: {name} is no longer a field: delete the line ({instead})")
    # Without a format it is the first one, whatever the newest is.
    number = data.get("format", 1)
    other = FORMATS.get(number, {}) if type(number) is int else {}
    defaults = [layer(where, tuple(name.split(".")), value) for name, value in {"format": 1, **other}.items()]
    manifest = resolve(Manifest, [*defaults, SettingsLayer(where, data)], where=where)
    absent = OPTIONAL - data.keys()
    return manifest.leaving_out(
        dotted(path) for path, _ in leaves(Manifest) if path[0] not in absent and not _named(data, path)
    )


def override(manifest: Manifest, assignments: Sequence[str], *, where: str = "--set") -> Manifest:
    """`manifest` with `section.key=value` assignments laid over it: another run, with another run id.

    Raises UsageError in the name of the assignment.
    """
    changes = [layer(where, *toml.assignment(text, where=where)) for text in assignments]
    return change(manifest, changes, where=where)


def change(manifest: Manifest, changes: Sequence[SettingsLayer], *, where: str) -> Manifest:
    """`manifest` with `changes` laid over it. Raises UsageError in the name of the change, or of `where`."""
    changed = resolve(Manifest, [SettingsLayer(where, manifest.model_dump(mode="json")), *changes], where=where)
    named = [each.values for each in changes]
    return changed.leaving_out(
        name for name in manifest.left_out if not any(_named(values, name.split(".")) for values in named)
    )


def to_toml(manifest: Manifest) -> str:
    """`manifest` as a commented file. `load` of it gives an equal manifest, with the same run id."""
    return toml.write(manifest, left_out=_still_left_out(manifest))


def _named(data: Any, path: Sequence[str]) -> bool:
    """Does `data` have a value at `path`?"""
    for name in path:
        if not (isinstance(data, Mapping) and name in data):
            return False
        data = data[name]
    return True


# ------------------------------------------------------------ the run id


def canonical_bytes(manifest: Manifest) -> bytes:
    """Canonical JSON (RFC 8785) of every field that the file of `manifest` names, in UTF-8."""
    return rfc8785.dumps(_without(manifest.model_dump(mode="json"), _still_left_out(manifest)))


def run_id(manifest: Manifest) -> RunId:
    """SHA-256 of the canonical bytes, 64 hex digits."""
    return RunId(hashlib.sha256(canonical_bytes(manifest)).hexdigest())


def completed_hash(manifest: Manifest) -> bytes:
    """SHA-256 of the canonical JSON of every field of `manifest`, those that its file leaves out included."""
    values = manifest.model_dump(mode="json")
    return hashlib.sha256(rfc8785.dumps(_without(values, _absent(values)))).digest()


def filled_in(manifest: Manifest) -> str:
    """What this version takes the fields for that the file leaves out: a line `name = JSON` each, in order."""
    values = manifest.model_dump(mode="json")
    return "\n".join(
        f"{name} = {rfc8785.dumps(_value(values, name)).decode()}"
        for name in sorted(_still_left_out(manifest) - OPTIONAL)
    )


def _still_left_out(manifest: Manifest) -> frozenset[str]:
    """The fields, and tables, that a file of `manifest` leaves out. One that has been given a value since must be in
    it."""
    values, usual = manifest.model_dump(mode="json"), Manifest().model_dump(mode="json")
    other = {"format": 1, **FORMATS[manifest.format]}
    same = (name for name in manifest.left_out if _value(values, name) == other.get(name, _value(usual, name)))
    return _absent(values) | frozenset(same)


def _absent(values: Mapping[str, Any]) -> frozenset[str]:
    """Optional tables that say nothing."""
    usual = Manifest().model_dump(mode="json")
    return frozenset(name for name in OPTIONAL if values[name] == usual[name])


def _value(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


def _without(values: Mapping[str, Any], names: Container[str], prefix: str = "") -> dict[str, Any]:
    """`values` but for those fields, and for tables of which then nothing is left."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = _without(value, names, f"{prefix}{key}.") if isinstance(value, dict) else value
        if f"{prefix}{key}" not in names and inner != {}:
            found[key] = inner
    return found
