"""What a plan adds up, and what `swarmnet plan` says of input that it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.cli.frame import run
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.plan.memory import GIB, RankMemory, StageMemory, read_size, shown, together

SIZES = st.integers(0, 10**6)


def rank(held: int, microbatch: int, update: int = 0) -> RankMemory:
    return RankMemory(10, 20, 30, 40, update=update, held=held, microbatch=microbatch, offloaded=0)


@given(SIZES, SIZES, st.integers(1, 50))
def test_each_further_microbatch_takes_what_one_holds(held: int, over: int, count: int) -> None:
    found = rank(held, held + over)
    assert found.peak(count + 1) - found.peak(count) == held
    assert found.peak(0) == found.state == 100


def test_a_job_is_a_microbatch_or_an_update_whichever_takes_more() -> None:
    assert rank(5, 7).peak(2) == 100 + 2 * 5 + 2
    assert rank(5, 7, update=30).peak(2) == 100 + 2 * 5 + 30


def staged(stage: int, held: int, microbatch: int, ranks: int, *, on_host: bool) -> StageMemory:
    return StageMemory(stage, range(1), ranks, rank(held, microbatch), {"memo": 1000}, 2, on_host)


@pytest.mark.parametrize("on_host", [False, True])
def test_stages_of_one_process_compute_one_at_a_time(on_host: bool) -> None:
    plans = [staged(0, 5, 50, 1, on_host=on_host), staged(1, 9, 20, 1, on_host=on_host)]
    lasting = 2 * 100 + 2 * 5 + 2 * 9
    assert together(plans) == lasting + max(50 - 5, 20 - 9) + 2000 * on_host


@pytest.mark.parametrize("on_host", [False, True])
def test_stages_of_several_ranks_have_processes_of_their_own(on_host: bool) -> None:
    plans = [staged(0, 5, 50, 2, on_host=on_host), staged(1, 9, 20, 2, on_host=on_host)]
    each = 200 + 2 * 5 + 2 * 9 + (50 - 5) + (20 - 9)
    assert together(plans) == (2 * each + 2000 if on_host else each)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_together_stages_need_more_than_alone_and_no_more_than_all_alone(
    sizes: list[tuple[int, int, int]], ranks: int, on_host: bool
) -> None:
    plans = [
        staged(stage, max(stash, owed), max(stash, owed) + over, ranks, on_host=on_host)
        for stage, (stash, owed, over) in enumerate(sizes)
    ]
    alone = [together([plan]) for plan in plans]
    assert max(alone) <= together(plans) <= sum(alone)
    assert together(plans[:1]) == alone[0]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80g", 80 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("24GB", 24 * 10**9),
        ("512MiB", 2**29),
        ("1024 B", 1024),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "much", "-3GiB", "0GiB", "24", "1073741824", "0.5", "24GiBs", "1e99GiB", "nan"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (24 * GIB, "24.0 GiB"),
        (GIB - 1, "1.00 GiB"),
        (100 * GIB, "100 GiB"),
        (int(9.994 * GIB), "9.99 GiB"),
        (int(9.996 * GIB), "10.0 GiB"),
    ],
)
def test_sizes_are_shown_in_three_digits(size: int, text: str) -> None:
    assert shown(size) == text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan {run} --stage 9", "there is no stage 9: {run} has stages 0 to 2"),
        ("plan {run} --stage 1,1", "stages = [1, 1] names a stage twice"),
        ("plan {run} --stage -1", "--stage: stages = [-1]: must be at least 0"),
        ("plan {run} --stage x", "write stage numbers with commas, such as 0,3, or all"),
        ("plan {run} --memory lots", "--memory lots: write a size with its unit, such as 24GiB"),
        ("plan {run} --memory 99999999TiB", "--memory 99999999TiB: must be at least a byte, and less than 1048576 TiB"),
        ("plan {run} --memory 0GiB", "--memory 0GiB: must be at least a byte"),
        (
            "plan {run} --gpus 99999999",
            'mesh.gpus = "99999999": must be a number from 1 to 9999, which ones with commas',
        ),
        ("plan {run} --gpus 9999 --memory 9GiB", "9999 tensor-parallel ranks cannot split this model"),
        ("plan {run} --memory 24", "--memory 24: write a size with its unit, such as 24GiB"),
        (
            "plan {run} --device cpu --activations offload",
            "--activations offload: the CPU's memory is host memory already",
        ),
        (
            "plan {run} --ranks 2 --set memory.offload_optimizer=true",
            "memory.offload_optimizer: the CPU's memory is host",
        ),
        ("plan {run} --device cpu --compile", "--compile: on the CPU it costs some ten seconds"),
        ("plan {run} --gpus 2 --memory 9GiB --compile", "--compile: layers that ranks share"),
        ("plan {run} --gpus 8 --memory 24GiB", "Ranks that can: 1, 2, 4"),
        ("plan {run} --ranks 3 --tensor 1 --shard zero2", "Ranks that can: 1, 2, 4"),
        ("plan nowhere.toml", "nowhere.toml"),
        ("plan {text}", "text.toml"),
        ("plan", "Missing argument 'MANIFEST'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(to_toml(Manifest()))
    (tmp_path / "text.toml").write_text("Once upon a time\n")
    names = {"run": tmp_path / "run.toml", "text": tmp_path / "text.toml"}
    assert run(line.format(**names).split()) == 2
    err = capsys.readouterr().err
    assert words.format(**names) in err and err.count("\n") == 1 and err.startswith("swarmnet: error: ")
