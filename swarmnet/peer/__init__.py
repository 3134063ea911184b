"""Build and run one peer: `replica` is the map of what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnet.config.peer import PeerConfig
    from swarmnet.manifest.schema import Manifest


def run_peer(
    config: PeerConfig,
    manifest: Manifest,
    *,
    heard: Callable[[str, dict[str, object]], None] = lambda event, fields: None,
    data_at_source: bool = True,
) -> int:
    """Run a peer (`peer.run`, imported on the first call, since it needs torch)."""
    from swarmnet.peer.run import run_peer as run

    return run(config, manifest, heard=heard, data_at_source=data_at_source)
