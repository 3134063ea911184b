"""The distribution that docs/extending.md describes, put on the path from the page itself, as an installer would."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from swarmnet.wire import codecs

PAGE = Path(__file__).parents[1] / "docs/extending.md"
PACKAGE = "acme_swarmnet"


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the page's package and its dist-info to `site`, and have Python find both until the test is over."""
    page = PAGE.read_text(encoding="utf-8")
    files = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", page, flags=re.DOTALL))
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    info = site / f"{PACKAGE}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, source in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(source)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    monkeypatch.setattr(codecs, "_used", {})
    for module in [each for each in sys.modules if each.split(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, module)
