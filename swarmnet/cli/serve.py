"""The commands of a member of a swarm: `join`, `peer`, `trainer`, `bootstrap`; and `status`, which looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnet.cli import importing
from swarmnet.cli.settings import (
    BUILT_IN,
    LOGS,
    NETWORK,
    RELAYING,
    SERVING,
    SETTINGS,
    SchemaCommand,
    peer_options,
    read_config,
    read_manifest,
    with_bootstrap,
    with_json,
    with_log_level,
)
from swarmnet.clock import entered, loop_runner
from swarmnet.errors import UsageError
from swarmnet.telemetry.text import typed

if TYPE_CHECKING:
    from swarmnet.cli.peer_screen import PeerScreen
    from swarmnet.config.peer import PeerConfig
    from swarmnet.manifest.schema import Manifest
    from swarmnet.net.swarm_link import SwarmLink
    from swarmnet.telemetry.run_state import RunState

PLAIN = click.option("--plain", is_flag=True, help="Print lines of the log, and no screen about this machine.")


@click.command("join", cls=SchemaCommand, context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_MANIFEST")
@peer_options(*SERVING, "rebalance_s")
@click.option("--no-restart", is_flag=True, help="End when the peer crashes. Without it, it joins again.")
@PLAIN
@click.pass_context
def join(ctx: click.Context, /, run: str, *, no_restart: bool, plain: bool, **_: Any) -> int:
    """Join a running swarm with one command, where a replica is needed most.

    LINK_OR_MANIFEST is the link that every peer prints, swarm:RUN_ID@ADDRESS, or the run's manifest file (then with
    --bootstrap). The manifest comes from any peer and is checked by its hash, the state of the stage from its replicas.
    The key that is this peer's identity is kept in ~/.swarmnet/peer unless --dir says otherwise. A run by invitation
    also needs what its owner's `swarmnet owner invite` printed: in the link (+invite=...), or as --invitation.

    \b
    Example:
      swarmnet join swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...

    \b
    Where others can connect to it, it relays for peers behind NAT: open both ports in the firewall.
      swarmnet join --port 31340 --dht-port 31341 LINK

    The first Ctrl+C finishes what the peer holds and leaves; the second ends it at once.
    """
    if not no_restart and (code := _supervised()) is not None:
        return code
    config = read_config(ctx, "stage")
    invited = _invited(run, config)
    _check_early(config)
    return _join(*invited, plain=plain)


def _check_early(config: PeerConfig) -> None:
    """Raise UsageError for what would end the peer only after seconds of finding the run and loading torch."""
    from swarmnet.net.ports import check_alone

    check_alone(config.network)


def _supervised() -> int | None:
    """None in a process that is started again after each crash; in this one its exit code, once it has ended."""
    from swarmnet.peer.supervise import supervise

    return supervise()


def _invited(run: str, config: PeerConfig) -> tuple[PeerConfig, SwarmLink | Manifest]:
    """What was typed: a link, or a manifest with an address to ask. Raises UsageError."""
    from swarmnet.net.swarm_link import SCHEME, SwarmLink

    # Pasted links often have a blank at an end.
    if run.strip().startswith(SCHEME):
        return config, SwarmLink.parse(run)

    from swarmnet.manifest.file import load

    path = Path(run).expanduser()
    if not path.is_file():
        lacks = "an address without its run: put swarm:RUN_ID@ before it, or copy the whole link that a peer printed"
        other = "no such file, and no link such as swarm:RUN_ID@ADDRESS"
        raise UsageError(f"{typed(run)}: {lacks if '/p2p/' in run else other}")
    manifest = load(path)
    # A manifest names nobody; a link does.
    if not config.bootstrap:
        raise UsageError(
            f"joining by {run} needs --bootstrap with the address of a peer that is up; to start a new swarm "
            "use `swarmnet peer`"
        )
    # The peer looks for data beside its manifest, so it has to know where that lies.
    return config.model_copy(update={"manifest": path}), manifest


@contextlib.contextmanager
def _screen(config: PeerConfig, *, plain: bool) -> Iterator[PeerScreen]:
    """What is shown of a peer in this terminal. While the screen is there, the log goes to a file."""
    from rich.console import Console

    from swarmnet import telemetry
    from swarmnet.cli.peer_screen import PeerScreen

    log_file = config.dir.absolute() / "peer.log"

    # Without it, it goes to standard error.
    def set_up_log() -> None:
        telemetry.setup(config.log.level, format=config.log.format, file=log_file if screen.live else None)

    with PeerScreen(Console(), log_file=log_file, plain=plain, on_live=set_up_log) as screen:
        yield screen


def _end(screen: PeerScreen, config: PeerConfig) -> None:
    """The last lines: what was contributed, and how to go on."""
    from swarmnet.peer.control_socket import contributed

    if screen.redraws:
        screen.end(contributed(config.dir), config.dir)


def _join(config: PeerConfig, invited: SwarmLink | Manifest, *, plain: bool) -> int:
    import logging

    from swarmnet import telemetry
    from swarmnet.cli.peer_screen import JoinTimes
    from swarmnet.clock import boot_time
    from swarmnet.net.swarm_link import SwarmLink

    log = telemetry.get(__name__)
    times = JoinTimes(boot_time)

    with _screen(config, plain=plain) as screen:
        screen.phase("joining", f"by {invited.public if isinstance(invited, SwarmLink) else config.manifest}")

        with importing():  # takes a second or two
            from swarmnet.peer.joining import prepare_join
            from swarmnet.peer.run import run_peer

        def tell(name: str, text: str) -> None:
            screen.phase(name, text)
            times.passed(name)

        def see(state: RunState, now: float) -> None:
            screen.see(state, now)
            if times.see(state):
                log.at(logging.INFO, "counts", {**times.seconds})

        # One loop for all of it: what has joined the DHT to find a stage is what serves it.
        with loop_runner() as runner, entered(runner, prepare_join(config, invited, tell)) as prepared:
            screen.phase("starting", "allocating memory for the stage, then listening under this machine's own address")

            code = run_peer(
                prepared.config,
                prepared.manifest,
                see=see,
                # A manifest from strangers must not make this peer read a file that they name.
                data_at_source=not isinstance(invited, SwarmLink) or prepared.manifest.data.source in BUILT_IN,
                prepared=prepared,
                runner=runner,
            )
        _end(screen, config)
        return code


@click.command("peer", cls=SchemaCommand, context_settings=SETTINGS)
@peer_options("manifest", *SERVING)
@click.option("--no-restart", is_flag=True, help="End when the peer crashes. Without it, it is started again.")
@PLAIN
@click.pass_context
def peer(ctx: click.Context, /, *, no_restart: bool, plain: bool, **_: Any) -> int:
    """Serve stages of a run's model.

    \b
    Example:
      swarmnet peer --manifest run.toml --stage 0 \\
          --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...

    Every flag is also a variable: SWARMNET_DHT_PORT is --dht-port. A flag wins over a variable, a variable over
    --config, and that over the default.

    The first Ctrl+C finishes what the peer holds and leaves; the second ends it at once.
    """
    if not no_restart and (code := _supervised()) is not None:
        return code
    config = read_config(ctx, "stage")
    manifest = read_manifest(config, "peer")
    _check_early(config)

    with importing():
        from swarmnet.peer.run import run_peer

    with _screen(config, plain=plain) as screen:
        # Where there is no screen, its log is all that it says.
        code = run_peer(config, manifest, see=screen.see) if screen.redraws else run_peer(config, manifest)
        _end(screen, config)
        return code


@click.command("trainer", cls=SchemaCommand, context_settings=SETTINGS)
@peer_options("manifest", "dir", "data", "host", "port", *NETWORK, "invitation", *RELAYING, *LOGS)
@click.pass_context
def trainer(ctx: click.Context, /, **_: Any) -> int:
    """Feed microbatches into stage 0; holds no weights.

    \b
    Example:
      swarmnet trainer --manifest run.toml \\
          --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    config = read_config(ctx, "trainer")
    manifest = read_manifest(config, "trainer")

    with importing():
        from swarmnet.trainer.run import run_trainer

    return run_trainer(config, manifest)


