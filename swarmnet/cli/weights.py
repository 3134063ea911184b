"""What a run has learned: `export` writes the model for transformers, `generate` continues a text with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from swarmnet.cli.frame import INTERRUPTED
from swarmnet.cli.settings import SETTINGS, collected, with_checkpoints
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.manifest.schema import Manifest
    from swarmnet.state.collect import CollectedCheckpoints


@click.command("export", context_settings=SETTINGS)
@click.argument("run", metavar="MANIFEST_OR_LINK")
@click.argument("target", type=click.Path(path_type=Path), metavar="OUT")
@with_checkpoints
@click.option(
    "--like",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Checkpoint whose tokenizer, generation settings and sliding window come along.  [what the run began with]",
)
def export(run: str, target: Path, directories: tuple[Path, ...], step: int | None, like: Path | None) -> int:
    """Write the model of a run to a new directory OUT, as Hugging Face's transformers loads it.

    With the run's manifest the weights of all stages come from checkpoints on this disk: those of `swarmnet local` lie
    beside its run.toml, those of peers in their --dir. With a link they are fetched from the peers of a swarm that is
    up.

    \b
    Examples, the first one after `swarmnet local --steps 200 --out runs/local`:
      swarmnet export runs/local/run.toml ./model
      swarmnet export run.toml ./model --dir ~/.swarmnet/stage-0 --dir ~/.swarmnet/stage-1-2
      swarmnet export swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... ./model
    """
    if target.exists():
        raise UsageError(f"{target}: exists already; name a directory that does not")
    if not run.strip().startswith("swarm:"):
        path = Path(run).expanduser()
        return _from_disk(path, target, [each.expanduser() for each in directories] or [path.parent], step, like)
    if directories and click.get_current_context().get_parameter_source("directories") == ParameterSource.COMMANDLINE:
        raise UsageError("--dir is for a manifest: with a link the weights come from the swarm")
    return _from_swarm(run, target, step, like)


def _from_disk(path: Path, target: Path, directories: list[Path], step: int | None, like: Path | None) -> int:
    from swarmnet.manifest.file import load, run_id

    manifest = load(path)
    beginning = _beginning(manifest, path.parent)
    began = beginning or _named_beginning(like, manifest)
    notes = _notes(like, began, manifest)
    collection = collected(manifest, run_id(manifest), directories)
    version = collection.newest() if step is None else step
    return _write(
        target, manifest, collection, version, like or beginning, began, _tokenizer(manifest, path.parent), notes
    )


def _from_swarm(link: str, target: Path, step: int | None, like: Path | None) -> int:
    """The manifest came from strangers: it has no say in which files are copied from here."""
    import asyncio
    import tempfile

    from swarmnet import telemetry
    from swarmnet.net.swarm_link import SwarmLink
    from swarmnet.peer.collect_remote import collect_remote

    telemetry.setup("warning")
    with tempfile.TemporaryDirectory(prefix="swarmnet-export-") as folder:
        found = asyncio.run(
            collect_remote(
                SwarmLink.parse(link),
                Path(folder),
                lambda phase, words: click.echo(f"{phase:<10} {words}"),
                version=step,
            )
        )
        began = _named_beginning(like, found.manifest)
        notes = _notes(like, began, found.manifest)
        collection = collected(found.manifest, found.run, [Path(folder)])
        return _write(target, found.manifest, collection, found.version, like, began, None, notes)


def _notes(like: Path | None, began: Path | None, manifest: Manifest) -> list[str]:
    """What to say of the checkpoints that are named. Raises UsageError if nothing of `like` is of use."""
    from swarmnet.model.huggingface.write import BESIDE, brought, unlike

    notes = []
    if manifest.initial.sha256 and began is None:
        notes.append(
            "note: the checkpoint that the run began with is not here: if its attention has a sliding window, "
            "config.json lacks it; --like DIR brings it along"
        )
    if like is None:
        return notes
    if not brought(like):
        raise UsageError(f"--like {like}: has none of {', '.join(BESIDE)}, and no config.json that says more")
    different = unlike(like, manifest.model, longest=manifest.training.sequence_length, began=began)
    return notes if different is None else [*notes, f"note: {different}: what came along may not fit"]


def _write(
    target: Path,
    manifest: Manifest,
    collection: CollectedCheckpoints,
    version: int,
    like: Path | None,
    began: Path | None,
    tokenizer: Path | None,
    notes: list[str],
) -> int:
    from swarmnet.model.huggingface.write import brought, write_model

    files = write_model(
        target,
        manifest.model,
        collection.stages(version),
        longest=manifest.training.sequence_length,
        like=like,
        began=began,
        tokenizer=tokenizer,
    )
    total = manifest.training.total_steps
    click.echo(f"wrote {target}: the weights of step {version} of {total}, in {', '.join(files)}")
    if like is not None and (what := brought(like)):
        click.echo(f"from {like} came {', '.join(what)}")
    for note in notes:
        click.echo(note)
    if "tokenizer.json" not in files:
        where = "--like DIR brings one along" if like is None else f"{like} has no tokenizer.json either"
        click.echo(f"without a tokenizer: the run's is {manifest.data.tokenizer!r}; {where}")
    return 0


def _beginning(manifest: Manifest, base: Path) -> Path | None:
    """The checkpoint the run began with, if it is still there."""
    folder = base / Path(manifest.initial.source).expanduser()
    return folder if manifest.initial.source and (folder / "config.json").is_file() else None


def _named_beginning(like: Path | None, manifest: Manifest) -> Path | None:
    """`like`, if the run began with a checkpoint and `like` has a config: whoever names it says that it is that one."""
    return like if like is not None and manifest.initial.sha256 and (like / "config.json").is_file() else None


def _tokenizer(manifest: Manifest, base: Path) -> Path | None:
    """The run's tokenizer, where it is a file that is here."""
    path = base / Path(manifest.data.tokenizer).expanduser()
    return path if path.suffix == ".json" and path.is_file() else None


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
def generate(
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
    from swarmnet.manifest.file import load, run_id
    from swarmnet.model.whole import generate as tokens_of
    from swarmnet.model.whole import whole

    run = load(manifest)
    tokenizer = tokenizer_of(run.data.tokenizer, manifest.parent)
    ids = tokenizer.of_prompt(prompt)
    if not ids:
        raise UsageError("PROMPT is empty: a model continues something")
    collection = collected(run, run_id(run), [path.expanduser() for path in directories] or [manifest.parent])
    version = collection.newest() if step is None else step
    module = whole(run.model, collection.stages(version))
    interrupted = False

    def found() -> Iterator[int]:
        nonlocal interrupted
        try:
            yield from tokens_of(
                module, ids, num_tokens=tokens, context=run.training.sequence_length, temperature=temperature, seed=seed
            )
        except KeyboardInterrupt:
            interrupted = True

    click.echo(prompt, nl=False)
    for piece in spelled(tokenizer, ids, found()):
        click.echo(piece, nl=False)
    click.echo()
    return INTERRUPTED if interrupted else 0
