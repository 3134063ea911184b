"""Where a watched curve is kept: a CSV file, a picture, TensorBoard, Weights & Biases.

Whatever was written before is read first, so a watch that is started again goes on where the last one ended: no step
stands twice. Files name their run. Lines of the CSV file are by step: where one comes late, or changes, all are written
again.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from swarmnet.clock import boot_time, wall_time
from swarmnet.errors import UsageError
from swarmnet.ids import RunId
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.state import WatchedRun
from swarmnet.telemetry.plot import Mark, draw_curve
from swarmnet.telemetry.run_state import StepPoint

COLUMNS = (
    "step", "loss", "tokens", "time", "tokens_per_second", "learning_rate", "grad_norm", "held_out", "replicas", "run",
)  # fmt: skip
"""Of the CSV file; the first three are as in the loss.csv of `swarmnet local`."""

RUN_DIGITS = 12
"""Of a run's id, in files."""

DRAW_EVERY_S = 10.0


_COLORS = {
    "joined": "tab:green",
    "left": "tab:red",
    "gone": "tab:red",
    "restarted": "tab:red",
    "went_back": "tab:orange",
}
"""Of what the picture marks."""


class CurveFile(Protocol):
    """Something that a curve is written to."""

    def write(self, curve: Curve, steps: Collection[int], versions: Collection[int]) -> None:
        """These steps, and evaluations of these versions, are new or have changed. Raises UsageError."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


# ---------------------------------------------------------------- CSV


class CsvFile:
    """A line for each step, by step, of the steps that are known."""

    def __init__(self, path: Path) -> None:
        """Read what is there; nothing is made or changed before the first `write`. Raises UsageError if it is something
        else, or cannot be written."""
        self._path = path
        self.points: list[StepPoint] = []
        self.run = ""
        """First digits of the run that the file is of; "": of none yet."""
        self._last: int | None = None  # lines of later steps can be appended; None: no line can be
        try:
            if str(path) == "-" or (path.exists() and not path.is_file()):
                raise UsageError(
                    f"--csv {path}: it is no regular file, and lines are put in between: name another file"
                )
            if path.exists():
                path.open("ab").close()
                self._read(path.read_bytes())
            above = next(each for each in path.absolute().parents if each.exists())
            if not (above.is_dir() and os.access(above, os.W_OK)):
                raise UsageError(f"--csv {path}: {above} is no directory that can be written: name another file")
        except OSError as error:
            raise UsageError(f"--csv {path}: {error.strerror}") from error

    def _read(self, data: bytes) -> None:
        # The last writer may have been killed within a line; what follows it is asked for again.
        whole = data[: data.rfind(b"\n") + 1]
        if whole and not whole.startswith(_HEAD):
            raise UsageError(f"--csv {self._path}: it has other columns than watch writes: name another file")
        for number, line in enumerate(whole[len(_HEAD) :].splitlines(), 2):
            try:
                (cells,) = csv.reader([line.decode()])
                named = dict(zip(COLUMNS, cells, strict=True))
                point, self.run = _point(named), named["run"]
            except (ValueError, KeyError) as error:
                raise UsageError(
                    f"--csv {self._path}: line {number} is none that watch wrote: name another file"
                ) from error
            if self.points and point.step <= self.points[-1].step:
                raise UsageError(f"--csv {self._path}: line {number}: step {point.step} stands twice or out of order")
            self.points.append(point)
        self._last = self.points[-1].step if self.points and whole == data else None

    def check(self, run: RunId) -> None:
        """Go on with the file for that run. Raises UsageError if it is of another one."""
        if self.run not in ("", run[:RUN_DIGITS]):
            raise UsageError(f"--csv {self._path}: the file is of another run ({self.run}): name another file")
        self.run = run[:RUN_DIGITS]

    def write(self, curve: Curve, steps: Collection[int], versions: Collection[int]) -> None:
        changed = {*steps, *(version - 1 for version in versions if version - 1 in curve)}
        if not changed and self._path.exists():
            return
        appends = self._last is not None and min(changed, default=-1) > self._last
        points = curve.since(min(changed)) if appends else curve.points
        lines = b"".join(_line(_cells(each, curve.tokens_per_second(each.step), self.run)) for each in points)
        try:
            if appends:
                with self._path.open("ab") as file:
                    file.write(lines)
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                place = self._path.resolve()
                draft = place.with_name(f".{place.name}.draft")
                draft.write_bytes(_HEAD + lines)
                os.replace(draft, place)
        except OSError as error:
            raise UsageError(f"--csv {self._path}: {error.strerror}") from error
        self._last = points[-1].step if points else None

    def close(self) -> None:
        """Each write is whole."""


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


_HEAD = _line(COLUMNS)


def _cells(point: StepPoint, pace: float | None, run: str) -> Sequence[object]:
    """By column; None is an empty cell. The writer's digits of a number read back as the same bits."""
    rounded = {"time": f"{point.time:.3f}", "tokens_per_second": None if pace is None else f"{pace:.1f}"}
    cells = {**asdict(point), **rounded, "run": run}
    return [cells[name] for name in COLUMNS]


