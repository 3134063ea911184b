"""What a person sees of a peer in its terminal: lines while it joins, then a screen; in a pipe lines alone.

tests/data/peer_screen.txt has what is shown of each story here. After an intended change, read the difference, and
write it again: `PEER_SCREEN=write pytest THIS_FILE`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from swarmnet.cli.peer_screen import PLAIN_EVERY_S, JoinTimes, PeerScreen, table
from swarmnet.cli.progress_bar import ProgressBar
from swarmnet.directory import Complaint, Record, StageStatus
from swarmnet.ids import Chain, Incarnation, PeerId, RunId
from swarmnet.telemetry.run_state import ContributorRank, LineBytes, RunState
from swarmnet.telemetry.text import size

ME = PeerId("12D3KooWpeer0WXYZ")
RECORD = Record(RunId("ab" * 32), ME, Incarnation(1), (), (), nickname="Anna")
LOG = Path("/home/you/.swarmnet/peer/peer.log")
SHOWN = Path(__file__).parents[1] / "data/peer_screen.txt"


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


def joins(story: Story) -> None:
    story.screen.phase("identity", "12D3KooW[bold], kept in a directory with a name that is longer than the line")
    story.fetching(0)
    story.fetching(500_000, PLAIN_EVERY_S / 2)
    story.fetching(1_000_000, PLAIN_EVERY_S / 2)
    story.on("following", stage=1, version=8, newest=12, level_in=None)
    story.synced()
    story.on("applied", stage=1, version=9)
    story.synced(12)


def is_too_slow(story: Story) -> None:
    story.fetching(1_720_000, level_in=12.4)
    story.on("following", PLAIN_EVERY_S, stage=1, version=8, newest=12, level_in=1.2)
    story.on("following", stage=1, version=9, newest=12, level_in=0.2)
    slow = {"bytes_per_s": 7_500_000, "sum_bytes": 1e9, "step_s": 80.0, "within": 30, "needs": 17_500_000, "donors": 3}
    story.on("too_slow", stage=1, needs_each=58_300_000, **slow)


def has_ranks_and_moves(story: Story) -> None:
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


def is_dialled_back(story: Story) -> None:
    for could, could_not, not_asked in (
        (["A"], {}, {}),
        (["A", "B"], {}, {"C": "silence"}),
        (["A"], {"B": "no answer"}, {}),
        ([], {}, {}),
    ):
        at = ["/ip4/203.0.113.7/tcp/31340"]
        story.on("dialled_back", addresses=at, could=could, could_not=could_not, not_asked=not_asked)


Tell = Callable[[Story], None]
LINES: dict[str, Tell] = {
    "every phase is a line, and bytes are told now and then": joins,
    "a run that begins": lambda story: story.synced(0, how="seed", num_bytes=0),
    "a peer's own disk": lambda story: story.synced(0, how="checkpoint", num_bytes=0),
    "when it will be in sync, and that it never will": is_too_slow,
    "ranks, and a move after which a new stage is served": has_ranks_and_moves,
    "who connected back": is_dialled_back,
}


def test_a_terminal_that_is_to_be_plain_is_a_pipe() -> None:
    assert told(joins, terminal=True, plain=True) == told(joins)


# ---------------------------------------------------------------- the screen


def shown(tell: Callable[[Story], None]) -> str:
    console = Console(file=io.StringIO(), width=160)
    story = Story(PeerScreen(Console(file=io.StringIO()), log_file=LOG))
    story.state.record = RECORD
    story.state.crossed.append(LineBytes(story.now))
    tell(story)
    console.print(table(story.state, story.screen.work, now=story.now, log_file=LOG))
    return console.file.getvalue()


def computes(story: Story) -> None:
    story.synced()
    status = StageStatus(1, 8, Chain("c"), True, queue=3, slots=8)
    story.state.record, story.state.microbatch_tokens = replace(RECORD, stages=(status,), steps=300), 512
    for step in (8, 9, 10):
        story.on("applied", 2.0, stage=1, version=step + 1)
        story.on("executed", stage=1, executions=4 * (step - 7), counted=3 * (step - 7))
        story.on("figures", step=step, loss=2.5, num_tokens=4096, grad_norm=1.0, learning_rate=0.1)
    story.state.standing = ContributorRank(2, 5, 0.124)
    story.state.lent = (1_250_000.0, 0.0)
    story.state.crossed.append(LineBytes(story.now, 6_000_000, 3_000_000))


def computed_before_a_move(story: Story) -> None:
    story.on("executed", stage=1, executions=9, counted=7)
    story.state = RunState(record=story.state.record, crossed=story.state.crossed)
    story.state.serve(2, now=story.now)
    story.on("executed", stage=2, executions=6, counted=5)


def waits(story: Story) -> None:
    story.fetching(1_000_000, level_in=12.4)
    story.on("waiting", reason="nobody serves stage 2 yet", advice="start one")
    complaint = Complaint(1, PeerId("12D3KooWpeerABCDEFGH"), "waited_for", "has not voted")
    story.state.record = replace(RECORD, complaints=(complaint,))
    story.on("pausing", why="as asked")
    story.on("checkpoint_failed", stage=1, version=8, path="/d", reason="no\x1b[2Jspace left", then="it goes on")
    story.on("cannot_reach", stage=1, peer="12D3KooWpeerABCDEFGH", reason="no answer")
    story.on("leader", stage=1, step=3, ballot="b")


def was_away(story: Story) -> None:
    story.synced()
    story.on("away", reason="no bootstrap peer answers")
    story.on("pausing", why="as asked")
    story.on("resumed")
    story.see(601.0)


SCREENS: dict[str, Tell] = {
    "it is about this machine": computes,
    "what was accepted before a move stays": computed_before_a_move,
    "what is waited for and what is wrong": waits,
    "warnings are no problem for ever, and a pause ends": was_away,
}


def test_each_story_is_shown_as_it_was() -> None:
    stories = [(name, told(tell)) for name, tell in LINES.items()]
    stories += [(name, shown(tell)) for name, tell in SCREENS.items()]
    lines = [line.rstrip() for name, shows in stories for line in (f"== {name}", *shows.splitlines(), "")]
    text = "\n".join(lines)
    if os.environ.get("PEER_SCREEN") == "write":
        SHOWN.write_text(text, encoding="utf-8")
    assert text == SHOWN.read_text(encoding="utf-8")


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
    told = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 1_540_000: "1.5 MB", 2.5e9: "2.5 GB", 3e12: "3.0 TB"}
    told[4e15] = "4000.0 TB"
    assert {number: size(number) for number in told} == told


# ---------------------------------------------------------------- a bar while something is scored


def scoring(console: Console, *scored: tuple[float, int, str]) -> str:
    """What is printed of phases, then of `scored` of 400 at some seconds."""
    now = 100.0
    with ProgressBar(console, clock=lambda: now) as following:
        following.phase("asking", "[here]")
        for at, done, words in scored:
            now = 100.0 + at
            following.scored(done, 400, words)
    return console.file.getvalue()


def test_in_a_pipe_it_is_a_line_every_five_seconds_with_the_rate_and_what_is_left() -> None:
    text = scoring(
        Console(file=io.StringIO(), width=40),
        (0.0, 0, "none"),
        (2.0, 8, "eight"),
        (5.0, 10, "ten of a longer line"),
        (9.0, 11, "eleven"),
        (10.5, 11, "eleven; waiting: nobody serves stage 0"),
        (440.0, 220, "most"),
    )
    assert text.splitlines() == [
        "asking    [here]",
        "scoring   ten of a longer line; 2.0/s, 3 min left",
        "scoring   eleven; waiting: nobody serves stage 0; 1.0/s, 6 min left",
        "scoring   most; 30.0/min, 6 min left",
    ]


def test_what_takes_hours_is_told_in_hours_and_what_has_not_begun_has_no_rate() -> None:
    text = scoring(Console(file=io.StringIO()), (0.0, 0, "none"), (30.0, 0, "none yet"), (3600.0, 40, "forty"))
    assert "none yet\n" in text and text.endswith("scoring   forty; 0.7/min, 9.0 h left\n")


def test_on_a_terminal_it_is_a_bar_that_goes_away() -> None:
    text = scoring(
        Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None),
        (0.0, 0, "none"),
        (1.0, 100, "100 of 400"),
    )
    assert text.startswith("asking    [here]\n") and "100 of 400; 100.0/s, 3 s left" in text
    assert "━" in text and text.endswith("\x1b[2K")
