"""Benchmarks as modules, for tests that use what they are made of."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@cache
def load(name: str) -> ModuleType:
    """benchmarks/<name>.py under a name of its own; what it imports from beside itself is found, behind all else."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_by(name: str, line: str, file: Path) -> str:
    """What `python benchmarks/<name>.py LINE FILE` prints, run in this process."""
    with mock.patch.object(sys, "argv", [f"{name}.py", *shlex.split(line), str(file)]):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            load(name).main()
    return out.getvalue()
