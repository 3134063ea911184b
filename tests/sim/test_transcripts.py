"""tests/transcripts: what replicas say to each other and decide, as a whole.

After an intended change: `python -m swarmnet.testing.transcript tests/transcripts/*.txt`, and read the difference.
"""

from pathlib import Path

import pytest

from swarmnet.errors import UsageError
from swarmnet.testing.transcript import main, written

TRANSCRIPTS = sorted((Path(__file__).parents[1] / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_swarm_says_and_decides_what_it_did(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert written(text) == text


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 30


@pytest.mark.parametrize(
    ("order", "refused"),
    [
        ("kil s0.0 at 1", "'kil s0.0 at 1': write an action (kill, stop, cut, drain, join, drop) and a cue, at or on"),
        ("kill s0.0", "'kill s0.0': write an action (kill, stop, cut, drain, join, drop) and a cue, at or on"),
        ("kill s0.0 on Committed step=9", "kill s0.0: its cue never came: Committed step=9"),
        ("kill s9.9 at 0.5", "kill s9.9: there is no such peer, or it needs other words ('s9.9')"),
        ("since one", "'since one': write an action (kill, stop, cut, drain, join, drop) and a cue, at or on"),
        ("swarm stagez=1", "swarm stagez=: a swarm has no such setting (swarmnet/testing/plan.py)"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(order: str, refused: str) -> None:
    with pytest.raises(UsageError) as error:
        written(f"swarm stages=1 replicas=1 microbatches=1 steps=1\n{order}\n")
    assert str(error.value) == refused


def test_a_file_is_written_again_or_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.txt"
    path.write_text("# One.\nswarm stages=1 replicas=1 microbatches=1 steps=1\n", encoding="utf-8")
    assert [main([str(path)]), main([str(path)])] == [0, 0]
    assert capsys.readouterr().out == f"{path}\n", "the second time nothing has changed"
    assert "\n---\n" in path.read_text(encoding="utf-8")
    for wrong in ([], [str(tmp_path / "none.txt")]):
        assert main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
