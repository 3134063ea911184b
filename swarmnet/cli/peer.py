"""`swarmnet peer`: serve one or several stages."""

from __future__ import annotations

from typing import Any

import click

from swarmnet.cli.frame import Typed
from swarmnet.cli.settings import SERVING, SETTINGS, SchemaCommand, peer_options, read_config, read_manifest


@click.command("peer", cls=SchemaCommand, context_settings=SETTINGS)
@peer_options("manifest", *SERVING)
@click.option("--no-restart", is_flag=True, help="End when the peer crashes. Without it, it is started again.")
@click.pass_context
def command(ctx: click.Context, /, *, no_restart: bool, **_: Any) -> int:
    """Serve stages of a run's model.

    \b
    Example:
      swarmnet peer --manifest run.toml --stage 0 \\
          --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...

    Every flag is also a variable: SWARMNET_DHT_PORT is --dht-port. A flag wins over a variable, a variable over
    --config, and that over the default.

    The first Ctrl+C finishes what the peer holds and leaves; the second ends it at once.
    """
    if not no_restart:
        from swarmnet.peer.supervise import supervise

        typed = ctx.find_object(Typed)
        assert typed is not None, "run by the frame"
        return supervise(typed.again("--no-restart"))
    config = read_config(ctx, "stage")
    manifest = read_manifest(config, "peer")

    from swarmnet.peer import run_peer

    return run_peer(config, manifest)
