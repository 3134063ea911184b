"""What a process does, written twice: everything to the events file, and what a person wants to see to the log.

`telemetry.kinds` has the level of each event. What is waited for is logged again, about once a minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from swarmnet.clock import boot_time, loop_time
from swarmnet.telemetry.events import EventLog
from swarmnet.telemetry.kinds import kind_of
from swarmnet.telemetry.log import FieldLogger
from swarmnet.telemetry.run_state import RunState

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
        kind = kind_of(event)
        level, untold = kind.level, 0
        if "step" in kind.marks:
            key, now = (event, fields.get("stage")), self._clock()
            if now - self._told_at.get(key, float("-inf")) < _EVERY_S:
                self._untold[key] = self._untold.get(key, 0) + 1
                level = logging.DEBUG
            else:
                self._told_at[key], untold = now, self._untold.pop(key, 0)
        if self._log.isEnabledFor(level):
            # A line for a person: no lists and digests, and no digits that nobody compares.
            all_of_it = level < logging.INFO
            shown = {key: _short(value) for key, value in fields.items() if all_of_it or not kind.fields.get(key)}
            self._log.at(level, event, shown | ({"untold": untold} if untold else {}))
        # A line of its own for each link that others can join by, ready to be copied.
        how = " through its relay" if fields.get("relays") else ""
        for link in offered(cast(Sequence[str], fields.get("links", ()))):
            self._log.event(f"others join{how} with: swarmnet join {link}{for_guests(fields.get('invited'))}")


def for_guests(invited: object) -> str:
    """The option that a command to join needs in a run by invitation: a file that the run's owner makes."""
    return " --invitation FILE" if invited else ""


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


async def remind(log: FieldLogger, state: RunState) -> None:
    """Log what the process waits for again, about once a minute while it lasts: near the end of what a person sees. The
    event itself is written once, when the wait begins or its reason changes. Until cancelled."""
    said_at: dict[tuple[int | None, float], float] = {}
    while True:
        await asyncio.sleep(LOOK_S)
        now = loop_time()
        waits = {(stage, wait.since): wait for stage, wait in state.waits.items()}
        said_at = {key: said_at.get(key, wait.since) for key, wait in waits.items()}
        for key, wait in waits.items():
            if now - said_at[key] >= EVERY_S:
                said_at[key] = now
                since = f"{(now - wait.since) / 60:.0f} min"
                log.at(logging.WARNING, "waiting", {**wait.fields, "since": since})
