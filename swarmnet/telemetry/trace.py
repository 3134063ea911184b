"""Spans as a Chrome trace: a file that chrome://tracing and https://ui.perfetto.dev show (`--trace`).

It is a JSON array, an event on each line. A file of a killed writer lacks the closing bracket, and perhaps the end
of a line; those viewers need neither, and `merge` reads it too. Times are microseconds of this machine's UNIX clock. A
peer is a process in it. What a stage does one at a time has a row of its own for each kind; waits, of which several are
under way at once, are asynchronous events.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from swarmnet.clock import boot_time, wall_time
from swarmnet.errors import UsageError
from swarmnet.telemetry import log as telemetry
from swarmnet.telemetry.spans import Span, SpanKind

log = telemetry.get(__name__)

MOST_BYTES = 16 << 20
"""Of a peer's file: then its older half goes. About 100,000 spans."""

_KINDS = get_args(SpanKind)
_ALONE = frozenset(("forward", "backward", "weights", "averaging", "collect", "barrier", "update"))
"""A stage does one of each at a time."""
_HOPS = frozenset(("reduce_scatter", "all_gather"))

_compact = json.JSONEncoder(separators=(",", ":")).encode
"""`json.dumps` would make an encoder for each line, which takes as long again."""

_BEGIN, _NEXT, _END = b"[\n", b",\n", b"\n]\n"


class SpanLines:
    """Writes one peer's spans as events, and names the rows in which viewers draw them. name: for a person."""

    def __init__(self, peer: str, name: str) -> None:
        # Files of several peers may be put together.
        self._pid = zlib.crc32(peer.encode()) >> 1
        self.names = {-1: _line("process_name", ph="M", pid=self._pid, args={"name": name})}
        """By row: the events that name them; -1 is the process."""
        self._waits = 0
        # One for the whole life: whatever sets the clock meanwhile must not bend the rows.
        self._offset_s = wall_time() - boot_time()

    def of(self, spans: Iterable[Span]) -> bytes:
        """Their events, and those of the rows that are new."""
        return b"".join(line for span in spans for line in self._lines(span))

    def _lines(self, span: Span) -> Iterator[bytes]:
        """The events of one span, and of its row if that is new."""
        began, ended = (round(1e6 * (at + self._offset_s)) for at in (span.began, span.ended))
        args: dict[str, int] = {"stage": span.stage, "step": span.step}
        if span.number >= 0:
            args["hop" if span.kind in _HOPS else "index"] = span.number
        if span.kind in _ALONE:
            row = span.stage * len(_KINDS) + _KINDS.index(span.kind)
            if row not in self.names:
                named = {"ph": "M", "pid": self._pid, "tid": row}
                self.names[row] = _line("thread_name", **named, args={"name": f"stage {span.stage} {span.kind}"})
                self.names[row] += _line("thread_sort_index", **named, args={"sort_index": row})
                yield self.names[row]
            yield _line(span.kind, ph="X", ts=began, dur=max(ended - began, 0), pid=self._pid, tid=row, args=args)
            return
        self._waits += 1
        wait = {"cat": span.kind, "id2": {"local": f"{self._waits:x}"}, "pid": self._pid, "tid": 0}
        yield _line(span.kind, ph="b", ts=began, **wait, args=args)
        yield _line(span.kind, ph="e", ts=max(ended, began), **wait)


def trace(peer: str, name: str, spans: Iterable[Span]) -> bytes:
    """A whole trace of one peer, with these spans alone."""
    lines = SpanLines(peer, name)
    events = lines.of(spans)
    return _BEGIN + (lines.names[-1] + events).removesuffix(_NEXT) + _END


