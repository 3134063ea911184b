"""Liars in a swarm of real processes: they go through, the curve shows it, and the report says who they are."""

from __future__ import annotations

from pathlib import Path

from running import run_swarm

SMALL = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.head_dim=16",
    "model.num_heads=2",
)


def test_liars_change_the_curve_and_the_report_names_them(tmp_path: Path) -> None:
    # One slot each, so that every replica gets work.
    size = ("--stages", "2", "--replicas", "3", "--steps", "16", "--slots", "1")
    liars = ("--liars", "sign-flip:1,lazy:1")
    swarm = run_swarm(tmp_path / "out", *size, *liars, settings=(*SMALL, "audit.contributions=1.0"))
    summary, printed = swarm.summary, swarm.printed
    lies = {liar["kind"]: liar["lies"] for liar in summary["liars"].values()}
    assert lies.keys() == {"sign-flip", "lazy"} and sum(lies.values()) > 0, printed
    assert all(liar["named_at"] is not None for liar in summary["liars"].values()), printed
    assert summary["steps"] == 16 and summary["false_bans"] == []
    assert (summary["lost"], summary["doubled"], summary["digest_conflicts"]) == (0, 0, [])
    # One process, which is honest, is held beside it; what liars have changed is no failure.
    assert summary["reference_max_difference"] > 0 and summary["reference_bit_equal"] is False
    assert all(f"Byzantine {name} (" in printed for name in summary["liars"])
    # It hears the proof, says so in one line, and ends; nobody starts it again.
    out = {event["child"] for event in swarm.of("shut_out")}
    assert out <= summary["liars"].keys()
    assert out and not summary["crashes"], printed
    for name in out:
        last = (tmp_path / "out" / "peers" / name / "log.txt").read_text().splitlines()[-1]
        assert last.startswith("this peer is banned for wrong work in stage") and "another --dir" in last
