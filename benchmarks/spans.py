"""What the record of a step costs: CPU of one span, with the two clock readings it needs, beside those readings alone.

    python benchmarks/spans.py [--json FILE]

`microbatch_us` is what a microbatch costs a stage by it: eleven spans. `written_us`: what `--trace` adds to a span.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from swarmnet.telemetry.spans import SpanBook
from swarmnet.telemetry.trace import TraceFile

SPANS, TURNS, OF_A_MICROBATCH = 20_000, 9, 11


def us_of(work: Callable[[int], object]) -> float:
    """Microseconds of CPU for each of the spans, the median of turns."""
    turns = []
    for _ in range(TURNS):
        began = time.process_time()
        for number in range(SPANS):
            work(number)
        turns.append((time.process_time() - began) / SPANS * 1e6)
    return statistics.median(turns)


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    typed = parser.parse_args()
    book, clock = SpanBook(), time.monotonic
    clocks = us_of(lambda _: (clock(), clock()))
    span = us_of(lambda number: book.add("forward", 0, 1, number, clock(), clock()))
    spans = book.since(0)
    with tempfile.TemporaryDirectory() as folder:
        file = TraceFile(Path(folder) / "trace.json", "peer", "peer")
        began = time.process_time()
        file.write(spans)
        written = (time.process_time() - began) / len(spans) * 1e6
        file.close()
    found = {
        "span_us": span,
        "of_clocks": span / clocks,
        "microbatch_us": OF_A_MICROBATCH * span,
        "written_us": written,
    }
    print(f"a span {span:.2f} us of CPU, {found['of_clocks']:.1f} times two readings of the clock")
    print(
        f"a microbatch, {OF_A_MICROBATCH} spans: {found['microbatch_us']:.1f} us; in a file {written:.1f} us more each"
    )
    if typed.json:
        typed.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
