"""Checkpoints on disk: each is whole, named as bad with a reason, or absent.

A checkpoint is two files, `stage-S-step-V.safetensors` and the JSON that describes it. Each is written to a temporary
file, synced, renamed, and the directory synced; the JSON last, so that it makes the checkpoint exist. What is read is
not trusted: regular files only, sizes before contents, and the digest before a byte is used.

`CheckpointStore` blocks; `DirectoryDisk` runs it on threads. One process writes a directory at a time (net.identity
holds the lock). Knows no engine and decides nothing about when to write or what to keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import hashlib
import io
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field, ValidationError

from swarmnet.clock import wall_time
from swarmnet.config.table import Count, Table
from swarmnet.errors import BadCheckpoint
from swarmnet.ids import Chain, OnDisk, PeerId, Restart, RunId
from swarmnet.manifest.extension import MAX_NOTICE_CHARS, MAX_NOTICES, Extension
from swarmnet.messages import MAX_EXCLUSIONS, Exclusion, StateHeader
from swarmnet.state.rollback import MAX_VOTERS
from swarmnet.wire.signed import from_text, to_text

MAX_JSON_BYTES = 64 << 10

_REFUSED = {
    # The JSON is written last: without it the writing was broken off.
    errno.ENOENT: "missing: its writing was interrupted, or it was deleted",
    errno.ELOOP: "a symbolic link, which is not followed",
}

_TEMPORARY = ".tmp"
_NAME = re.compile(r"stage-(0|[1-9][0-9]{0,15})-step-(0|[1-9][0-9]{0,15})\.(?:json|safetensors)")
_Hex64 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
_Name = Annotated[str, Field(max_length=256)]
_Earlier = Annotated[str | int, Field(exclude=True)]


def _checked(notice: str) -> str:
    from_text(notice, Extension)
    return notice


_Notice = Annotated[str, Field(max_length=MAX_NOTICE_CHARS), AfterValidator(_checked)]


class CheckpointInfo(Table):
    """The JSON of a checkpoint."""

    format: Literal[1] = 1
    run: _Hex64
    stage: Count
    version: Count
    chain: _Hex64
    """Which commits led here."""
    before: _Hex64
    """Which led to one version earlier."""
    term_chain: _Hex64
    restart_number: Count
    """Of the restart of the run that the state descends from; 0 if there was none."""
    restart_version: Count
    num_bytes: Count
    sha256: _Hex64
    numerics: _Name = ""
    written_at: Annotated[str, Field(max_length=64)] = ""
    notices: Annotated[tuple[_Notice, ...], Field(max_length=MAX_NOTICES)] = ()
    """What the run's owner has signed to extend it, as far as it is in force at this version."""
    exclusions: Annotated[tuple[tuple[_Name, Count, Count], ...], Field(max_length=MAX_EXCLUSIONS)] = ()
    """Peers that steps do not wait for, until which step, and at which level (`step.exclusion`)."""
    exclusions_before: Annotated[tuple[tuple[_Name, Count, Count], ...], Field(max_length=MAX_EXCLUSIONS)] = ()
    """The same of one version earlier."""
    owner: _Earlier = ""
    owed_bytes: _Earlier = 0
    owed_sha256: _Earlier = ""
    """Earlier releases wrote these three. They are read and not used."""

    @classmethod
    def of(cls, run: RunId, stage: int, header: StateHeader, data: bytes | memoryview, **origin: str) -> CheckpointInfo:
        """What a checkpoint of `data`, the state at `header`, has to say of itself. origin: numerics and written_at."""
        restart = {"restart_number": header.restart.number, "restart_version": header.restart.version}
        state = {name: getattr(header, name) for name in ("version", "chain", "before", "term_chain")}
        state |= {"notices": tuple(map(to_text, header.notices))}
        for name in ("exclusions", "exclusions_before"):
            state[name] = tuple((each.peer, each.until_step, each.level) for each in getattr(header, name))
        files = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return cls.model_validate({"run": run, "stage": stage, **state, **restart, **files, **origin})

    @property
    def on_disk(self) -> OnDisk:
        """As it is announced: the version, and the restart that the state descends from."""
        return OnDisk(self.version, Restart(self.restart_number, self.restart_version))

    @property
    def header(self) -> StateHeader:
        """Where a replica stands that has loaded it."""
        chains = Chain(self.chain), Chain(self.before), Chain(self.term_chain)
        tables = [
            tuple(Exclusion(PeerId(peer), until_step, level) for peer, until_step, level in table)
            for table in (self.exclusions, self.exclusions_before)
        ]
        notices = tuple(from_text(text, Extension) for text in self.notices)
        return StateHeader(self.version, *chains, self.on_disk.restart, notices, *tables)


