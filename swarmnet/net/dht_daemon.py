"""The libp2p daemon (hivemind's `p2pd`) as a child process that cannot outlive us.

Knows how to start, watch and end it; nothing of what is said through it. Started here and not by `hivemind.P2P` because
that offers no way to tie the child's life to ours, to keep it out of the terminal's Ctrl+C, or to see it die.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from swarmnet.clock import set_within
from swarmnet.errors import SwarmError, UsageError
from swarmnet.host import tasks_left
from swarmnet.net.address import Address
from swarmnet.net.identity import FileLock, Identity, own_directory, sweep
from swarmnet.net.parent_death import dies_with_parent
from swarmnet.net.ports import check_free

START_TIMEOUT_S = 15.0
PREFIX = "swarmnet-p2pd-"
"""How directories of daemons begin, in the system's directory for temporary files."""

STOP_TIMEOUT_S = 2.0

LEAST_TASKS = 24
"""Threads of the daemon and of gRPC: 8 and 7 on two processors."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a node listens. announce: multiaddrs to tell others instead. client: ask only, listen nowhere.

    first: the port to try first where `port` is 0.
    """

    host: str = "127.0.0.1"
    port: int = 0
    first: int = 0
    announce: Sequence[str] = ()
    client: bool = False


class DaemonFailed(SwarmError):
    """The libp2p daemon did not start."""


class Daemon(asyncio.SubprocessProtocol):
    """A running p2pd. `control` is its control socket; `exited` is set when the process is gone."""

    def __init__(self, directory: Path, hold: FileLock) -> None:
        self.control = directory / "control.sock"
        self.exited = asyncio.Event()
        self._directory, self._hold = directory, hold
        self._ready = asyncio.Event()
        self._output = b""
        self._transport: asyncio.SubprocessTransport | None = None
        self._claim: socket.socket | None = None

    @classmethod
    async def start(cls, identity: Identity, listen: Listen) -> Daemon:
        """Start p2pd under `identity`.

        Raises UsageError if the address cannot be listened on, DaemonFailed if p2pd does not come up.
        """
        # Without a thread that they need, the daemon and gRPC end with pages of stacks.
        if (left := tasks_left()) is not None and left < LEAST_TASKS:
            raise UsageError(
                f"only {left} more processes and threads may start here, and about {LEAST_TASKS} are needed: raise "
                "pids.max of this process's control group (docker --pids-limit, TasksMax= of a systemd unit)"
            )
        for address in map(Address.parse, listen.announce):
            await _check_name(address)
        claim: socket.socket | None = None
        if not listen.client:
            port, claim = _take_port(listen)
            listen = replace(listen, port=port)
        sweep(PREFIX)
        self = cls(*own_directory(PREFIX))
        self._claim = claim
        try:
            await self._start(identity, listen)
        except BaseException:
            self.kill()
            raise
        return self

    async def _start(self, identity: Identity, listen: Listen) -> None:
        key = self._directory / "key"
        key.touch(0o600)
        key.write_bytes(identity.to_bytes())
        arguments = [
            str(_binary()),
            f"-id={key}",
            f"-listen=/unix{self.control}",
            "-idleTimeout=30s",
            "-natPortMap=0",
            "-autonat=0",
            "-autoRelay=0",
            "-relay=0",
            "-relayService=0",
            *_listening(listen),
        ]
        environment = {**os.environ, "GOLOG_LOG_LEVEL": "fatal"}
        loop = asyncio.get_running_loop()
        await loop.subprocess_exec(
            lambda: self,
            *dies_with_parent(*arguments),
            stdin=None,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        await set_within(self._ready, START_TIMEOUT_S)
        key.unlink()
        # `exited` sets `ready` too, so that no task waits for a dead process.
        if self.exited.is_set() or not self._ready.is_set():
            said = self._output.decode(errors="replace").strip()[-300:]
            raise DaemonFailed("the libp2p daemon did not start", said=said)

    async def stop(self) -> None:
        """End the process and remove its directory. Returns once it is gone."""
        if self._transport is not None and not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._transport.terminate()
            await set_within(self.exited, STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the process without waiting."""
        if self._transport is not None:
            if not self.exited.is_set():
                with contextlib.suppress(ProcessLookupError):
                    self._transport.kill()
            self._transport.close()
        if self._claim is not None:
            self._claim.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._hold.release()

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        assert self._transport is not None
        pid: int = self._transport.get_pid()
        return pid

    # asyncio calls these; draining the output here needs no task

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        self._output = (self._output + data)[-4096:]
        # p2pd prints its id once its sockets are open.
        if b"Peer ID:" in self._output:
            self._ready.set()

    def process_exited(self) -> None:
        self.exited.set()
        self._ready.set()


def _binary() -> Path:
    """Where hivemind keeps its p2pd; found without importing hivemind."""
    spec = find_spec("hivemind")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "hivemind_cli" / "p2pd"
    # Checked here, because the child's own error would name an internal file.
    if not os.access(path, os.X_OK):
        raise DaemonFailed("hivemind is installed without its libp2p daemon: reinstall it", path=str(path))
    return path


def _listening(listen: Listen) -> list[str]:
    if listen.client:
        return ["-noListenAddrs", "-dhtClient=1"]
    # As elsewhere, :: is every address, those of IPv4 among them.
    hosts = ["::", "0.0.0.0"] if listen.host == "::" else [listen.host]
    addresses = (f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{listen.port}" for host in hosts)
    arguments = [f"-hostAddrs={','.join(addresses)}", "-dhtServer=1"]
    if listen.announce:
        bare = (address.partition("/p2p/")[0] for address in listen.announce)
        arguments.append(f"-announceAddrs={','.join(bare)}")
    return arguments


async def _check_name(address: Address) -> None:
    """Raises UsageError if there is no such host name; names that cannot be asked for now are taken."""
    if not address.kind.startswith("dns"):
        return
    family = socket.AF_INET6 if address.kind == "dns6" else socket.AF_INET
    try:
        await asyncio.get_running_loop().getaddrinfo(address.host, None, family=family)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            raise UsageError(f"--announce {address}: there is no such host ({error.strerror})") from error


def _take_port(listen: Listen) -> tuple[int, socket.socket | None]:
    """(the port to listen on, what claims it as long as it is open). Raises UsageError if a fixed one is taken."""
    # The last port is only a wish: any other will do.
    if not listen.port and listen.first:
        with contextlib.suppress(UsageError):
            return _take_port(replace(listen, port=listen.first))
    # The daemon would take one for each family.
    if not listen.port and listen.host == "::":
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
            listen = replace(listen, port=probe.getsockname()[1])
    # Before the look at the port: between look and listening another of us would find it free, too.
    claim = _claimed(listen.port) if listen.port else None
    try:
        check_free(listen.host, listen.port, flag="--dht-port")  # p2pd would share a taken port silently
    except UsageError:
        if claim is not None:
            claim.close()
        raise
    return listen.port, claim


def _claimed(port: int) -> socket.socket | None:
    """Keep others of us away from a port between our look at it and the daemon's listening: two that start at the same
    moment would both find it free. A name that the kernel forgets with its owner. Raises UsageError if it is claimed.
    """
    # Abstract names of sockets are Linux's own.
    if sys.platform != "linux":
        return None
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0swarmnet-dht-port-{port}")
    except OSError as error:
        claim.close()
        raise UsageError(f"cannot listen on port {port} (another peer does): choose another with --dht-port") from error
    return claim
