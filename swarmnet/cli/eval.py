"""`swarmnet eval`: the loss of a text by one version of a run's weights, from checkpoints here or in its swarm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from swarmnet.cli.frame import INTERRUPTED
from swarmnet.cli.settings import BUILT_IN, SETTINGS, collected, with_bootstrap, with_checkpoints, with_json
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    import torch

    from swarmnet.cli.progress_bar import ProgressBar
    from swarmnet.data.heldout import HeldOutText, Tally
    from swarmnet.data.tokenizer import Tokenizer
    from swarmnet.manifest.schema import Manifest
    from swarmnet.net.swarm_link import SwarmLink
    from swarmnet.state.collect import CollectedCheckpoints

NO_FILE = ("bytes", "ids")
"""Tokenizers that are no files."""


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
def evaluate(
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
    """Print the loss (nats per token), perplexity and bits per byte of a text by one version of a run's weights.

    With a manifest the weights come from checkpoints on this disk. With a link, or a manifest and --bootstrap, they are
    fetched from the peers of a swarm that is up. Either way the whole model runs in this process, on the CPU. How far
    it is goes to standard error. Ctrl+C prints what has been scored so far.

    \b
    Examples, the last one after `swarmnet local --steps 200 --out runs/local`:
      swarmnet eval swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... --data essay.txt
      swarmnet eval run.toml --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
      swarmnet eval runs/local/run.toml --microbatches 10
    """
    import tempfile

    from swarmnet.manifest.file import load
    from swarmnet.net.swarm_link import SwarmLink

    request = ScoreRequest(data, tokenizer, microbatches)
    link = run.strip().startswith("swarm:")
    named = directories and ctx.get_parameter_source("directories") == ParameterSource.COMMANDLINE
    if (link or bootstrap) and named:
        raise UsageError("--dir is for weights on this disk: with a link or --bootstrap they come from the swarm")
    path = Path(run).expanduser()
    if not link and not path.is_file():
        raise UsageError(f"{run}: no such file, and no link such as swarm:RUN_ID@ADDRESS")
    with _progress_bar() as bar, tempfile.TemporaryDirectory(prefix="swarmnet-eval-") as folder:
        if link:
            found = SwarmLink.parse(run)
            scores, weights = _fetched(found, (), step, Path(folder), request.of_strangers, bar)
        else:
            manifest = load(path)
            if bootstrap:
                scores, weights = _fetched(
                    manifest, bootstrap, step, Path(folder), lambda each: request.of(each, path.parent), bar
                )
            else:
                scores = request.of(manifest, path.parent)
                weights = _on_disk(manifest, [each.expanduser() for each in directories] or [path.parent], step)
        _score(scores, *weights, bar)
    if scores.tally.num_tokens or as_json:
        click.echo(scores.as_json() if as_json else scores.as_text())
    else:
        click.echo(f"nothing has been scored yet (0 of {scores.text.num_microbatches} microbatches)", err=True)
    return 0 if scores.complete else INTERRUPTED


def _progress_bar() -> ProgressBar:
    """On standard error, by this process's clock."""
    import time

    from rich.console import Console

    from swarmnet.cli.progress_bar import ProgressBar

    return ProgressBar(Console(stderr=True), clock=time.monotonic)


Weights = tuple["CollectedCheckpoints", int]
"""Checkpoints, and which version of them."""


def _on_disk(manifest: Manifest, directories: list[Path], step: int | None) -> Weights:
    from swarmnet.manifest.file import run_id

    collection = collected(manifest, run_id(manifest), directories)
    return collection, collection.newest() if step is None else step


def _fetched(
    invitation: SwarmLink | Manifest,
    bootstrap: tuple[str, ...],
    step: int | None,
    folder: Path,
    scores_of: Callable[[Manifest], Scores],
    bar: ProgressBar,
) -> tuple[Scores, Weights]:
    """Checkpoints of the swarm's, below `folder`."""
    import asyncio

    from swarmnet import telemetry
    from swarmnet.peer.collect_remote import collect_remote

    telemetry.setup("error")
    scores: list[Scores] = []
    try:
        found = asyncio.run(
            collect_remote(
                invitation,
                folder,
                bar.phase,
                version=step,
                bootstrap=bootstrap,
                # A text that is not here is noticed before gigabytes are fetched.
                agreed=lambda manifest: scores.append(scores_of(manifest)),
            )
        )
    except KeyboardInterrupt:
        click.echo("nothing has been scored yet: the weights were still being fetched", err=True)
        raise
    return scores[0], (collected(found.manifest, found.run, [folder]), found.version)


def _score(scores: Scores, collection: CollectedCheckpoints, version: int, bar: ProgressBar) -> None:
    """Score all, or what there is time for until Ctrl+C."""
    from swarmnet.model.whole import loss_of, whole

    module = whole(scores.manifest.model, collection.stages(version))
    scores.version = version
    total = scores.text.num_microbatches
    try:
        bar.scored(0, total, scores.so_far)
        for number in range(total):
            tokens = scores.microbatch(number)
            loss = loss_of(module, tokens, compute=scores.manifest.numerics.compute)
            scores.tally.add(loss, tokens[:, 1:].numel(), scores.text.num_bytes(number, scores.tokenizer))
            bar.scored(number + 1, total, scores.so_far)
    except KeyboardInterrupt:
        pass  # the tally says how far it came


