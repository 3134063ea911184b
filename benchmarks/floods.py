"""What honest callers keep of their rate while one identity floods the peer they call.

    python benchmarks/floods.py [--messages 10000] [--records 10000] [--json FILE]

A peer in a process of its own serves a tiny model; an honest caller asks it twenty times a second, by turns for an
evaluation and for the manifest. Another process says 200 messages a second over every method (well-formed ones, damaged
ones, noise), or fills the DHT node with records of as many identities, a third of them damaged. Printed is the rate of
the honest caller meanwhile against its rate before, and what the peer's memory grew by. The goal is a share of 0.9 and
64 MiB. What attacks is what tests/swarm/test_hostile_flood.py attacks with.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import Benchmark, write

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = Benchmark(__doc__)
    parser.add_argument("--messages", type=int, default=10_000, help="%(default)s; 0: none")
    parser.add_argument("--records", type=int, default=10_000, help="%(default)s; 0: none")
    options = parser.asked()
    if min(options.messages, options.records) < 0:
        parser.error("--messages and --records must be 0 or more")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "swarm")]
    from test_hostile_flood import Attack, withstand

    rows = []
    for what, number in (("messages", options.messages), ("records", options.records)):
        if not number:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (found,) = withstand(Path(folder), Attack(what, number), warm_up=400, quiet_s=10.0)
        rows.append(
            {
                "what": what,
                "number": number,
                "before": round(found.before, 2),
                "meanwhile": round(found.meanwhile, 2),
                "share": round(found.share, 3),
                "grown_mib": round(found.grown / 2**20, 2),
            }
        )
        print(
            f"{number} {what}: {found.meanwhile:.1f} calls a second answered, {found.before:.1f} before: share "
            f"{found.share:.3f}; memory {found.grown / 2**20:+.1f} MiB",
            flush=True,
        )
        write(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
