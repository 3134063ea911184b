"""`swarmnet init`: write a run's manifest."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from swarmnet.cli.line import Proposal, machines_of, with_line
from swarmnet.cli.settings import SETTINGS, TYPED, SchemaCommand, fields, given, with_json
from swarmnet.errors import UsageError, unwritable
from swarmnet.manifest import presets
from swarmnet.telemetry.text import counted, typed

if TYPE_CHECKING:
    from swarmnet.config.check import SettingsLayer
    from swarmnet.data.tokens import Tokens
    from swarmnet.manifest.schema import Manifest

EXISTS = "exists already; choose another name, or add --force to overwrite it"

Said = dict[str, tuple[str, Any]]
"""Field of the manifest, by its dotted name -> (who says it, value)."""

MOST_PASSES = 4
"""Over the data, up to which repeated text is about as good as new text (arXiv:2305.16264)."""

_LARGE_ADAPTERS = 20 << 20
"""Bytes of an aggregate in int64."""

NAMES = frozenset(["stdlib", "bytes", "ids"])
"""Sources and tokenizers that are no paths, even where a file has that name."""


@click.command("init", cls=SchemaCommand, context_settings=SETTINGS)
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default=Path("run.toml"), metavar="[FILE]")
@fields("manifest", "name")
@click.option(
    "--preset",
    type=click.Choice(get_args(presets.Name)),
    metavar="NAME",
    allow_from_autoenv=False,
    help=f"Begin with {presets.HELP}.  [toy]",
)
@fields("manifest", "cut", "training.total_steps", "averaging", "training.seed")
@click.option(
    "--from",
    "checkpoint",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    envvar="SWARMNET_FROM",
    help="Begin with a Hugging Face checkpoint (Llama, Mistral, Qwen2, Qwen3): its model and weights.",
)
@click.option(
    "--lora",
    "adapters",
    metavar="r=N[,FIELD=VALUE...]",
    allow_from_autoenv=False,
    help="Fine-tune: freeze the weights, and train adapters of that rank (LoRA). Fields of [lora], such as "
    "r=16,lora_alpha=32.",
)
@fields("manifest", "lora", "data", "admission")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    allow_from_autoenv=False,
    help="Any field of the manifest, such as model.num_layers=12; repeatable.",
)
@with_line(
    "Mbit/s of a member's line, its narrower direction: choose numerics, codecs, sync, microbatch and slots for it, "
    "and say what others would cost."
)
@click.option(
    "--owner",
    "owned",
    is_flag=True,
    allow_from_autoenv=False,
    help="Write an owner's key, which can extend the run later; --admission invite does so anyhow.",
)
@click.option("--force", is_flag=True, allow_from_autoenv=False, help="Overwrite FILE.")
@with_json
@click.pass_context
def init(
    ctx: click.Context,
    /,
    path: Path,
    *,
    preset: str | None,
    checkpoint: Path | None,
    adapters: str | None,
    assignments: tuple[str, ...],
    force: bool,
    owned: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Write FILE (run.toml): a run's manifest, with every field and what it means.

    \b
    Example:
      swarmnet init run.toml --data corpus.txt --stages 4 --set model.num_layers=12
      swarmnet init run.toml --data tokens.u16.bin --tokenizer tokenizer.json --preset 350m
      swarmnet init run.toml --data corpus.txt --stages 4 --from ./Llama-3.2-1B
      swarmnet init run.toml --data corpus.txt --stages 2 --from ./Qwen3-8B --lora r=16 --base nf4
      swarmnet init run.toml --data corpus.txt --admission invite
      swarmnet init run.toml --data corpus.txt --mbit 200 --device cuda
      swarmnet init run.toml --data corpus.txt --fleet fleet.toml --set model.num_layers=32
    """
    machines = machines_of(ctx.params)
    # A mistyped order of FILE and --data would write a manifest over a name like corpus.txt.
    if path.suffix != ".toml":
        raise UsageError(f"{typed(path)}: a manifest's name ends in .toml, such as run.toml")
    for file in (path, *(() if machines is None else machines.peer_files(path))):
        if file.exists() and not force:
            raise UsageError(f"{file}: {EXISTS}")

    say = functools.partial(click.echo, err=as_json)
    from swarmnet.cli.measured import saved
    from swarmnet.config import toml
    from swarmnet.manifest.codec_names import named_by
    from swarmnet.manifest.file import run_id, to_toml
    from swarmnet.manifest.implied import remarks
    from swarmnet.net.admission_files import new_owner, owner_key_file, write_owner
    from swarmnet.wire import codecs

    if preset is not None and checkpoint is not None:
        raise UsageError("--preset and --from exclude each other: the checkpoint's model is the run's")
    begins = None if checkpoint is None else Begins(checkpoint)
    said: Said = {".".join(option.path): (origin, value) for option, origin, value in given(ctx, *TYPED)}
    sets: Said = {".".join(key): ("--set", value) for key, value in map(toml.assignment, assignments)}
    for text in () if adapters is None else adapters.split(","):
        if "=" not in text:
            raise UsageError(f"--lora {typed(adapters)}: write r=16, or several fields, such as r=16,lora_alpha=32")
        key, value = toml.assignment(f"lora.{text.strip()}", where="--lora")
        said[".".join(key)] = ("--lora", value)
    if adapters is not None and not said.get("lora.r", ("", 0))[1]:
        raise UsageError(f"--lora {typed(adapters)}: name the adapters' rank, such as r=16")
    if "data.tokenizer" not in said | sets:
        said["data.tokenizer"] = ("--tokenizer", "bytes" if begins is None else begins.tokenizer)
    for name in said.keys() & {"data.source", "data.tokenizer"}:
        said[name] = (said[name][0], _seen_from(path.parent, said[name][1]))
    owner = None
    invites = said.get("admission.policy", ("", ""))[1] == "invite"
    if (invites or owned) and "admission.key" not in sets:
        # The run's id depends on the key, so it is made before the manifest.
        owner = new_owner(path)
        said["admission.key"] = ("owner's key", owner.peer)
    steps = (said | sets).get("training.total_steps", ("", None))[1]
    under: Said = {}
    if begins is None:
        origin = "--preset" if preset else "manifest"
        under = {key: (origin, value) for key, value in presets.preset_fields(preset or "toy", steps).items()}
    chosen, follows = _manifest(said | sets, begins, under)
    # A codec that is not installed is said before minutes of reading.
    codecs.use_all(named_by(chosen))
    sized_by = "--set" if "model.vocab_size" in sets else f"--from {checkpoint}" if begins is not None else None
    say(f"reading the data: {chosen.data.source}")
    manifest, tokens = _sized(chosen, base=path.parent, sized_by=sized_by)
    choice = None
    if machines is not None:
        values = {key: value for key, (_, value) in (said | sets).items()}
        choice = Proposal.of(manifest, values, machines, times=saved(path, manifest))
        # What somebody has said is not for us to choose.
        origin = "--fleet" if machines.replicas is None else "--mbit"
        fitting: Said = {key: (origin, value) for key, value in choice.fields.items() if key not in values}
        chosen, follows = _manifest(fitting | said | sets, begins, under)
        manifest = chosen.model_copy(update={"model": manifest.model})
    manifest = _digested(manifest, tokens)
    model, data = manifest.model, manifest.data
    if begins is not None:
        tied = sets.get("model.tie_embeddings", ("", None))[1]
        say(f"reading the weights in {checkpoint}")
        manifest = begins.fill(manifest, source=_seen_from(path.parent, str(checkpoint)), tied=tied)
    makes = not path.parent.exists()
    if owner is not None:
        write_owner(path, owner)  # first: nobody could act for a run whose key is nowhere
    _write(path, to_toml(manifest), force=force)
    configs = {} if choice is None else choice.peer_configs(path)
    for file, (_slots, text) in configs.items():
        _write(file, text, force=force)
    lines = [
        f"wrote {path}: a model of {model.num_parameters:,} parameters in {counted(manifest.cut.stages, 'stage')}, "
        f"{manifest.training.total_steps} steps",
        *_of_adapters(manifest),
        f"data: {data.num_tokens:,} tokens of {data.source}, tokenizer {data.tokenizer} ({model.vocab_size:,} ids)",
        *tokens.notes,
        f"the run reads {manifest.training.total_tokens:,} tokens: {_passes(manifest)} over the data",
    ]
    if manifest.training.total_tokens > MOST_PASSES * data.num_tokens:
        lines.append(
            f"warning: more than {MOST_PASSES} passes over the data teach little more (arXiv:2305.16264): take more "
            "text, or fewer --steps"
        )
    # Somebody who has chosen a size knows that there are others.
    if begins is None and preset is None and not any(key.startswith("model.") for key in sets):
        names = ", ".join(presets.PRESETS)
        lines.append(
            f"the model is a toy of {model.num_parameters / 1e6:.1f}M parameters: --preset ({names}) for others"
        )
    if makes:
        lines.insert(0, f"made the folder {path.absolute().parent}, which was not there")
    if begins is not None:
        untied = "; embedding and head are no longer tied" if begins.unties(manifest) else ""
        lines += [f"weights of version 0 are those in {checkpoint}{untied}", *begins.notes()]
    if choice is not None:
        wrote = (f"wrote {file}: slots = {slots}, for `peer` and `join`" for file, (slots, _text) in configs.items())
        lines += [*choice.lines(), *wrote]
    if follows:
        also = ", ".join(f"{name} = {value}" for name, value in follows.items())
        lines.append(f"with it: {also}; --set chooses otherwise")
    lines += [*remarks(manifest), f"run id {run_id(manifest)}"]
    if owner is not None:
        may = "says who joins, and may extend the run" if invites else "may extend the run"
        lines.append(f"wrote {owner_key_file(path)}: only the holder of this key {may}: keep it safe, and a copy")
    if manifest.admission.policy == "open":
        lines.append(
            "open run: anyone may join, and a majority of strangers could stop or change it; --admission invite "
            "lets in only whom you invite"
        )
    say("\n".join([*lines, *_next(path, manifest, config=next(iter(configs), None))]))
    if as_json:
        said_of_line = {} if choice is None else choice.record()
        record = {"file": str(path), "run": run_id(manifest), "parameters": model.num_parameters}
        record |= {"passes": manifest.training.total_tokens / data.num_tokens}
        click.echo(json.dumps({**record, **said_of_line}, indent=2))
    return 0


