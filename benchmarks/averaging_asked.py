"""What `averaging.py` is asked to measure: its flags, read and checked. What is wrong with them is one line.

Knows which codecs can be measured, and measures nothing.
"""

from __future__ import annotations

import argparse
import re

from harness import Benchmark, listed

ELEMENT_BYTES = {"int64": 4.4, "small": 0.7}
"""Of the codecs that can be measured, for numbers as large as here."""

MAX_RATIO = 100
"""Of two lines."""

MAX_PEERS, MIN_PARAMETERS, MAX_PARAMETERS = 64, 1000, 10**9
"""What one machine can hold; and fewer parameters are no vector to cut."""


def read(description: str | None) -> argparse.Namespace:
    """The command line's flags. Ends the process with exit code 2 and a line if they are wrong."""
    parser = Benchmark(description)
    parser.add_argument("--full", action="store_true", help="every row, three turns: half an hour")
    parser.add_argument("--peers", type=listed(some_peers), help="such as 2,4")
    parser.add_argument("--parameters", type=listed(size), help="such as 250k,10M")
    parser.add_argument(
        "--codec", type=listed(codec), default=["small", "int64"], help=f"of {', '.join(ELEMENT_BYTES)}"
    )
    parser.add_argument("--turns", type=positive, help="2, or 3 with --full")
    parser.add_argument("--no-hivemind", action="store_true")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--links", type=listed(shape), help="behind emulated lines, PEERSxMBIT,...; and nothing else")
    parser.add_argument("--rtt", type=float, default=50.0, help="with --links: milliseconds")
    parser.add_argument("--uneven", type=listed(uneven), help="one narrow line, PEERSxRATIO,...; and nothing else")
    parser.add_argument("--kill", action="store_true", help="what a member killed mid-round costs, and nothing else")
    parser.add_argument(
        "--arithmetic", type=listed(codec), help=f"a member's CPU time without transport, of {', '.join(ELEMENT_BYTES)}"
    )
    parser.add_argument("--patience", type=float, default=30.0, help="seconds to wait for a good sum after a kill")
    args = parser.asked()
    args.turns = args.turns or (3 if args.full else 2)
    return args


def size(text: str) -> int:
    """10M, 250k, 1000."""
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", text)):
        raise ValueError("write numbers with commas, such as 250k,10M")
    found = round(float(match[1]) * {"": 1, "k": 1000, "M": 1_000_000}[match[2]])
    if not MIN_PARAMETERS <= found <= MAX_PARAMETERS:
        raise ValueError(f"vectors have {MIN_PARAMETERS} to {MAX_PARAMETERS} parameters")
    return found


def some_peers(text: str) -> int:
    """2 and more."""
    if not (text.isascii() and text.isdigit() and 2 <= int(text) <= MAX_PEERS):
        raise ValueError(f"write how many peers average, 2 to {MAX_PEERS}, with commas, such as 2,4,8")
    return int(text)


def codec(text: str) -> str:
    """One that the benchmark knows the bytes and the rounding of."""
    if text not in ELEMENT_BYTES:
        raise ValueError(f"codecs are {', '.join(ELEMENT_BYTES)}")
    return text


def shape(text: str) -> tuple[int, int]:
    """4x200: peers and megabits per second."""
    if not (match := re.fullmatch(r"(\d+)x(\d+)", text)) or int(match[2]) < 1:
        raise ValueError("write PEERSxMBIT with commas, such as 2x200,4x200")
    return some_peers(match[1]), int(match[2])


def uneven(text: str) -> tuple[int, int]:
    """4x5: peers, one of which has a fifth of the others' line."""
    if not (match := re.fullmatch(r"(\d+)x(\d+)", text)) or not 1 <= int(match[2]) <= MAX_RATIO:
        raise ValueError(f"write PEERSxRATIO with commas, such as 4x5; a ratio is 1 to {MAX_RATIO}")
    return some_peers(match[1]), int(match[2])


def positive(text: str) -> int:
    """1 and more."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)
