"""What `swarmnet local` was asked to do, checked before anything starts. Knows no manifest and no process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError

from swarmnet.config.peer import Shard, listen_at
from swarmnet.config.table import CliOption
from swarmnet.errors import UsageError
from swarmnet.manifest import presets
from swarmnet.testing import fault
from swarmnet.testing.byzantine import parse_byzantine
from swarmnet.testing.fault import Fault, Kill, KillRank

MOST = 1000
"""Stages, replicas of one, ranks, trainers, microbatches in flight: no machine makes use of more."""

SESSION = (
    *("out", "verify", "kill", "kill_every", "kill_rank", "kill_all", "chaos", "resume", "slots", "trace"),
    *("dashboard", "log_level"),
)
"""Options of one session. All others say what the run is, and a resumed run keeps them."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """One local swarm. Raises UsageError at once for values that cannot work.

    A field with a `CliOption` is an option of `swarmnet local`, and it says what the field is. The first seven describe
    a manifest that is built on the spot, as its fields of that name do. With `manifest` the file says them. `tensor`,
    `shard` and `sequence_parallel` are those of each replica's peer config.
    """

    stages: int = 3
    steps: int = 60
    seed: int = 0
    data: str = "stdlib"
    admission: Literal["open", "invite"] | None = None
    """"invite": this swarm's owner is made, and invites its peers. None: as the manifest says, or open."""
    numerics: Annotated[
        Literal["deterministic", "fast"] | None,
        CliOption(
            default="deterministic, or the manifest's", help="which kernels: those with the bits of one process, or any"
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None, CliOption("N", default="50", help="steps between two checkpoints on disk")
    ] = None
    manifest: Annotated[
        Path | None, CliOption("FILE", help="run this manifest; --stages, --steps, --sync and --seed then change it")
    ] = None
    preset: Annotated[
        presets.Name | None,
        CliOption("NAME", variable=False, help=f"{presets.HELP}; a step here stays at 8 microbatches"),
    ] = None
    set: Annotated[
        tuple[str, ...],
        CliOption("KEY=VALUE", variable=False, help="change a field of the manifest, such as training.microbatches=16"),
    ] = ()
    typed: tuple[tuple[str, str], ...] = ()
    """(Flag, "section.key=value") of other flags that change the manifest. `set` goes over them."""
    replicas: Annotated[int, CliOption("N", help="peers per stage")] = 2
    trainers: Annotated[int, CliOption("N", help="trainers")] = 1
    out: Annotated[Path | None, CliOption("DIR", default="runs/local-SEED-TIME", help="directory of the results")] = (
        None
    )
    verify: Annotated[bool, CliOption(help="then train in one process, too; print the largest difference in loss")] = (
        False
    )
    kill: Annotated[
        tuple[str, ...], CliOption("STAGE@STEP", help="SIGKILL a replica of STAGE in the middle of STEP")
    ] = ()
    kill_every: Annotated[float | None, CliOption("S", help="SIGKILL some replica every S seconds")] = None
    kill_rank: Annotated[
        tuple[str, ...], CliOption("STAGE@STEP", help="SIGKILL one rank of a replica of STAGE in the middle of STEP")
    ] = ()
    kill_all: Annotated[int | None, CliOption("STEP", help="SIGKILL every process in the middle of STEP, and end")] = (
        None
    )
    chaos: Annotated[
        str | None, CliOption("FILE", help="carry out this schedule of faults, or random:SEED; implies --verify")
    ] = None
    liars: Annotated[
        str | None,
        CliOption("KIND:N,...", help="make so many replicas Byzantine; KIND=P%: so many of them (docs/local.md)"),
    ] = None
    resume: Annotated[bool, CliOption(help="go on with the run in --out DIR, with its manifest and replicas")] = False
    ranks: Annotated[
        tuple[str, ...],
        CliOption(
            "STAGE=N", help="ranks of each replica of STAGE, on the CPU; STAGE.REPLICA=N: of one; several with commas"
        ),
    ] = ()
    device: Annotated[
        Literal["cpu", "cuda"],
        CliOption(help="where replicas compute: on the CPU, or by turns on this machine's GPUs, which they share"),
    ] = "cpu"
    tensor: int = 0
    shard: Shard = "none"
    sequence_parallel: bool = False
    slots: Annotated[
        int | None,
        CliOption("N", default="0", help="microbatches in flight per stage, at most; 0: those that it needs"),
    ] = None
    trace: Annotated[
        Path | None, CliOption("FILE", help="write what each peer spent its time on, for chrome://tracing or Perfetto")
    ] = None
    dashboard: Annotated[
        str | None, CliOption("[HOST:]PORT", help="serve a page about the run there (docs/watch.md); 0: any port")
    ] = None
    log_level: str = "warning"

    def __post_init__(self) -> None:
        for name in ("stages", "replicas", "steps", "trainers", "slots", "checkpoint_every", "tensor"):
            value: int | None = getattr(self, name)
            flag = f"--{name.replace('_', '-')}"
            if value is not None and value < (name != "tensor"):  # 0 is what a mesh chooses itself
                raise UsageError(f"{flag} must be at least 1, got {value}")
            if value is not None and value > MOST and name not in ("steps", "checkpoint_every"):
                raise UsageError(f"{flag} must be at most {MOST}, got {value}")
        if self.kill_every is not None and not self.kill_every > 0:
            raise UsageError(f"--kill-every must be more than 0 seconds, got {self.kill_every}")
        if self.chaos is not None and (self.kill or self.kill_rank or self.kill_every is not None):
            raise UsageError("--chaos and --kill exclude each other: write [[kill]] entries into the chaos file")
        if self.kill_all is not None and (self.chaos is not None or self.verify):
            raise UsageError(
                f"{'--verify' if self.chaos is None else '--chaos'} and --kill-all exclude each other: losses are held "
                "against one process at the end of a run, which --kill-all does not reach; give it with --resume"
            )
        if self.liars is not None:
            parse_byzantine(self.liars)
            if self.chaos is not None or self.kill_all is not None:
                raise UsageError("--liars goes with neither --chaos nor --kill-all: the losses would not tell which")
            if self.ranks or self.device != "cpu":
                raise UsageError("--liars needs replicas of one rank on the CPU: leave --ranks and --device out")
        if self.device == "cuda" and self.ranks:
            raise UsageError("--ranks are on the CPU: leave out --device cuda, or --ranks")
        if self.preset is not None and self.manifest is not None:
            raise UsageError("--preset and --manifest exclude each other: the manifest says what the model is")
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out DIR: the directory of the run that is to go on")
        if self.dashboard is not None:
            try:
                listen_at(self.dashboard)
            except ValueError as error:
                raise UsageError(f"--dashboard {self.dashboard}: {error}") from error
        if self.numerics not in (None, "deterministic", "fast"):
            raise UsageError(
                f'--numerics must be "deterministic" or "fast" (--sync local brings its own), got {self.numerics!r}'
            )

    def record(self) -> dict[str, Any]:
        """As JSON, for `resumed`."""
        found: dict[str, Any] = TypeAdapter(LocalOptions).dump_python(self, mode="json")
        return found

    def resumed(self, record: Mapping[str, Any]) -> LocalOptions:
        """The options of the run that was begun with those of `record`, in the session that these ask for.

        Raises UsageError for a session that this run cannot have.
        """
        try:
            begun = TypeAdapter(LocalOptions).validate_python(record)
        except ValidationError as error:
            reason = f"{self.out} was begun by another swarmnet, with options that this one lacks: begin it again"
            raise UsageError(reason) from error
        return replace(begun, **{name: getattr(self, name) for name in SESSION})

    def faults(self, *, stages: int, replicas: int, steps: int) -> tuple[Fault, ...]:
        """What is asked for. replicas: of each stage. Raises UsageError for what cannot be."""
        everything = fault.kill_all(self.kill_all, steps=steps)
        if self.chaos is not None:
            return *fault.load(self.chaos, stages=stages, replicas=replicas, steps=steps), *everything
        return (
            *fault.flagged(Kill, self.kill, stages=stages, steps=steps),
            *fault.flagged(KillRank, self.kill_rank, stages=stages, steps=steps),
            *fault.kill_every(self.kill_every),
            *everything,
        )
