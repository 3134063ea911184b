"""What a run has learned: `export` writes it for transformers, `eval` scores a text, `generate` continues one."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from swarmnet.cli.frame import INTERRUPTED
from swarmnet.cli.settings import (
    BUILT_IN,
    SETTINGS,
    CountRange,
    NumberRange,
    check_writable,
    with_bootstrap,
    with_checkpoints,
    with_json,
)
from swarmnet.errors import UsageError
from swarmnet.telemetry.text import typed

if TYPE_CHECKING:
    import torch

    from swarmnet.data.heldout import HeldOutText, Tally
    from swarmnet.data.tokenizer import Tokenizer
    from swarmnet.ids import RunId
    from swarmnet.manifest.schema import Manifest
    from swarmnet.model.decoder import StageModule
    from swarmnet.model.lora import Base
    from swarmnet.state.collect import CollectedCheckpoints

NO_FILE = ("bytes", "ids")
"""Tokenizers that are no files."""


# ------------------------------------------------------------ where the weights are


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """One version of a run's weights."""

    manifest: Manifest
    base: Path | None
    """Where the manifest is; None: it came from the network, and has no say in which files are opened here."""
    collection: CollectedCheckpoints
    places: tuple[Path, ...] = ()
    """Where peers have left their files, on this disk."""

    def module(self, checkpoint: Path | None) -> StageModule:
        """The whole model. checkpoint: as of `frozen`."""
        from swarmnet.model.whole import whole

        lora = self.manifest.lora
        if not lora.r:
            return whole(self.manifest.model, self.collection.stages())
        base = self.frozen(checkpoint)
        return whole(self.manifest.model, self.collection.stages(), lora=lora, base=base)

    def frozen(self, checkpoint: Path | None) -> Base:
        """The weights that adapters belong to: the files of peers, else from the checkpoint that the run began with.

        checkpoint: its directory; None: where the manifest says. Raises UsageError: not here, or another one.
        """
        import tempfile

        from swarmnet.model.base_file import BaseLayout, content_of, write_base
        from swarmnet.model.lora import drawn_base

        owner: dict[str, Base] = {}
        manifest = self.manifest
        layouts = [BaseLayout.of(spec) for spec in manifest.specs]
        if not manifest.initial.sha256:
            shapes = {name: shape for layout in layouts for name, shape in layout.shapes.items()}
            return drawn_base(manifest.specs[0], shapes)
        checkpoint = checkpoint or _beginning(manifest, self.base)
        # What is mapped stays readable when its name is gone.
        with tempfile.TemporaryDirectory(prefix="swarmnet-base-") as folder:
            for layout, root in zip(layouts, manifest.initial.sha256, strict=True):
                made = Path(folder) / root
                here = (path for place in self.places for path in place.rglob(f"base/{root}"))
                path = next((path for path in here if content_of(path, layout, agreed=root)), made)
                if path == made and checkpoint is None:
                    raise UsageError(
                        "the adapters of this run mean nothing without the checkpoint that it began with "
                        f"({manifest.initial.source!r} where it was made): name its directory with --from DIR"
                    )
                if path == made and checkpoint is not None:
                    write_base(made, checkpoint, layout, agreed=root)
                owner |= dict.fromkeys(layout.shapes, layout.mapped(path))
        return lambda name: owner[name](name)


with_beginning = click.option(
    "--from",
    "checkpoint",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Where the checkpoint is that a run with adapters began with.  [where peers or the manifest have it]",
)


