"""What README and messages tell people to type is right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_stages_on_the_front_page_are_there() -> None:
    (stages,) = re.findall(r"^swarmnet init .*--stages (\d+)", README, re.MULTILINE)
    asked = re.findall(r"^swarmnet peer .*--stage ([\d,]+)", README, re.MULTILINE)
    assert asked and all(int(stage) < int(stages) for line in asked for stage in line.split(","))


def test_whoever_installs_an_extra_gets_ours() -> None:
    """On PyPI "swarmnet" is another project: messages and docs name this distribution."""
    assert PROJECT["name"] != "swarmnet"
    assert PROJECT["scripts"] == {"swarmnet": "swarmnet.cli:main"}
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("swarmnet/**/*.py"), ROOT / "pyproject.toml"]
    named = [
        (match[1], set(match[2].split(",")), path)
        for path in files
        for match in re.finditer(r"""["'`]([\w-]*swarmnet[\w-]*)\[([a-z,]+)\]""", path.read_text(encoding="utf-8"))
    ]
    assert len(named) >= 5
    for name, extras, path in named:
        assert name == PROJECT["name"] and extras <= PROJECT["optional-dependencies"].keys(), path
