"""What README and messages tell people to type is right."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_stages_on_the_front_page_are_there() -> None:
    (stages,) = re.findall(r"^swarmnet init .*--stages (\d+)", README, re.MULTILINE)
    asked = re.findall(r"^swarmnet peer .*--stage ([\d,]+)", README, re.MULTILINE)
    assert asked and all(int(stage) < int(stages) for line in asked for stage in line.split(","))
