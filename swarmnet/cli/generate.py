"""`swarmnet generate`: a look at what a run has learned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import click

from swarmnet.cli.frame import INTERRUPTED
from swarmnet.cli.settings import SETTINGS, with_checkpoints
from swarmnet.errors import UsageError


@click.command("generate", context_settings=SETTINGS)
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False), metavar="MANIFEST")
@click.argument("prompt", metavar="PROMPT")
@with_checkpoints
@click.option(
    "--tokens", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="How many to add."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    show_default=True,
    metavar="X",
    help="0: always the likeliest.",
)
@click.option(
    "--seed", type=click.IntRange(min=0, max=2**64 - 1), default=0, show_default=True, metavar="N", help="Of the draw."
)
def command(
    manifest: Path,
    prompt: str,
    directories: tuple[Path, ...],
    step: int | None,
    tokens: int,
    temperature: float,
    seed: int,
) -> int:
    """Continue PROMPT with the model of a run, from checkpoints on this disk: a smoke test of what one has trained.

    The whole model runs in this process, on the CPU. To use it in earnest, write it with `swarmnet export`. Ctrl+C ends
    it with what there is.

    \b
    Example, after `swarmnet local --steps 200 --out runs/local`:
      swarmnet generate runs/local/run.toml import --tokens 200
    """
    if math.isnan(temperature):
        raise UsageError("--temperature nan: must be a number from 0 on")
    from swarmnet.data.source import tokenizer_of
    from swarmnet.data.tokenizer import spelled
    from swarmnet.manifest.canonical import run_id
    from swarmnet.manifest.file import load
    from swarmnet.model.whole import generate, whole
    from swarmnet.state.collect import Collection

    run = load(manifest)
    tokenizer = tokenizer_of(run.data.tokenizer, manifest.parent)
    ids = tokenizer.of_prompt(prompt)
    if not ids:
        raise UsageError("PROMPT is empty: a model continues something")
    collection = Collection(run, run_id(run), [path.expanduser() for path in directories] or [manifest.parent])
    version = collection.newest() if step is None else step
    module = whole(run.model, collection.stages(version))
    interrupted = False

    def found() -> Iterator[int]:
        nonlocal interrupted
        try:
            yield from generate(
                module, ids, num_tokens=tokens, context=run.training.sequence_length, temperature=temperature, seed=seed
            )
        except KeyboardInterrupt:
            interrupted = True

    click.echo(prompt, nl=False)
    for piece in spelled(tokenizer, ids, found()):
        click.echo(piece, nl=False)
    click.echo()
    return INTERRUPTED if interrupted else 0
