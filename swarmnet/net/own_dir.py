"""A process's own directory: the identity in it, and the lock that keeps a second process from being the same peer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from swarmnet.errors import UsageError
from swarmnet.net.hold import FileLock
from swarmnet.net.identity import Identity

IDENTITY_FILE = "identity.key"
LOCK_FILE = "lock"


@contextlib.contextmanager
def own_identity(directory: Path) -> Iterator[Identity]:
    """Load or create the identity in `directory`; nobody else can be it until the context is left.

    Raises UsageError if another process is it, or the directory cannot be used.
    """
    lock = directory / LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = FileLock.file(lock)
    except OSError as error:
        raise UsageError(
            f"cannot lock {lock} ({error.strerror or error}): choose a --dir on a local disk that you can write"
        ) from error
    if held is None:
        raise UsageError(f"{directory} is in use by another process: give each peer its own --dir")
    try:
        yield Identity.load_or_create(directory / IDENTITY_FILE)
    finally:
        held.release()
