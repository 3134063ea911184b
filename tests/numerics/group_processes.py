"""Ranks of a real process group, for tests: each runs a script beside this file and reports over a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_group(script: str, backend: str, size: int, store: Path) -> list[dict[str, Any]]:
    """What each of `size` ranks reports, in order: `SCRIPT BACKEND RANK SIZE STORE FD` writes JSON to the pipe FD."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    readers, processes = [], []
    for rank in range(size):
        reader, writer = os.pipe()
        arguments = [backend, str(rank), str(size), str(store), str(writer)]
        processes.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(script)), *arguments],
                pass_fds=[writer],
                env=environment,
                stderr=subprocess.PIPE,
            )
        )
        os.close(writer)
        readers.append(reader)
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    reports = []
    for reader, error in zip(readers, errors, strict=True):
        with os.fdopen(reader) as pipe:
            written = pipe.read()
        assert written, error
        reports.append(json.loads(written))
    return reports