def _of_adapters(manifest: Manifest) -> list[str]:
    """What is trained of it, and what each stage has to have first, if not all is."""
    from swarmnet.model.base_file import BaseLayout
    from swarmnet.plan.memory import shown

    lora = manifest.lora
    if not lora.r:
        return []
    trained, whole = lora.num_parameters(manifest.model), manifest.model.num_parameters
    sizes = ", ".join(shown(BaseLayout.of(spec).num_bytes) for spec in manifest.specs)
    return [
        f"adapters of rank {lora.r}: {trained:,} parameters are trained ({trained / whole:.2%}), all others "
        f"frozen, in {lora.base}: {sizes} by stage"
    ]


def _passes(manifest: Manifest) -> str:
    """How many passes over its data a run makes, in words."""
    passes = manifest.training.total_tokens / manifest.data.num_tokens
    number = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
    return f"{number} pass{'es' * (number != '1')}"


def _next(path: Path, manifest: Manifest, *, config: Path | None) -> list[str]:
    """What to type next: a run that other machines can be in is started on them."""
    run, slots = typed(path), "" if config is None else f" --config {typed(config)}"
    here = f"swarmnet local --manifest {run}"
    if manifest.admission.policy == "invite":
        return [
            f"next: swarmnet owner invite {run} --bearer > own.invitation, and one for each guest",
            f"then: swarmnet peer --manifest {run}{slots} --stage 0 --invitation own.invitation, and what that prints",
            f"to try it on this machine: {here}",
        ]
    # Nobody else could join it, so no other machine is mentioned.
    if manifest.data.source == "stdlib":  # another Python version has another text
        return [f"next: {here}"]
    return [
        f"next: swarmnet peer --manifest {run}{slots} --stage 0, and on other machines what that prints",
        f"then: swarmnet trainer --manifest {run} --bootstrap ADDRESS, what follows the @ in the link",
        f"to try it on this machine: {here}",
    ]


