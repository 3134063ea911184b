"""`swarmnet join`: take a place in a running swarm, wherever one is needed most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnet.cli.frame import Typed
from swarmnet.cli.settings import SERVING, SETTINGS, SchemaCommand, peer_options, read_config
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.config.peer import PeerConfig
    from swarmnet.manifest.schema import Manifest
    from swarmnet.net.swarm_link import SwarmLink


@click.command("join", cls=SchemaCommand, context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_MANIFEST")
@peer_options(*SERVING)
@click.option("--no-restart", is_flag=True, help="End when the peer crashes. Without it, it joins again.")
@click.pass_context
def command(ctx: click.Context, /, run: str, *, no_restart: bool, **_: Any) -> int:
    """Join a running swarm with one command, where a replica is needed most.

    LINK_OR_MANIFEST is the link that every peer prints, swarm:RUN_ID@ADDRESS, or the run's manifest file (then with
    --bootstrap). The manifest comes from any peer and is checked by its hash, the state of the stage from its replicas.
    The key that is this peer's identity is kept in ~/.swarmnet/peer unless --dir says otherwise. A run by invitation
    also needs what its owner's `swarmnet invite` printed: in the link (+invite=...), or as --invitation.

    \b
    Example:
      swarmnet join swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...

    \b
    Other peers must be able to connect to this one: open both ports in the firewall.
      swarmnet join --port 31340 --dht-port 31341 LINK

    The first Ctrl+C finishes what the peer holds and leaves; the second ends it at once.
    """
    if not no_restart:
        from swarmnet.peer.supervise import supervise

        typed = ctx.find_object(Typed)
        assert typed is not None, "run by the frame"
        return supervise(typed.again("--no-restart"))
    config = read_config(ctx, "stage")
    invited, config = _invited(run, config)
    return _join(config, invited)


def _invited(run: str, config: PeerConfig) -> tuple[SwarmLink | Manifest, PeerConfig]:
    """What was typed: a link, or a manifest with somebody to ask. Raises UsageError."""
    from swarmnet.net.swarm_link import SCHEME, SwarmLink

    if run.strip().startswith(SCHEME):
        return SwarmLink.parse(run), config

    from swarmnet.manifest.file import load

    path = Path(run).expanduser()
    if not path.is_file():
        raise UsageError(f"{run}: no such file, and no link such as swarm:RUN_ID@ADDRESS")
    if not config.bootstrap:
        raise UsageError(
            f"joining by {run} needs --bootstrap with the address of a peer that is up; to start a new swarm "
            "use `swarmnet peer`"
        )
    return load(path), config.model_copy(update={"manifest": path})


def _join(config: PeerConfig, invited: SwarmLink | Manifest) -> int:
    import asyncio
    import time

    from rich.console import Console

    from swarmnet import telemetry
    from swarmnet.cli.progress_bar import ProgressBar
    from swarmnet.net.swarm_link import SwarmLink

    def set_up_log() -> None:
        telemetry.setup(config.log.level, format=config.log.format)

    with ProgressBar(Console(), clock=time.monotonic, on_bar=set_up_log) as story:
        story.phase("joining", f"by {invited.public if isinstance(invited, SwarmLink) else config.manifest}")

        from swarmnet.peer.joining import find_place  # takes a second or two, hivemind alone

        place = asyncio.run(find_place(config, invited, story.phase))
        story.phase("starting", "making room for the stage, then listening under this machine's own address")

        from swarmnet.peer import run_peer

        return run_peer(
            place.config,
            place.manifest,
            heard=story.on_event,
            data_at_source=not isinstance(invited, SwarmLink) or place.manifest.data.source in BUILT_IN,
        )


BUILT_IN = ("stdlib", "corpus:small")
"""Data sources that name no file of the operator's."""
