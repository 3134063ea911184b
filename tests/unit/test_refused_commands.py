"""What is typed wrongly is answered in one line, before anything starts or is written: a transcript of all commands.

After an intended change, read the difference, and write the file again: `REFUSED=write pytest THIS_FILE`.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from command_lines import begun

from swarmnet.cli.frame import run
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Admission, Manifest
from swarmnet.net.admission_files import new_owner, write_owner

ROOT = Path(__file__).parents[2]
REFUSED = ROOT / "tests/data/refused_commands.txt"
STARTS = (
    *("peer.run.run_peer", "trainer.run.run_trainer", "peer.bootstrap.run_bootstrap"),
    *("local.run_local", "peer.status.run_status", "cli.serve._join"),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an open run, one by invitation, one that was begun, a corpus and what is none."""
    for name in STARTS:
        monkeypatch.setattr(f"swarmnet.{name}", lambda *args, **kwargs: pytest.fail("it has started"))
    for name in [name for name in os.environ if name.startswith("SWARMNET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWARMNET_NO_RESTART", "1")
    monkeypatch.setenv("HOME", "/home/you")
    monkeypatch.chdir(tmp_path)
    owner = new_owner(Path("owned.toml"))
    write_owner(Path("owned.toml"), owner)
    begun(Path("o"))
    for name, text in {
        "run.toml": to_toml(Manifest()),
        "owned.toml": to_toml(Manifest(admission=Admission(policy="invite", key=owner.peer))),
        "run.peer.toml": "slots = 4\n",
        "corpus.txt": "Once upon a time" * 64,
        "b.jsonl": '{"text": "one"}\n',
        "bad.jsonl": "{",
        "there.u8.bin": "ids",
        "mine.csv": "a,b\n1,2\n",
    }.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_each_is_refused_in_one_line_and_changes_nothing(place: Path, capsys) -> None:
    before, lines = contents(place), list[str]()
    for line in REFUSED.read_text(encoding="utf-8").splitlines():
        if line.startswith("swarmnet: error: "):
            continue
        lines.append(line)
        if line.startswith("$ "):
            assert run(shlex.split(line.replace("ROOT", str(ROOT)))[2:]) == 2, line
            (error,) = capsys.readouterr().err.replace(str(ROOT), "ROOT").replace(str(place), "HERE").splitlines()
            lines.append(error)
            assert error.startswith("swarmnet: error: ") and contents(place) == before, line
    told = "\n".join(lines) + "\n"
    if os.environ.get("REFUSED") == "write":
        REFUSED.write_text(told, encoding="utf-8")
    assert told == REFUSED.read_text(encoding="utf-8")
