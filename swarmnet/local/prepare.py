"""Turn options into a manifest: build or load it, lay `--set` over it, fill in the data's digests; then write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet.config import toml
from swarmnet.config.check import layer
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import Tokens, verify
from swarmnet.data.windows import with_digests
from swarmnet.errors import UsageError
from swarmnet.ids import RunId
from swarmnet.local.options import LocalOptions
from swarmnet.manifest import file
from swarmnet.manifest.codec_names import may_owe, named_by
from swarmnet.manifest.file import run_id
from swarmnet.manifest.implied import implied
from swarmnet.manifest.schema import Admission, Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.admission_files import new_owner, write_invitation, write_owner
from swarmnet.net.identity import Identity
from swarmnet.wire import codecs

_INVITED_S = 10 * 365 * 24 * 3600.0
"""A run may be resumed as long as it is kept."""

SMALL_PARAMETERS = 50_000_000
"""Below this many parameters exact sums cost little on a CPU."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The manifest of one local run, as every child will read it once `write` has been called.

    owner: of a new run by invitation.
    """

    manifest: Manifest
    run_id: RunId
    path: Path
    owner: Identity | None = None

    @property
    def exact(self) -> bool:
        """Deterministic mode: only bit-equality with one process will do."""
        return self.manifest.numerics.mode == "deterministic"

    @property
    def lossless(self) -> bool:
        """No codec rounds what crosses the wire."""
        wire = self.manifest.wire
        return (wire.activations, wire.gradients) == ("fp32", "fp32") and self.manifest.averaging.codec in (
            "int64",
            "fp32",
        )

    @property
    def pure(self) -> bool:
        """Does a step not show who computed what, but for rounding? It does where replicas train on their own, where a
        reducer compares them, and where what one owes is sent later."""
        averaging = self.manifest.averaging
        return averaging.equal_bits and averaging.reducer == "sum" and not may_owe(averaging.codec)

    def write(self) -> None:
        """Put it at `path`. Raises UsageError for a directory that cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(file.to_toml(self.manifest), encoding="utf-8")
            if self.owner is not None:
                write_owner(self.path, self.owner)
                write_invitation(self.path, RunTerms.of(self.manifest), life_s=_INVITED_S)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written ({error.strerror}): choose another --out") from error


def choose(options: LocalOptions) -> Manifest:
    """The manifest the options ask for, data digests not filled in yet. Raises UsageError in the name of the flag.

    A manifest file keeps its own stages, steps, seed, data and numerics; what was typed beside it goes over it.
    """
    manifest = Manifest(name="local") if options.manifest is None else file.load(options.manifest)
    described = _described(options, manifest) if options.manifest is None else []
    typed = [(flag, *_assignment(flag, text)) for flag, text in options.typed]
    if options.checkpoint_every is not None:
        typed.append(("--checkpoint-every", "training.checkpoint_every", options.checkpoint_every))
    typed += [("--set", *_assignment("--set", text)) for text in options.set]
    said = {name: value for _, name, value in typed}
    if options.numerics is not None:
        said.setdefault("numerics.mode", options.numerics)
    follows = [("manifest", name, value) for name, value in implied(said, opened=False).items()]
    mode = options.numerics
    if (
        mode is None
        and options.manifest is None
        and not any(name in ("numerics.mode", "averaging.codec") for _, name, _ in (*follows, *typed))
    ):
        # Nobody has said how to sum: exactly, as long as that costs little.
        small = _laid(manifest, [*described, *follows, *typed]).model.num_parameters < SMALL_PARAMETERS
        mode = "deterministic" if small else "fp32"
    if mode is not None:
        flag = "manifest" if options.numerics is None else f"--numerics {mode}"
        described += [
            (flag, "numerics.mode", mode),
            (flag, "averaging.codec", "int64" if mode == "deterministic" else "fp32"),
        ]
    return _laid(manifest, [*described, *follows, *typed])


Change = tuple[str, str, object]
"""(Who says so, dotted name of a field, its value.)"""