def _seen_from(folder: Path, source: str) -> str:
    """A relative path that exists here, as a path relative to the manifest's folder; anything else as it is."""
    from swarmnet.data.documents import split_column

    path, _ = split_column(source, os.path.exists)
    # The file may be written elsewhere; who reads it starts at its folder.
    if source in NAMES or Path(path).is_absolute() or not os.path.exists(path):
        return source
    return Path(os.path.relpath(path, folder)).as_posix() + source[len(path) :]


def _manifest(said: Said, begins: Begins | None, under: Said) -> tuple[Manifest, dict[str, object]]:
    """The manifest asked for, and which of its fields follow from others. under: what holds unless it is said."""
    from swarmnet.config.check import layer
    from swarmnet.manifest.file import change
    from swarmnet.manifest.implied import implied
    from swarmnet.manifest.schema import Manifest

    values = {key: value for key, (_, value) in said.items()}
    follows = implied(values)
    layers = [layer(origin, tuple(key.split(".")), value) for key, (origin, value) in under.items()]
    layers += [layer("manifest", tuple(name.split(".")), value) for name, value in follows.items()]
    if begins is not None:
        # Under what was typed: --set may still change the model that the checkpoint describes.
        layers.append(begins.layer(stages=values.get("cut.stages", Manifest().cut.stages)))
    layers += [layer(origin, tuple(key.split(".")), value) for key, (origin, value) in said.items()]
    manifest = change(Manifest(), layers, where="manifest")
    # A fine grid costs nothing where adapters are small, and needs no steps to find its own.
    if manifest.lora.r and "averaging.codec" in follows and manifest.averaging.sync != "local":
        large = 8 * manifest.lora.num_parameters(manifest.model) > _LARGE_ADAPTERS
        codec = follows["averaging.codec"] = "small" if large else "int64"
        manifest = change(manifest, [layer("manifest", ("averaging", "codec"), codec)], where="manifest")
    return manifest, follows


