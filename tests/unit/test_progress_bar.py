"""What a person reads while something is scored: lines in a pipe, a bar on a terminal."""

import io

from rich.console import Console

from swarmnet.cli.progress_bar import ProgressBar


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


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