def _point(cells: Mapping[str, str]) -> StepPoint:
    numbers = {name: float(cells[name]) for name in ("loss", "time", "learning_rate", "grad_norm")}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("not finite")
    held_out = float(cells["held_out"]) if cells["held_out"] else None
    return StepPoint(
        int(cells["step"]), tokens=int(cells["tokens"]), held_out=held_out, replicas=cells["replicas"], **numbers
    )


# ---------------------------------------------------------------- the others


class CurvePicture:
    """A PNG, drawn again now and then, and at the end."""

    def __init__(self, path: Path, run: RunId, seen: WatchedRun, say: Callable[[str], None]) -> None:
        self._path, self._run, self._seen, self._say = path, run, seen, say
        self._drawn_at = -math.inf
        self._last: Curve | None = None

    def write(self, curve: Curve, steps: Collection[int], versions: Collection[int]) -> None:
        if steps or versions:
            self._last = curve
        if self._last is not None and boot_time() - self._drawn_at >= DRAW_EVERY_S:
            self._draw(curve)

    def close(self) -> None:
        if self._last is not None:
            self._draw(self._last)

    def _draw(self, curve: Curve) -> None:
        losses, title = [(point.step, point.loss) for point in curve.points], f"run {self._run[:RUN_DIGITS]}"
        changes = self._seen.history
        marks = [Mark(each.step, each.kind.replace("_", " "), each.text, _COLORS[each.kind]) for each in changes]
        try:
            note = draw_curve(self._path, losses, title=title, held_out=curve.evaluations, marks=marks)
        except OSError as error:
            raise UsageError(f"--png {self._path}: {error.strerror}") from error
        if note and losses:
            self._say(note)
        self._drawn_at, self._last = boot_time(), None


def values_of(curve: Curve, step: int) -> dict[str, float]:
    """What is known of a step, by name, for tools that draw."""
    (point,) = curve.before(step, 1)
    pace = curve.tokens_per_second(step)
    found = {name: float(getattr(point, name)) for name in ("loss", "tokens", "learning_rate", "grad_norm")}
    return found | ({} if pace is None else {"tokens_per_second": pace})


class TensorBoard:
    """Event files in a directory. A step that an earlier watch has written is not written again."""

    def __init__(self, directory: Path, run: RunId) -> None:
        """Read what is there; nothing is made before the first `write`. Raises UsageError if it is of another run."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._directory, self._ending = directory, f".{run[:RUN_DIGITS]}"
        self._writer: Any = None
        self._there: dict[tuple[str, int], float] = {}
        try:
            for path in sorted(directory.glob("*tfevents*")):
                if path.suffix != self._ending:
                    raise UsageError(
                        f"--tensorboard {directory}: {path.name} is of another run: name another directory"
                    )
                for event in EventFileLoader(str(path)).Load():
                    for value in event.summary.value:
                        self._there[value.tag, event.step] = next(iter(value.tensor.float_val), math.nan)
        except OSError as error:
            raise UsageError(f"--tensorboard {directory}: {error.strerror}") from error

    def write(self, curve: Curve, steps: Collection[int], versions: Collection[int]) -> None:
        for step in sorted(steps):
            self._add("loss", step, curve.before(step, 1)[0].time, values_of(curve, step))
        for version in sorted(versions):
            self._add("held_out", version, wall_time(), {"held_out": curve.evaluations[version]})
        if self._writer is not None:
            self._writer.flush()

    def _add(self, key: str, step: int, time: float, values: Mapping[str, float]) -> None:
        """Unless it is there. key: the value by which that is seen."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Event files hold 32 bits of a number.
        if math.isclose(self._there.get((key, step), math.nan), values[key], rel_tol=1e-6):
            return
        self._there[key, step] = values[key]
        try:
            self._writer = self._writer or EventFileWriter(str(self._directory), filename_suffix=self._ending)
        except OSError as error:
            raise UsageError(f"--tensorboard {self._directory}: {error.strerror}") from error
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=each) for tag, each in values.items()])
        self._writer.add_event(self._event(wall_time=time, step=step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of a project at Weights & Biases, or on this disk if WANDB_MODE=offline. Its id follows from the run's, so
    it is resumed; steps that are there are not sent again."""

    def __init__(self, project: str, run: RunId) -> None:
        """Raises UsageError."""
        import wandb

        try:
            self._run: Any = wandb.init(
                project=project,
                id=f"swarmnet-{run[:RUN_DIGITS]}",
                name=f"swarmnet {run[:RUN_DIGITS]}",
                resume="allow",
                settings=wandb.Settings(console="off"),  # the terminal is the screen's
            )
        except wandb.Error as error:
            raise UsageError(f"--wandb {project}: {' '.join(str(error).split())}") from error
        self._run.define_metric("held_out", step_metric="version")
        self._next = int(self._run.step)  # it takes no step that is earlier

    def write(self, curve: Curve, steps: Collection[int], versions: Collection[int]) -> None:
        for step in sorted(step for step in steps if step >= self._next):
            self._run.log(values_of(curve, step), step=step)
            self._next = step + 1
        for version in sorted(versions):
            self._run.log({"held_out": curve.evaluations[version], "version": version}, step=max(self._next - 1, 0))

    def close(self) -> None:
        self._run.finish()
