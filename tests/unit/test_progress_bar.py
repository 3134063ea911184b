"""What a person reads while a peer joins: lines in a pipe, a bar on a terminal, each phase once."""

import io

import pytest
from rich.console import Console

from swarmnet.cli.progress_bar import PLAIN_EVERY_S, JoinTimes, ProgressBar, size


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fetching(done: int, total: int = 4_000_000, donors: int = 2, level_in: float | None = None) -> dict[str, object]:
    left = {"seconds_left": None, "level_in": level_in}
    return {"stage": 1, "version": 7, "bytes": done, "total": total, "donors": donors, **left}


def following(version: int, level_in: float | None = None) -> dict[str, object]:
    return {"stage": 1, "version": version, "newest": 12, "level_in": level_in}


def synced(version: int = 8, **changes: object) -> dict[str, object]:
    return {"stage": 1, "version": version, "how": "snapshot", "seconds": 2.0, "bytes": 4_000_000, **changes}


def told(console: Console, tell) -> tuple[str, list[str]]:
    changes: list[str] = []
    clock = Clock()
    with ProgressBar(console, clock=clock, on_bar=lambda: changes.append("bar")) as story:
        tell(story, clock)
    return console.file.getvalue(), changes


def plain() -> Console:
    return Console(file=io.StringIO(), width=60)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)


def test_in_a_pipe_every_phase_is_a_line_and_bytes_are_told_now_and_then() -> None:
    def tell(story: ProgressBar, clock: Clock) -> None:
        story.phase("identity", "12D3KooW[bold], kept in a directory with a name that is longer than the line")
        story.on_event("fetching", fetching(0))
        clock.now += PLAIN_EVERY_S / 2
        story.on_event("fetching", fetching(500_000))
        clock.now += PLAIN_EVERY_S / 2
        story.on_event("fetching", fetching(1_000_000))
        story.on_event("following", following(8))
        story.on_event("synced", synced())
        story.on_event("applied", {"stage": 1, "version": 9})
        story.on_event("synced", synced(12))

    text, changes = told(plain(), tell)
    assert text.splitlines() == [
        "identity  12D3KooW[bold], kept in a directory with a name that is longer than the line",
        "state     0 %; 0 B of 4.0 MB from 2 replicas",
        "state     25 %; 1.0 MB of 4.0 MB from 2 replicas, 200.0 kB/s, 15 s left",
        "state     version 8, 4.0 MB in 2.0 s (2.0 MB/s)",
        "serving   stage 1 from step 8 on; Ctrl+C leaves in good order",
        "state     version 12, 4.0 MB in 2.0 s (2.0 MB/s)",
    ]
    assert not changes


@pytest.mark.parametrize(
    ("how", "words"),
    [("seed", "drawn from the run's seed: it has not begun yet"), ("checkpoint", "from this peer's own disk")],
)
def test_state_that_did_not_travel(how: str, words: str) -> None:
    text, _ = told(plain(), lambda story, clock: story.on_event("synced", synced(0, how=how, seconds=0.0, bytes=0)))
    assert text.splitlines()[0] == f"state     version 0, {words}"


def test_on_a_terminal_a_bar_comes_and_goes_and_the_log_is_told() -> None:
    def tell(story: ProgressBar, clock: Clock) -> None:
        story.on_event("fetching", fetching(1_000_000, donors=1))
        story.on_event("fetching", fetching(4_000_000))
        story.on_event("following", following(8))
        story.on_event("synced", synced())

    text, changes = told(terminal(), tell)
    assert "from 1 replica" in text and "catching up, version 8 of 12" in text and "4.0 MB in 2.0 s" in text
    assert changes == ["bar", "bar"]


