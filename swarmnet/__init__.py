"""swarmnet trains large language models on machines that volunteers offer.

The public names are those of `swarmnet.api`. Each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnet.api import (
        LocalOptions,
        Manifest,
        PeerConfig,
        SwarmError,
        UsageError,
        load_manifest,
        peer_config,
        read_status,
        run_local,
        run_peer,
        run_trainer,
    )

__all__ = [
    "LocalOptions",
    "Manifest",
    "PeerConfig",
    "SwarmError",
    "UsageError",
    "load_manifest",
    "peer_config",
    "read_status",
    "run_local",
    "run_peer",
    "run_trainer",
]

__version__ = "0.1.0"

PROTOCOL_VERSION = (5, 0)
"""(major, minor) of the wire protocol. Peers of one run must share the major number (docs/upgrading.md)."""

SOFTWARE = f"swarmnet {__version__}, protocol {PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]}"
"""What runs here, for people."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from swarmnet import api

        return getattr(api, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
