"""Build and run one peer: `replica` is the map of what it is made of."""

from __future__ import annotations

from swarmnet.config.peer import PeerConfig
from swarmnet.manifest.schema import Manifest


def run_peer(config: PeerConfig, manifest: Manifest) -> int:
    """See `peer.run`; imported on the first call, since it needs torch."""
    from swarmnet.peer.run import run_peer as run

    return run(config, manifest)
