"""What a person sees of a peer in its terminal: lines while it joins, then a screen; in a pipe lines alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from swarmnet.cli.peer_screen import PLAIN_EVERY_S, JoinTimes, PeerScreen, table
from swarmnet.directory import Complaint, Record, StageStatus
from swarmnet.ids import Chain, Incarnation, PeerId, RunId
from swarmnet.telemetry.run_state import ContributorRank, LineBytes, RunState
from swarmnet.telemetry.text import size

ME = PeerId("12D3KooWpeer0WXYZ")
RECORD = Record(RunId("ab" * 32), ME, Incarnation(1), (), (), nickname="Anna")
LOG = Path("/home/you/.swarmnet/peer/peer.log")


class Story:
    """A screen, and the peer whose events it is shown."""

    def __init__(self, screen: PeerScreen) -> None:
        self.screen, self.state, self.now = screen, RunState(), 100.0
        self.state.serve(1, now=self.now)

    def on(self, event: str, later_s: float = 0.0, **fields: object) -> None:
        self.now += later_s
        self.state.on(event, fields, now=self.now)
        self.see()

    def see(self, later_s: float = 0.0) -> None:
        self.now += later_s
        self.screen.see(self.state, self.now)

    def fetching(
        self, done: int, later_s: float = 0.0, *, donors: int = 2, level_in: float | None = None, stage: int = 1
    ) -> None:
        of = {"version": 7, "bytes": done, "total": 4_000_000, "donors": donors, "seconds_left": None}
        self.on("fetching", later_s, stage=stage, level_in=level_in, **of)

    def synced(self, version: int = 8, *, how: str = "snapshot", num_bytes: int = 4_000_000) -> None:
        self.on("synced", stage=1, version=version, how=how, seconds=2.0 if num_bytes else 0.0, bytes=num_bytes)


def told(tell: Callable[[Story], None], *, terminal: bool = False, plain: bool = False) -> str:
    """What is printed."""
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None, _environ={})
    with PeerScreen(console, log_file=LOG, plain=plain) as screen:
        tell(Story(screen))
    return console.file.getvalue()


@pytest.mark.parametrize("as_asked", [{}, {"terminal": True, "plain": True}])
def test_without_a_screen_every_phase_is_a_line_and_bytes_are_told_now_and_then(as_asked: dict[str, bool]) -> None:
    def tell(story: Story) -> None:
        story.screen.phase("identity", "12D3KooW[bold], kept in a directory with a name that is longer than the line")
        story.fetching(0)
        story.fetching(500_000, PLAIN_EVERY_S / 2)
        story.fetching(1_000_000, PLAIN_EVERY_S / 2)
        story.on("following", stage=1, version=8, newest=12, level_in=None)
        story.synced()
        story.on("applied", stage=1, version=9)
        story.synced(12)

    assert told(tell, **as_asked).splitlines() == [
        "identity  12D3KooW[bold], kept in a directory with a name that is longer than the line",
        "state     0 %; 0 B of 4.0 MB from 2 replicas",
        "state     25 %; 1.0 MB of 4.0 MB from 2 replicas, 200.0 kB/s, 15 s left",
        "state     version 8, 4.0 MB in 2.0 s (2.0 MB/s)",
        "serving   stage 1 from step 8 on; Ctrl+C leaves in good order",
        "state     version 12, 4.0 MB in 2.0 s (2.0 MB/s)",
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [("seed", "drawn from the run's seed: it has not begun yet"), ("checkpoint", "from this peer's own disk")],
)
def test_state_that_did_not_travel(how: str, words: str) -> None:
    text = told(lambda story: story.synced(0, how=how, num_bytes=0))
    assert text.splitlines()[0] == f"state     version 0, {words}"


def test_a_joiner_hears_when_it_will_be_level_and_that_it_never_will() -> None:
    slow = {"bytes_per_s": 7_500_000, "sum_bytes": 1e9, "step_s": 80.0, "within": 30, "needs": 17_500_000, "donors": 3}

    def tell(story: Story) -> None:
        story.fetching(1_720_000, level_in=12.4)
        story.on("following", PLAIN_EVERY_S, stage=1, version=8, newest=12, level_in=1.2)
        story.on("following", stage=1, version=9, newest=12, level_in=0.2)
        story.on("too_slow", stage=1, needs_each=58_300_000, **slow)

    assert told(tell).splitlines() == [
        "state     43 %, in sync in about 12 steps; 1.7 MB of 4.0 MB from 2 replicas",
        "state     catching up, version 8 of 12, in sync in about 1 step",
        "state     too slow: 7.5 MB/s come, and every 80 s a sum of 1.0 GB is added. To be in sync within 30 steps it "
        "takes 17.5 MB/s: a line of 140 Mbit/s here, and of 466 Mbit/s at each of 3 replicas if theirs never rest (a "
        "tenth is for joiners), or more replicas",
    ]


def test_ranks_and_moves_are_lines_and_a_new_stage_is_served_anew() -> None:
    def tell(story: Story) -> None:
        story.on("mesh_starting", stage=1, mesh="tp2", ranks=2)
        story.on("mesh_started", stage=1, mesh="tp2", epoch=1, pids=(7, 8), seconds=3.21)
        story.on("rank_lost", stage=1, rank=1, reason="killed by SIGKILL")
        story.on("rank_lost", stage=1, rank=None, reason="silence")
        story.synced()
        story.on("moving", **{"from": 1, "to": 2, "rates": ()})
        story.on("moved", **{"from": 1, "to": 2, "version": 9})
        story.state = RunState()
        story.state.serve(2, now=story.now)
        story.on("synced", stage=2, version=9, how="checkpoint")

    assert told(tell).splitlines() == [
        "ranks     stage 1 on 2 ranks (tp2): starting their processes",
        "ranks     2 ranks (tp2) of stage 1 are up after 3.2 s",
        "ranks     rank 1 of stage 1 was lost (killed by SIGKILL): all start again",
        "ranks     a rank of stage 1 was lost (silence): all start again",
        "state     version 8, 4.0 MB in 2.0 s (2.0 MB/s)",
        "serving   stage 1 from step 8 on; Ctrl+C leaves in good order",
        "moving    stage 2 needs this peer more than stage 1: fetching its state, and serving on meanwhile",
        "moving    left stage 1 in good order",
        "state     version 9, from this peer's own disk",
        "serving   stage 2 from step 9 on; Ctrl+C leaves in good order",
    ]


@pytest.mark.parametrize(
    ("could", "could_not", "not_asked", "line"),
    [
        (["A"], {}, {}, "reachable 1 member connected back"),
        (["A", "B"], {}, {"C": "silence"}, "reachable 2 members connected back; could not ask ...C"),
        (["A"], {"B": "no answer"}, {}, "reachable 1 of 2 members that tried could connect to this peer, not ...B"),
        ([], {}, {}, "reachable no peer that was asked could say whether others can connect to this peer"),
    ],
)
def test_who_connected_back_is_a_line(
    could: list[str], could_not: dict[str, str], not_asked: dict[str, str], line: str
) -> None:
    at = ["/ip4/203.0.113.7/tcp/31340"]
    fields = {"addresses": at, "could": could, "could_not": could_not, "not_asked": not_asked}
    assert told(lambda story: story.on("dialled_back", **fields)).splitlines() == [line]


# ---------------------------------------------------------------- the screen


def shown(tell: Callable[[Story], None]) -> dict[str, str]:
    """The rows of the screen; words of several rows of one name, one after the other."""
    console = Console(file=io.StringIO(), width=160)
    story = Story(PeerScreen(Console(file=io.StringIO()), log_file=LOG))
    story.state.record = RECORD
    story.state.crossed.append(LineBytes(story.now))
    tell(story)
    console.print(table(story.state, story.screen.work, now=story.now, log_file=LOG))
    rows: dict[str, str] = {}
    name = ""
    for line in console.file.getvalue().splitlines():
        name = line[:10].strip() or name
        rows[name] = f"{rows.get(name, '')} {line[10:].strip()}".strip()
    return rows


def test_the_screen_is_about_this_machine() -> None:
    def tell(story: Story) -> None:
        story.synced()
        status = StageStatus(1, 8, Chain("c"), True, queue=3, slots=8)
        story.state.record, story.state.microbatch_tokens = replace(RECORD, stages=(status,), steps=300), 512
        for step in (8, 9, 10):
            story.on("applied", 2.0, stage=1, version=step + 1)
            story.on("executed", stage=1, executions=4 * (step - 7), counted=3 * (step - 7))
            figures = {"num_tokens": 4096, "grad_norm": 1.0, "learning_rate": 0.1}
            story.on("figures", step=step, loss=2.5, **figures)
        story.state.standing = ContributorRank(2, 5, 0.124)
        story.state.lent = (1_250_000.0, 0.0)
        story.state.crossed.append(LineBytes(story.now, 6_000_000, 3_000_000))

    rows = shown(tell)
    assert rows["peer"] == "Anna ...eer0WXYZ, stage 1 in sync"
    assert rows["run"] == "step 11 of 300, loss 2.5000, ends in about 9:38"
    assert rows["speed"] == "1.5 microbatches/s, 768 tokens/s, 3 of 8 slots in use"
    assert rows["accepted"] == "9 microbatches of 12 computed, 12.4% of the run, number 2 of 5 contributors"
    assert rows["link"] == "sends 1.0 MB/s of 10 Mbit/s offered, receives 500.0 kB/s; 6.0 MB sent and 3.0 MB received"
    assert (rows["waits for"], rows["problems"], rows["log"]) == ("nothing", "none", str(LOG))


def test_what_was_accepted_before_a_move_stays_on_the_screen() -> None:
    def tell(story: Story) -> None:
        story.on("executed", stage=1, executions=9, counted=7)
        story.state = RunState(record=story.state.record, crossed=story.state.crossed)
        story.state.serve(2, now=story.now)
        story.on("executed", stage=2, executions=6, counted=5)

    assert shown(tell)["accepted"] == "12 microbatches of 15 computed"


def test_the_screen_says_what_is_waited_for_and_what_is_wrong() -> None:
    def tell(story: Story) -> None:
        story.fetching(1_000_000, level_in=12.4)
        story.on("waiting", reason="nobody serves stage 2 yet", advice="start one")
        complaint = Complaint(1, PeerId("12D3KooWpeerABCDEFGH"), "waited_for", "has not voted")
        story.state.record = replace(RECORD, complaints=(complaint,))
        story.on("pausing", why="as asked")
        story.on("checkpoint_failed", stage=1, version=8, path="/d", reason="no\x1b[2Jspace left", then="it goes on")
        story.on("cannot_reach", stage=1, peer="12D3KooWpeerABCDEFGH", reason="no answer")
        story.on("leader", stage=1, step=3, ballot="b")

    rows = shown(tell)
    assert rows["peer"] == "Anna ...eer0WXYZ, stage 1 has no state yet" and rows["run"].startswith("steps, of which")
    assert rows["accepted"] == "0 microbatches of 0 computed"
    text = " ".join(rows.values())
    for words in (
        "the end of its pause (as asked)",
        "the state of stage 1: 25 %, in sync in about 12 steps; 1.0 MB of 4.0 MB from 2 replicas",
        "because nobody serves stage 2 yet (start one)",
        "...ABCDEFGH of stage 1 (has not voted)",
        "stage 1: messages of a replica arrive, but it cannot be connected to: ...ABCDEFGH, no answer",
        "a checkpoint could not be written: no\\x1b[2Jspace left, it goes on",
    ):
        assert words in text.replace("\n", " "), text


def test_warnings_are_no_problem_for_ever_and_a_pause_ends() -> None:
    def tell(story: Story) -> None:
        story.synced()
        story.on("away", reason="no bootstrap peer answers")
        story.on("pausing", why="as asked")
        story.on("resumed")
        story.see(601.0)

    rows = shown(tell)
    assert (rows["problems"], rows["waits for"]) == ("none", "nothing")


def test_the_last_lines_say_what_was_contributed_and_how_to_go_on() -> None:
    def tell(story: Story) -> None:
        story.state.record, story.state.standing = RECORD, ContributorRank(1, 2, 0.6)
        story.state.crossed.append(LineBytes(story.now))
        story.on("executed", stage=1, executions=9, counted=7)
        story.state = RunState(record=RECORD, crossed=story.state.crossed, standing=story.state.standing)
        story.state.serve(2, now=story.now)
        story.on("executed", stage=2, executions=9, counted=5)
        story.screen.end("12,480 microbatches counted", Path("/home/you/.swarmnet/peer"))

    text = told(tell, terminal=True)
    assert text.rpartition("\x1b[2K")[2].splitlines()[-3:] == [
        "accepted  12 microbatches since it was started, 60.0% of the run",
        "in all    12,480 microbatches counted",
        "again     the same command goes on as the same peer: its key and its state are in /home/you/.swarmnet/peer",
    ]
    # The cursor is hidden for no longer than it takes to show it again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_log_is_told_when_the_screen_comes_and_goes() -> None:
    changes: list[bool] = []
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, _environ={})
    with PeerScreen(console, log_file=LOG, on_live=lambda: changes.append(screen.live)) as screen:
        story = Story(screen)
        story.see()
        assert not changes, "nothing is known of the peer yet"
        story.state.record = RECORD
        story.state.crossed.append(LineBytes(story.now))
        story.see()
        assert changes == [True]
    assert changes == [True, False]


def test_each_phase_of_a_join_is_timed_once_until_something_counts() -> None:
    now = [10.0]
    times, state = JoinTimes(lambda: now[0]), RunState()
    state.serve(1, now=10.0)

    def on(event: str, **fields: object) -> bool:
        state.on(event, {"stage": 1, **fields}, now=now[0])
        return times.see(state)

    now[0] += 1.5
    times.passed("manifest")
    now[0] += 1.0
    times.passed("manifest")
    for event in ("listening", "hidden", "synced", "synced"):
        now[0] += 1.0
        assert not on(event, version=0)
    assert not on("executed", counted=0, executions=1)
    assert on("executed", counted=2, executions=2) and not on("executed", counted=4, executions=4)
    assert times.seconds == {"manifest": 1.5, "listening": 3.5, "reachable": 4.5, "synced": 5.5, "counted": 6.5}


def test_sizes() -> None:
    assert [size(number) for number in (0, 999, 1000, 1_540_000, 2.5e9, 3e12, 4e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "2.5 GB",
        "3.0 TB",
        "4000.0 TB",
    ]
