"""Files that a watched curve is kept in: gone on with, put right where something comes late, and of one run only."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.errors import UsageError
from swarmnet.ids import PeerId, Restart, RunId
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.files import COLUMNS, CsvFile, CurvePicture, TensorBoard, WeightsAndBiases
from swarmnet.monitor.state import Change, WatchedRun
from swarmnet.telemetry.figures import StepFigures
from swarmnet.telemetry.plot import PICTURES, check_ending
from swarmnet.telemetry.run_state import StepPoint

RUN = RunId("ab" * 32)


def point(step: int, loss: float = 1.0 / 3) -> StepPoint:
    return StepPoint(step, loss, 8, 1000.0 + step, 0.5, 1e-3, None, "1/1")


def heard(curve: Curve, *steps: int, loss_sum: float = 8.0) -> list[int]:
    figures = {step: StepFigures(step, loss_sum, 8, 0.5, 1e-3, 100.0 - step) for step in steps}
    return curve.settle({PeerId("a"): figures}, now=1100.0, replicas="1/1", live_s=1000.0)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps_in(path: Path) -> list[int]:
    return [int(row["step"]) for row in rows(path)]


def kept(path: Path, *steps: int) -> Curve:
    """A file with these steps, closed again."""
    file = CsvFile(path)
    file.check(RUN)
    curve = Curve(point(step) for step in steps)
    file.write(curve, steps, ())
    return curve


def gone_on(path: Path, *steps: int) -> None:
    """Another watch goes on with the file, and hears of these."""
    file = CsvFile(path)
    curve = Curve(file.points)
    file.write(curve, heard(curve, *steps, loss_sum=8 / 3), ())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.csv"


def test_a_line_reads_back_as_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.csv"
    curve = kept(path, 0, 1, 2)
    curve.evaluated({3: 0.1 + 0.2}, steps=0)
    file = CsvFile(path)
    file.write(curve, (), (3,))
    assert CsvFile(path).points == curve.points
    assert path.read_text().startswith("step,loss,tokens,") and rows(path)[2]["held_out"] == repr(0.1 + 0.2)


def test_a_watch_that_goes_on_appends_doubles_nothing_and_puts_what_fills_a_gap_where_it_belongs(path: Path) -> None:
    kept(path, 0, 1)
    before = path.read_bytes()
    gone_on(path, 1, 2, 6)
    assert path.read_bytes().startswith(before) and steps_in(path) == [0, 1, 2, 6]
    gone_on(path, 3, 5, 7)
    assert steps_in(path) == [0, 1, 2, 3, 5, 6, 7]
    gone_on(path, 8)
    assert steps_in(path) == [0, 1, 2, 3, 5, 6, 7, 8]


def test_a_run_that_went_back_replaces_its_lines(path: Path) -> None:
    file, curve = CsvFile(path), Curve()
    file.write(curve, heard(curve, 0, 1, 2), ())
    curve.went_back(Restart(1, 1))
    file.write(curve, heard(curve, 1, loss_sum=80.0), ())
    assert [(row["step"], row["loss"]) for row in rows(path)] == [("0", "1.0"), ("1", "10.0"), ("2", "1.0")]


def test_a_line_that_was_cut_off_is_written_anew(path: Path) -> None:
    kept(path, 0, 1)
    path.write_bytes(path.read_bytes()[:-5])
    assert [each.step for each in CsvFile(path).points] == [0]
    gone_on(path, 1)
    assert steps_in(path) == [0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step,loss\n1,2\n", "other columns"),
        (",".join(COLUMNS) + "\n1,nan,8,1.0,,1e-3,0.5,,,ab\n", "line 2 is none that watch wrote"),
        (",".join(COLUMNS) + "\n1,2\n", "line 2 is none that watch wrote"),
        (",".join(COLUMNS) + "\n" + "1,2.0,8,1.0,,1e-3,0.5,,,ab\n" * 2, "line 3: step 1 stands twice"),
    ],
)
def test_somebody_elses_file_is_left_as_it_is(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        CsvFile(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, f"--csv {name}: it is no regular file") for name in ("-", "/dev/full", "fifo")),
        ("file/run.csv", r"--csv .*run.csv: .*file is no directory that can be written"),
    ],
)
def test_what_cannot_be_written_is_refused(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("file").write_text("")
    with pytest.raises(UsageError, match=words):
        CsvFile(Path(name))


def test_nothing_is_made_or_changed_before_the_first_write(tmp_path: Path) -> None:
    path, cut = tmp_path / "made" / "run.csv", tmp_path / "cut.csv"
    CsvFile(path).close()
    kept(cut, 0, 1)
    cut.write_bytes(before := cut.read_bytes()[:-5])
    CsvFile(cut).close()
    assert list(tmp_path.iterdir()) == [cut] and cut.read_bytes() == before
    CsvFile(path).write(Curve(), (), ())
    assert path.read_text() == ",".join(COLUMNS) + "\n", "the run is found, and no step is known"


def test_the_picture_shows_who_came(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said: list[str] = []
    curve = Curve(map(point, range(3)))
    seen = WatchedRun(curve, now=0.0)
    seen.history.append(Change("joined", "...$x$ joined stage 1", step=1))
    picture = CurvePicture(tmp_path / "run.png", RUN, seen, said.append)
    picture.write(curve, (0, 1, 2), ())
    picture.close()
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG") and not said


def test_matplotlib_can_draw_whatever_ending_is_taken() -> None:
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    assert set(PICTURES) <= set(agg.FigureCanvasAgg.get_supported_filetypes())
    check_ending("--png", Path("run.SVG"))
    with pytest.raises(UsageError, match=r"--png run: no picture ends so"):
        check_ending("--png", Path("run"))


def test_tensorboard_gets_each_step_once_and_again_if_the_run_went_back(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    path, curve = tmp_path / "tb", Curve(map(point, range(3)))
    curve.evaluated({3: 0.25}, steps=0)
    went_back = Curve([point(0), point(1, 2.0)])
    TensorBoard(path, RUN)
    assert not path.exists(), "nothing is made before there is something to write"
    # The second watch knows nothing of the first but what is in the directory.
    for known, steps, versions in ((curve, (0, 1), (3,)), (curve, (0, 1, 2), (3,)), (went_back, (0, 1), ())):
        board = TensorBoard(path, RUN)
        board.write(known, steps, versions)
        board.close()
    found = [
        (value.tag, event.step, value.tensor.float_val[0])
        for file in sorted(path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for event in loader.EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    losses = [(step, value) for tag, step, value in found if tag == "loss"]
    assert losses == [(step, pytest.approx(value)) for step, value in ((0, 1 / 3), (1, 1 / 3), (2, 1 / 3), (1, 2.0))]
    assert [each for each in found if each[0] == "held_out"] == [("held_out", 3, 0.25)]
    with pytest.raises(UsageError, match=r"--tensorboard .*tb: .*\.abababababab is of another run: name another"):
        TensorBoard(path, RunId("cd" * 32))


def test_weights_and_biases_get_steps_in_order_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    logged, did, asked = list[tuple[int, float | None, float | None]](), list[object](), dict[str, Any]()
    run = SimpleNamespace(step=2, finish=lambda: did.append("finished"))
    run.define_metric = lambda name, step_metric: did.append((name, step_metric))
    run.log = lambda values, step: logged.append((step, values.get("loss"), values.get("held_out")))

    def init(**words: Any) -> SimpleNamespace:
        if did:
            raise RuntimeError("no API key\nrun wandb login")
        asked.update(words)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError, Settings=dict))
    sink = WeightsAndBiases("swarms", RUN)
    assert (asked["project"], asked["id"], asked["resume"]) == ("swarms", f"swarmnet-{RUN[:12]}", "allow")
    curve = Curve(map(point, range(4)))
    curve.evaluated({2: 0.25}, steps=0)
    sink.write(curve, (0, 1, 2, 3), (2,))
    sink.write(curve, (1,), ())
    sink.close()
    assert logged == [(2, 1.0 / 3, None), (3, 1.0 / 3, None), (3, None, 0.25)], "wandb drops what goes back"
    assert did == [("held_out", "version"), "finished"]
    with pytest.raises(UsageError, match="--wandb swarms: no API key run wandb login"):
        WeightsAndBiases("swarms", RUN)
