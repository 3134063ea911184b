"""`import swarmnet` and `swarmnet --help` stay light: what matters is what they do *not* import. Times are printed."""

import json
import subprocess
import sys

import pytest

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


COMMANDS = (
    "init",
    "local",
    "join",
    "peer",
    "trainer",
    "bootstrap",
    "status",
    "dashboard",
    "export",
    "eval",
    "generate",
)
HELP = "from swarmnet.cli.frame import run; assert run({argv!r}) == 0"


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not probe("import swarmnet") & (HEAVY | {"click"})


def test_a_public_name_is_imported_when_it_is_used() -> None:
    light = probe("import swarmnet; dir(swarmnet); hasattr(swarmnet, 'telemetry'); from swarmnet import errors")
    assert "swarmnet.api" not in light
    used = probe("import swarmnet; swarmnet.UsageError, swarmnet.run_peer, swarmnet.LocalOptions")
    assert "swarmnet.api" in used and not used & (HEAVY - {"pydantic"})


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    """Of commands that take a config, the options are the fields of a schema, which is pydantic's."""
    assert not probe(HELP.format(argv=argv)) & (HEAVY if argv[0].startswith("-") else HEAVY - {"pydantic"})


def test_a_manifest_is_read_without_torch() -> None:
    modules = probe("from swarmnet.manifest.file import load; from swarmnet.config import PeerConfig; PeerConfig()")
    assert "pydantic" in modules and not modules & (HEAVY - {"pydantic"})


def test_the_dht_comes_without_the_rest_of_hivemind_which_is_there_for_whoever_asks() -> None:
    probe(
        "import sys, swarmnet.net.dht; assert 'scipy' not in sys.modules and 'hivemind.optim' not in sys.modules\n"
        "import hivemind; assert hivemind.DHT is hivemind.dht.DHT and hivemind.Optimizer.__module__ in sys.modules"
    )
