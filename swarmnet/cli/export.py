"""`swarmnet export`: the model of a run, from its peers' checkpoints, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnet.cli.settings import SETTINGS
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.manifest.schema import Manifest


@click.command("export", context_settings=SETTINGS)
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False), metavar="MANIFEST")
@click.argument("target", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--dir", "directories", type=click.Path(path_type=Path, file_okay=False), multiple=True, metavar="DIR",
              envvar="SWARMNET_DIR", help="Where peers keep their checkpoints, at any depth; repeatable.  [MANIFEST's]")
@click.option("--step", type=int, metavar="N", help="Which version of the weights.  [the newest that is whole]")
@click.option("--like", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR",
              help="Checkpoint whose tokenizer and generation settings come along.  [what the run began with]")
def command(
    manifest: Path, target: Path, directories: tuple[Path, ...], step: int | None, like: Path | None
) -> int:
    """Write the model of a run to a new directory OUT, as Hugging Face's transformers loads it.

    Collects the weights of all stages from checkpoints on this disk: those of `swarmnet local` lie beside its run.toml,
    those of peers in their --dir.

    \b
    Examples:
      swarmnet export runs/local/run.toml ./model
      swarmnet export run.toml ./model --dir ~/.swarmnet/stage-0 --dir ~/.swarmnet/stage-1-2
    """
    if target.exists():
        raise UsageError(f"{target}: exists already; name a directory that does not")

    from swarmnet.manifest.canonical import run_id
    from swarmnet.manifest.file import load
    from swarmnet.model.huggingface.write import write_model
    from swarmnet.state.collect import Collection

    run = load(manifest)
    base = manifest.parent
    collection = Collection(run, run_id(run), [path.expanduser() for path in directories] or [base])
    version = collection.newest() if step is None else step
    files = write_model(
        target, run.model, collection.stages(version), longest=run.training.sequence_length,
        like=like or _beginning(run, base), tokenizer=_tokenizer(run, base),
    )
    click.echo(f"wrote {target}: the weights of step {version} of {run.training.total_steps}, in {', '.join(files)}")
    if "tokenizer.json" not in files:
        click.echo(f"without a tokenizer: the run's is {run.data.tokenizer!r}; --like DIR brings one along")
    return 0


def _beginning(manifest: Manifest, base: Path) -> Path | None:
    """The checkpoint the run began with, if it is still there."""
    folder = base / Path(manifest.initial.source).expanduser()
    return folder if manifest.initial.source and (folder / "config.json").is_file() else None


def _tokenizer(manifest: Manifest, base: Path) -> Path | None:
    """The run's tokenizer, where it is a file that is here."""
    path = base / Path(manifest.data.tokenizer).expanduser()
    return path if path.suffix == ".json" and path.is_file() else None