@contextlib.contextmanager
def weights_of(
    run: str,
    directories: tuple[Path, ...],
    step: int | None,
    *,
    bootstrap: tuple[str, ...] = (),
    say: Callable[[str, str], None] = lambda phase, words: None,
    agreed: Callable[[Manifest, Path | None], None] = lambda manifest, base: None,
) -> Iterator[FoundWeights]:
    """The weights of version `step`, without it the newest that is whole. Raises UsageError.

    Args:
        run: a link, or a manifest's path: without `bootstrap` the weights are on this disk then.
        say: called with the progress while they are fetched.
        agreed: called with the manifest, and where it is, before anything is fetched or read; it may raise.
    """
    import tempfile

    from swarmnet.manifest.file import load, run_id
    from swarmnet.net.address import check_addresses
    from swarmnet.net.swarm_link import SCHEME, SwarmLink

    # A link stands for a run of strangers, a path for one of ours.
    link, path = run.strip().startswith(SCHEME), Path(run).expanduser()
    # A variable that names directories is meant for other commands, too.
    on_line = click.get_current_context().get_parameter_source("directories") == ParameterSource.COMMANDLINE
    if (link or bootstrap) and directories and on_line:
        how = "a link" if link else "--bootstrap"
        raise UsageError(f"--dir is for weights on this disk: with {how} they come from the swarm")
    if not link and not path.is_file():
        raise UsageError(f"{typed(run)}: no such file, and no link such as swarm:RUN_ID@ADDRESS")
    # What is typed is checked before torch is imported, which takes a second.
    if not (link or bootstrap):
        places = [each.expanduser() for each in directories] or [path.parent]
        for place in places:
            if not place.is_dir():
                raise UsageError(f"{place}: no such directory")
        manifest = load(path)
        # A mistake in what is asked is said before weights are read.
        agreed(manifest, path.parent)
        collection = _collected(manifest, run_id(manifest), places, step)
        for passed in collection.passed_over():
            click.echo(f"warning: {passed}: not used; the weights are those of step {collection.version}", err=True)
        yield FoundWeights(manifest, path.parent, collection, tuple(places))
        return
    check_addresses(bootstrap)
    invitation, base = (SwarmLink.parse(run), None) if link else (load(path), path.parent)

    from swarmnet import telemetry
    from swarmnet.clock import run_loop
    from swarmnet.peer.collect_remote import collect_remote

    # Peers that do not answer are normal while weights are fetched; only errors are news.
    telemetry.setup("error")
    with tempfile.TemporaryDirectory(prefix="swarmnet-weights-") as folder:
        found = run_loop(
            collect_remote(
                invitation,
                Path(folder),
                say,
                version=step,
                bootstrap=bootstrap,
                agreed=lambda manifest: agreed(manifest, base),
            )
        )
        here = _collected(found.manifest, found.run, [Path(folder)], found.version)
        yield FoundWeights(found.manifest, base, here)


def _collected(manifest: Manifest, run: RunId, directories: list[Path], step: int | None) -> CollectedCheckpoints:
    """What peers of that run have left below `directories`."""
    from swarmnet.stage.canonical import Canonical
    from swarmnet.state.collect import CollectedCheckpoints

    shapes = [Canonical.of(spec).shapes for spec in manifest.specs]
    return CollectedCheckpoints(run, directories, shapes, step, allow_drop=manifest.training.allow_drop)


# ------------------------------------------------------------ the tokenizer

with_tokenizer = click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="The run's tokenizer.json.  [where the manifest says]",
)


def _tokenizer_name(manifest: Manifest, base: Path | None, tokenizer: Path | None) -> str:
    """The run's tokenizer; the same file, wherever the command is typed. Raises UsageError if it is not here."""
    named = manifest.data.tokenizer if tokenizer is None else str(tokenizer.absolute())
    if base is None and tokenizer is None and named not in NO_FILE:
        raise UsageError(
            f"the run's tokenizer is {named!r} where it was made, and a manifest from the "
            "network opens no files here: name your copy of it with --tokenizer FILE"
        )
    if base is not None and named not in NO_FILE:
        named = str((base / Path(named).expanduser()).absolute())
    return named


