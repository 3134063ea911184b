"""What `--help` says of every command, as a terminal of 80 columns shows it: tests/data/help.txt has it all."""

from pathlib import Path

import pytest
from command_lines import command_lines

from swarmnet.cli.frame import run

GOLDEN = Path(__file__).parents[1] / "data" / "help.txt"


def test_help_is_as_it_was_agreed(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an intended change, read the difference and write what is said now to the file."""
    monkeypatch.setenv("COLUMNS", "80")
    for words in command_lines():
        assert run([*words, "--help"]) == 0
    assert capsys.readouterr().out == GOLDEN.read_text(encoding="utf-8")
