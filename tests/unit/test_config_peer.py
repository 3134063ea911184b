"""The peer config: examples that load, limits, and one precedence."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.config import PeerConfig, toml
from swarmnet.config.check import SettingsLayer, check, dotted, layer, leaves, merge, resolve
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Manifest, Model
from swarmnet.peer.devices import choose_layout

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "peer_configs").glob("*.toml"))


def read(text: str) -> PeerConfig:
    return check(PeerConfig, toml.parse(text, where="peer.toml"), origin=lambda _: "peer.toml")


def test_there_is_an_example_for_everyone() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "bootstrap",
        "eight_gpu_tensor_parallel",
        "gaming_pc_zero",
        "local_cpu",
        "local_cpu_ranks",
        "one_gpu_volunteer",
        "trainer",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_say_how_they_are_started(path: Path) -> None:
    config = check(PeerConfig, toml.read(path), origin=lambda _: str(path))
    command = {"stage": "peer", "trainer": "trainer", "bootstrap": "bootstrap"}[config.roles[0]]
    command = "join" if path.stem in ("one_gpu_volunteer", "gaming_pc_zero") else command
    assert f"#   swarmnet {command} --config peer_configs/{path.name}" in path.read_text(encoding="utf-8")
    assert (config.manifest is None) == (command in ("bootstrap", "join"))
    assert bool(config.stages) == (command == "peer")
    assert "~" not in str(config.dir)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_an_example_leaves_in_comments_is_valid_too(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in lines)
    assert read(text.replace("12D3KooW...", "12D3KooWabc"))


def test_eight_gpus_split_every_layer() -> None:
    config = read((ROOT / "peer_configs/eight_gpu_tensor_parallel.toml").read_text(encoding="utf-8"))
    layout = choose_layout(config.mesh, config.device, Manifest(model=Model(num_heads=16, num_kv_heads=8)), cuda=8)
    assert (layout.label, layout.devices) == ("tp8sp", tuple(f"cuda:{number}" for number in range(8)))


@pytest.mark.parametrize("written", ["8", '"8"', '"0,1,3"', '"3,"', '"auto"'])
def test_gpus_are_a_number_a_list_or_all(written: str) -> None:
    assert read(f"[mesh]\ngpus = {written}").mesh.gpus == written.strip('"')


def test_a_config_is_frozen_and_writes_back() -> None:
    config = read('stages = [0, 3]\nevents = "e.jsonl"\nthreads = 2')
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1  # type: ignore[misc]
    assert read(toml.write(config)) == config


def test_every_setting_says_what_it_is() -> None:
    assert not [dotted(path) for path, field in leaves(PeerConfig) if not field.description]


FLAG, SET, ENV, FILE = "--port", "--set", "SWARMNET_PORT", "peer.toml"


@given(st.lists(st.sampled_from([FILE, ENV, SET, FLAG]), unique=True))
def test_the_last_layer_wins(origins: list[str]) -> None:
    layers = [layer(origin, ("port",), number) for number, origin in enumerate(origins, start=1)]
    assert resolve(PeerConfig, layers, where="").port == len(origins)


def test_layers_meet_inside_tables_and_errors_name_who_won() -> None:
    layers = [
        SettingsLayer(FILE, {"mesh": {"gpus": 4, "tensor": 2}, "port": -1}),
        layer(ENV, ("port",), 5),
        layer(SET, ("mesh", "gpus"), 8),
    ]
    data, origins = merge(layers)
    assert data == {"mesh": {"gpus": 8, "tensor": 2}, "port": 5}
    assert origins[("mesh", "gpus")] == SET and origins[("mesh", "tensor")] == FILE and origins[("port",)] == ENV
    for path, value, line in [
        (("port",), 70000, "--x: port = 70000: must be at most 65535"),
        (("mesh", "gpu"), 1, "--x: mesh.gpu: unknown key; did you mean mesh.gpus?"),
        (("stages",), [2, 2], "config: stages = [2, 2] names a stage twice"),
    ]:
        with pytest.raises(UsageError) as caught:
            resolve(PeerConfig, [*layers, layer("--x", path, value)], where="config")
        assert str(caught.value).startswith(line)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from([path for path, _ in leaves(PeerConfig)]),
)
def test_any_value_anywhere_is_a_setting_or_one_line(value: object, path: tuple[str, ...]) -> None:
    try:
        config = resolve(PeerConfig, [layer("--set", path, value)], where="config")
    except UsageError as error:
        assert str(error).startswith(("--set: ", "config: ")) and "\n" not in str(error)
    else:
        assert isinstance(config, PeerConfig)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_string_is_written_as_toml(text: str) -> None:
    assert tomllib.loads(toml.write(PeerConfig(data=text)))["data"] == text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_file_keeps_what_is_not_changed(path: Path, tmp_path: Path) -> None:
    before = path.read_text(encoding="utf-8")
    copy = tmp_path / "peer.toml"
    copy.write_text(before, encoding="utf-8")
    change = {"slots": 3, "caps": {"upload_mbit": 5.0, "hours": "22:00-07:00"}}
    text = toml.changed(copy, change)
    data, after = tomllib.loads(before), tomllib.loads(text)
    assert after == data | {"slots": 3, "caps": data.get("caps", {}) | change["caps"]}


def test_a_new_file_has_what_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    assert toml.changed(path, {"caps": {"disk_gib": 1.5}}) == "[caps]\ndisk_gib = 1.5\n"
    path.write_text('caps = { disk_gib = 1.0, hours = "" }  # mine\nslots = 2\n')
    assert toml.changed(path, {"caps": {"disk_gib": 1.5}}) == 'slots = 2\n\n[caps]\ndisk_gib = 1.5\nhours = ""\n'
