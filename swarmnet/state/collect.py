"""The weights of a whole run from checkpoints that its peers have left on disks, stage by stage.

Peers' directories are found below those that are named. A version is whole if every stage has a checkpoint of it, all
of one lineage: where the run went back, what was given up is left alone (`state.lineage`). Reads weights only: what the
optimizer keeps is twice as much. Decides nothing about formats.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from swarmnet.errors import BadCheckpoint, UsageError
from swarmnet.ids import OnDisk, PeerId, RunId
from swarmnet.model.huggingface.checkpoint import Shapes, opened, tensor_in
from swarmnet.state.disk import CheckpointInfo, CheckpointStore
from swarmnet.state.lineage import Announced, of_one_lineage
from swarmnet.state.rollback import Holding, Rollbacks

_DEEPEST = 6


class CollectedCheckpoints:
    """All checkpoints of `run` below `directories`.

    Args:
        shapes: each stage's parameters, by name.
        allow_drop: may stages of the run have taken older states of their own (training.allow_drop)?
    """

    def __init__(
        self, run: RunId, directories: Sequence[Path], shapes: Sequence[Shapes], *, allow_drop: bool = False
    ) -> None:
        self._shapes = shapes
        self._kept: dict[tuple[int, int], list[tuple[CheckpointStore, CheckpointInfo]]] = {}
        """(stage, version) -> the checkpoints of it, each with the store that has it."""
        self._verified: set[Path] = set()
        self.bad: list[BadCheckpoint] = []
        """What cannot be used, and why."""
        found: list[tuple[CheckpointStore, tuple[CheckpointInfo, ...]]] = []
        announced: list[Announced] = []
        for directory in _homes(directories, run):
            store = CheckpointStore(directory, run)
            for stage in range(len(shapes)):
                there = store.found(stage)
                self.bad += there.bad
                found.append((store, there.good))
                disk = tuple(OnDisk(info.version, info.restart) for info in there.good)
                announced.append((Holding(PeerId(str(directory)), stage), disk))
        usable = of_one_lineage(announced, Rollbacks(len(shapes), allow_drop=allow_drop))
        for (store, good), holding in zip(found, usable, strict=True):
            for info in good:
                if info.version in holding.disk:
                    self._kept.setdefault((info.stage, info.version), []).append((store, info))

    def newest(self) -> int:
        """The newest version that is whole and sound. Raises UsageError that says what is missing."""
        for version in sorted(self._whole(), reverse=True):
            with contextlib.suppress(UsageError):  # what is wrong is in `bad` then
                self._verify(version)
                return version
        held = "; ".join(f"stage {stage}: {listed(versions)}" for stage, versions in enumerate(self._versions()))
        broken = f"; not used: {self.bad[0]}" if self.bad else ""
        raise UsageError(
            f"no version of the weights is here whole ({held}{broken}): name the directories of peers "
            "that have the others with --dir"
        )

    def passed_over(self, version: int) -> list[str]:
        """What is here of `version` and newer ones and is not used, and why: damaged files, steps that are not whole.

        Raises UsageError if `version` itself is not sound.
        """
        self._verify(version)
        damaged = {str(error): _version(error) for error in self.bad if _version(error) >= version}
        newer = sorted({at for _, at in self._kept if at > version} - set(damaged.values()))
        missing = {at: [n for n in range(len(self._shapes)) if (n, at) not in self._kept] for at in newer}
        parts = [f"step {at} (stage {', '.join(map(str, lack))} has none)" for at, lack in missing.items() if lack]
        return [*damaged, *parts]

    def stages(self, version: int) -> Iterator[dict[str, Tensor]]:
        """Each stage's weights of `version`, by name, verified. Raises UsageError if a stage has none that is sound."""
        for stage, shapes in enumerate(self._shapes):
            path = self._sound(stage, version)
            with opened(path) as content:
                yield {name: tensor_in(content, path, name, shape) for name, shape in shapes.items()}

    def _versions(self) -> list[set[int]]:
        """By stage."""
        return [{version for at, version in self._kept if at == stage} for stage in range(len(self._shapes))]

    def _whole(self) -> set[int]:
        return set.intersection(*self._versions())

    def _verify(self, version: int) -> None:
        for stage in range(len(self._shapes)):
            self._sound(stage, version)

    def _sound(self, stage: int, version: int) -> Path:
        # Another peer may have the same checkpoint whole.
        reasons: list[str] = []
        for store, info in self._kept.get((stage, version), []):
            path = store.data_path(stage, version)
            try:
                # Gigabytes are read once.
                if path not in self._verified:
                    store.verify(info)
                    self._verified.add(path)
                return path
            except BadCheckpoint as error:
                reasons.append(str(error))
                self.bad.append(error)
        why = f": {reasons[0]}" if reasons else ""
        others = self._whole() - {version}
        raise UsageError(
            f"no sound checkpoint of stage {stage} at step {version} is here{why}; "
            f"{f'whole: {listed(others, 12)}' if others else 'nor is another step here whole'}"
        )


def _homes(directories: Sequence[Path], run: RunId) -> list[Path]:
    """The directories of peers that have something of `run`, at or below those given."""
    found: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        layer = [directory]
        # Operators name a directory of many peers: look some layers down.
        for _ in range(_DEEPEST):
            found |= dict.fromkeys(path for path in layer if CheckpointStore(path, run).folder.is_dir())
            layer = sorted(inner for path in layer for inner in _inside(path))
    return list(found)


def _inside(path: Path) -> list[Path]:
    try:
        return [inner for inner in path.iterdir() if inner.is_dir() and not inner.is_symlink()]
    except OSError:
        return []  # not ours to look into


def _version(error: BadCheckpoint) -> float:
    """Of which version the file is; infinity: of any, such as a directory that cannot be read."""
    found = re.search(r"-step-([0-9]+)\.[a-z]+\Z", error.path)
    return int(found[1]) if found else math.inf


def listed(versions: set[int], at_most: int = 4) -> str:
    """The newest of these, in words."""
    return f"steps {', '.join(map(str, sorted(versions)[-at_most:]))}" if versions else "none"
