"""benchmarks/gpu_check.sh with a stand-in for Python: it runs all parts whatever one of them says, and reports it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ["tests", "mfu", "mesh", "apply", "codecs", "activations", "swarm"]


def check(folder: Path, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    stand_in = folder / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/asked"\n{python}\n')
    stand_in.chmod(0o755)
    return subprocess.run(
        [ROOT / "benchmarks" / "gpu_check.sh", folder / "out"],
        env=os.environ | {"PYTHON": str(stand_in)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_part_that_fails_stops_no_other_one(tmp_path: Path) -> None:
    ended = check(tmp_path, 'case "$1" in *codecs*) echo broken; exit 3;; esac', REHEARSE="1")
    assert ended.returncode == 1 and "broken" in ended.stdout
    summary = [line.split() for line in (tmp_path / "out" / "summary.txt").read_text().splitlines()]
    assert [(name, code) for name, _, code, *_ in summary] == [(n, "3" if n == "codecs" else "0") for n in PARTS]
    asked = [word for line in (tmp_path / "asked").read_text().splitlines() for word in line.split()[:1]]
    assert [word for word in asked if word.endswith(".py") and not (ROOT / word).exists()] == []
    assert check(tmp_path, "", REHEARSE="1").returncode == 0


def test_a_machine_without_a_gpu_is_told_in_one_line(tmp_path: Path) -> None:
    ended = check(tmp_path, "exit 1", REHEARSE="")
    assert ended.returncode == 2 and ended.stderr.startswith("gpu_check: torch sees no CUDA device here")
    assert len(ended.stderr.splitlines()) == 1
