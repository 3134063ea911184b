"""The events file: one JSON object per line, `{"t": unix seconds, "event": name, ...}`, appended as things happen.

A line is one `write` call in append mode, so that a SIGKILL loses at most the line being written and several processes
may share a file. Knows no event by name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmnet.errors import UsageError
from swarmnet.telemetry.jsonline import encode


class EventLog:
    """Appends events to `path`, or does nothing where there is none."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        """Open `path` for appending, with its directories. Raises UsageError if that is impossible."""
        self._clock = clock
        self._file = -1
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{path}: events cannot be written there: {error.strerror}") from error
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":   # the last writer was killed in the middle of a line
            os.write(self._file, b"\n")

    def emit(self, name: str, /, **fields: object) -> None:
        """Append one event. `fields` may be anything (see `jsonline`), except `t` and `event`."""
        assert not {"t", "event"} & fields.keys(), "t and event are the file's own"
        if self._file < 0:
            return
        line = (encode({"t": self._clock(), "event": name, **fields}) + "\n").encode()
        while line:                                  # the kernel takes it whole, unless the disk is full
            line = line[os.write(self._file, line):]

    def close(self) -> None:
        """Close the file; later events go nowhere."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventReader:
    """Follows an events file that others are still writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.torn = 0
        """Lines so far that a killed writer left unfinished."""

    def read(self) -> list[dict[str, Any]]:
        """The events that became whole since the last call, oldest first; [] while there is no file.

        An unfinished last line waits for its end; a file that became shorter is read again from its start.
        """
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.split(b"\n"):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                events.append(event)
            else:
                self.torn += bool(line)
        return events
