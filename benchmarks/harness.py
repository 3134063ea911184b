"""What all benchmarks share: the command line and its help, `--json`, ways in turns, medians of ratios, the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Benchmark(argparse.ArgumentParser):
    """A benchmark's command line: its module's text is the help, and `--json FILE` takes what it found.

    Args:
        text: the module's docstring.
        quick: what `--quick` leaves out; without it there is no such flag.
    """

    def __init__(self, text: str | None, *, quick: str = "") -> None:
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
        if quick:
            self.add_argument("--quick", action="store_true", help=quick)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and leave the usage to --help. Exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def asked(self, wrong: Callable[[argparse.Namespace], str] = lambda typed: "") -> argparse.Namespace:
        """What was typed. Prints on which machine this is, because a figure means little without it.

        Args:
            wrong: what no single flag can tell is wrong with them, in one line; "" if nothing is.
        """
        typed = self.parse_args()
        if typed.json and not typed.json.absolute().parent.is_dir():
            self.error(f"--json {typed.json}: there is no such folder; make it first")
        if line := wrong(typed):
            self.error(line)
        print(machine(), file=sys.stderr, flush=True)
        return typed


def machine() -> str:
    """Processor, cores and the load of the last minute."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = f"{os.cpu_count()} cores of {model or platform.machine()}"
    return f"{cores}, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}"


def write(file: Path | None, found: object) -> None:
    """To `--json`, if it was given."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Of values with commas between them. The ValueError of `parse` is the line that the user reads."""

    def parsed(text: str) -> list[T]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from error

    return parsed


def progress(jobs: Sequence[T], words: Callable[[T], object] = str) -> Iterator[T]:
    """The jobs; before each, on stderr, the seconds since the first, which of how many it is, and what it is."""
    began = time.monotonic()
    for number, job in enumerate(jobs, 1):
        said = f"[{time.monotonic() - began:4.0f} s, {number} of {len(jobs)}] {words(job)}"
        print(said, file=sys.stderr, flush=True)
        yield job
    print(f"[{time.monotonic() - began:4.0f} s] done", file=sys.stderr, flush=True)


def in_turns(ways: Mapping[str, Callable[[], T]], turns: int, *, warmup: int = 1) -> dict[str, list[T]]:
    """What each way returns in each turn after the warm-up. Every second turn goes backwards: none is always first."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(warmup + turns):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            taken = ways[name]()
            if turn >= warmup:
                found[name].append(taken)
    return found


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Ours / theirs, the median over turns of two neighbours: a disturbance of the machine meets both."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def middle(values: Sequence[float]) -> dict[str, Any]:
    """The median, and the quarters around it."""
    if len(values) < 2:
        return {"median": values[0], "quarters": [values[0], values[0]]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "quarters": [low, high]}


def cpu_seconds(pids: Iterable[int], *, groups: bool = False) -> float:
    """User and system time of these processes; groups: of all that are in process groups of these numbers."""
    wanted, ticks = set(pids), 0
    for stat in Path("/proc").glob("[0-9]*/stat") if groups else (Path(f"/proc/{pid}/stat") for pid in wanted):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if not groups or int(fields[2]) in wanted:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
