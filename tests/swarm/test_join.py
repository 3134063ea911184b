"""One command joins a running swarm of real processes: `swarmnet join LINK` as a stranger would type it.

Two replicas of stage 0, one of stage 1 and a trainer, each a process of its own. The newcomer knows nothing but the
link; it goes where it is missed, takes part, and the run ends as a single process would have.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from running import PATIENCE_S, Running
from safetensors.torch import load_file

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load, run_id
from swarmnet.net.identity import Identity, own_identity
from swarmnet.ranks.launcher import child_environment
from swarmnet.testing.reference import run_reference

STEPS, BEFORE_JOIN = 20, 4

SMALL = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "model.hidden_size=64",
    "training.eval_every=0",
    "model.intermediate_size=128",
    "model.head_dim=16",
    "protocol.long_silence_s=1800",
)


def test_a_stranger_with_a_link_takes_part_and_changes_nothing(start: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    settings = [word for setting in SMALL for word in ("--set", setting)]
    assert run(["init", str(path), "--data", "corpus:small", "--stages", "2", "--steps", str(STEPS), *settings]) == 0
    manifest = load(path)

    alone = ("--device", "cpu", "--no-restart")
    first = start("a", "peer", "--manifest", str(path), "--stage", "0", *alone)
    listening = first.says("listening")
    known = ("--manifest", str(path), "--bootstrap", listening["dht"][0])
    second = start("b", "peer", *known, "--stage", "0", *alone)
    third = start("c", "peer", *known, "--stage", "1", *alone)
    trainer = start("trainer", "trainer", *known)
    third.until(lambda event: event["event"] == "applied" and event["version"] >= BEFORE_JOIN)
    trainer.process.send_signal(signal.SIGSTOP)  # the run waits for the newcomer, however slow it is

    (link,) = listening["links"]
    assert link == f"swarm:{run_id(manifest)}@{listening['dht'][0]}"
    # Left to choose, it goes by speeds that a busy machine measures (`test_prepare_join` has what they lead to).
    joiner = start("joiner", "join", link, "--stage", "1", "--device", "cpu", "--nickname", "Anna", terminal=True)
    me = joiner.says("listening")["peer"]
    synced = joiner.says("synced", stage=1)
    assert synced["how"] == "snapshot" and BEFORE_JOIN <= synced["version"] < STEPS
    trainer.process.send_signal(signal.SIGCONT)

    finished = [
        each.says("finished", stage=stage) for each, stage in ((first, 0), (second, 0), (third, 1), (joiner, 1))
    ]
    assert [event["version"] for event in finished] == [STEPS] * 4
    assert len({event["weights_sha256"] for event in finished[:2]}) == 1
    assert len({event["weights_sha256"] for event in finished[2:]}) == 1
    assert trainer.process.wait(timeout=PATIENCE_S) == 0
    last_stage = (*joiner.events, *third.events)  # either may have skipped a commit and fetched what it made
    commits = {event["step"]: event for event in last_stage if event["event"] == "committed"}
    contributed = {
        step for step, event in commits.items() for peer, indexes in event["contributions"] if peer == me and indexes
    }
    assert contributed and min(contributed) >= synced["version"]

    reference = run_reference(manifest, load_tokens("corpus:small"))
    losses = [commits[step]["loss_sum"] / commits[step]["num_tokens"] for step in range(STEPS)]
    assert losses == reference.losses
    (snapshot,) = joiner.directory.glob(f"snapshots/*/stage-1-step-{STEPS}.safetensors")
    weights = {name.removeprefix("weights."): value for name, value in load_file(snapshot).items()}
    compared = [name for name in weights if name in reference.weights]
    assert compared and all(torch.equal(weights[name], reference.weights[name]) for name in compared)

    assert (joiner.directory / f"run-{run_id(manifest)[:12]}.toml").is_file()
    assert joiner.stop() == 0
    said = joiner.log.read_text()
    unwrapped = "".join(said.split())
    for words in (
        "identity  12D3Koo",
        "3 peers",
        "its hash is the run's id",
        "serving   stage 1 from step",
        "Ctrl+C leaves in good order",
        # The screen, and what is left when it has gone.
        f"Anna ...{me[-8:]}, stage 1 ",
        f"step {STEPS} of {STEPS}",
        "of 4 contributors",
        f"{joiner.directory}/peer.log",
        "again     the same command goes on as the same peer",
    ):
        assert "".join(words.split()) in unwrapped, said
    assert re.search(r"stage +1, as you said", said), said
    assert re.search(r"in all    \d+ microbatches? counted", said.rpartition("\x1b[2K")[2]), said
    logged = (joiner.directory / "peer.log").read_text()
    assert " counts identity=" in logged and " applied " in logged and " applied " not in said


def test_an_interrupted_join_leaves_nothing_behind_and_says_nothing_more(tmp_path: Path) -> None:
    """Ctrl+C while it knocks at an address where somebody listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{Identity.generate().peer}"
        process = subprocess.Popen(
            [sys.executable, "-m", "swarmnet", "join", f"swarm:{'ab' * 32}@{address}", "--dir", str(tmp_path / "me")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_environment(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            assert process.stdout is not None
            heard = [process.stdout.readline() for _ in range(3)]
            assert [line.split()[0] for line in heard] == ["joining", "identity", "asking"], heard
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, rest.strip()) == (130, "")
    with own_identity(tmp_path / "me"):  # nobody holds it any more
        pass
