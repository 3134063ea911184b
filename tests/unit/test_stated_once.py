"""Facts that stand in several files are equal: the version, and the address of the repository."""

import re
import tomllib
from pathlib import Path

from swarmnet import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"]["Repository"]
CITED = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_package_states_its_version_once() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert f"\nversion: {__version__}\n" in CITED


def test_every_page_clones_from_the_address() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".agents/**/*.md")]
    cloned = [
        address
        for page in pages
        for address in re.findall(r"^ *git clone (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert cloned and set(cloned) == {ADDRESS}


def test_other_files_name_the_same_address() -> None:
    assert all(url.startswith(ADDRESS) for url in PROJECT["urls"].values())
    assert f"\nrepository-code: {ADDRESS}\n" in CITED
    links = re.findall(r"url: (\S+)", (ROOT / ".github/ISSUE_TEMPLATE/config.yml").read_text(encoding="utf-8"))
    assert links and all(url.startswith(f"{ADDRESS}/") for url in links)