def _run_tokenizer(manifest: Manifest, base: Path | None, tokenizer: Path | None) -> Tokenizer:
    """What the run's ids mean. Raises UsageError for another tokenizer, which would spell noise."""
    from swarmnet.data.source import tokenizer_of

    named, agreed = _tokenizer_name(manifest, base, tokenizer), manifest.data.tokenizer_sha256
    if named == "ids":
        raise UsageError(
            "the run's data are ids without a tokenizer: name the one that made them with --tokenizer FILE"
        )
    found = tokenizer_of(named, None)
    if manifest.data.tokenizer != "ids" and found.sha256 != agreed != "":
        raise UsageError(
            f"{named} is not the tokenizer the run was made with (digest {found.sha256[:12]} here, {agreed[:12]} in "
            "the manifest): name that one with --tokenizer FILE"
        )
    return found


# ------------------------------------------------------------ export


@click.command("export", context_settings=SETTINGS)
@click.argument("run", metavar="MANIFEST_OR_LINK")
@click.argument("target", type=click.Path(path_type=Path), metavar="OUT")
@with_checkpoints
@click.option(
    "--like",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Checkpoint from which tokenizer, generation settings and sliding window come.  [what the run began with]",
)
@with_beginning
@click.option("--adapter", "form", flag_value="adapter", help="Of a run with adapters: write them, for PEFT.  [so]")
@click.option("--merged", "form", flag_value="merged", help="Of such a run: write the whole model, with them in it.")
@click.option(
    "--dtype",
    type=click.Choice(("fp32", "bf16")),
    default="fp32",
    show_default=True,
    help="Of the weights that are written.",
)
def export(
    run: str,
    target: Path,
    directories: tuple[Path, ...],
    step: int | None,
    like: Path | None,
    checkpoint: Path | None,
    form: str | None,
    dtype: str,
) -> int:
    """Write the model of a run to a new directory OUT, as Hugging Face's transformers loads it; of a run with adapters
    (--lora) the adapters, as PEFT loads them.

    With the run's manifest the weights of all stages come from checkpoints on this disk: those of `swarmnet local` are
    next to its run.toml, those of peers in their --dir. With a link they are fetched from the peers of a swarm that is
    up.

    \b
    Examples, the first one after `swarmnet local --steps 200 --out runs/local`:
      swarmnet export runs/local/run.toml ./model
      swarmnet export run.toml ./model --dir ~/.swarmnet/stage-0 --dir ~/.swarmnet/stage-1-2
      swarmnet export run.toml ./model --merged --dtype bf16
      swarmnet export swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... ./model
    """
    if os.path.lexists(target):
        raise UsageError(f"{target}: exists already; name a directory that does not")
    # Weights may take an hour to fetch.
    check_writable(target.parent, "OUT")
    notes: list[str] = []

    def agreed(manifest: Manifest, base: Path | None) -> None:
        if form and not manifest.lora.r:
            raise UsageError(f"--{form} is for a run with adapters (lora.r), and this one trains all weights")
        _tokenizer(manifest, base)  # refuses early
        notes.extend(_notes(like, _began(manifest, base, like), manifest))

    say = lambda phase, words: click.echo(f"{phase:<10} {words}")  # noqa: E731
    with weights_of(run, directories, step, say=say, agreed=agreed) as found:
        from swarmnet.manifest.terms import RunTerms
        from swarmnet.model.huggingface.write import brought, write_model
        from swarmnet.net.admission_files import notices_of

        manifest, base = found.manifest, found.base
        like = like or checkpoint or _beginning(manifest, base)
        only_adapters = bool(manifest.lora.r) and form != "merged"
        if only_adapters:
            from swarmnet.model.huggingface.adapter import write_adapter

            named = str(like.absolute() if like is not None else manifest.initial.source)
            files = write_adapter(target, manifest.lora, found.collection.stages(), base=named, like=like)
        else:
            files = write_model(
                target,
                manifest.model,
                _stages(found, checkpoint, dtype),
                longest=manifest.training.sequence_length,
                like=like,
                began=_began(manifest, base, like),
                tokenizer=_tokenizer(manifest, base),
                dtype=dtype,
            )
    notices = notices_of(RunTerms.of(manifest))
    notices.learn_all(found.collection.notices)
    click.echo(
        f"wrote {target}: the weights of step {found.collection.version} of {notices.end}, in {', '.join(files)}"
    )
    if only_adapters:
        click.echo(f"load it with peft.PeftModel.from_pretrained(model, {str(target)!r}), model being {named}")
        return 0
    if like is not None and (what := brought(like)):
        click.echo(f"from {like} came {', '.join(what)}")
    for note in notes:
        click.echo(note)
    # transformers would load such a model and then fail at its first text.
    if "tokenizer.json" not in files:
        where = "--like DIR brings one along" if like is None else f"{like} has no tokenizer.json either"
        click.echo(f"without a tokenizer: the run's is {manifest.data.tokenizer!r}; {where}")
    return 0


