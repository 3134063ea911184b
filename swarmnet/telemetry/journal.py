"""What a process does, written twice: everything to the events file, and what a person wants to see to the log.

`telemetry.kinds` has the level of each event. What is waited for is logged again, about once a minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from swarmnet.clock import boot_time
from swarmnet.telemetry.events import EventLog
from swarmnet.telemetry.kinds import KINDS
from swarmnet.telemetry.log import FieldLogger

_EVERY_S = 1.0
"""Of an event that comes with every step, the log shows one line of each stage so often."""


class Journal:
    """Call it with an event's name and fields."""

    def __init__(self, events: EventLog, log: FieldLogger, *, clock: Callable[[], float] = boot_time) -> None:
        self._events, self._log, self._clock = events, log, clock
        self._told_at: dict[tuple[str, object], float] = {}
        self._untold: dict[tuple[str, object], int] = {}

    def __call__(self, event: str, fields: dict[str, object]) -> None:
        """Write to the events file; log at the level the event deserves, those of each step once a second."""
        self._events.emit(event, **fields)
        kind = KINDS[event]
        level, untold = kind.level, 0
        if "step" in kind.marks:
            key, now = (event, fields.get("stage")), self._clock()
            if now - self._told_at.get(key, float("-inf")) < _EVERY_S:
                self._untold[key] = self._untold.get(key, 0) + 1
                level = logging.DEBUG
            else:
                self._told_at[key], untold = now, self._untold.pop(key, 0)
        if event == "listening":
            self._log.event("listening", peer=fields["peer"])
            self._invite(fields["links"], "others join with")
        elif event == "hidden":
            self._log.at(level, event, {"could_not": fields["could_not"], "relays": fields["relays"]})
            # Those it printed before lead nowhere.
            self._invite(fields["links"], "nobody can dial this peer; others join through its relay with")
        elif self._log.isEnabledFor(level):
            # A line for a person: no digests, and no digits that nobody compares.
            hidden = kind.programs if level >= logging.INFO else frozenset()
            shown = {key: _short(value) for key, value in fields.items() if key not in hidden}
            self._log.at(level, event, shown | ({"untold": untold} if untold else {}))

    def _invite(self, links: object, words: str) -> None:
        """A line of its own for each link that others can join by, ready to be copied."""
        assert isinstance(links, list | tuple)
        for link in offered(links):
            self._log.event(f"{words}: swarmnet join {link}")


def loopback_last(addresses: Iterable[str]) -> list[str]:
    """Multiaddrs in the order in which to offer them: those of this machine alone come last."""
    return sorted(addresses, key=_of_this_machine)


def offered(places: Iterable[str]) -> list[str]:
    """Of multiaddrs, or links, those that other machines can use; without any, those of this machine."""
    known = list(places)
    return [place for place in known if not _of_this_machine(place)] or known


def _of_this_machine(place: str) -> bool:
    # A link has its address behind the @.
    address = place.partition("@")[2] or place
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def _short(value: object) -> object:
    if not isinstance(value, float):
        return value
    # Four decimals of a small number would be zeros.
    return round(value, 4) if abs(value) >= 1e-3 else float(f"{value:.1e}")


EVERY_S, LOOK_S = 60.0, 5.0


class Reminder:
    """Says again what a process waits for, about once a minute while it lasts: near the end of what a person sees.

    The event itself is written once, when the wait begins or its reason changes. Call it with every event, inside a
    running loop, and keep `run` running beside.
    """

    def __init__(self, log: FieldLogger) -> None:
        self._log = log
        self._waits: dict[object, tuple[float, float, dict[str, object]]] = {}
        """Stage, or None for all of the process -> (waits since, said at, fields)."""

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        """Take in one event that was told already."""
        stage = fields.get("stage")
        match event:
            case "waiting":
                now = asyncio.get_running_loop().time()
                self._waits[stage] = now, now, dict(fields)
            case "synced" | "applied":
                self._waits.pop(stage, None)
            case "complete":
                self._waits.pop(None, None)
            # Whatever it waited for before is not what it waits for now.
            case "restart" | "draining":
                self._waits.clear()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = asyncio.get_running_loop().time()
            for stage, (since, said_at, fields) in self._waits.items():
                if now - said_at >= EVERY_S:
                    self._waits[stage] = since, now, fields
                    self._log.at(logging.WARNING, "waiting", {**fields, "since": f"{(now - since) / 60:.0f} min"})
