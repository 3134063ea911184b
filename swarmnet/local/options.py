"""What `swarmnet local` was asked to do, checked before anything starts. Knows no manifest and no process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swarmnet.config.peer import Shard
from swarmnet.errors import UsageError
from swarmnet.local import fault
from swarmnet.local.fault import Fault, Kill, KillRank

MOST = 1000
"""Stages, replicas of one, ranks, trainers, microbatches in flight: no machine makes use of more."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """One local swarm. Raises UsageError at once for values that cannot work.

    stages, steps, seed, data, numerics describe a manifest built on the spot; with `manifest` the file says them.
    out: directory of the results, ./runs/local-<seed>-<timestamp> if None. kill: "STAGE@STEP" each. kill_every:
    seconds between two kills anywhere. set: manifest overrides "section.key=value". typed: (flag, override) of other
    flags that change the manifest; `set` goes over them. slots: microbatches one replica
    works on at once, None for what a peer does by default. numerics: None means deterministic for models under 50M
    parameters, else fp32. chaos: a chaos file, or "random:SEED"; implies oracle. checkpoint_every: steps between two
    checkpoints. kill_all: SIGKILL every process in the middle of this step, and end. resume: go on with what is in
    `out`, whose manifest and replicas count then. reseed_from_neighbours: a stage that nobody has any state of is made
    from the stages beside it, as a last resort. ranks: "STAGE=N" or "STAGE.REPLICA=N", several with commas; tensor,
    shard, sequence_parallel: how those ranks share a stage, as in the peer config. kill_rank: "STAGE@STEP" each.
    admission: "invite": this swarm's owner is made, and invites its peers; None: as the manifest says, or open.
    """

    stages: int = 3
    replicas: int = 2
    steps: int = 60
    seed: int = 0
    out: Path | None = None
    kill: tuple[str, ...] = ()
    kill_every: float | None = None
    oracle: bool = False
    trainers: int = 1
    data: str = "stdlib"
    manifest: Path | None = None
    numerics: Literal["deterministic", "fp32"] | None = None
    set: tuple[str, ...] = ()
    typed: tuple[tuple[str, str], ...] = ()
    slots: int | None = None
    log_level: str = "warning"
    chaos: str | None = None
    checkpoint_every: int | None = None
    kill_all: int | None = None
    resume: bool = False
    reseed_from_neighbours: bool = False
    ranks: tuple[str, ...] = ()
    tensor: int = 0
    shard: Shard = "none"
    sequence_parallel: bool = False
    kill_rank: tuple[str, ...] = ()
    admission: Literal["open", "invite"] | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "replicas", "steps", "trainers", "slots"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, got {value}")
        for name in ("stages", "replicas", "trainers", "slots", "tensor"):
            if (value := getattr(self, name)) is not None and value > MOST:
                raise UsageError(f"--{name} must be at most {MOST}, got {value}")
        if self.kill_every is not None and not self.kill_every > 0:
            raise UsageError(f"--kill-every must be more than 0 seconds, got {self.kill_every}")
        if self.tensor < 0:
            raise UsageError(f"--tensor must be at least 1, got {self.tensor}")
        if self.chaos is not None and (self.kill or self.kill_rank or self.kill_every is not None):
            raise UsageError("--chaos and --kill exclude each other: write [[kill]] entries into the chaos file")
        if self.kill_all is not None and (self.chaos is not None or self.oracle):
            raise UsageError(
                f"{'--oracle' if self.chaos is None else '--chaos'} and --kill-all exclude each other: losses are held "
                "against one process at the end of a run, which --kill-all does not reach; give it with --resume"
            )
        if self.reseed_from_neighbours and (self.chaos is not None or self.oracle):
            raise UsageError(
                f"{'--oracle' if self.chaos is None else '--chaos'} and --reseed-from-neighbours exclude each other: a "
                "stage that is made anew is not what one process has"
            )
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(f"--checkpoint-every must be at least 1, got {self.checkpoint_every}")
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out DIR: the directory of the run that is to go on")
        if self.numerics not in (None, "deterministic", "fp32"):
            raise UsageError(f'--numerics must be "deterministic" or "fp32", got {self.numerics!r}')

    def faults(self, *, stages: int, replicas: int, steps: int, seed: int) -> tuple[str, tuple[Fault, ...]]:
        """What seeds the choice of replicas, and the faults that are asked for. Raises UsageError for what cannot be.

        Args:
            replicas: of each stage.
            seed: the run's, which counts unless a schedule of faults has its own.
        """
        everything = fault.kill_all(self.kill_all, steps=steps)
        if self.chaos is not None:
            own, faults = fault.load(self.chaos, stages=stages, replicas=replicas, steps=steps)
            return f"{own}/whom", (*faults, *everything)
        flagged = (
            *fault.flagged(Kill, self.kill, stages=stages, steps=steps),
            *fault.flagged(KillRank, self.kill_rank, stages=stages, steps=steps),
        )
        return f"{seed}/churn", (*flagged, *everything)