def _stages(found: FoundWeights, checkpoint: Path | None, dtype: str) -> Iterator[Mapping[str, torch.Tensor]]:
    """The weights of each stage that are written, adapters merged."""
    import torch

    from swarmnet.model.lora import frozen_shapes, merged, stage_module

    manifest, kind = found.manifest, torch.bfloat16 if dtype == "bf16" else torch.float32
    base = found.frozen(checkpoint) if manifest.lora.r else None
    for spec, weights in zip(manifest.specs, found.collection.stages(), strict=True):
        if base is not None:
            weights = dict(merged(frozen_shapes(stage_module(spec)), manifest.lora, base, weights))
        yield {name: tensor.to(kind) for name, tensor in weights.items()}


def _notes(like: Path | None, began: Path | None, manifest: Manifest) -> list[str]:
    """What to say of the checkpoints that are named. Raises UsageError if nothing of `like` is of use."""
    from swarmnet.model.huggingface.write import TEXT_FILES, brought, unlike

    notes = []
    if manifest.initial.sha256 and began is None:
        notes.append(
            "note: the checkpoint that the run began with is not here: if its attention has a sliding window, "
            "config.json lacks it; --like DIR brings it along"
        )
    if like is None:
        return notes
    # Whoever names a checkpoint wants something of it.
    if not brought(like):
        raise UsageError(f"--like {like}: has none of {', '.join(TEXT_FILES)}, and no config.json that says more")
    different = unlike(like, manifest.model, longest=manifest.training.sequence_length, began=began)
    return notes if different is None else [*notes, f"note: {different}: what came along may not fit"]


def _beginning(manifest: Manifest, base: Path | None) -> Path | None:
    """The checkpoint the run began with, if it is still where a manifest of ours says."""
    if base is None or not manifest.initial.source:
        return None
    folder = base / Path(manifest.initial.source).expanduser()
    return folder if (folder / "config.json").is_file() else None


def _began(manifest: Manifest, base: Path | None, like: Path | None) -> Path | None:
    """The same, or `like` if the run began with a checkpoint: by naming one the user says that it is that one."""
    # A manifest without digests began at random: no checkpoint can be its beginning.
    named = like is not None and manifest.initial.sha256 and (like / "config.json").is_file()
    return _beginning(manifest, base) or (like if named else None)


def _tokenizer(manifest: Manifest, base: Path | None) -> Path | None:
    """The run's tokenizer, where it is a file that a manifest of ours names. Raises UsageError if the file changed."""
    path = None if base is None else base / Path(manifest.data.tokenizer).expanduser()
    if path is None or path.suffix != ".json" or not path.is_file():
        return None
    _run_tokenizer(manifest, base, None)
    return path


# ------------------------------------------------------------ generate