class Begins:
    """The checkpoint that a run is to begin with, in `folder`. Raises UsageError if it is none, or not supported."""

    def __init__(self, folder: Path) -> None:
        from swarmnet.model.huggingface.config import read_config

        self._folder, self._described = folder, read_config(folder)

    @property
    def tokenizer(self) -> str:
        """Its own. Raises UsageError if it brings none that can be read: other ids would be noise to its embedding."""
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise UsageError(
                f"{self._folder}: has no tokenizer.json, and its weights mean nothing to another tokenizer's ids: let "
                "transformers write one there (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or say "
                "--tokenizer FILE (bytes, if it was trained on bytes; ids, if --data holds its token ids)"
            )
        return str(path)

    def layer(self, *, stages: object) -> SettingsLayer:
        """The model, for a run of so many stages: with more than one, embedding and head are two matrices."""
        from swarmnet.config.check import SettingsLayer

        model = self._described.model.model_dump(mode="json")
        # Between stages the head is a matrix of its own, which begins as a copy.
        model["tie_embeddings"] = model["tie_embeddings"] and stages == 1
        return SettingsLayer(f"--from {self._folder}", {"model": model})

    def unties(self, manifest: Manifest) -> bool:
        """Is it tied in its files and not in the run?"""
        return self._described.model.tie_embeddings and not manifest.model.tie_embeddings

    def notes(self) -> list[str]:
        """What is there and is not applied, so that it is not taken for a part of the run."""
        from swarmnet.model.huggingface.checkpoint import Checkpoint

        unread = ("settings", self._described.unread), ("files", Checkpoint(self._folder).unread())
        return [
            f"note: {what} of {self._folder} that are not used: {', '.join(found)}" for what, found in unread if found
        ]

    def fill(self, manifest: Manifest, *, source: str, tied: bool | None) -> Manifest:
        """`manifest` with the digests of the weights. Raises UsageError: they do not fit its model.

        tied: whether the head is the embedding, if the operator has said so; else the checkpoint's config says it.
        """
        from swarmnet.config.check import SettingsLayer
        from swarmnet.manifest.file import change
        from swarmnet.model.base_file import BaseLayout, base_root
        from swarmnet.model.huggingface.checkpoint import checked, digest, stage_shapes

        window, length = self._described.window, manifest.training.sequence_length
        # Inside its window a model computes the same with and without it.
        if window is not None and length > window:
            raise UsageError(
                f"{self._folder}: its attention reaches back {window} tokens only (sliding_window), which "
                f"is not supported: set training.sequence_length = {length} to {window} or less"
            )
        described, shapes = self._described.model.tie_embeddings, stage_shapes(manifest.model, manifest.cut, length)
        differs = not (described if tied is None else tied)
        lacks = described or tied is True
        checkpoint = checked(self._folder, shapes, may_lack_head=lacks, may_differ_head=differs)
        # Of frozen weights what counts is how they rest.
        if manifest.lora.r:
            found = [base_root(checkpoint, BaseLayout.of(spec)) for spec in manifest.specs]
        else:
            found = [digest(checkpoint.read(each)) for each in shapes]
        initial = {"initial": {"source": source, "sha256": found}}
        return change(manifest, [SettingsLayer("--from", initial)], where="--from")