def test_a_joiner_hears_when_it_will_be_level_and_that_it_never_will() -> None:
    slow = {"bytes_per_s": 7_500_000, "sum_bytes": 1e9, "step_s": 80.0, "within": 30, "needs": 17_500_000, "donors": 3}

    def tell(story: ProgressBar, clock: Clock) -> None:
        story.on_event("fetching", fetching(1_720_000, level_in=12.4))
        clock.now += PLAIN_EVERY_S
        story.on_event("following", following(8, level_in=1.2))
        story.on_event("following", following(9, level_in=0.2))
        story.on_event("too_slow", {**slow, "stage": 1, "needs_each": 58_300_000})

    text, _ = told(plain(), tell)
    assert text.splitlines() == [
        "state     43 %, level in about 12 steps; 1.7 MB of 4.0 MB from 2 replicas",
        "state     catching up, version 8 of 12, level in about 1 step",
        "state     too slow: 7.5 MB/s come, and every 80 s a sum of 1.0 GB is added. To be level within 30 steps it "
        "takes 17.5 MB/s: a line of 140 Mbit/s here, and of 466 Mbit/s at each of 3 replicas if theirs never rest (a "
        "tenth is for joiners), or more replicas",
    ]


def test_the_bar_goes_however_it_ends() -> None:
    _, changes = told(terminal(), lambda story, clock: story.on_event("fetching", fetching(1)))
    assert changes == ["bar", "bar"]

    def stop(story: ProgressBar, clock: Clock) -> None:
        story.on_event("fetching", fetching(1))
        story.on_event("stopped", {"reason": "asked to stop"})

    assert told(terminal(), stop)[1] == ["bar", "bar"]


def test_each_phase_of_a_join_is_timed_once_until_something_counts() -> None:
    now = [10.0]
    times = JoinTimes(lambda: now[0])
    now[0] += 1.5
    times.passed("manifest")
    now[0] += 1.0
    times.passed("manifest")
    for event in ("listening", "hidden", "synced"):
        now[0] += 1.0
        assert not times.on_event(event, {})
    assert not times.on_event("executed", {"counted": 0})
    assert times.on_event("executed", {"counted": 2}) and not times.on_event("executed", {"counted": 4})
    assert times.seconds == {"manifest": 1.5, "listening": 3.5, "reachable": 4.5, "synced": 5.5, "counted": 5.5}


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


def test_ranks_that_start_and_that_are_lost_are_lines() -> None:
    def tell(story: ProgressBar, clock: Clock) -> None:
        story.on_event("mesh_starting", {"stage": 1, "mesh": "tp2", "ranks": 2})
        story.on_event("mesh_started", {"stage": 1, "mesh": "tp2", "epoch": 1, "pids": (7, 8), "seconds": 3.21})
        story.on_event("rank_lost", {"stage": 1, "rank": 1, "reason": "killed by SIGKILL"})
        story.on_event("rank_lost", {"stage": 1, "rank": None, "reason": "silence"})

    assert told(plain(), tell)[0].splitlines() == [
        "ranks     stage 1 on 2 ranks (tp2): starting their processes",
        "ranks     2 ranks (tp2) of stage 1 are up after 3.2 s",
        "ranks     rank 1 of stage 1 was lost (killed by SIGKILL): all start anew",
        "ranks     a rank of stage 1 was lost (silence): all start anew",
    ]


@pytest.mark.parametrize(
    ("could", "could_not", "not_asked", "line"),
    [
        (["A"], {}, {}, "reachable 1 member connected back"),
        (["A", "B"], {}, {"C": "silence"}, "reachable 2 members connected back; could not ask ...C"),
        (["A"], {"B": "no answer"}, {}, "reachable 1 of 2 members that tried could connect to this peer, not ...B"),
        ([], {}, {}, "reachable nobody who was asked could say whether others can connect to this peer"),
    ],
)
def test_who_connected_back_is_a_line(
    could: list[str], could_not: dict[str, str], not_asked: dict[str, str], line: str
) -> None:
    at = ["/ip4/203.0.113.7/tcp/31340"]
    fields = {"addresses": at, "could": could, "could_not": could_not, "not_asked": not_asked}
    assert told(plain(), lambda story, clock: story.on_event("dialled_back", fields))[0].splitlines() == [line]


# ---------------------------------------------------------------- scoring


def scoring(console: Console, *scored: tuple[float, int, str]) -> str:
    """What is printed of phases, then of `scored` of 400 at some seconds."""
    clock = Clock()
    with ProgressBar(console, clock=clock) as following:
        following.phase("asking", "[here]")
        for at, done, words in scored:
            clock.now = 100.0 + at
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