class RunMemory(Table):
    """What a peer remembers of a run in addition to its checkpoints.

    Without it a restart would be numbered like the one before it, and peers that never computed anything could decide
    where the run goes on.
    """

    restart: Count = 0
    """The number of the last restart that this stage went under."""
    voters: Annotated[tuple[_Name, ...], Field(max_length=MAX_VOTERS)] = ()
    """Peers that have contributed to commits (`state.rollback`), the latest last."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is on disk of one stage: `good` oldest first, `bad` with what is wrong."""

    good: tuple[CheckpointInfo, ...] = ()
    bad: tuple[BadCheckpoint, ...] = ()
    memory: RunMemory = field(default_factory=RunMemory)


@dataclass(frozen=True, slots=True)
class Written:
    """What came of writing a checkpoint. `problem` says in words why it is not on disk; None: it is."""

    info: CheckpointInfo
    problem: str | None = None


class Disk(Protocol):
    """Where the checkpoints of a run are: a directory, or in the simulator a dictionary."""

    def path(self, stage: int, version: int) -> str:
        """Where a checkpoint is or would be, for people."""

    async def open(self, stage: int) -> Found:
        """Tidy up after a crash, and say what is there, verified."""

    async def write(self, stage: int, header: StateHeader, data: bytes | memoryview) -> Written:
        """Put a checkpoint on disk; it replaces one of the same version."""

    async def retain(self, stage: int, versions: Collection[int]) -> str | None:
        """Delete the stage's checkpoints but these. Returns what went wrong, in words."""

    async def remember(self, stage: int, memory: RunMemory) -> None:
        """Keep this for the next process. A disk that cannot be written costs the memory, no more."""

    async def load(self, stage: int, version: int) -> tuple[CheckpointInfo, memoryview]:
        """One checkpoint, verified. Raises BadCheckpoint."""


