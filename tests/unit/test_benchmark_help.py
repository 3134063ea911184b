"""Whoever asks a benchmark for its help gets it, without what takes long to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ASK = """
import contextlib, io, json, runpy, sys
sys.path[:0] = ["benchmarks"]
found = {}
for name in sys.argv[1:]:
    sys.argv, said, code = [name, "--help"], io.StringIO(), None
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(f"benchmarks/{name}.py", run_name="__main__")
        except SystemExit as end:
            code = end.code
    slow = {"torch._dynamo", "torch.distributed.pipelining", "torch.distributed.tensor"} & sys.modules.keys()
    found[name] = code, said.getvalue().startswith("usage: "), sorted(slow)
print(json.dumps(found))
"""


def test_help_is_there_at_once() -> None:
    files = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "benchmarks").glob("*.py"))}
    # Parts of benchmarks, which run in processes of their own, take no flags.
    programs = [name for name, text in files.items() if "__main__" in text and name not in ("links", "stage_cost")]
    assert {"mesh", "pipeline"} < set(programs)
    asked = subprocess.run([sys.executable, "-c", ASK, *programs], cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == {name: [0, True, []] for name in programs}
