"""Standard output of a run whose reader may go away: `swarmnet local | head`. The run is not about its output.

When nobody reads any more, one line on standard error says so, printing stops, and everything else goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO, cast

from rich.console import Console


class Outlet:
    """A text stream in front of `stream` for which a closed pipe is no error. As much of a file as `Console` needs."""

    def __init__(self, stream: TextIO, *, files: Path) -> None:
        """files: where the run's results are, for who wonders."""
        self._stream, self._files = stream, files

    @property
    def encoding(self) -> str:
        """That of the stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Is it a terminal?"""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor. Raises OSError if it has none."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Pass it on, as long as somebody reads."""
        with self._unread():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, as long as somebody reads."""
        with self._unread():
            self._stream.flush()

    @contextlib.contextmanager
    def _unread(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            _to_nowhere(self._stream)
            try:
                print(
                    f"swarmnet: nobody reads the output any more; the run goes on, its files are in {self._files} "
                    "(Ctrl+C ends it)",
                    file=sys.stderr,
                    flush=True,
                )
            except BrokenPipeError:  # both went to one reader: `2>&1 | head`
                _to_nowhere(sys.stderr)


def _to_nowhere(stream: IO[str]) -> None:
    """What is written from now on, and what still is in its buffer, is dropped."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def console(files: Path) -> Console:
    """Standard output as rich has it; see `Outlet`."""
    return Console(file=cast("IO[str]", Outlet(sys.stdout, files=files)))
