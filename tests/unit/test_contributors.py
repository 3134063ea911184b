"""Who has contributed what: in the records, in `status`, and in `watch` on a terminal."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from swarmnet.directory import Complaint, Record, StageStatus
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.state import MOST_CONTRIBUTORS, WatchedRun
from swarmnet.monitor.view import WatchScreen
from swarmnet.net.traffic import Traffic
from swarmnet.peer import status
from swarmnet.peer.contributors import contributors
from swarmnet.peer.run import observe
from swarmnet.peer.swarm_health import assess
from swarmnet.telemetry.run_state import RunState

RUN = RunId("ab" * 32)


def record(name: str, *counted: int, **changes: object) -> Record:
    """With as many stages as amounts."""
    stages = tuple(StageStatus(stage, 9, Chain("c"), True, counted=each) for stage, each in enumerate(counted))
    return replace(Record(RUN, PeerId(f"12D3KooWpeer{name}"), 1, (), stages), **changes)


RECORDS = [
    record("aaaaAAAA", 30, 10, nickname="[b]Anna's[/b]"),
    record("bbbbBBBB", 60),
    record("ccccCCCC", 0),
    record("trainer", trainer=True),
]
ROWS = [("...bbbbBBBB", "0", "60", "60.0%"), ("[b]Anna's[/b] ...aaaaAAAA", "0,1", "40", "40.0%")]


def test_those_who_contributed_the_most_come_first_and_their_shares_are_the_whole() -> None:
    rows = contributors(RECORDS)
    assert [each.cells for each in rows] == ROWS
    assert contributors([record("a", 0)]) == ()
    many = record("manyMANY", *[7] * 16)
    assert contributors([many])[0].cells[1:] == ("0,1,2,+13", "112", "100.0%")


def test_whom_most_have_banned_is_in_no_table() -> None:
    ban = (Complaint(0, RECORDS[1].peer, "convicted", "lied"),)
    accusers = [record(name, 1, complaints=ban) for name in "defghi"]
    assert RECORDS[1].peer not in {each.peer for each in assess(RUN, [*RECORDS, *accusers], 2).contributors}
    training, state = SimpleNamespace(microbatch_size=1, sequence_length=1), RunState()
    for stage in (0, 1):
        state.serve(stage, now=0.0)
    peer = SimpleNamespace(
        me=RECORDS[0].peer,
        state=state,
        status=lambda: RECORDS[0],
        manifest=SimpleNamespace(training=training),
        records={each.peer: each for each in [*RECORDS[1:], *accusers]},
    )
    observe(peer, Traffic(), now=0.0)
    assert state.standing == (1, 7, 40 / 46), "a peer's own screen counts those that the table has"


def test_status_shows_the_first_and_says_how_many_more(capsys: pytest.CaptureFixture[str]) -> None:
    found = assess(RUN, RECORDS, 2)
    status._show(found)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("contributor                stage  accepted  share")
    assert [line.split()[-3:] for line in lines[at + 1 : at + 3]] == [list(row[1:]) for row in ROWS]
    assert lines[at + 2].startswith("[b]Anna's[/b] ...aaaaAAAA  0,1")
    assert asdict(found)["contributors"][1] == {
        "peer": RECORDS[0].peer,
        "nickname": "[b]Anna's[/b]",
        "stages": (0, 1),
        "accepted": 40,
        "share": 0.4,
    }
    status._show(assess(RUN, [record(f"{number:08}", number + 1) for number in range(12)], 1))
    assert "and 2 more, whom --json has" in capsys.readouterr().out


def test_watch_shows_them_on_a_terminal_as_text_and_tells_programs() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    seen = WatchedRun(Curve(()), now=0.0)
    hostile = replace(RECORDS[0], nickname="\x1b]2;mine\x07")
    seen.look(assess(RUN, [hostile, *RECORDS[1:]], 2), now=1.0)
    with WatchScreen(console) as screen:
        screen.look(seen)
    text = console.file.getvalue()
    assert "\\x1b]2;mine\\x07 ...aaaaAAAA" in text and "40.0%" in text and "\x1b]2" not in text
    many = WatchedRun(Curve(()), now=0.0)
    many.look(assess(RUN, [record(f"{number:08}", 1) for number in range(MOST_CONTRIBUTORS + 1)], 1), now=1.0)
    assert len(many.state()["contributors"]) == MOST_CONTRIBUTORS
