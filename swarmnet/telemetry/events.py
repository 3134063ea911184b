"""The events file: one JSON object per line, `{"t": unix seconds, "event": name, ...}`, appended as things happen.

A line is one `write` call in append mode, so that a SIGKILL loses at most the line being written and several processes
may share a file. While a file cannot be written, for a full disk say, its events wait, and two lines in the log say so;
all else goes on. Knows no event by name.
"""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from swarmnet.clock import wall_time
from swarmnet.errors import UsageError
from swarmnet.telemetry import log as telemetry
from swarmnet.telemetry.log import encode

log = telemetry.get(__name__)

LATER = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM))
"""Why a file cannot be written that may pass while we run; all else is the operator's to change."""

_MOST_WAITING = 16 << 20
"""Bytes of events that wait until the file can be written again: of more the oldest are lost."""


class EventLog:
    """Appends events to `path`, or does nothing where there is none."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = wall_time) -> None:
        """Open `path` for appending; its directory must exist. Raises UsageError if that is impossible."""
        self._clock, self._path = clock, path
        self._file = -1
        self._waiting: deque[str] = deque()
        self._size, self._lost, self._failing = 0, 0, False
        self._torn = False  # does the file end within a line?
        if path is None:
            return
        try:
            self._open(path)
        except OSError as error:
            # A directory that is not ours does not become so while we run.
            if error.errno not in LATER:
                raise UsageError(
                    f"{path}: events cannot be written there ({error.strerror}): name a file in a directory that exists"
                ) from error
            self._failed(error)

    def emit(self, name: str, /, **fields: object) -> None:
        """Append one event. `fields` may be anything (`log.encode`), except `t` and `event`. Never raises OSError."""
        assert not {"t", "event"} & fields.keys(), "t and event are the file's own"
        if self._path is not None:
            self.copy({"t": self._clock(), "event": name, **fields})

    def copy(self, event: Mapping[str, object]) -> None:
        """Append an event that was written before, with its own time, as `emit` does."""
        if self._path is None:
            return
        self._waiting.append(encode(event))
        self._size += len(self._waiting[-1])
        while self._size > _MOST_WAITING:
            self._size -= len(self._waiting.popleft())
            self._lost += 1
        try:
            # Writing failed before the file could even be opened.
            if self._file < 0:
                self._open(self._path)
            while self._waiting:
                self._write(self._waiting[0])
                self._size -= len(self._waiting.popleft())
        except OSError as error:
            self._failed(error)
            return
        if self._failing:
            log.warning("events_written_again", path=str(self._path), lost=self._lost)
            self._failing, self._lost = False, 0

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        # The last writer may have been killed in the middle of a line.
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def _write(self, text: str) -> None:
        line = (("\n" if self._torn else "") + text + "\n").encode()
        while line:  # the kernel takes it whole, unless the disk is full
            line = line[os.write(self._file, line) :]
            self._torn = bool(line)

    def _failed(self, error: OSError) -> None:
        # Said once: a full disk would else fill the log as well.
        if not self._failing:
            self._failing = True
            log.warning(
                "events_not_written",
                path=str(self._path),
                reason=error.strerror or str(error),
                then="events wait until it can be written again; all else goes on",
            )

    def close(self) -> None:
        """Close the file; later events go nowhere."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path = -1, None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def of_kind(events: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those of one kind."""
    return [event for event in events if event.get("event") == kind]


class EventReader:
    """Follows an events file that others are still writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The events that became whole since the last call, oldest first; [] while there is no file.

        An unfinished last line waits for its end; a file that became shorter is read again from its start.
        """
        try:
            with self._path.open("rb") as file:
                # Somebody has emptied it.
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        # Its writer may be in the middle of the last line.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.split(b"\n"):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            # A line that was torn may still be JSON, a number say.
            if isinstance(event, dict):
                events.append(event)
        return events