class DirectoryDisk:
    """A `CheckpointStore`, on threads. One writes at a time, also if the caller of the one before was cancelled."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._one_writes = threading.Lock()

    def path(self, stage: int, version: int) -> str:
        return str(self.store.data_path(stage, version))

    async def open(self, stage: int) -> Found:
        await self._change(lambda: self.store.clean(stage))  # a disk that cannot be written can be read
        return await asyncio.to_thread(self.store.found, stage, through=True)

    async def write(self, stage: int, header: StateHeader, data: bytes | memoryview) -> Written:
        info = await asyncio.to_thread(self.store.describe, stage, header, data)
        return Written(info, await self._change(lambda: self.store.write(info, data)))

    async def retain(self, stage: int, versions: Collection[int]) -> str | None:
        problem = await self._change(lambda: self.store.retain(stage, versions))
        return problem and f"older checkpoints cannot be deleted: {problem}"

    async def remember(self, stage: int, memory: RunMemory) -> None:
        await self._change(lambda: self.store.remember(stage, memory))

    async def load(self, stage: int, version: int) -> tuple[CheckpointInfo, memoryview]:
        return await asyncio.to_thread(self.store.load, stage, version)

    async def _change(self, change: Callable[[], None]) -> str | None:
        """Returns what the disk refused, in words."""

        def alone() -> str | None:
            try:
                with self._one_writes:
                    change()
            except OSError as error:
                return error.strerror or str(error)
            return None

        return await asyncio.to_thread(alone)


class CheckpointStore:
    """The checkpoints of one run under a peer's directory; a peer may serve one run after another from it."""

    def __init__(self, directory: Path, run: RunId, *, numerics: str = "") -> None:
        self.folder = directory / "snapshots" / run[:12]
        self._run, self._numerics = run, numerics

    def data_path(self, stage: int, version: int) -> Path:
        """The data file of a checkpoint."""
        return self.folder / f"stage-{stage}-step-{version}.safetensors"

    def info_path(self, stage: int, version: int) -> Path:
        """The JSON file of a checkpoint."""
        return self.folder / f"stage-{stage}-step-{version}.json"

    # ------------------------------------------------------------ reading

    def found(self, stage: int, *, through: bool = False) -> Found:
        """What is there, by name, JSON and size; through: and holds what it should, as its digest says."""
        good: list[CheckpointInfo] = []
        bad: list[BadCheckpoint] = []
        try:
            versions = self._versions(stage)
        except OSError as error:
            return Found(bad=(BadCheckpoint(self.folder, f"cannot be listed: {error.strerror}"),))
        for version in sorted(versions):
            try:
                info = self._info(stage, version)
                if through:
                    self.verify(info)
                good.append(info)
            except BadCheckpoint as error:
                bad.append(error)
        return Found(tuple(good), tuple(bad), self._memory(stage))

    def verify(self, info: CheckpointInfo, data: memoryview | None = None) -> None:
        """Read a checkpoint through, into `data` if that is given. Raises BadCheckpoint."""
        path = self.data_path(info.stage, info.version)
        with _opened(path, info.num_bytes) as file:
            # A checkpoint may be larger than memory that is free.
            if data is None:
                digest = hashlib.file_digest(file, "sha256")
            else:
                file.readinto(data)
                digest = hashlib.sha256(data)
        if (found := digest.hexdigest()) != info.sha256:
            raise BadCheckpoint(path, f"altered: SHA-256 is {found[:12]}..., its JSON promises {info.sha256[:12]}...")

    def load(self, stage: int, version: int) -> tuple[CheckpointInfo, memoryview]:
        """One checkpoint, verified. Raises BadCheckpoint."""
        info = self._info(stage, version)
        data = memoryview(bytearray(info.num_bytes))
        self.verify(info, data)
        return info, data

    def _memory(self, stage: int) -> RunMemory:
        """What was remembered there last; nothing if that cannot be read."""
        with contextlib.suppress(BadCheckpoint, ValidationError), _opened(self._memory_path(stage)) as file:
            return RunMemory.model_validate_json(file.read(MAX_JSON_BYTES))
        return RunMemory()

    def remember(self, stage: int, memory: RunMemory) -> None:
        """Store it; it replaces the earlier one. Raises OSError."""
        _make_folder(self.folder)
        _put(self._memory_path(stage), memory.model_dump_json(indent=1).encode() + b"\n")

    def _memory_path(self, stage: int) -> Path:
        return self.folder / f"stage-{stage}-run.json"

    def _versions(self, stage: int) -> set[int]:
        """Of which there is a file. Raises OSError."""
        names = os.listdir(self.folder) if self.folder.exists() else ()
        return {int(match[2]) for name in names if (match := _NAME.fullmatch(name)) and int(match[1]) == stage}

    def _info(self, stage: int, version: int) -> CheckpointInfo:
        path = self.info_path(stage, version)
        try:
            with _opened(path) as file:
                info = CheckpointInfo.model_validate_json(file.read(MAX_JSON_BYTES))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = "".join(f"{part}: " for part in first["loc"])
            raise BadCheckpoint(path, f"not a checkpoint's JSON: {where}{first['msg']}"[:300]) from error
        # A directory may have been copied from another run.
        if info.run != self._run:
            raise BadCheckpoint(path, f"of another run ({info.run[:12]}, not {self._run[:12]})")
        if (info.stage, info.version) != (stage, version):
            raise BadCheckpoint(path, f"speaks of stage {info.stage}, step {info.version}: the file was renamed")
        with _opened(self.data_path(stage, version), info.num_bytes):
            return info

    # ------------------------------------------------------------ writing

    def describe(self, stage: int, header: StateHeader, data: bytes | memoryview) -> CheckpointInfo:
        """What the JSON of a checkpoint that is written here now has to say."""
        now = datetime.datetime.fromtimestamp(wall_time(), datetime.UTC).isoformat(timespec="seconds")
        return CheckpointInfo.of(self._run, stage, header, data, numerics=self._numerics, written_at=now)

    def write(self, info: CheckpointInfo, data: bytes | memoryview) -> None:
        """Put a checkpoint on disk; it replaces one of the same stage and version.

        The state that a run has just gone back to is written again with the same data: it is never absent. Raises
        OSError (full, read-only, ...): all other checkpoints are untouched; if the old file had other data, the old
        JSON may be left with the new data, and its digest shows that.
        """
        _make_folder(self.folder)
        _put(self.data_path(info.stage, info.version), data)
        _put(self.info_path(info.stage, info.version), info.model_dump_json(indent=1).encode() + b"\n")

    def retain(self, stage: int, versions: Collection[int]) -> None:
        """Delete all checkpoints but these, the JSON first, so that none is left half; and what is older than these and
        no checkpoint, because no later write repairs it. Raises OSError."""
        good, oldest = {info.version for info in self.found(stage).good}, min(versions, default=0)
        for version in self._versions(stage):
            if version not in versions and (version in good or version < oldest):
                # Earlier releases wrote a third file.
                for kind in ("json", "owed", "safetensors"):
                    (self.folder / f"stage-{stage}-step-{version}.{kind}").unlink(missing_ok=True)

    def clean(self, stage: int) -> None:
        """Delete what interrupted writes have left. Call it before the stage's first write. Raises OSError."""
        for path in self.folder.glob(f".stage-{stage}-*{_TEMPORARY}"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path, promised: int | None = None) -> Iterator[io.BufferedReader]:
    """A regular file, of the size that is promised, if one is. Raises BadCheckpoint if it cannot be read, here or in
    the block."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hang us
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            # A pipe or a device would hang, or never end.
            if not stat.S_ISREG(status.st_mode):
                raise BadCheckpoint(path, "not a regular file")
            if promised not in (None, status.st_size):
                raise BadCheckpoint(path, f"torn: {status.st_size} bytes where its JSON promises {promised}")
            yield file
    except OSError as error:
        raise BadCheckpoint(path, _REFUSED.get(error.errno or 0, f"{error.strerror}")) from error


def _put(path: Path, data: bytes | memoryview) -> None:
    """`path` holds `data`, or what it held before."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Create it and its parents so that they outlive a crash as well."""
    for missing in [each for each in (*reversed(folder.parents), folder) if not each.is_dir()]:
        missing.mkdir(exist_ok=True)
        _sync_folder(missing.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs no directories
            raise
    finally:
        os.close(handle)
