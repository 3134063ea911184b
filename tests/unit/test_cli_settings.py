"""From the command line to what the commands call: one precedence, checked before anything starts."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command_lines import begun, command_lines, found

import swarmnet as product
from swarmnet import telemetry
from swarmnet.cli.frame import run
from swarmnet.cli.settings import flagged
from swarmnet.config import PeerConfig
from swarmnet.local.earlier import BEGAN
from swarmnet.local.prepare import choose
from swarmnet.manifest.file import load, run_id, to_toml
from swarmnet.manifest.schema import Manifest

ROOT = Path(__file__).parents[2]
MADDR = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
OTHER = MADDR.replace("/tcp/1/", "/tcp/2/")


def typed(line: str) -> int:
    """Run `line` as if it had been typed after `swarmnet`."""
    return run(line.split())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What the commands called, instead of calling it; in an empty directory with a manifest, without variables."""
    made: list[tuple[Any, ...]] = []
    for module, name in (
        ("swarmnet.peer.run", "run_peer"),
        ("swarmnet.trainer.run", "run_trainer"),
        ("swarmnet.local", "run_local"),
        ("swarmnet.peer.bootstrap", "run_bootstrap"),
        ("swarmnet.peer.status", "run_status"),
    ):
        fake = ModuleType(module)
        fake.__path__ = list(getattr(sys.modules.get(module), "__path__", [str(ROOT / module.replace(".", "/"))]))
        setattr(fake, name, lambda *args, name=name: made.append((name, *args)) or 0)
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(telemetry, "setup", lambda *args, **kwargs: None)
    for name in [name for name in __import__("os").environ if name.startswith("SWARMNET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/you")
    monkeypatch.setenv("SWARMNET_NO_RESTART", "1")
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(to_toml(Manifest()), encoding="utf-8")
    Path("run.peer.toml").write_text("slots = 4\n", encoding="utf-8")
    return made


def peer(calls: list[tuple[Any, ...]], *argv: str) -> PeerConfig:
    assert run(["peer", "--manifest", "run.toml", "--stage", "0", *argv]) == 0
    name, config, manifest = calls.pop()
    assert name == "run_peer" and manifest == Manifest() and isinstance(config, PeerConfig)
    return config


def test_every_flag_arrives(calls) -> None:
    config = peer(
        calls,
        *(
            f"--stage 0,2 --gpus 0,3 --tensor 1 --shard zero3 --sequence-parallel --dir d --data t "
            f"--initial i --host 127.0.0.1 --port 1 --dht-port 2 --announce {MADDR} "
            f"--bootstrap {MADDR} --bootstrap {OTHER} --device cuda --slots 3 --events e --log-level error "
            "--log-format json --set caps.output_cache_bytes=7 --set threads=2"
        ).split(),
    )
    assert config == PeerConfig.model_validate(
        {
            "manifest": Path("run.toml"),
            "roles": ("stage",),
            "stages": (0, 2),
            "dir": Path("d"),
            "data": "t",
            "initial": Path("i"),
            "host": "127.0.0.1",
            "port": 1,
            "dht_port": 2,
            "announce": (MADDR,),
            "bootstrap": (MADDR, OTHER),
            "mesh": {"gpus": "0,3", "tensor": 1, "shard": "zero3", "sequence_parallel": True},
            "device": "cuda",
            "threads": 2,
            "slots": 3,
            "events": Path("e"),
            "caps": {"output_cache_bytes": 7},
            "log": {"level": "error", "format": "json"},
        }
    )


def test_flag_over_set_over_variable_over_file_over_default(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer(calls).port == 0
    Path("peer.toml").write_text("port = 1\nslots = 9\n[log]\nlevel = 'error'\n")
    file = ("--config", "peer.toml")
    assert peer(calls, *file).port == 1
    monkeypatch.setenv("SWARMNET_SET", "port=2 log.format=json")
    assert peer(calls, *file).port == 2
    monkeypatch.setenv("SWARMNET_PORT", "3")
    assert peer(calls, *file).port == 3
    assert peer(calls, *file, "--set", "port=4").port == 4
    config = peer(calls, *file, "--set", "threads=2", "--port", "5")
    assert (config.port, config.slots, config.threads, config.log.level) == (5, 9, 2, "error")


def test_what_caps_changed_is_a_file_s_word(calls) -> None:
    assert peer(calls, "--dir", "d").own_file == Path("d/peer.toml")
    Path("d").mkdir(exist_ok=True)
    Path("d/peer.toml").write_text("slots = 2\n[caps]\nupload_mbit = 5.0\n")
    again = peer(calls, "--dir", "d")
    assert (again.slots, again.caps.upload_mbit) == (2, 5.0)
    assert peer(calls, "--dir", "d", "--upload", "20").caps.upload_mbit == 20.0, "a flag wins"
    Path("shared.toml").write_text("slots = 3\nthreads = 1\n")
    named = peer(calls, "--dir", "d", "--config", "shared.toml")
    assert (named.slots, named.threads, named.caps.upload_mbit) == (2, 1, 5.0), "above a file that peers share"
    assert peer(calls, "--dir", "e", "--config", "shared.toml").slots == 3, "and for no other peer"
    assert product.peer_config("shared.toml", dir="d").slots == 2


def test_variables_hold_several_values(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNET_BOOTSTRAP", f"{MADDR} {OTHER}")
    monkeypatch.setenv("SWARMNET_STAGE", "1,2")
    monkeypatch.setenv("SWARMNET_MANIFEST", "run.toml")
    monkeypatch.setenv("SWARMNET_CONFIG", str(ROOT / "peer_configs/local_cpu.toml"))
    assert run(["peer"]) == 0
    config = calls.pop()[1]
    assert config.bootstrap == (MADDR, OTHER) and config.stages == (1, 2) and config.slots == 2


def test_a_variable_that_no_command_reads_is_refused(calls, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("SWARMNET_STEPS", "3")  # of another command
    assert run(["peer", "--manifest", "run.toml", "--stage", "1"]) == 0
    monkeypatch.setenv("SWARMNET_PRT", "3")
    assert run(["peer", "--manifest", "run.toml", "--stage", "1"]) == 2
    assert "SWARMNET_PRT, which is no setting of any command; did you mean SWARMNET_PORT?" in capsys.readouterr().err


def test_a_typed_path_to_the_text_starts_here_and_the_manifest_s_own_at_the_manifest(calls) -> None:
    assert run(["trainer", "--manifest", "run.toml", "--data", "corpus.txt"]) == 0
    assert calls.pop()[1].data_folder is None
    assert run(["trainer", "--manifest", "run.toml"]) == 0
    assert calls.pop()[1].data_folder == Path()


@pytest.mark.parametrize(("name", "role"), [("peer", "stage"), ("trainer", "trainer"), ("bootstrap", "bootstrap")])
def test_roles_and_directories_follow_the_command(calls, name: str, role: str) -> None:
    assert (
        run(
            [
                name,
                *([] if name == "bootstrap" else ["--manifest", "run.toml"]),
                *(["--stage", "0"] if name == "peer" else []),
            ]
        )
        == 0
    )
    called, config, *rest = calls.pop()
    assert called == f"run_{name}" and config.roles == (role,) and rest == ([] if name == "bootstrap" else [Manifest()])
    assert config.dir == Path(f"/home/you/.swarmnet/{name}")


def test_a_wrong_variable_is_named(calls, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNET_DHT_PORT", "70000")
    assert run(["bootstrap"]) == 2
    assert "error: SWARMNET_DHT_PORT: dht_port = 70000" in capsys.readouterr().err


def test_local_builds_its_options(calls) -> None:
    assert (
        typed(
            "local --stages 4 --replicas 3 --steps 9 --seed 5 --out o --kill 1@2 --kill 3@8 --kill-every 1.5 "
            "--verify --trainers 2 --data d --numerics fast --set a.b=c --slots 2 --log-level info"
        )
        == 0
    )
    name, options = calls.pop()
    assert name == "run_local" and (options.stages, options.replicas, options.steps, options.seed) == (4, 3, 9, 5)
    assert options.out == Path("o") and options.kill == ("1@2", "3@8") and options.kill_every == 1.5 and options.verify
    assert (options.trainers, options.data, options.numerics, options.set) == (2, "d", "fast", ("a.b=c",))
    assert (options.slots, options.log_level, options.manifest) == (2, "info", None)
    assert (options.ranks, options.tensor, options.shard, options.sequence_parallel) == ((), 0, "none", False)


def test_local_has_ranks(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNET_RANKS", "2")  # of a peer: a local swarm's are for stages
    assert typed("local --ranks 1=2,2=4 --ranks 0.1=2 --tensor 2 --shard dp --sequence-parallel --kill-rank 1@3") == 0
    options = calls.pop()[1]
    assert (options.ranks, options.tensor, options.shard) == (("1=2,2=4", "0.1=2"), 2, "dp")
    assert options.sequence_parallel and options.kill_rank == ("1@3",)


@pytest.mark.parametrize("command", ["peer --manifest run.toml --stage 0", "trainer --manifest run.toml"])
def test_more_threads_than_this_machine_has_are_refused(calls, capsys, command: str) -> None:
    assert typed(f"{command} --set threads=99999") == 2 and not calls
    err = capsys.readouterr().err
    assert (
        err.startswith("swarmnet: error: --set: threads = 99999: must be at most ") and "on this machine, which" in err
    )


@pytest.fixture
def ended() -> None:
    begun(Path("o"))


def test_a_run_that_goes_on_may_be_told_again_what_it_is(calls, ended) -> None:
    again = (
        "--stages 3 --steps 9 --seed 0 --replicas 2 --trainers 1 --sync exact --data stdlib "
        "--set training.microbatches=4 --ranks 1=2"
    )
    assert typed(f"local --resume --out o {again} --kill 1@2 --verify") == 0
    assert calls.pop()[1].resume


def test_a_run_that_goes_on_recorded_its_options(calls, ended, capsys) -> None:
    Path("o/events.jsonl").write_text(json.dumps({"t": 1.0, "event": BEGAN}) + "\n", encoding="utf-8")
    assert typed("local --resume --out o") == 2 and not calls
    assert "o was begun by an older swarmnet" in capsys.readouterr().err


def test_local_flags_change_the_manifest_it_is_given(calls) -> None:
    Path("run.toml").write_text(to_toml(load("run.toml")).replace("stages = 3 ", "stages = 2 "), encoding="utf-8")
    assert typed("local --manifest run.toml --steps 9 --set training.seed=4") == 0
    options = calls.pop()[1]
    assert (options.stages, options.steps, options.seed, options.data) == (2, 9, 4, "stdlib")
    assert options.typed == (("--steps", "training.total_steps=9"),) and options.set == ("training.seed=4",)
    assert options.manifest == Path("run.toml")


@pytest.mark.parametrize("manifest", ["", " --manifest run.toml"])
def test_local_sync_brings_along_what_it_needs_and_set_wins(calls, manifest: str) -> None:
    assert typed(f"local --sync local --set averaging.codec=fp16{manifest}") == 0
    options = calls.pop()[1]
    chosen = choose(options)
    assert options.typed == (("--sync local", "averaging.sync=local"),) and options.set == ("averaging.codec=fp16",)
    assert (chosen.averaging.sync, chosen.numerics.mode, chosen.averaging.codec, chosen.averaging.reducer) == (
        "local",
        "fp32",
        "fp16",
        "norm_clip",
    )
    assert typed(f"local --sync overlap{manifest}") == 0
    chosen = choose(calls.pop()[1])
    assert (chosen.averaging.sync, chosen.optimizer.lead, chosen.numerics.mode) == ("overlap", 2.5, "deterministic")


@pytest.mark.parametrize(
    ("line", "named", "known", "as_json"),
    [
        (f"run.toml --bootstrap {MADDR} --json", Path("run.toml"), (MADDR,), True),
        (f"{run_id(Manifest())} --bootstrap {MADDR} --json", run_id(Manifest()), (MADDR,), True),
        (f"{'ab' * 6} --bootstrap {MADDR} --json", "ab" * 6, (MADDR,), True),
        (f"{'AB' * 32} --bootstrap {MADDR}", "ab" * 32, (MADDR,), False),
        (f"swarm:{'ab' * 32}@{MADDR} --bootstrap {MADDR}", "ab" * 32, (MADDR, MADDR), False),
        (f"swarm:{'AB' * 6}@{MADDR}", "ab" * 6, (MADDR,), False),
    ],
)
def test_status_takes_a_file_a_run_id_its_first_digits_or_a_link(
    calls, line: str, named: Path | str, known: tuple[str, ...], as_json: bool
) -> None:
    assert typed(f"status {line}") == 0
    assert calls.pop() == ("run_status", named, known, as_json)


def test_local_names_the_defaults_of_others(calls) -> None:
    named = {field.name: field.flag.default for field in flagged("local")}
    assert named["slots"] == str(PeerConfig().slots)
    assert named["checkpoint-every"] == str(Manifest().training.checkpoint_every)
    assert typed("local") == 0 and calls.pop()[1].slots is None, "they are the peers' to choose"


def test_one_flag_is_one_variable_whatever_the_command() -> None:
    for words in command_lines():
        assert found(*words).context_settings["auto_envvar_prefix"] == "SWARMNET"
