"""The weights of a whole run from checkpoints that its peers have left on disks, stage by stage.

Peers' directories are found below those that are named. A version is whole if every stage has a checkpoint of it, all
of one lineage: where the run went back, what was given up is left alone (`state.rollback`). Reads weights only: what
the optimizer keeps is twice as much. Decides nothing about formats.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from swarmnet.errors import BadCheckpoint, UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.extension import Notice
from swarmnet.model.huggingface.checkpoint import Shapes, opened, tensor_in
from swarmnet.state.disk import CheckpointInfo, CheckpointStore
from swarmnet.state.rollback import Holding, Rollbacks, of_one_lineage

_DEEPEST = 6


class CollectedCheckpoints:
    """One version of the weights of `run`, from all checkpoints below `directories`.

    Args:
        shapes: each stage's parameters, by name.
        step: which version; None: the newest that is whole and sound.
        allow_drop: may stages of the run have taken older states of their own (training.allow_drop)?

    Raises: UsageError: that version, or any, is not here whole and sound.
    """

    def __init__(
        self, run: RunId, directories: Sequence[Path], shapes: Sequence[Shapes], step: int | None, *, allow_drop: bool
    ) -> None:
        self._shapes = shapes
        self._kept: list[dict[int, list[tuple[CheckpointStore, CheckpointInfo]]]] = [{} for _ in shapes]
        """By stage and version: the checkpoints of it, each with the store that has it."""
        homes = [CheckpointStore(directory, run) for directory in _homes(directories, run)]
        found = [(store, stage, store.found(stage)) for store in homes for stage in range(len(shapes))]
        self.bad = [error for _, _, there in found for error in there.bad]
        """What cannot be used, and why."""
        announced = [
            (Holding(PeerId(str(store.folder)), stage), tuple(info.on_disk for info in there.good))
            for store, stage, there in found
        ]
        usable = of_one_lineage(announced, Rollbacks(len(shapes), allow_drop=allow_drop))
        for (store, stage, there), holding in zip(found, usable, strict=True):
            for info in there.good:
                if info.version in holding.disk:
                    self._kept[stage].setdefault(info.version, []).append((store, info))
        # Gigabytes are read once.
        self.version, self._paths = self._newest() if step is None else (step, self._verified(step))

    def _newest(self) -> tuple[int, list[Path]]:
        """The newest version that is whole and sound. Raises UsageError that says what is missing."""
        for version in sorted(self._whole(), reverse=True):
            with contextlib.suppress(UsageError):  # what is wrong is in `bad` then
                return version, self._verified(version)
        held = "; ".join(f"stage {stage}: {listed(set(kept))}" for stage, kept in enumerate(self._kept))
        broken = f"; not used: {self.bad[0]}" if self.bad else ""
        raise UsageError(
            f"no version of the weights is here whole ({held}{broken}): name the directories of peers "
            "that have the others with --dir"
        )

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What had extended the run by `version`, as a checkpoint of it says: not verified."""
        return self._kept[0][self.version][0][1].header.notices

    def passed_over(self) -> list[str]:
        """What is here of `version` and newer ones and is not used, and why: files that are damaged, parts of steps."""
        damaged = {str(error): _version(error) for error in self.bad if _version(error) >= self.version}
        newer = sorted({at for kept in self._kept for at in kept if at > self.version} - set(damaged.values()))
        missing = {at: [stage for stage, kept in enumerate(self._kept) if at not in kept] for at in newer}
        parts = [f"step {at} (stage {', '.join(map(str, lack))} has none)" for at, lack in missing.items() if lack]
        return [*damaged, *parts]

    def stages(self) -> Iterator[dict[str, Tensor]]:
        """Each stage's weights of `version`, by name."""
        for path, shapes in zip(self._paths, self._shapes, strict=True):
            with opened(path) as content:
                yield {name: tensor_in(content, path, name, shape) for name, shape in shapes.items()}

    def _whole(self) -> set[int]:
        return set.intersection(*map(set, self._kept))

    def _verified(self, version: int) -> list[Path]:
        """Each stage's data of that version. Raises UsageError if a stage has none that is sound."""
        return [self._sound(stage, version) for stage in range(len(self._shapes))]

    def _sound(self, stage: int, version: int) -> Path:
        # Another peer may have the same checkpoint whole.
        reasons: list[str] = []
        for store, info in self._kept[stage].get(version, []):
            try:
                store.verify(info)
                return store.data_path(stage, version)
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
    found: dict[Path, Path] = {}  # through however many links, once
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: no such directory")
        # Operators name a directory of many peers: look some layers down.
        for depth in range(_DEEPEST):
            paths = sorted(directory.glob("*/" * depth + CheckpointStore(Path(), run).folder.as_posix()))
            for home in (path.parents[1] for path in paths if path.is_dir()):
                found.setdefault(home.resolve(), home)
    return list(found.values())


def _version(error: BadCheckpoint) -> float:
    """Of which version the file is; infinity: of any, such as a directory that cannot be read."""
    found = re.search(r"-step-([0-9]+)\.[a-z]+\Z", error.path)
    return int(found[1]) if found else math.inf


def listed(versions: set[int], at_most: int = 4) -> str:
    """The newest of these, in words."""
    return f"steps {', '.join(map(str, sorted(versions)[-at_most:]))}" if versions else "none"
