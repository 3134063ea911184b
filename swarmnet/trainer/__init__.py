"""Feeds a run: microbatches in, losses out. Holds no weights."""

from __future__ import annotations

from swarmnet.config.peer import PeerConfig
from swarmnet.manifest.schema import Manifest


def run_trainer(config: PeerConfig, manifest: Manifest) -> int:
    """Run a trainer (`trainer.run`, imported on the first call, since it needs torch)."""
    from swarmnet.trainer.run import run_trainer as run

    return run(config, manifest)
