"""One precedence for every setting of a peer: flag > `--set` > environment > file > default.

A layer is what one origin says, as nested data; the last layer that names a path wins, and an error names the origin
that won. Knows neither click nor the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmnet.config.check import check
from swarmnet.config.table import Table

T = TypeVar("T", bound=Table)
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """What `origin` ("peer.toml", "SWARMNET_PORT", "--port") says."""

    origin: str
    values: Mapping[str, Any]


def layer(origin: str, path: Path, value: Any) -> SettingsLayer:
    """A layer that sets one path."""
    for name in reversed(path):
        value = {name: value}
    return SettingsLayer(origin, value)


def merge(layers: Iterable[SettingsLayer]) -> tuple[dict[str, Any], dict[Path, str]]:
    """Lay `layers` over each other, weakest first. Returns the data and who set each path."""
    data: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for each in layers:
        _lay(data, each.values, each.origin, (), origins)
    return data, origins


def resolve(model: type[T], layers: Iterable[SettingsLayer], *, where: str) -> T:
    """Merge, then check. Raises UsageError in the name of the layer that set the wrong value, else of `where`."""
    data, origins = merge(layers)

    def origin(path: Path) -> str:
        while path and path not in origins:
            path = path[:-1]
        return origins.get(path, where)

    return check(model, data, origin=origin)


def _lay(data: dict[str, Any], values: Mapping[str, Any], origin: str, prefix: Path, origins: dict[Path, str]) -> None:
    for name, value in values.items():
        path = (*prefix, name)
        origins[path] = origin
        if isinstance(value, Mapping):
            if not isinstance(data.get(name), dict):
                data[name] = {}
            _lay(data[name], value, origin, path, origins)
        else:
            data[name] = value
