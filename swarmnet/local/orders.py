"""What the supervisor tells the children that were started for chaos: one file for each start of a child.

Orders are JSON lines, and say what is to hold from now on, so that reading one twice changes nothing:

    hold    id, phase, step, moment: hold once, the first time this phase comes at `step` or later, and say so
    go_on   id: hold no longer, or not at all, for that order
    links   cut: peer ids; paces: [bytes_per_s, latency_s] by peer id; the state of this child's links, whole
    trace   say what is worked on, microbatch by microbatch

Peer ids are learned from the children; a link rule reaches a child as soon as both ends have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swarmnet.local.fault import Fault, Partition, Slow, member_of
from swarmnet.telemetry.events import EventLog


class LinkLimit(NamedTuple):
    """A slow link: bytes_per_s 0 means unlimited."""

    bytes_per_s: float
    latency_s: float


class FaultOrders:
    """Who is not open here has no faults below it, and is told nothing. trace: all say what they work on."""

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace
        self._files: dict[str, EventLog] = {}
        self._said: dict[str, dict[str, object]] = {}
        self._peers: dict[str, str] = {}
        self._rules: Sequence[Fault] = ()

    def open(self, name: str, path: Path) -> None:
        """`name` is about to be started and will follow `path`, which does not exist yet."""
        self.close(name)
        self._files[name] = EventLog(path)
        self._links(name)
        if self._trace:
            self.send(name, "trace")

    def close(self, name: str) -> None:
        """`name` has ended."""
        if (file := self._files.pop(name, None)) is not None:
            file.close()
        self._said.pop(name, None)

    def send(self, name: str, order: str, **fields: object) -> None:
        """Tell a child something, if it listens."""
        if (file := self._files.get(name)) is not None:
            file.emit(order, **fields)

    def listening(self, name: str, peer: str) -> None:
        """`name` goes by this peer id."""
        self._peers[name] = peer
        self.rules(self._rules)

    def rules(self, rules: Sequence[Fault]) -> None:
        """From now on these partitions and slow links hold."""
        self._rules = rules
        for name in sorted(self._files):
            self._links(name)

    def _links(self, name: str) -> None:
        cut, paces = links_of(name, self._rules, self._peers)
        links: dict[str, object] = {
            "cut": sorted(self._peers[other] for other in cut),
            "paces": {self._peers[other]: pace for other, pace in paces.items()},
        }
        # Most rules are about others: a child is told only what changes for it.
        if links != self._said.get(name, {"cut": [], "paces": {}}):
            self._said[name] = links
            self.send(name, "links", **links)


def links_of(name: str, rules: Iterable[Fault], others: Iterable[str]) -> tuple[set[str], Mapping[str, LinkLimit]]:
    """Under these partitions and slow links: whom `name` cannot reach, and at what pace it reaches whom.

    A process in no group of a partition reaches everybody. Of several slow links between two the slowest counts.
    """
    cut: set[str] = set()
    paces: dict[str, LinkLimit] = {}
    for rule in rules:
        mine = member_of(rule.groups, name)
        for other in others:
            theirs = member_of(rule.groups, other)
            if other == name:
                continue
            if isinstance(rule, Partition) and None not in (mine, theirs) and mine != theirs:
                cut.add(other)
            elif isinstance(rule, Slow) and (mine is not None or theirs is not None):
                before = paces.get(other, LinkLimit(0.0, 0.0))
                rates = [rate for rate in (before.bytes_per_s, rule.bytes_per_s) if rate]
                paces[other] = LinkLimit(min(rates, default=0.0), max(before.latency_s, rule.latency_s))
    return cut, paces
