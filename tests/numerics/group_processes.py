"""Ranks of a real process group, for tests: forks of a script beside this file, each reporting over a pipe."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmnet.ranks.supervisor import PRELOAD

ROOT = Path(__file__).parents[2]


def run_group(script: str, backend: str, size: int, store: Path) -> list[dict[str, Any]]:
    """What each of `size` ranks reports, in order: `SCRIPT BACKEND STORE FD...` calls `become_ranks`."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    pipes = [os.pipe() for _ in range(size)]
    writers = [writer for _, writer in pipes]
    group = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), backend, str(store), *map(str, writers)],
        pass_fds=writers,
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    for writer in writers:
        os.close(writer)
    try:
        error = group.communicate(timeout=240)[1].decode()
    finally:
        if group.poll() is None:
            os.killpg(group.pid, signal.SIGKILL)
            group.wait()
    reports = []
    for reader, _ in pipes:
        with os.fdopen(reader) as pipe:
            written = pipe.read()
        assert written, error
        reports.append(json.loads(written))
    return reports


def become_ranks(main: Callable[[str, int, int, str], object], *, modules: Sequence[str] = ()) -> None:
    """Call main(backend, rank, size, store) in a process a rank, and write what it returns as JSON to the rank's pipe.

    Ranks are forks that find `modules` and all that ranks need imported. They leave without tearing their group down:
    gloo may then abort a process that has done everything right.
    """
    for module in (*PRELOAD, *modules):
        importlib.import_module(module)
    backend, store, *pipes = sys.argv[1:]
    writers = [int(each) for each in pipes]
    for rank, writer in enumerate(writers):
        if os.fork():
            continue
        try:
            for other in writers:
                if other != writer:
                    os.close(other)
            found = main(backend, rank, len(writers), store)
            with os.fdopen(writer, "w") as pipe:
                json.dump(found, pipe)
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    for _ in writers:
        os.wait()
