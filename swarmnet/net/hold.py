"""What one process holds alone: a lock that the kernel gives back when the process ends, however it ends.

Knows nothing of what is held; each holder says what the lock means. The file stays behind and means nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


class FileLock:
    """A path that is ours until `release`, or until this process ends."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def directory(cls, path: Path, *, wait: bool) -> FileLock | None:
        """Lock an existing directory on a local disk. None: another holds it (never with `wait`).

        Raises OSError, FileNotFoundError among them: while we waited the holder may have removed it.
        """
        return cls._take(path, os.O_RDONLY | os.O_DIRECTORY, wait)

    @classmethod
    def file(cls, path: Path) -> FileLock | None:
        """Lock a file, made if need be. None: another holds it. Raises OSError."""
        return cls._take(path, os.O_RDWR | os.O_CREAT, wait=False)

    @classmethod
    def _take(cls, path: Path, flags: int, wait: bool) -> FileLock | None:
        handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if not os.path.samestat(os.fstat(handle), os.stat(path)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        return cls(handle)

    def release(self) -> None:
        """Give it back. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