def _sized(manifest: Manifest, *, base: Path, sized_by: str | None) -> tuple[Manifest, Tokens]:
    """The data, and `manifest` with the vocabulary size they need unless `sized_by` something. Raises UsageError."""
    from swarmnet.config.check import SettingsLayer
    from swarmnet.data.source import load_tokens
    from swarmnet.manifest.file import change

    said = _said_now_and_then("reading the data: {:,} documents, {:,} tokens")
    tokens = load_tokens(manifest.data.source, manifest.data.tokenizer, base=base, progress=said)
    # An id beyond the embedding would crash the first step.
    if sized_by and manifest.model.vocab_size < tokens.vocab_size:
        raise UsageError(
            f"{sized_by}: model.vocab_size = {manifest.model.vocab_size}: must be at least "
            f"{tokens.vocab_size}, which the data need"
        )
    model = {} if sized_by else {"vocab_size": tokens.vocab_size}
    return change(manifest, [SettingsLayer("data", {"model": model})], where="data"), tokens


def _digested(manifest: Manifest, tokens: Tokens) -> Manifest:
    """`manifest` with length and digests of its data. Raises UsageError for data that cannot feed such a run."""
    from swarmnet.data.windows import with_digests

    said = _said_now_and_then("hashing the data: {:,} of {:,} windows")
    return manifest.model_copy(update={"data": with_digests(manifest.data, tokens, manifest.training, progress=said)})


@click.command("tokenize", context_settings=SETTINGS)
@click.argument("source", metavar="SOURCE")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--tokenizer", metavar="NAME", default="bytes", show_default=True, help="bytes, or a tokenizer.json.")
@click.option(
    "--end-token",
    metavar="NAME",
    help='Token that ends a document; "" for none.  [what files in the folder of tokenizer.json name]',
)
@click.option(
    "--special-tokens", is_flag=True, help="Text that spells a special token becomes it, as a chat template needs."
)
@click.option("--skip-bad", is_flag=True, help="Leave out and count documents that are no text, instead of ending.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def tokenize(
    source: str, out: Path, tokenizer: str, *, end_token: str | None, special_tokens: bool, skip_bad: bool, force: bool
) -> int:
    """Write the token ids of SOURCE to a file that runs map into memory, once for all peers.

    For text that is large, or in many small documents. SOURCE is what --data takes: text, .jsonl, .parquet or .arrow,
    text and .jsonl also compressed (.gz, .zst), folders of them, or a folder that Hugging Face datasets has saved.
    PATH#COLUMN reads another column than "text". OUT gets the ending that says how wide an id is: .u8.bin, .u16.bin or
    .u32.bin. It prints what ends a document, and how often text spells a special token.

    \b
    Example:
      swarmnet tokenize books/ books --tokenizer tokenizer.json
      swarmnet tokenize reviews.parquet#content reviews --tokenizer tokenizer.json
      swarmnet init run.toml --data books.u16.bin --tokenizer tokenizer.json
    """
    from swarmnet.data.source import ids_path, tokenizer_of, write_ids

    encoder = tokenizer_of(tokenizer, None, end=end_token, specials=special_tokens)
    out = ids_path(out, encoder)
    if out.exists() and not force:
        raise UsageError(f"{out}: {EXISTS}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no such folder; make it first")
    said = _said_now_and_then("{:,} documents, {:,} tokens")
    written, notes = write_ids(source, encoder, out, skip_bad=skip_bad, progress=said)
    click.echo("\n".join([f"{out}: {written:,} tokens, {out.stat().st_size / 1e6:,.1f} MB", *notes]))
    named = "" if tokenizer == "bytes" else f" --tokenizer {typed(tokenizer)}"
    click.echo(f"next: swarmnet init run.toml --data {typed(out)}{named}")
    return 0


def _said_now_and_then(words: str) -> Callable[[int, int], None]:
    """Progress on standard error, a line of `words` every few seconds; none of what is done sooner."""
    import time

    from swarmnet.telemetry.screen import PLAIN_EVERY_S

    said_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= PLAIN_EVERY_S:
            said_at = time.monotonic()
            click.echo(words.format(done, total), err=True)

    return progress


def _write(path: Path, text: str, *, force: bool) -> None:
    from swarmnet.net.identity import write_whole

    try:
        written = write_whole(path, text, mode=0o666, once=not force)
    except OSError as error:
        raise unwritable(path, error) from error
    # Somebody has written it since we looked.
    if not written:
        raise UsageError(f"{path}: {EXISTS}")