@click.command("bootstrap", cls=SchemaCommand, context_settings=SETTINGS)
@peer_options("dir", "host", *NETWORK, *LOGS)
@click.pass_context
def bootstrap(ctx: click.Context, /, **_: Any) -> int:
    """Run a DHT node that others can join by; serves no stage.

    \b
    Example:
      swarmnet bootstrap --dht-port 31337

    Any peer that is up can do this too; a node of its own merely keeps one address alive.
    """
    config = read_config(ctx, "bootstrap")

    from swarmnet.peer.bootstrap import run_bootstrap

    return run_bootstrap(config)


@click.command("doctor", cls=SchemaCommand, context_settings=SETTINGS)
@click.argument("run", metavar="[LINK_OR_MANIFEST]", required=False)
@peer_options("dir", "host", "port", *NETWORK, "invitation", "device", "log")
@with_json
@click.pass_context
def doctor(ctx: click.Context, /, run: str | None, *, as_json: bool, **_: Any) -> int:
    """Look at this machine, and with a link at its line to a run: what is wrong, and what to do.

    With a link it has members of the run connect to this machine, and measures the line to a few of them; it serves
    nothing. Say the same --dir, --port and --dht-port as to `join`. The exit code is 0 if all is well, 1 if something
    is not.

    \b
    Examples:
      swarmnet doctor
      swarmnet doctor swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    config = read_config(ctx, "stage")
    invited: SwarmLink | Manifest | None = None
    if run is not None:
        config, invited = _invited(run, config)

    from swarmnet import telemetry
    from swarmnet.peer.doctor import run_doctor

    # What it says is enough, unless somebody asks for more.
    if config.log.level == "info":
        telemetry.setup("error", format=config.log.format)
    return run_doctor(config, invited, as_json=as_json)


@click.command("status", context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_RUN_OR_MANIFEST")
@with_bootstrap
@with_json
@with_log_level
def status(run: str, bootstrap: tuple[str, ...], as_json: bool, log_level: str) -> int:
    """Ask the DHT how a run is doing, what is wrong with it and what to do.

    The run is named by the link that its peers print, by its manifest file, or by its id (64 hex digits, or the first
    12 or more). The exit code is 0 if a peer announces it, 1 if none does, 2 if none answers at the address.

    \b
    Examples:
      swarmnet status swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
      swarmnet status run.toml --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    from swarmnet.net.swarm_link import find_run

    # What is typed is checked before hivemind is imported, which takes a second.
    named, bootstrap = find_run(run, bootstrap)

    from swarmnet import telemetry
    from swarmnet.peer.status import run_status

    telemetry.setup(log_level)  # type: ignore[arg-type]  # click has checked the choice
    return run_status(named, bootstrap, as_json)