@click.command("generate", context_settings=SETTINGS)
@click.argument("run", metavar="MANIFEST_OR_LINK")
@click.argument("prompt", metavar="PROMPT")
@with_bootstrap
@with_tokenizer
@with_beginning
@with_checkpoints
@click.option("--tokens", type=CountRange(min=1), default=100, show_default=True, metavar="N", help="How many to add.")
@click.option(
    "--temperature",
    type=NumberRange(min=0.0),
    default=0.8,
    show_default=True,
    metavar="X",
    help="0: always the likeliest.",
)
@click.option(
    "--seed", type=CountRange(min=0, max=2**64 - 1), default=0, show_default=True, metavar="N", help="Of the draw."
)
def generate(
    run: str,
    prompt: str,
    bootstrap: tuple[str, ...],
    tokenizer: Path | None,
    checkpoint: Path | None,
    directories: tuple[Path, ...],
    step: int | None,
    tokens: int,
    temperature: float,
    seed: int,
) -> int:
    """Continue PROMPT with the model of a run: a smoke test of what one has trained.

    With the run's manifest the weights come from checkpoints on this disk. With a link, or a manifest and --bootstrap,
    they are fetched from the peers of a swarm that is up. The whole model runs in this process, on the CPU. To use it
    in earnest, write it with `swarmnet export`. Ctrl+C ends it with what there is.

    \b
    Examples, the first one after `swarmnet local --steps 200 --out runs/local`:
      swarmnet generate runs/local/run.toml import --tokens 200
      swarmnet generate swarm:RUN_ID@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... import
    """
    # The model needs a position to continue from.
    if not prompt:
        raise UsageError("PROMPT is empty: a model continues something")
    asked: list[tuple[Tokenizer, list[int]]] = []

    def agreed(manifest: Manifest, base: Path | None) -> None:
        spells = _run_tokenizer(manifest, base, tokenizer)
        asked.append((spells, spells.of_prompt(prompt)))
        if not asked[0][1]:
            raise UsageError("PROMPT is empty: the run's tokenizer leaves nothing of it")

    def say(phase: str, words: str) -> None:
        click.echo(f"{phase:<10} {words}", err=True)

    with weights_of(run, directories, step, bootstrap=bootstrap, say=say, agreed=agreed) as found:
        from swarmnet.data.tokenizer import spelled
        from swarmnet.model.whole import generate as tokens_of

        module = found.module(checkpoint)
    spells, ids = asked[0]
    interrupted, context = False, found.manifest.training.sequence_length

    def written() -> Iterator[int]:
        nonlocal interrupted
        try:
            yield from tokens_of(module, ids, num_tokens=tokens, context=context, temperature=temperature, seed=seed)
        except KeyboardInterrupt:
            interrupted = True

    click.echo(prompt, nl=False)
    for piece in spelled(spells, ids, written()):
        click.echo(piece, nl=False)
    click.echo()
    return INTERRUPTED if interrupted else 0


# ------------------------------------------------------------ eval


