"""What of the children's events is worth a line on the terminal beside the curve, each said once. Pure.

The link by which others join, as long as there is one that works; checkpoints that cannot be used or written, and what
is used instead; ranks that are lost, and back; what a stage waits for; the run going back. Faults and crashes are the
supervisor's to tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 5.0
"""A wait that ends sooner is part of every start, and nothing to tell."""


_SOURCES = {
    "checkpoint": "from an older checkpoint of its own",
    "snapshot": "fetched from other replicas",
    "seed": "drawn from the run's seed",
    "neighbours": "made anew from the stages beside it",
}


@dataclass(slots=True)
class News:
    """Tell it everything; what it returns are the lines."""

    _links: dict[str, str] = field(default_factory=dict)  # of those that listen now
    _invited: tuple[str, str] | None = None  # by whom, and with which link
    _bad: set[str] = field(default_factory=set)  # whose checkpoint was of no use
    _unwritten: set[str] = field(default_factory=set)
    _waits: dict[tuple[str, int | None], tuple[float, str]] = field(default_factory=dict)  # by process and stage
    _said: set[str] = field(default_factory=set)

    def on(self, name: str, event: Mapping[str, Any], *, now: float) -> list[str]:
        """One event of the process `name`."""
        match event:
            case {"event": "listening", "links": [*_, link]}:  # the last one is the one that works on this machine
                return self._listening(name, link)
            case {"event": "checkpoint_bad", "path": path, "reason": reason}:
                self._bad.add(name)
                return [f"{name}: the checkpoint {path} is of no use: {reason}"]
            case {"event": "checkpoint_failed", "path": path, "reason": reason} if name not in self._unwritten:
                self._unwritten.add(name)
                return [f"{name}: the checkpoint {path} could not be written: {reason}; training goes on without it"]
            case {"event": "waiting", "reason": reason}:
                stage = event.get("stage")  # none: no step can be done without it
                if (name, stage) not in self._waits or self._waits[name, stage][1] != reason:
                    self._waits[name, stage] = now, reason
            case {"event": "complete"}:
                self._waits.pop((name, None), None)
            case {"event": "restart", "number": number, "version": version, "reason": reason}:
                return self._once(
                    f"the run goes on from version {version} (restart {number}, {reason})", about=f"restart {number}"
                )
            case {"event": "rank_lost", "rank": rank, "reason": reason}:
                which = "a rank" if rank is None else f"rank {rank}"
                return [f"{name} has lost {which} ({reason}): its ranks start anew"]
            case {"event": "mesh_started", "mesh": mesh, "pids": pids, "seconds": seconds} if event["epoch"] > 1:
                return [f"{name} has its {len(pids)} ranks ({mesh}) again, after {seconds:.1f} s"]
            case {"event": "dropped", "stage": stage, "to": version, "reason": reason}:
                return self._once(f"stage {stage} at version {version} is not what it was: {reason}")
            case {"event": "synced", "stage": stage, "version": version, "how": how}:
                self._waits.pop((name, stage), None)
                self._waits.pop((name, None), None)  # it serves: others say what is missing
                if name in self._bad:
                    self._bad.discard(name)
                    return [f"{name} goes on from version {version}, {_SOURCES.get(how, how)}"]
        return []

    def gone(self, name: str, *, back: bool) -> list[str]:
        """The process `name` has ended. back: it will be started again."""
        self._waits = {key: wait for key, wait in self._waits.items() if key[0] != name}
        if self._links.pop(name, None) is None or back or self._invited is None or self._invited[0] != name:
            return []
        self._invited = None
        return self._invite(next(iter(self._links.items()))) if self._links else []

    def tick(self, *, now: float) -> list[str]:
        """Time has passed: what has been waited for so long that it is worth a word."""
        reasons = Counter(reason for since, reason in self._waits.values() if now - since >= PATIENCE_S)
        if not reasons:
            return []
        ((reason, _),) = reasons.most_common(1)  # some see less of the swarm than others
        return self._once(f"waiting: {reason}")

    def _listening(self, name: str, link: str) -> list[str]:
        self._links[name] = link
        if self._invited is None or (self._invited[0] == name and self._invited[1] != link):
            return self._invite((name, link))
        return []

    def _invite(self, who: tuple[str, str]) -> list[str]:
        self._invited = who
        return [f"join it while it runs: swarmnet join {who[1]}"]

    def _once(self, text: str, *, about: str = "") -> list[str]:
        if (about or text) in self._said:
            return []
        self._said.add(about or text)
        return [text]
