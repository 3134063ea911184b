"""A peer process of four ranks, for tests that end it: `python -m rank_peer`. Prints the ranks' pids as JSON."""

from __future__ import annotations

import json

from swarmnet.ranks.supervisor import RankGroup


def main() -> None:
    group = RankGroup(
        "rank_toy:make", {}, devices=["cpu"] * 4, deadline_s=100.0, memory={"memory": ((1 << 14,), "float32")}
    )
    group.start()
    group.order("write", memory="memory", value=1.0)
    print(json.dumps(group.pids), flush=True)
    group.order("apart")


if __name__ == "__main__":
    main()