@click.command("eval", context_settings=SETTINGS)
@click.argument("run", metavar="LINK_OR_MANIFEST")
@with_bootstrap
@click.option("--data", metavar="SOURCE", help="Any text, as `init` takes it.  [the part the run has held out]")
@with_tokenizer
@with_beginning
@click.option("--microbatches", type=CountRange(min=1), metavar="N", help="How many to score at most.  [all]")
@with_checkpoints
@with_json
def evaluate(
    run: str,
    bootstrap: tuple[str, ...],
    data: str | None,
    tokenizer: Path | None,
    checkpoint: Path | None,
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
    import time

    from rich.console import Console

    from swarmnet.cli.progress_bar import ProgressBar

    # A text that is not here is noticed before gigabytes are fetched.
    asked: list[Scores] = []
    with ProgressBar(Console(stderr=True), clock=time.monotonic) as bar, contextlib.ExitStack() as stack:
        source = weights_of(
            run,
            directories,
            step,
            bootstrap=bootstrap,
            say=bar.phase,
            agreed=lambda manifest, base: asked.append(scores_of(manifest, base, data, tokenizer, microbatches)),
        )
        try:
            found = stack.enter_context(source)
        except KeyboardInterrupt:
            click.echo("nothing has been scored yet: the weights were still being fetched", err=True)
            raise
        from swarmnet.model.whole import loss_of

        scores, module = asked[0], found.module(checkpoint)
        scores.version, total = found.collection.version, scores.text.num_microbatches
        with contextlib.suppress(KeyboardInterrupt):  # the tally says how far it came
            bar.scored(0, total, scores.so_far)
            for number in range(total):
                tokens = scores.microbatch(number)
                loss = loss_of(module, tokens, compute=scores.manifest.numerics.compute)
                scores.tally.add(loss, tokens[:, 1:].numel(), scores.text.num_bytes(number, scores.tokenizer))
                bar.scored(number + 1, total, scores.so_far)
    if scores.tally.num_tokens or as_json:
        click.echo(scores.as_json() if as_json else scores.as_text())
    else:
        click.echo(f"nothing has been scored yet (0 of {total} microbatches)", err=True)
    return 0 if scores.complete else INTERRUPTED


def scores_of(
    manifest: Manifest, base: Path | None, data: str | None, tokenizer: Path | None, microbatches: int | None
) -> Scores:
    """What is to be scored. Raises UsageError: the data or the tokenizer are not here, or others.

    Args:
        base: where the manifest is; None: it came from the network, and opens no files here.
        data: a source; None: what the run has held out.
        tokenizer: the run's; None: where its manifest says.
        microbatches: at most so many.
    """
    from swarmnet.data.heldout import Tally, any_text, held_out
    from swarmnet.data.source import load_tokens, tokenizer_of
    from swarmnet.data.tokens import verify

    named = _tokenizer_name(manifest, base, tokenizer)
    if base is None and data is None and manifest.data.source not in BUILT_IN:
        raise UsageError(
            f"the run's text is {manifest.data.source!r} where it was made, and a manifest from the network "
            "opens no files here: name a text with --data, or take the manifest's file instead of "
            "the link, with --bootstrap"
        )
    if data is None:
        tokens = load_tokens(manifest.data.source, named, base=base or Path())
        # Held-out windows are only held out if the stream is the run's.
        verify(tokens, manifest.data)
        text = held_out(tokens, manifest.training, at_most=microbatches)
    else:
        tokens = load_tokens(data, named)
        # Another tokenizer's ids would score noise.
        if named != "ids" and tokens.tokenizer_sha256 != manifest.data.tokenizer_sha256 != "":
            raise UsageError(
                f"{named} is not the tokenizer the run was made with (digest {tokens.tokenizer_sha256[:12]} here, "
                f"{manifest.data.tokenizer_sha256[:12]} in the manifest)"
            )
        text = any_text(tokens, manifest.training, at_most=microbatches)
    if tokens.vocab_size > manifest.model.vocab_size:
        raise UsageError(
            f"{tokens.source!r} holds token ids up to {tokens.vocab_size - 1}, and the model knows "
            f"{manifest.model.vocab_size}"
        )
    return Scores(manifest, text, None if named == "ids" else tokenizer_of(named, None), Tally())


@dataclass(slots=True)
class Scores:
    """An evaluation of `text`, and what it has come to."""

    manifest: Manifest
    text: HeldOutText
    tokenizer: Tokenizer | None
    """None: `text` is mere ids."""
    tally: Tally
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
        """One line of progress."""
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
        # There are as many models as replicas then.
        if self.manifest.averaging.sync == "local":
            lines.append("which are each replica's own between outer steps: those of one replica of each stage")
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs: what cannot be known is null."""
        from swarmnet.manifest.file import run_id

        tally, some = self.tally, bool(self.tally.num_tokens)
        # JSON has no word for infinity.
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