class TraceFile:
    """Appends one peer's spans, to a file of bounded size. `close` makes it strict JSON.

    A disk that is full costs spans and a line in the log, and nothing else.
    """

    def __init__(self, path: Path, peer: str, name: str, *, most_bytes: int = MOST_BYTES) -> None:
        """Go on with the trace that is there, or begin one. name: of the peer, for a person.

        Raises UsageError if the file is no trace, or cannot be written.
        """
        check_trace(path)
        self._path, self._most_bytes = path, most_bytes
        self._lines, self._failed = SpanLines(peer, name), False
        try:
            self._file = self._begun(_whole(path.read_bytes()) or _BEGIN + self._lines.names[-1])
        except OSError as error:
            raise _cannot(path, error) from error

    def write(self, spans: Iterable[Span]) -> None:
        """Append them."""
        data = self._lines.of(spans)
        try:
            if self._size > self._most_bytes:
                self._halve()
            self._append(data)
        except OSError as error:
            if not self._failed:
                log.warning("trace_not_written", path=str(self._path), reason=error.strerror or str(error))
            self._failed = True

    def close(self) -> None:
        """Nothing more comes."""
        try:
            os.pwrite(self._file, _END, self._size - len(_NEXT))
        # It is a trace without the bracket, too.
        except OSError as error:
            log.warning("trace_not_closed", path=str(self._path), reason=error.strerror or str(error))
        os.close(self._file)

    def _begun(self, data: bytes) -> int:
        """The descriptor of a new file with these lines, instead of what is there."""
        draft = self._path.with_name(f".{self._path.name}.draft")
        draft.write_bytes(data)
        os.replace(draft, self._path)
        self._size = len(data)
        return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def _append(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._size + written)
        finally:
            # The disk is full: no torn line may stay in the middle.
            if written < len(data):
                os.ftruncate(self._file, self._size)
        self._size += written

    def _halve(self) -> None:
        """Drop the older half of the events."""
        data = os.pread(self._file, self._size, self._size // 2)
        kept = data[data.index(_NEXT) + len(_NEXT) :]
        before = self._file
        self._file = self._begun(_BEGIN + b"".join(self._lines.names.values()) + kept)
        os.close(before)


def _line(name: str, **fields: Any) -> bytes:
    return _compact({"name": name, **fields}).encode() + _NEXT


def _whole(data: bytes) -> bytes:
    """What was written of a trace, up to the last line that is whole, ready for the next event."""
    if data.endswith(_END):
        return data[: -len(_END)] + _NEXT
    return data[: data.rfind(_NEXT) + len(_NEXT)] if _NEXT in data else b""


def _cannot(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--trace {path}: cannot be written there ({error.strerror}): name another file")


def check_trace(path: Path) -> None:
    """Make the file, unless it is there. Raises UsageError if that cannot be, or if it is something else than a trace,
    which would be lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise UsageError(f"--trace {path}: it is no regular file: name another one")
        with path.open("a+b") as file:
            file.seek(0)
            begun = file.read(len(_BEGIN))
    except OSError as error:
        raise _cannot(path, error) from error
    if begun not in (b"", _BEGIN):
        raise UsageError(f"--trace {path}: it is there already and no trace: name another file")


def merge(traces: Mapping[str, Path], into: Path) -> None:
    """One file of several peers' traces, which they may still be writing. traces: by the names that they get in it.

    Raises UsageError if it cannot be written.
    """
    check_trace(into)
    draft = into.with_name(f".{into.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(_BEGIN[:-1])
            before = b"\n"
            for place, (name, path) in enumerate(traces.items()):
                for line in _whole(path.read_bytes()).split(_NEXT)[:-1] if path.exists() else ():
                    event = line.removeprefix(_BEGIN)
                    if event.startswith(b'{"name":"process_name"'):
                        named = {"ph": "M", "pid": json.loads(event)["pid"]}
                        event = _line("process_name", **named, args={"name": name})
                        event += _line("process_sort_index", **named, args={"sort_index": place})[: -len(_NEXT)]
                    file.write(before + event)
                    before = _NEXT
            file.write(_END)
        os.replace(draft, into)
    except OSError as error:
        raise _cannot(into, error) from error
