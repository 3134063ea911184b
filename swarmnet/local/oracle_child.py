"""The single process, as a child: runs the oracle on a manifest and writes each step's loss as an event.

`python -m swarmnet.local.oracle_child RUN.toml EVENTS`. Writes `oracle_step {step, loss, tokens}` lines, floats as
shortest decimals that read back to the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarmnet.local.oracle import run_oracle
from swarmnet.local.prepare import read_manifest, read_tokens
from swarmnet.telemetry.events import EventLog


def main(argv: list[str]) -> int:
    """Exit code 0 when every step has been written."""
    manifest = read_manifest(Path(argv[0]))
    with EventLog(Path(argv[1])) as log:
        run_oracle(
            manifest,
            read_tokens(manifest),
            on_step=lambda step, loss, tokens: log.emit("oracle_step", step=step, loss=loss, tokens=tokens),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
