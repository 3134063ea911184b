"""What the tree of training windows costs: to build, to look a path up, to check one, and the bytes it adds.

    python benchmarks/windows.py [--data SOURCE] [--json FILE]

Seconds are of this thread's own work, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from swarmnet.data.sampler import Sampler
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import Tokens
from swarmnet.data.windows import WindowTree

LENGTHS = (64, 256, 1024, 4096)
LOOKED_UP = 2000


def measure(tokens: Tokens, length: int) -> dict[str, float]:
    """One row of the table."""
    sampler = Sampler(0, tokens.num_tokens, length, 1)
    began = time.thread_time()
    tree = WindowTree(tokens, length, sampler.num_windows)
    built = time.thread_time()
    numbers = [sampler.windows(index)[0] for index in range(LOOKED_UP)]
    permuted = time.thread_time()
    paths = [tree.path(number) for number in numbers]
    looked_up = time.thread_time()
    windows = [tokens.ids[number * length : (number + 1) * length + 1].astype("<i4").tobytes() for number in numbers]
    cut = time.thread_time()
    proven = all(tree.proven.proves(*each) for each in zip(numbers, windows, paths, strict=True))
    checked = time.thread_time()
    assert proven
    return {
        "sequence_length": length,
        "windows": sampler.num_windows,
        "build_s": round(built - began, 3),
        "build_ns_per_token": round((built - began) / tokens.num_tokens * 1e9, 1),
        "depth": tree.proven.depth,
        "path_bytes": len(paths[0]),
        "tokens_bytes": len(windows[0]),
        "permute_us": round((permuted - built) / LOOKED_UP * 1e6, 1),
        "path_us": round((looked_up - permuted) / LOOKED_UP * 1e6, 1),
        "check_us": round((checked - cut) / LOOKED_UP * 1e6, 1),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What the tree of training windows costs.")
    parser.add_argument("--data", default="stdlib", metavar="SOURCE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    tokens = load_tokens(options.data)
    rows = [measure(tokens, length) for length in LENGTHS if tokens.num_tokens > 110 * length]
    print(f"{options.data}: {tokens.num_tokens:,} tokens")
    for row in rows:
        print("  ".join(f"{name} {value:,}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"data": options.data, "tokens": tokens.num_tokens, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
