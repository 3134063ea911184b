"""`import swarmnet` and `swarmnet --help` stay light: what matters is what they do *not* import. Times are printed."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Manifest

HEAVY = {"torch", "hivemind", "grpc", "bitsandbytes", "numpy", "pydantic", "cryptography", "rich", "safetensors"}

PROBE = """
import json, sys, time
began = time.perf_counter()
{code}
print(json.dumps([time.perf_counter() - began, sorted(sys.modules)]))
"""


def probe(code: str) -> set[str]:
    """The modules that `code` leaves imported in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PROBE.format(code=code)], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    print(f"{seconds:.3f} s: {code}")
    return set(modules)


LINK = f"swarm:{'ab' * 32}@/ip4/127.0.0.1/tcp/9/p2p/12D3KooWQnR8zTceaCmCtaXVSKAnG6pTeEu5o7e7PiBDBi6Eo5UH"
LIGHT = "init local join peer trainer bootstrap status dashboard export eval generate"
"""Commands whose help is there at once."""
RUN = "from swarmnet.cli.frame import run; "


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not probe("import swarmnet") & (HEAVY | {"click"})


def test_a_public_name_is_imported_when_it_is_used() -> None:
    light = probe("import swarmnet; dir(swarmnet); hasattr(swarmnet, 'telemetry'); from swarmnet import errors")
    assert "swarmnet.api" not in light
    used = probe("import swarmnet; swarmnet.UsageError, swarmnet.run_peer, swarmnet.LocalOptions")
    assert "swarmnet.api" in used and not used & (HEAVY - {"pydantic"})


def test_help_imports_nothing_heavy() -> None:
    """Of commands that take a config, the options are the fields of a schema, which is pydantic's."""
    assert not probe(f"{RUN} assert run(['--help']) == run(['--version']) == 0") & HEAVY
    modules = probe(f"{RUN} assert not any(run([name, '--help']) for name in {LIGHT.split()})")
    assert not modules & (HEAVY - {"pydantic"})


@pytest.mark.parametrize("words", ["peer --manifest RUN --stage 0", f"join {LINK}"], ids=["peer", "join"])
def test_a_taken_port_is_refused_before_anything_heavy_is_imported(tmp_path: Path, words: str) -> None:
    manifest = tmp_path / "run.toml"
    manifest.write_text(to_toml(Manifest()))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = ("--host", "127.0.0.1", "--port", str(taken.getsockname()[1]), "--dir", str(tmp_path / "peer"))
        argv = [*words.replace("RUN", str(manifest)).split(), *at, "--no-restart"]
        found = probe(f"{RUN} assert run({argv!r}) == 2")
    assert not found & {"torch", "hivemind", "grpc"}


def test_a_manifest_is_read_without_torch() -> None:
    modules = probe("from swarmnet.manifest.file import load; from swarmnet.config import PeerConfig; PeerConfig()")
    assert "pydantic" in modules and not modules & (HEAVY - {"pydantic", "cryptography", "numpy"})


def test_the_dht_comes_without_the_rest_of_hivemind_which_is_there_for_whoever_asks() -> None:
    probe(
        "import sys, swarmnet.net.dht; assert 'scipy' not in sys.modules and 'hivemind.optim' not in sys.modules\n"
        "import hivemind; assert hivemind.DHT is hivemind.dht.DHT and hivemind.Optimizer.__module__ in sys.modules"
    )


def test_a_peer_imports_what_it_serves_with_and_no_more() -> None:
    modules = probe("from swarmnet.peer.joining import prepare_join; from swarmnet.peer.run import run_peer")
    assert "torch" in modules
    assert not modules & {"scipy", "transformers", "tokenizers", "matplotlib", "sympy", "torch._dynamo"}
    assert not modules & {f"swarmnet.{name}" for name in ("local", "monitor", "simulate", "testing", "trainer")}


LINK = "swarm:0123456789ab@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
MISTAKES = (
    "statsu",
    "status --frob",
    "status nothing",
    "status run.toml",
    "status run.toml --bootstrap foo",
    "status run.toml --bootstrap /ip4/127.0.0.1/tcp/1",
    "watch nothing",
    "watch run.toml --bootstrap foo",
    f"watch {LINK} --csv file/curve.csv",
    f"watch {LINK} --png file/curve.png",
    "dashboard run.toml --bootstrap foo",
    "export nothing model",
    "export run.toml run.toml",
    "export run.toml file/model",
    "export run.toml model --dir nothing",
    f"export {LINK} model --dir .",
    "export swarm:12@x model",
    "eval nothing",
    "eval run.toml --dir nothing",
    "eval run.toml --bootstrap foo",
    "eval run.toml --data nothing",
    "generate nothing x",
    "generate run.toml x --dir nothing",
    "generate run.toml x --bootstrap foo",
    "peer --no-restart --manifest run.toml --stage 0 --dir file/x",
    "peer --no-restart --manifest run.toml --stage 0 --bootstrap foo",
    "peer --no-restart --manifest run.toml --stage 0 --bootstrap /ip4/127.0.0.1/tcp/1",
    "trainer --manifest run.toml --dir file/x",
    "bootstrap --dir file/x",
    f"join --no-restart {LINK} --dir file/x",
    "extend run.toml --steps 100000 --bootstrap foo",
    "ban run.toml 12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp --bootstrap foo",
    "receipts run.toml",
)


def test_what_is_refused_imports_nothing_heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "run.toml").write_text(to_toml(Manifest()))
    lines = [line.split() for line in MISTAKES]
    modules = probe(f"{RUN} assert [run(line) for line in {lines}] == [2] * {len(lines)}")
    assert not modules & {"torch", "hivemind", "grpc", "safetensors", "transformers", "scipy"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run.toml"]
