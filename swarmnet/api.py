"""What a Python program may call: `swarmnet.load_manifest` and the other public names, each imported when first used.

Thin functions over what the commands call. A caller's mistake raises `swarmnet.UsageError`, one line that says
what and where; other failures are `swarmnet.SwarmError`, too. docs/python-api.md has examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet.config.peer import PeerConfig as PeerConfig
from swarmnet.config.peer import Role
from swarmnet.errors import SwarmError as SwarmError
from swarmnet.errors import UsageError as UsageError
from swarmnet.local.options import LocalOptions as LocalOptions
from swarmnet.manifest.schema import Manifest as Manifest

if TYPE_CHECKING:
    from swarmnet.peer.swarm_health import Assessment


def load_manifest(path: Path | str) -> Manifest:
    """Read and check a run's manifest. Raises UsageError."""
    from swarmnet.manifest.file import load

    return load(Path(path).expanduser())


def peer_config(file: Path | str | None = None, *, role: Role = "stage", **settings: Any) -> PeerConfig:
    """The config of one peer, checked.

    Args:
        file: a peer config file; without it, what `settings` do not say has its default.
        role: "stage" for `run_peer`, "trainer" for `run_trainer`.
        settings: fields of the peer config by their names in docs/peer-config.md, over those of the file. A table is a
            dict: `mesh={"ranks": 2}`. Environment variables are not read.

    Raises: UsageError, in the name of the field.
    """
    from swarmnet.cli.settings import implied, own_layers
    from swarmnet.config import toml
    from swarmnet.config.check import SettingsLayer, resolve

    plain = {name: os.fspath(each) if isinstance(each, os.PathLike) else each for name, each in settings.items()}
    layers = [
        implied(role),
        *([SettingsLayer(str(file), toml.read(Path(file).expanduser()))] if file is not None else []),
    ]
    last = SettingsLayer("peer_config", plain)
    config = resolve(PeerConfig, [*layers, last], where="peer_config")
    return resolve(PeerConfig, [*layers, *own_layers(config), last], where="peer_config") if role == "stage" else config


def run_peer(
    config: PeerConfig, *, on_event: Callable[[str, dict[str, object]], None] = lambda event, fields: None
) -> int:
    """Serve `config.stages` of the run `config.manifest` until SIGINT or SIGTERM, as `swarmnet peer` does.

    Takes the main thread of a process and its logging. It does not start again by itself after a crash.

    Args:
        on_event: called with every event and its fields, from the thread that calls.

    Returns: the exit code, 0 after it has left in good order.

    Raises: UsageError before it has joined the run, or if others cannot connect to it.
    """
    from swarmnet.net.ports import check_alone
    from swarmnet.peer.run import run_peer as run

    manifest = _begin(config, "peer")
    check_alone(config.network)
    return run(config, manifest, heard=on_event)


def run_trainer(config: PeerConfig) -> int:
    """Feed the run `config.manifest` to its last step, as `swarmnet trainer` does.

    Takes the main thread of a process and its logging.

    Returns: the exit code.

    Raises: UsageError before it has joined the run, such as when the run's data is not here.
    """
    from swarmnet.trainer.run import run_trainer as run

    return run(config, _begin(config, "trainer"))


def run_local(options: LocalOptions) -> int:
    """Train in a swarm of processes on this machine, as `swarmnet local` does. Takes the main thread.

    Returns: 0 if every step was done and every microbatch counted once; 1 if not; 130 and 143 after SIGINT and SIGTERM.
        `options.out` then has summary.json, loss.csv, events.jsonl and the manifest, run.toml.

    Raises: UsageError before any process is started.
    """
    from swarmnet.local import run_local as run

    return run(options)


def read_status(run: Path | str, *, bootstrap: Sequence[str] = ()) -> Assessment:
    """Ask a run's DHT how it is doing, as `swarmnet status` does, without joining it. Takes seconds.

    Args:
        run: the link that its peers print, its manifest's path, or its id.
        bootstrap: addresses of peers that are up; a link brings its own.

    Returns: `seen`, `version`, `loss`, `stages`, `problems`, ...; `seen` is false if no peer answers or announces it.

    Raises: UsageError if `run` names none; PeerTimeout if this machine has not even come to ask.
    """
    from swarmnet.net.swarm_link import find_run
    from swarmnet.peer.status import read_status as read

    return read(*find_run(os.fspath(run), tuple(bootstrap)))


def _begin(config: PeerConfig, command: str) -> Manifest:
    """The manifest, with logging set up as the command would."""
    from swarmnet import telemetry
    from swarmnet.cli.settings import read_manifest

    manifest = read_manifest(config, command)
    telemetry.setup(config.log.level, format=config.log.format)
    return manifest