# ------------------------------------------------------------ what is scored, and how it is said


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What is to be scored, as it was typed."""

    data: str | None
    """A source; None: what the run has held out."""
    tokenizer: Path | None
    """The run's; None: where its manifest says."""
    microbatches: int | None
    """At most so many."""

    def of(self, manifest: Manifest, base: Path) -> Scores:
        """By a manifest that lies in `base`. Raises UsageError: the data or the tokenizer are not here, or others."""
        tokenizer = manifest.data.tokenizer
        if self.tokenizer is not None:
            tokenizer = str(self.tokenizer.resolve())
        elif tokenizer not in NO_FILE:
            tokenizer = str((base / Path(tokenizer).expanduser()).resolve())
        return self._scores(manifest, tokenizer, base)

    def of_strangers(self, manifest: Manifest) -> Scores:
        """By a manifest that came from the network: it opens no files here. Raises UsageError as `of`."""
        agreed = manifest.data
        if self.tokenizer is None and agreed.tokenizer not in NO_FILE:
            raise UsageError(
                f"the run's tokenizer is {agreed.tokenizer!r} where it was made, and a manifest from the "
                "network opens no files here: name your copy of it with --tokenizer FILE"
            )
        if self.data is None and agreed.source not in BUILT_IN:
            raise UsageError(
                f"the run's text is {agreed.source!r} where it was made, and a manifest from the network "
                "opens no files here: name a text with --data, or take the manifest's file instead of "
                "the link, with --bootstrap"
            )
        tokenizer = agreed.tokenizer if self.tokenizer is None else str(self.tokenizer.resolve())
        return self._scores(manifest, tokenizer, Path())

    def _scores(self, manifest: Manifest, tokenizer: str, base: Path) -> Scores:
        from swarmnet.data.heldout import any_text, held_out
        from swarmnet.data.source import load_tokens, tokenizer_of
        from swarmnet.data.tokens import verify

        if self.data is None:
            tokens = load_tokens(manifest.data.source, tokenizer, base=base)
            verify(tokens, manifest.data)
            text = held_out(tokens, manifest.training, at_most=self.microbatches)
        else:
            tokens = load_tokens(self.data, tokenizer)
            if tokenizer != "ids" and tokens.tokenizer_sha256 != manifest.data.tokenizer_sha256 != "":
                raise UsageError(
                    f"{tokenizer} is not the tokenizer the run was made with (digest "
                    f"{tokens.tokenizer_sha256[:12]} here, {manifest.data.tokenizer_sha256[:12]} in the "
                    "manifest)"
                )
            text = any_text(tokens, manifest.training, at_most=self.microbatches)
        if tokens.vocab_size > manifest.model.vocab_size:
            raise UsageError(
                f"{tokens.source!r} holds token ids up to {tokens.vocab_size - 1}, and the model knows "
                f"{manifest.model.vocab_size}"
            )
        encoder = None if tokenizer == "ids" else tokenizer_of(tokenizer, None)
        return Scores(manifest, text, encoder)


def _tally() -> Tally:
    from swarmnet.data.heldout import Tally

    return Tally()


@dataclass(slots=True)
class Scores:
    """An evaluation of `text`, and what it has come to."""

    manifest: Manifest
    text: HeldOutText
    tokenizer: Tokenizer | None
    """None: `text` is mere ids."""
    tally: Tally = field(default_factory=_tally)
    version: int = 0
    """Of the weights."""

    @property
    def complete(self) -> bool:
        """Was all scored that was to be?"""
        return self.tally.num_microbatches == self.text.num_microbatches

    def microbatch(self, number: int) -> torch.Tensor:
        """Tokens of microbatch `number`, int32 [B, T + 1]."""
        return self.text.tokens.microbatch(self.text.positions(number), self.text.sequence_length)

    @property
    def so_far(self) -> str:
        """One line for whoever waits."""
        tally = self.tally
        loss = f", loss {tally.loss:.4f}" if tally.num_tokens else ""
        return f"{tally.num_microbatches} of {self.text.num_microbatches} microbatches{loss}"

    def as_text(self) -> str:
        """For people."""
        tally = self.tally
        bits = tally.bits_per_byte
        lines = [
            f"loss {tally.loss:.6f} nats per token, perplexity {tally.perplexity:.4f}"
            f"{'' if bits is None else f', {bits:.4f} bits per byte'}"
            f"{'' if self.complete else ' (partial)'}",
            f"over {tally.num_tokens:,} tokens of {self.text.tokens.source}, {tally.num_microbatches} of "
            f"{self.text.in_all} microbatches"
            f"{f'; {self.text.left_out:,} tokens more are in none' if self.text.left_out else ''}",
            f"by the weights of step {self.version}",
        ]
        if self.manifest.averaging.sync == "local":
            lines.append("which are each replica's own between outer steps: those of one replica of each stage")
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs: what cannot be known is null."""
        from swarmnet.manifest.file import run_id

        tally, some = self.tally, bool(self.tally.num_tokens)
        perplexity = tally.perplexity if some else math.inf
        return json.dumps(
            {
                "run": run_id(self.manifest),
                "data": self.text.tokens.source,
                "loss": tally.loss if some else None,
                "perplexity": perplexity if math.isfinite(perplexity) else None,
                "bits_per_byte": tally.bits_per_byte,
                "tokens": tally.num_tokens,
                "bytes": tally.num_bytes if some else None,
                "microbatches": tally.num_microbatches,
                "of_microbatches": self.text.in_all,
                "tokens_left_out": self.text.left_out,
                "version": self.version,
                "partial": not self.complete,
            }
        )
