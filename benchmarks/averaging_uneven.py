"""What `averaging.py --uneven` measures: rounds of whole simulated peers, one of them behind a narrower line.

Peers, step machines, leader and exchanges are production's; lines, time and arithmetic are the simulator's, so that
minutes of traffic cost seconds. Every sum of a run counts: those that were left before their end, too.
"""

from __future__ import annotations

import statistics
from typing import Any

from swarmnet.ids import PeerId
from swarmnet.messages import Control, StagePlan
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

ELEMENT_BYTES = 8
"""The simulator's sums are int64."""

MBIT, STEPS, UNTIL_S = 200, 6, 36_000.0
Found = dict[str, Any]


def measure_uneven(peers: int, ratio: int, parameters: int) -> Found:
    """Six rounds of so many members, one of which has 1/ratio of the others' line, both ways."""
    plan = Plan(stages=1, replicas=peers, microbatches=8 * peers, steps=STEPS, padding=parameters)
    swarm = VirtualSwarm(plan, seed=1)
    cut: dict[int, bool] = {}  # step -> are its parts of different lengths?
    tell = swarm.network.tell

    def watched(sender: PeerId, peer: PeerId, message: Control) -> None:
        if isinstance(message, StagePlan) and message.attempt is not None:
            cut[message.stamp.step] = len(set(message.attempt.bandwidths)) > 1
        tell(sender, peer, message)

    async def narrow(swarm: VirtualSwarm) -> None:
        for number, node in enumerate(swarm.nodes):
            rate = MBIT * 125_000 / (ratio if number == 1 else 1)
            swarm.limit(node, up_bytes_per_s=rate, down_bytes_per_s=rate)

    swarm.network.tell = watched  # type: ignore[method-assign]
    swarm.run(until_s=UNTIL_S, script=narrow)
    heard = [(event, fields) for _, _, event, fields in swarm.events]
    ended = [event for event, _ in heard if event in ("averaged", "sum_left")]
    contributors = {fields["step"]: len(fields["contributions"]) for event, fields in heard if event == "committed"}
    # Every contribution reaches all reducers but its own part, every reduced part everybody but who made it.
    bound = ELEMENT_BYTES * parameters * sum(count - 1 + peers - 1 for count in contributors.values())
    sent = sum(fields["averaging_bytes"] for event, fields in heard if event == "applied")
    even_s, cut_s = (_median_s(swarm, [step for step in cut if cut[step] == by_line]) for by_line in (False, True))
    return {
        "peers": peers,
        "uneven": ratio,
        "mbit": MBIT,
        "parameters": parameters,
        "rounds": STEPS,
        "exchanges_begun": len(ended),
        "exchanges_finished": ended.count("averaged"),
        "megabytes": round(sent / peers / 1e6, 1),
        "bytes_vs_bound": round(sent / bound, 4),
        "even_s": even_s,
        "cut_s": cut_s,
    }


def _median_s(swarm: VirtualSwarm, steps: list[int]) -> float | None:
    """Seconds from the first leader's round to the last member's commit, the median of these steps; None: of none."""
    took = []
    for step in steps:
        began = min(
            at - fields["seconds"]
            for at, _, event, fields in swarm.events
            if event in ("averaged", "sum_left") and fields["step"] == step
        )
        took.append(
            max(at for at, _, event, fields in swarm.events if event == "committed" and fields["step"] == step) - began
        )
    return round(statistics.median(took), 2) if took else None


def show_uneven(row: Found) -> None:
    """One line."""
    cut = "no round was cut by lines" if row["cut_s"] is None else f"{row['cut_s']:.2f} s cut by lines"
    print(
        f"{row['peers']} peers at {row['mbit']} Mb/s, one at 1/{row['uneven']} of it, {row['parameters'] / 1e6:g}M: "
        f"bytes {row['bytes_vs_bound']:.3f} of the bound ({row['megabytes']:.0f} MB a member in {row['rounds']} "
        f"rounds), exchanges finished {row['exchanges_finished']} of {row['exchanges_begun']}; a round "
        f"{row['even_s']:.2f} s evenly cut, {cut} (simulated)",
        flush=True,
    )
