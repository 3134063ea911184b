"""Put a stage's snapshot on disk so that it is whole or absent: temporary file, fsync, rename."""

from __future__ import annotations

import os
from pathlib import Path

from swarmnet.ids import RunId


def snapshot_path(directory: Path, run: RunId, stage: int, version: int) -> Path:
    """Where the snapshot of a stage at a version lies: a peer may serve one run after another from its directory."""
    return directory / "snapshots" / run[:12] / f"stage-{stage}-step-{version}.safetensors"


def write_snapshot(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path`. Raises OSError; a file of that name is then the old one or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
