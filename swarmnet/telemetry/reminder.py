"""Says again what a process waits for, about once a minute while it lasts: it stays near the end of what a person sees.

The event itself is written once, when the wait begins or its reason changes. Knows which events end a wait, no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet.telemetry.log import FieldLogger

EVERY_S, LOOK_S = 60.0, 5.0


@dataclass(slots=True)
class _Wait:
    since: float
    said_at: float
    fields: dict[str, object]


class Reminder:
    """Call it with every event, inside a running loop, and keep `run` running beside."""

    def __init__(self, log: FieldLogger) -> None:
        self._log = log
        self._waits: dict[object, _Wait] = {}  # by stage; None: all of the process

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        """Take in one event that was told already."""
        stage = fields.get("stage")
        match event:
            case "waiting":
                now = asyncio.get_running_loop().time()
                self._waits[stage] = _Wait(now, now, dict(fields))
            case "synced" | "applied":
                self._waits.pop(stage, None)
            case "complete":
                self._waits.pop(None, None)
            case "restart" | "draining":
                self._waits.clear()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = asyncio.get_running_loop().time()
            for wait in self._waits.values():
                if now - wait.said_at >= EVERY_S:
                    wait.said_at = now
                    self._log.at(
                        logging.WARNING, "waiting", {**wait.fields, "since": f"{(now - wait.since) / 60:.0f} min"}
                    )
