"""Facts that stand in several files are equal: version, address, extras, and what people are told to type."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from swarmnet import __version__
from swarmnet.config.check import EXTRAS

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


README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_stages_on_the_front_page_are_there() -> None:
    (stages,) = re.findall(r"^swarmnet init run.toml .*--stages (\d+)", README, re.MULTILINE)
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


def test_the_table_of_extras_is_that_of_the_project() -> None:
    extras = {name: needed for name, needed in PROJECT["optional-dependencies"].items() if name not in ("docs", "test")}
    page = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\w-]+) \|", page, re.MULTILINE))
    assert {name: re.split("[<>=]", *needed)[0] for name, needed in extras.items()} == listed
    assert {name: package.replace("_", "-") for name, package in EXTRAS.items()} == listed


def test_what_people_start_first_needs_no_extra() -> None:
    """A command that fails for a package, one at a time, loses a volunteer in the first minute."""
    needed = {re.split("[<>=]", each)[0] for each in PROJECT["dependencies"]}
    assert {"rich", "async-upnp-client", "hivemind"} <= needed
