"""`swarmnet eval`: the loss of a text by the weights of a run, through its swarm or from checkpoints on this disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from swarmnet.cli.frame import INTERRUPTED
from swarmnet.cli.settings import SETTINGS, with_bootstrap, with_checkpoints, with_json
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.cli.progress_bar import ProgressBar
    from swarmnet.cli.scores import Scores
    from swarmnet.config.peer import PeerConfig
    from swarmnet.manifest.schema import Manifest
    from swarmnet.net.swarm_link import SwarmLink

LOOK_S = 3.0
"""How long a run that must be up is looked for."""


@click.command("eval", context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_MANIFEST")
@with_bootstrap
@click.option("--data", metavar="SOURCE", help="Any text, as `init` takes it.  [the part the run has held out]")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="The run's tokenizer.json.  [where the manifest says]",
)
@click.option("--microbatches", type=click.IntRange(min=1), metavar="N", help="How many to score at most.  [all]")
@with_checkpoints
@with_json
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    bootstrap: tuple[str, ...],
    data: str | None,
    tokenizer: Path | None,
    microbatches: int | None,
    directories: tuple[Path, ...],
    step: int | None,
    as_json: bool,
) -> int:
    """Print the loss (nats per token), perplexity and bits per byte of a text by the weights of a run.

    With a link, or a manifest and --bootstrap, the swarm computes them: its peers run the microbatches forward beside
    what they train, and nothing is counted. With a manifest alone it is this process, from checkpoints on this disk.
    How far it is goes to standard error. Ctrl+C prints what has been scored so far.

    \b
    Examples, the last one after `swarmnet local --steps 200 --out runs/local`:
      swarmnet eval swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... --data essay.txt
      swarmnet eval run.toml --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
      swarmnet eval runs/local/run.toml --microbatches 10
    """
    named = directories if ctx.get_parameter_source("directories") == ParameterSource.COMMANDLINE else ()
    link = run.strip().startswith("swarm:")
    if (link or bootstrap) and (step is not None or named):
        raise UsageError(
            f"{'--dir' if step is None else '--step'} is for weights on this disk: in a swarm there are "
            "only the newest, which move on while it trains"
        )
    from swarmnet.cli.scores import ScoreRequest

    request = ScoreRequest(data, tokenizer, microbatches)
    if link:
        from swarmnet.net.swarm_link import SwarmLink

        return _print(_through_swarm(SwarmLink.parse(run), None, bootstrap, request.of_strangers), as_json)
    path = Path(run).expanduser()
    if not path.is_file():
        raise UsageError(f"{run}: no such file, and no link such as swarm:RUN_ID@ADDRESS")

    from swarmnet.manifest.file import load

    manifest = load(path)
    if bootstrap:
        scores = _through_swarm(manifest, path, bootstrap, lambda each: request.of(each, path.parent))
    else:
        scores = _from_disk(
            manifest,
            request.of(manifest, path.parent),
            step,
            [each.expanduser() for each in directories] or [path.parent],
        )
    return _print(scores, as_json)


def _print(scores: Scores, as_json: bool) -> int:
    """What was scored, then why it is not all of it. Returns the exit code."""
    if scores.tally.num_tokens or as_json:
        click.echo(scores.as_json() if as_json else scores.as_text())
    elif scores.interrupted:
        click.echo(f"nothing has been scored yet (0 of {scores.text.num_microbatches} microbatches)", err=True)
    if scores.failure is not None:
        raise scores.failure
    return 0 if scores.complete else INTERRUPTED


def _progress_bar() -> ProgressBar:
    """On standard error, by this process's clock."""
    import time

    from rich.console import Console

    from swarmnet.cli.progress_bar import ProgressBar

    return ProgressBar(Console(stderr=True), clock=time.monotonic)


def _through_swarm(
    invitation: SwarmLink | Manifest,
    path: Path | None,
    bootstrap: tuple[str, ...],
    scores_of: Callable[[Manifest], Scores],
) -> Scores:
    """path: the manifest's."""
    import asyncio
    import tempfile

    from swarmnet import telemetry
    from swarmnet.config.layers import SettingsLayer, resolve
    from swarmnet.config.peer import PeerConfig

    telemetry.setup("error")
    with tempfile.TemporaryDirectory(prefix="swarmnet-eval-") as folder:
        config = resolve(
            PeerConfig,
            [
                SettingsLayer("eval", {"dir": folder} | ({} if path is None else {"manifest": str(path)})),
                SettingsLayer("--bootstrap", {"bootstrap": list(bootstrap)}),
            ],
            where="eval",
        )
        try:
            with _progress_bar() as bar:
                return asyncio.run(_ask(config, invitation, scores_of, bar))
        except KeyboardInterrupt:
            click.echo("nothing has been scored yet: the swarm was still being looked for", err=True)
            raise


async def _ask(
    config: PeerConfig, invitation: SwarmLink | Manifest, scores_of: Callable[[Manifest], Scores], bar: ProgressBar
) -> Scores:
    from swarmnet.manifest.codec_names import named_by
    from swarmnet.net.identity import Identity
    from swarmnet.peer.joining import reach
    from swarmnet.trainer.evaluation import Piece
    from swarmnet.trainer.scoring import score
    from swarmnet.wire.codecs import encode, use_all

    identity = Identity.generate()
    async with reach(config, identity, invitation, bar.phase, "trainer", look_s=LOOK_S) as found:
        if not found.records:
            raise UsageError(
                f"nobody announces run {found.run[:12]}, which is this manifest's: take the manifest that "
                "its peers were started with, or the link that they print"
            )
        use_all(named_by(found.manifest))
        scores = scores_of(found.manifest)

        def piece(number: int) -> Piece:
            return Piece((encode("int32", scores.microbatch(number)),), scores.num_bytes(number))

        ending = await score(
            identity,
            found.run,
            found.manifest,
            found.directory,
            piece,
            scores.text.num_microbatches,
            tally=scores.tally,
            greeter=found.greeter,
            heard=lambda served: _follow(bar, scores, "" if served else "; waiting: nobody serves stage 0"),
        )
        scores.interrupted, scores.failure = ending.interrupted, ending.failure
        return scores


def _follow(bar: ProgressBar, scores: Scores, waiting: str = "") -> None:
    bar.scored(scores.tally.num_microbatches, scores.text.num_microbatches, scores.so_far(waiting))


def _from_disk(manifest: Manifest, scores: Scores, step: int | None, directories: list[Path]) -> Scores:
    from swarmnet.manifest.canonical import run_id
    from swarmnet.model.whole import loss_of, whole
    from swarmnet.state.collect import Collection

    collection = Collection(manifest, run_id(manifest), directories)
    version = collection.newest() if step is None else step
    module = whole(manifest.model, collection.stages(version))
    try:
        with _progress_bar() as bar:
            _follow(bar, scores)
            for number in range(scores.text.num_microbatches):
                tokens = scores.microbatch(number)
                loss = loss_of(module, tokens, compute=manifest.numerics.compute)
                scores.tally.add(loss, tokens[:, 1:].numel(), scores.num_bytes(number), version)
                _follow(bar, scores)
    except KeyboardInterrupt:
        scores.interrupted = True
    return scores
