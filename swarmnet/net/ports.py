"""Is a port free, and which ones a process had last: it comes back where others remember it.

A link names a DHT port, and records that are still fresh name a data port. Where the operator fixed neither, the last
ones are tried first, and any free one is taken if they are not to be had. What is kept is a hint, in the process's own
directory: a missing or torn file is no hint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from swarmnet.config.peer import NetworkSettings
from swarmnet.errors import UsageError
from swarmnet.net.identity import own_identity, write_whole
from swarmnet.telemetry.log import get

FILE = "ports.json"

log = get(__name__)


@dataclass(frozen=True, slots=True)
class LastPorts:
    """0: none."""

    port: int = 0
    dht_port: int = 0
    bulk_port: int = 0

    @classmethod
    def read(cls, directory: Path) -> LastPorts:
        """What `keep` wrote into `directory`; zeros for whatever is not a port."""
        try:
            found = json.loads((directory / FILE).read_bytes())
        except (OSError, ValueError):
            return cls()
        # The file may have been edited: a value that is no port is ignored.
        ports = found if isinstance(found, dict) else {}
        return cls(*(_port(ports.get(each.name)) for each in fields(cls)))

    def keep(self, directory: Path) -> None:
        """Write, whole or not at all. A disk that cannot take it costs the hint."""
        path = directory / FILE
        try:
            write_whole(path, json.dumps(asdict(self)) + "\n", mode=0o666)
        except OSError as error:
            log.warning("ports_not_kept", path=str(path), error=str(error))


def check_free(host: str, port: int, *, flag: str) -> None:
    """Raises UsageError, in the name of `flag`, if the port is taken or may not be used; it may be taken a moment
    later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
            probe.listen()  # bind alone succeeds next to a listener that set SO_REUSEADDR only
        except OSError as error:
            advice = (
                f"choose another with {flag}"
                if error.errno == errno.EADDRINUSE
                else "--host must be the IP address of one of this machine's interfaces, or 0.0.0.0"
            )
            raise UsageError(f"cannot listen on {host} port {port} ({error.strerror or error}): {advice}") from error


def check_alone(network: NetworkSettings) -> None:
    """Raises UsageError if another process has the directory, or a port that the operator chose: before a peer takes
    minutes to load what it cannot serve. `net.endpoint` takes both."""
    # A directory that is not there is no other process's, and a peer that is refused later leaves none behind.
    with own_identity(network.dir) if network.dir.is_dir() else contextlib.nullcontext():
        for flag, port in (("--port", network.port), ("--dht-port", network.dht_port)):
            if port:
                check_free(network.host, port, flag=flag)


def _port(value: object) -> int:
    return value if type(value) is int and 0 < value < 65536 else 0
