"""`swarmnet watch`, typed wrongly: one line, exit code 2, and no network."""

from __future__ import annotations

import asyncio
import signal

import pytest

from swarmnet.cli.frame import run
from swarmnet.config import check
from swarmnet.monitor import run as monitor
from swarmnet.monitor.view import folded
from swarmnet.peer.status import Waiting

LINK = f"swarm:{'ab' * 32}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"


@pytest.mark.parametrize(("found", "code"), [(True, 0), (False, 130)])
def test_ctrl_c_is_an_interrupt_only_before_the_run_was_found(
    found: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stopped(*arguments: object) -> None:
        if found:
            next(each for each in arguments if isinstance(each, Waiting)).over()
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr(monitor, "look_on", stopped)
    assert run(["watch", LINK]) == code
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "extra"), [("--png=x.png", "plot"), ("--tensorboard=x", "tensorboard"), ("--wandb=x", "wandb")]
)
def test_an_extra_that_is_missing_is_named_before_anything_is_asked(
    option: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert run(["watch", LINK, option]) == 2
    assert f"pip install 'swarmnet-train[{extra}]'" in capsys.readouterr().err


def test_a_narrow_terminal_breaks_a_line_between_its_figures() -> None:
    line = "ab12  step 5/60  loss 3.1000  1,200 tokens/s  replicas 2/2 2/2  ETA 0:30"
    assert folded(line, 200) == [line]
    rows = folded(line, 30)
    assert max(map(len, rows)) <= 30 and "  ".join(rows) == line and "replicas 2/2 2/2  ETA 0:30" in rows
