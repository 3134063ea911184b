"""Checkpoints on disk: each is whole, named as bad with a reason, or absent. Blocking; call it beside the event loop.

A checkpoint is two files, `stage-S-step-V.safetensors` and the JSON that vouches for it, and sometimes `.owed`: what
this peer's averaging codec owed then, which is nobody else's. Each is written to a temporary file, synced, renamed, and
the directory synced; the JSON last, so that it makes the checkpoint exist. What is read is not trusted: regular files
only, sizes before contents, and the digest before anybody sees a byte.

One process writes a directory at a time (net.identity holds the lock), and one writer a stage. Knows no engine and
decides nothing about when to write or what to keep.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import io
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from swarmnet.errors import BadCheckpoint
from swarmnet.ids import RunId
from swarmnet.state.checkpoint_info import MAX_JSON_BYTES, CheckpointInfo, file_name, parse_info, parse_name
from swarmnet.state.cut import StateHeader

_CHUNK = 4 << 20
_TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class Found:
    """What lies on disk of one stage: `good` oldest first, `bad` with what is wrong."""

    good: tuple[CheckpointInfo, ...] = ()
    bad: tuple[BadCheckpoint, ...] = ()


class CheckpointStore:
    """The checkpoints of one run under a peer's directory; a peer may serve one run after another from it.

    owner: who writes here; what another one owed is not its own, however the file came here.
    """

    def __init__(self, directory: Path, run: RunId, *, numerics: str = "", owner: str = "") -> None:
        self.folder = directory / "snapshots" / run[:12]
        self._run, self._numerics, self._owner = run, numerics, owner

    def data_path(self, stage: int, version: int) -> Path:
        """Where the data of a checkpoint lies."""
        return self.folder / file_name(stage, version, "safetensors")

    def info_path(self, stage: int, version: int) -> Path:
        """Where the JSON of a checkpoint lies."""
        return self.folder / file_name(stage, version, "json")

    def owed_path(self, stage: int, version: int) -> Path:
        """Where it lies what the averaging codec owed at a checkpoint."""
        return self.folder / file_name(stage, version, "owed")

    # ------------------------------------------------------------ reading

    def found(self, stage: int) -> Found:
        """What is there, by name, JSON and size. Digests are not looked at: see `verify`."""
        good: list[CheckpointInfo] = []
        bad: list[BadCheckpoint] = []
        try:
            names = self._names(stage)
        except OSError as error:
            return Found(bad=(BadCheckpoint(self.folder, f"cannot be listed: {error.strerror}"),))
        for version, kinds in sorted(names.items()):
            try:
                if "json" not in kinds:
                    path = (self.data_path if "safetensors" in kinds else self.owed_path)(stage, version)
                    raise BadCheckpoint(path, "no JSON vouches for it (its writing was interrupted, or it is older)")
                good.append(self._info(stage, version))
            except BadCheckpoint as error:
                bad.append(error)
        return Found(tuple(good), tuple(bad))

    def verify(self, info: CheckpointInfo) -> None:
        """Read a checkpoint through. Raises BadCheckpoint."""
        digest = hashlib.sha256()
        with self._data(info) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        self._check(info, digest.hexdigest())

    def verified(self, stage: int) -> Found:
        """What is there and holds what it should."""
        found = self.found(stage)
        good, bad = [], list(found.bad)
        for info in found.good:
            try:
                self.verify(info)
                good.append(info)
            except BadCheckpoint as error:
                bad.append(error)
        return Found(tuple(good), tuple(bad))

    def load(self, stage: int, version: int) -> tuple[CheckpointInfo, memoryview]:
        """One checkpoint, verified. Raises BadCheckpoint."""
        info = self._info(stage, version)
        data = memoryview(bytearray(info.num_bytes))
        digest = hashlib.sha256()
        with self._data(info) as file:
            for start in range(0, info.num_bytes, _CHUNK):
                piece = data[start : start + _CHUNK]
                if file.readinto(piece) != len(piece):
                    raise BadCheckpoint(self.data_path(stage, version), "became shorter while it was read")
                digest.update(piece)
        self._check(info, digest.hexdigest())
        return info, data

    def owed(self, stage: int, version: int) -> memoryview | None:
        """What this peer's averaging codec owed at that checkpoint, verified; None if it owed nothing.

        Raises BadCheckpoint: the checkpoint itself may be sound all the same.
        """
        info, path = self._info(stage, version), self.owed_path(stage, version)
        if not info.owed_sha256:
            return None
        if info.owner != self._owner:
            raise BadCheckpoint(path, f"owed by another peer ({info.owner or 'unknown'})")
        with _opened(path) as (file, num_bytes):
            if num_bytes != info.owed_bytes:
                raise BadCheckpoint(path, f"torn: {num_bytes} bytes where its JSON promises {info.owed_bytes}")
            data = file.read(num_bytes)
        if hashlib.sha256(data).hexdigest() != info.owed_sha256:
            raise BadCheckpoint(path, "altered: its SHA-256 is not the one its JSON promises")
        return memoryview(data)

    def _names(self, stage: int) -> dict[int, set[str]]:
        """version -> parts that are there. Raises OSError."""
        versions: dict[int, set[str]] = {}
        for name in os.listdir(self.folder) if self.folder.exists() else ():
            if (parsed := parse_name(name)) is not None and parsed[0] == stage:
                versions.setdefault(parsed[1], set()).add(parsed[2])
        return versions

    def _info(self, stage: int, version: int) -> CheckpointInfo:
        path = self.info_path(stage, version)
        with _opened(path) as (file, num_bytes):
            if num_bytes > MAX_JSON_BYTES:
                raise BadCheckpoint(path, f"{num_bytes} bytes, far more than a checkpoint's JSON has")
            text = file.read(MAX_JSON_BYTES)
        info = parse_info(text, path, run=self._run, stage=stage, version=version)
        with self._data(info):
            return info

    @contextlib.contextmanager
    def _data(self, info: CheckpointInfo) -> Iterator[io.BufferedReader]:
        """The data file, open, of the right size."""
        path = self.data_path(info.stage, info.version)
        with _opened(path) as (file, num_bytes):
            if num_bytes != info.num_bytes:
                raise BadCheckpoint(path, f"torn: {num_bytes} bytes where its JSON promises {info.num_bytes}")
            yield file

    def _check(self, info: CheckpointInfo, digest: str) -> None:
        if digest != info.sha256:
            path = self.data_path(info.stage, info.version)
            raise BadCheckpoint(path, f"altered: SHA-256 is {digest[:12]}..., its JSON promises {info.sha256[:12]}...")

    # ------------------------------------------------------------ writing

    def describe(
        self, stage: int, header: StateHeader, data: bytes | memoryview, owed: bytes | memoryview | None = None
    ) -> CheckpointInfo:
        """What a checkpoint of `data`, the state at `header`, has to say of itself, and of what is owed beside it."""
        return CheckpointInfo(
            run=self._run,
            stage=stage,
            version=header.version,
            chain=header.chain,
            before=header.before,
            term_chain=header.term_chain,
            restart_number=header.restart.number,
            restart_version=header.restart.version,
            num_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            numerics=self._numerics,
            written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            owner=self._owner,
            owed_bytes=0 if owed is None else len(owed),
            owed_sha256="" if owed is None else hashlib.sha256(owed).hexdigest(),
        )

    def write(self, info: CheckpointInfo, data: bytes | memoryview, owed: bytes | memoryview | None = None) -> None:
        """Put a checkpoint on disk, in place of one of the same stage and version.

        Where the same data lie already, only the JSON is replaced: the state that a run has just gone back to is never
        absent. Raises OSError (full, read-only, ...): the checkpoint is then absent or the old one, all others are
        untouched.
        """
        _make_folder(self.folder)
        told = self.info_path(info.stage, info.version)
        if not self._holds(info):
            if os.path.lexists(told):
                told.unlink()
                _sync_folder(self.folder)  # else the old JSON could outlive a crash and speak of the new data
            _put(self.data_path(info.stage, info.version), data)
        if owed is not None:
            _put(self.owed_path(info.stage, info.version), owed)
        _put(told, info.model_dump_json(indent=1).encode() + b"\n")

    def _holds(self, info: CheckpointInfo) -> bool:
        """Is there a sound checkpoint with the same data?"""
        try:
            old = self._info(info.stage, info.version)
            if (old.sha256, old.num_bytes) != (info.sha256, info.num_bytes):
                return False
            self.verify(old)
        except BadCheckpoint:
            return False
        return True

    def remove(self, stage: int, versions: Collection[int]) -> None:
        """Delete these checkpoints; the JSON first, so that none is left half. Raises OSError."""
        for version in versions:
            for path in (
                self.info_path(stage, version),
                self.owed_path(stage, version),
                self.data_path(stage, version),
            ):
                path.unlink(missing_ok=True)

    def remove_leftovers(self, stage: int, *, below: int) -> None:
        """Delete what is older than version `below` and no checkpoint: nobody will repair it. Raises OSError."""
        good = {info.version for info in self.found(stage).good}
        self.remove(stage, [version for version in self._names(stage) if version < below and version not in good])

    def clean(self, stage: int) -> None:
        """Delete what interrupted writes have left. Call it before the stage's first write. Raises OSError."""
        for path in self.folder.glob(f".stage-{stage}-step-*{_TEMPORARY}"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """A regular file and its size. Raises BadCheckpoint for whatever cannot be read, here or in the block."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hang us
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise BadCheckpoint(path, "not a regular file")
            yield file, status.st_size
    except FileNotFoundError as error:
        raise BadCheckpoint(path, "missing") from error
    except OSError as error:
        reason = "a symbolic link, which is not followed" if error.errno == errno.ELOOP else f"{error.strerror}"
        raise BadCheckpoint(path, reason) from error


def _put(path: Path, data: bytes | memoryview) -> None:
    """`path` holds `data`, or what it held before."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    view = memoryview(data)
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            for start in range(0, len(view), _CHUNK):
                file.write(view[start : start + _CHUNK])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Create it and its parents so that they outlive a crash as well."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs no directories
            raise
    finally:
        os.close(handle)
