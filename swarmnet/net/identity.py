"""Who a peer is: an Ed25519 key in a file, the libp2p peer id that embeds its public half, and the directory it is in.

The key file is libp2p's own marshalled `PrivateKey` protobuf, so the libp2p daemon started with the same file runs
under the same peer id. A lock that the kernel gives back when a process ends, however it ends, keeps a second process
from being the same peer. Knows nothing of TLS (`net.tls`) or of what is signed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId
from swarmnet.wire.peer_ids import peer_id_from_public_bytes, public_bytes_of

# PrivateKey { KeyType Type = 1; bytes Data = 2; }: type 1 is Ed25519, its data the seed and the public key
_KEY_PREFIX = bytes((0x08, 0x01, 0x12, 0x40))
_KEY_FILE_BYTES = len(_KEY_PREFIX) + 64


class Identity:
    """An Ed25519 private key and the peer id it stands for."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self.key = key
        self.peer: PeerId = peer_id_from_public_bytes(key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> Identity:
        """A fresh identity that lives in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Parse libp2p's marshalled Ed25519 `PrivateKey`. Raises ValueError."""
        if len(data) != _KEY_FILE_BYTES or not data.startswith(_KEY_PREFIX):
            raise ValueError("not a libp2p Ed25519 private key")
        identity = cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))
        # A torn or edited file would run under an id that its key does not prove.
        if identity.key.public_key().public_bytes_raw() != data[36:]:
            raise ValueError("its public half does not belong to its private half")
        return identity

    def to_bytes(self) -> bytes:
        """libp2p's marshalled `PrivateKey`: what the key file holds."""
        return _KEY_PREFIX + self.key.private_bytes_raw() + self.key.public_key().public_bytes_raw()

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file, or create it once with mode 0600; processes that race for it end up with the same key.

        Raises UsageError if the file is not a key, can be read by others, or cannot be read or written.
        """
        try:
            # Two processes may find none: `create` lets one of them win, and both read that one's.
            if not path.exists():
                cls.generate().create(path)
            return cls.load(path)
        except ValueError as error:
            raise UsageError(
                f"{path} is not an identity key ({error}): restore it from a backup, or remove it to get a new identity"
            ) from error
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            then = "free space on that disk" if full else "choose a file you can read in a directory you can write"
            raise UsageError(f"cannot use the identity key {path} ({error.strerror or error}): {then}") from error

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file that has to be there. Raises ValueError, OSError; UsageError if others can read it."""
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            # Others could take part as this peer.
            if mode & 0o077:
                raise UsageError(
                    f"{path} has mode {mode:04o}, so others can read this identity: run `chmod 600 {path}`"
                )
            return cls.from_bytes(file.read(_KEY_FILE_BYTES + 1))

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Of a private key's 32 bytes. Raises ValueError."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def create(self, path: Path) -> bool:
        """Write the key to `path` with mode 0600 unless something is there; whether it is written. Raises OSError."""
        return write_whole(path, self.to_bytes(), once=True)

    def sign(self, data: bytes) -> bytes:
        """64-byte Ed25519 signature."""
        return self.key.sign(data)

    @staticmethod
    def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Did `peer` sign these bytes? An identity signs with its own key and checks any peer's signature."""
        return verify(peer, data, signature)


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether `peer` signed `data`. A malformed peer id or signature is simply no."""
    try:
        public_key(peer).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key(peer: PeerId) -> Ed25519PublicKey:
    """The key a peer id embeds. Raises ValueError if it is not an Ed25519 peer id."""
    return Ed25519PublicKey.from_public_bytes(public_bytes_of(peer))


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o600, once: bool = False, sync: bool = False) -> bool:
    """Put a file at `path` so that a reader never sees half of it. Raises OSError.

    once: never over one that is there. sync: it outlives a power cut. Returns whether it was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            # What is written once cannot be written again after a power cut.
            if once or sync:
                file.flush()
                os.fsync(file.fileno())
        if once:
            os.link(draft, path)
        else:
            os.replace(draft, path)
    except FileExistsError:  # another process was first
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


# ---------------------------------------------------------------- file locks


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
            # The holder may have removed the path while we waited: the lock would be on nothing.
            if not os.path.samestat(os.fstat(handle), os.stat(path)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        # Another process holds it.
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        return cls(handle)

    def release(self) -> None:
        """Give it back. Idempotent."""
        # Closing the file gives the lock back.
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def own_directory(prefix: str) -> tuple[Path, FileLock]:
    """A new directory among the system's temporary ones that is ours for as long as we live. prefix: of its name.

    Raises UsageError where there is none that can be written.
    """
    while True:
        try:
            # 0700: a socket in it gives command of what listens there.
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=_temporary()))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the peer is restarted until the disk has space
            raise UsageError(
                f"no directory for temporary files ({error.strerror or error}): name one that can be written with "
                f"TMPDIR, of less than {_SHORT} characters"
            ) from error
        with contextlib.suppress(FileNotFoundError):  # another's sweep held it before we did
            hold = FileLock.directory(directory, wait=True)
            assert hold is not None, "we waited for it"
            return directory, hold


_SHORT = 64  # characters of a directory: the address of a socket in it holds about a hundred


def _temporary() -> str:
    """Raises FileNotFoundError if no directory can be written."""
    return found if len(found := tempfile.gettempdir()) < _SHORT else "/tmp"


def sweep(prefix: str) -> None:
    """Remove directories of killed processes, which have no holder. A process that is only starting holds its own."""
    for left in Path(_temporary()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if hold := FileLock.directory(left, wait=False):
                shutil.rmtree(left, ignore_errors=True)
                hold.release()


# ---------------------------------------------------------------- a peer's directory


IDENTITY_FILE = "identity.key"
LOCK_FILE = "lock"


def holder_of(directory: Path) -> PeerId | None:
    """The identity of `directory` if another process uses it; None: no process does."""
    lock = directory / LOCK_FILE
    try:
        held = FileLock.file(lock) if lock.is_file() else None
        if held is not None:
            held.release()
        return Identity.load(directory / IDENTITY_FILE).peer if lock.is_file() and held is None else None
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def own_identity(directory: Path) -> Iterator[Identity]:
    """Load or create the identity in `directory`; no other process can take it until the context is left.

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
    # Two processes under one id would contradict each other, and both would be shut out.
    if held is None:
        raise UsageError(f"{directory} is in use by another process: give each peer its own --dir")
    try:
        yield Identity.load_or_create(directory / IDENTITY_FILE)
    finally:
        held.release()
