"""The supervisor's side of the orders: one file for each start of a child, and the links as each is to see them.

Peer ids are learned from the children; a link rule reaches a child as soon as both ends have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swarmnet.local.fault import Fault, links_of
from swarmnet.local.orders import Order, SetLinks, Trace, record
from swarmnet.telemetry.events import EventLog


class Channels:
    """Who is not open here has no faults below it, and is told nothing. trace: all say what they work on."""

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace
        self._files: dict[str, EventLog] = {}
        self._said: dict[str, SetLinks] = {}
        self._peers: dict[str, str] = {}
        self._rules: tuple[Fault, ...] = ()

    def open(self, name: str, path: Path) -> None:
        """`name` is about to be started and will follow `path`, which does not exist yet."""
        self.close(name)
        self._files[name] = EventLog(path)
        self._links(name)
        if self._trace:
            self.send(name, Trace())

    def close(self, name: str) -> None:
        """`name` has ended."""
        if (file := self._files.pop(name, None)) is not None:
            file.close()
        self._said.pop(name, None)

    def send(self, name: str, order: Order) -> None:
        """Tell a child something, if it listens."""
        if (file := self._files.get(name)) is not None:
            event, fields = record(order)
            file.emit(event, **fields)

    def listening(self, name: str, peer: str) -> None:
        """`name` goes by this peer id."""
        self._peers[name] = peer
        self.rules(self._rules)

    def rules(self, rules: Sequence[Fault]) -> None:
        """From now on these partitions and slow links hold."""
        self._rules = tuple(rules)
        for name in sorted(self._files):
            self._links(name)

    def _links(self, name: str) -> None:
        cut, paces = links_of(name, self._rules, self._peers)
        links = SetLinks(
            frozenset(self._peers[other] for other in cut), {self._peers[other]: pace for other, pace in paces.items()}
        )
        if links != self._said.get(name, SetLinks()):
            self._said[name] = links
            self.send(name, links)
