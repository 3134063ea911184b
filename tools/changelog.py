"""Move the fragments of .changes/ into CHANGELOG.md at a release: `python tools/changelog.py [YYYY-MM-DD]`.

The section of `swarmnet.__version__` gets the date, today if left out, and the fragments on top, by type and name. Then
the fragments are deleted.
"""

from __future__ import annotations

import re
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TYPES = ("added", "changed", "fixed", "removed")
NAME = re.compile(rf"[a-z0-9-]+\.({'|'.join(TYPES)})\.md")


def fragments(folder: Path) -> list[Path]:
    """By type, then by name. Raises: ValueError for a file that is none."""
    found = [path for path in folder.iterdir() if path.name != "README.md"]
    for path in found:
        if not NAME.fullmatch(path.name) or not path.read_text(encoding="utf-8").strip():
            raise ValueError(f"{path.name} is not NAME.TYPE.md with a text, TYPE one of {', '.join(TYPES)}")
    return sorted(found, key=lambda path: (TYPES.index(path.name.split(".")[1]), path.name))


def assembled(changes: str, version: str, date: str, texts: list[str]) -> str:
    """The changelog with the section of a released version on top, which it may have had without a date."""
    points = "".join(
        textwrap.fill(
            " ".join(text.split()),
            120,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
        for text in texts
    )
    open_section, heading = f"## {version}, not released yet\n\n", f"## {version}, {date}\n\n"
    if open_section in changes:
        return changes.replace(open_section, heading + points, 1)
    if f"\n## {version}," in changes:
        raise ValueError(f"{version} was released before: raise swarmnet.__version__ first")
    introduction, _, older = changes.partition("\n## ")
    return f"{introduction}\n{heading}{points}\n## {older}"


def main(date: str = "") -> None:
    """Rewrite CHANGELOG.md of this checkout."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "swarmnet/__init__.py").read_text(), re.MULTILINE)
    log, found = ROOT / "CHANGELOG.md", fragments(ROOT / ".changes")
    texts = [path.read_text(encoding="utf-8") for path in found]
    date = date or f"{datetime.now(UTC):%Y-%m-%d}"
    log.write_text(assembled(log.read_text(encoding="utf-8"), version, date, texts), encoding="utf-8")
    for path in found:
        path.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