def _described(options: LocalOptions, manifest: Manifest) -> list[Change]:
    """A small model made on the spot: a layer for each stage at least."""
    usual = LocalOptions()
    found: list[Change] = []
    for name, field, value in (
        ("stages", "model.num_layers", max(manifest.model.num_layers, options.stages)),
        ("stages", "cut.stages", options.stages),
        ("steps", "training.total_steps", options.steps),
        ("seed", "training.seed", options.seed),
        ("data", "data.source", options.data),
    ):
        typed = getattr(options, name) != getattr(usual, name)
        found.append((f"--{name}" if typed else "manifest", field, value))
    return found


def _assignment(flag: str, text: str) -> tuple[str, object]:
    path, value = toml.assignment(text, where=flag)
    return ".".join(path), value


def _laid(manifest: Manifest, changes: Sequence[Change]) -> Manifest:
    """`manifest` with `changes`, weakest first. Of a rule about several fields, all flags that were typed are named."""
    flags = dict.fromkeys(flag for flag, _, _ in changes if flag != "manifest")
    layers = [layer(flag, tuple(name.split(".")), value) for flag, name, value in changes]
    return file.change(manifest, layers, where=", ".join(flags) or "manifest")


def prepare(options: LocalOptions, directory: Path) -> Prepared:
    """What is to become `directory`/run.toml; writes nothing.

    Raises UsageError for bad options, an unreadable file, a codec that is not installed, or other data than agreed.
    """
    chosen = choose(options)
    codecs.use_all(named_by(chosen))
    manifest = with_data(chosen, base=options.manifest.parent if options.manifest else Path())
    path, owner = directory / "run.toml", None
    policy = options.admission or manifest.admission.policy
    if policy == "invite":  # an owner of its own: a manifest's may be far away
        owner = new_owner(path)
    admission = Admission(policy=policy, key=owner.peer if owner else "")
    manifest = manifest.model_copy(update={"admission": admission})
    return Prepared(manifest, run_id(manifest), path, owner)


def with_data(manifest: Manifest, *, base: Path) -> Manifest:
    """`manifest` with its data found, paths made absolute (children read the copy in another directory) and digests
    filled in. Raises UsageError for data that is not there, not the one the digests name, too
    short for a microbatch, or has more tokens than the model's vocabulary.
    """
    source, tokenizer = (absolute(text, base) for text in (manifest.data.source, manifest.data.tokenizer))
    tokens = load_tokens(source, tokenizer)
    if manifest.data.tokens_sha256:  # else it has not been prepared: whatever is there is the run's
        verify(tokens, manifest.data)
    if tokens.vocab_size > manifest.model.vocab_size:
        raise UsageError(
            f"the tokenizer knows {tokens.vocab_size} tokens, the model {manifest.model.vocab_size}: "
            f"add --set model.vocab_size={tokens.vocab_size}"
        )
    # Also where it has digests: --set may have changed the windows.
    named = manifest.data.model_copy(update={"source": source, "tokenizer": tokenizer})
    data = with_digests(named, tokens, manifest.training)
    initial = manifest.initial.model_copy(
        update={"source": manifest.initial.source and absolute(manifest.initial.source, base)}
    )
    return manifest.model_copy(update={"data": data, "initial": initial})


def absolute(name: str, base: Path) -> str:
    """A path that exists below `base`, for processes that run elsewhere; any other name as it is."""
    path = base / Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def resume(directory: Path) -> Prepared:
    """What was written into `directory` for the run that is to go on. Raises UsageError if there is none, or if
    a codec of its is not installed any more."""
    path = directory / "run.toml"
    if not path.is_file():
        raise UsageError(f"{directory} holds no run that could be resumed: there is no run.toml")
    manifest = file.load(path)
    codecs.use_all(named_by(manifest))
    return Prepared(manifest, run_id(manifest), path)


def read_manifest(path: Path) -> Manifest:
    """What `Prepared.write` wrote."""
    return file.load(path)


def read_tokens(manifest: Manifest) -> Tokens:
    """The token stream of a manifest that was prepared. Raises UsageError if it has changed since."""
    tokens = load_tokens(manifest.data.source, manifest.data.tokenizer)
    verify(tokens, manifest.data)
    return tokens
