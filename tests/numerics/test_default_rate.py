"""The default optimizer must not amplify rounding: a curve that two groupings of one sum tell apart proves nothing."""

from __future__ import annotations

import json
from pathlib import Path

from benchmark_modules import load, printed_by

from swarmnet.local.audit import FP32_STEPS, FP32_TOLERANCE
from swarmnet.manifest.schema import Training


def test_losses_of_the_first_steps_do_not_show_how_sums_were_grouped() -> None:
    rounding = load("rounding")
    # With so few tokens a rate of 3e-3 shows already: the distance is 6e-6.
    training = Training(total_steps=60, microbatch_size=1, eval_every=0)
    distances = rounding.apart(*rounding.curves("corpus:small", training, steps=FP32_STEPS))
    assert 0 < max(distances) < FP32_TOLERANCE / 10


def test_the_benchmark_prints_and_writes_its_table(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "rows.json"
    line = "--steps 2 --seeds 1 --data corpus:small --rate 1e-3:4 --rate 2e-3:4 --json"
    out = printed_by("rounding", line, file)
    slow, fast = json.loads(file.read_text())
    assert (slow["rate"], fast["rate"]) == ("1e-3:4", "2e-3:4") and slow["over"] == 1.0 and fast["over"] < 1.0
    assert max(slow["all"], fast["all"]) < 1e-5 and len(out.splitlines()) == 3
