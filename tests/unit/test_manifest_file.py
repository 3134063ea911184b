"""The manifest's file: complete, closed, commented; fetched by its hash from peers; remarked on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.config.check import dotted, leaves
from swarmnet.config.table import LARGEST_INTEGER
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError, UsageError
from swarmnet.ids import PeerId
from swarmnet.manifest import file, schema
from swarmnet.manifest.file import canonical_bytes, completed_hash, load, override, run_id, to_toml
from swarmnet.manifest.implied import remarks
from swarmnet.manifest.schema import (
    FORMATS,
    OPTIONAL,
    Averaging,
    Cut,
    Data,
    Manifest,
    Model,
    Numerics,
    Optimizer,
    Protocol,
    Training,
    Wire,
)
from swarmnet.messages import Accepted, Answer, Busy, ManifestData, ManifestRequest, Rejected, Running
from swarmnet.peer import joining
from swarmnet.peer.joining import fetch_manifest, genuine
from swarmnet.sums.local_sum import OuterPlan
from swarmnet.testing.doubles import FakeTransport, Script, in_turn

DEFAULT = to_toml(Manifest())

above0 = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
count = st.integers(0, LARGEST_INTEGER)
positive = st.integers(1, LARGEST_INTEGER)
text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"]))
digest = st.just("") | st.text("0123456789abcdef", min_size=64, max_size=64)
datas = st.builds(Data, source=text, tokenizer=text, num_tokens=count, tokens_sha256=digest, tokens_root=digest)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    layers = draw(st.just("auto") | st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any).map(tuple))
    stages, num_layers = (2, 4) if layers == "auto" else (len(layers), sum(layers))
    suspect_s, long_silence_s = sorted(draw(st.lists(above0, min_size=2, max_size=2, unique=True)))
    sync = draw(st.sampled_from(["exact", "overlap", "local"]))
    local = sync == "local"
    reducer = draw(st.sampled_from(["sum", "norm_clip", "centered_clip"])) if local else "sum"
    mode = "fp32" if local else draw(st.sampled_from(["deterministic", "fast"]))
    own = {
        "norm_clip": {"norm_factor": above0},
        "centered_clip": {"clip_radius": above0},
        "overlap": {"overlap_after": count},
    }
    return Manifest(
        name=draw(text),
        model=Model(num_layers=num_layers, rope_theta=draw(above0), attention_bias=draw(st.booleans())),
        cut=Cut(stages=stages, layers=layers),
        data=draw(datas),
        training=Training(seed=draw(count), total_steps=draw(positive), sequence_length=draw(positive)),
        optimizer=Optimizer(learning_rate=draw(above0), beta1=draw(st.floats(0, 1, exclude_max=True))),
        numerics=Numerics(mode=mode, grid_bits=draw(st.integers(8, 48))),
        wire=Wire(activations=draw(st.sampled_from(["fp32", "bf16", "int8"]))),
        averaging=Averaging(
            codec=draw(st.sampled_from(["fp32", "fp16", "int8", "nf4"] if local else ["int64", "small"])),
            sync=sync,
            reducer=reducer,
            **{name: draw(values) for choice in (sync, reducer) for name, values in own.get(choice, {}).items()},
        ),
        protocol=Protocol(suspect_s=suspect_s, long_silence_s=long_silence_s),
    )


@given(manifests())
def test_a_written_manifest_reads_back_equal(manifest: Manifest) -> None:
    again = load(to_toml(manifest))
    assert again == manifest
    assert run_id(again) == run_id(manifest)


@given(manifests(), manifests())
def test_equal_manifests_and_only_they_share_a_run_id(one: Manifest, other: Manifest) -> None:
    assert (one == other) == (run_id(one) == run_id(other))


def test_the_run_id_of_the_default_manifest_is_what_it_was() -> None:
    """A change here makes every manifest in the world another run."""
    assert canonical_bytes(Manifest()).startswith(b'{"admission":{"key":"","policy":"open"},"audit":{')
    assert run_id(Manifest()) == "2fda2b49a5d9eb22242a777a5653b1cf87939a8a2c896f09381ea3e789c657f9"


def test_order_comments_layout_and_how_floats_are_written_do_not_show_in_the_run_id() -> None:
    data = tomllib.loads(DEFAULT)
    lines = []
    for name in sorted(data, key=lambda key: (isinstance(data[key], dict), key)):
        if isinstance(data[name], dict):
            lines.append(f"[{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in sorted(data[name].items(), reverse=True)]
        else:
            lines.append(f"{name} = {_toml(data[name])}")
    assert run_id(load("\n".join(lines) + "\n")) == run_id(Manifest())
    for written in ("1", "1.0", "1e0", "1.00", "+1.0"):
        assert run_id(load(DEFAULT.replace("clip_norm = 1.0", f"clip_norm = {written}"))) == run_id(Manifest())


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'" if isinstance(value, str) else repr(value)


FROZEN = json.loads((Path(__file__).parents[1] / "data/manifest_defaults.json").read_text(encoding="utf-8"))
"""Format -> dotted name of a field -> what a file of that format means that leaves the field out."""


def without(*names: str) -> str:
    """The default file without the lines of these fields."""
    lines, table = [], ""
    for line in DEFAULT.splitlines():
        table = f"{line[1:-1]}." if line.startswith("[") else table
        if f"{table}{line.partition(' = ')[0]}" not in names:
            lines.append(line)
    return "\n".join(lines)


def test_the_defaults_of_a_format_never_change() -> None:
    """A file that leaves a field out would become another run. A changed default is a new format (`schema.FORMATS`), a
    new field a line more in the file, whose default is what versions without the field did."""
    assert set(FROZEN) == set(map(str, FORMATS))
    for number, frozen in FROZEN.items():
        manifest = load(f"format = {number}\n").model_dump(mode="json")
        assert {dotted(path): value_at(manifest, path) for path, _ in leaves(Manifest)} == frozen


def value_at(values: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        values = values[name]
    return values


REQUIRED = [path for path, _ in leaves(Manifest) if path[0] not in OPTIONAL]


@pytest.mark.parametrize("path", REQUIRED, ids=dotted)
def test_any_field_may_be_left_out(path: tuple[str, ...]) -> None:
    manifest = load(without(dotted(path)))
    assert manifest.left_out == {dotted(path)} and manifest.model_dump() == Manifest().model_dump()
    # The hash is of what the file says, whichever fields a later version adds.
    said = json.loads(canonical_bytes(Manifest()))
    del value_at(said, path[:-1])[path[-1]]
    assert json.loads(canonical_bytes(manifest)) == said and run_id(manifest) != run_id(Manifest())
    again = load(to_toml(manifest))
    assert again == manifest and run_id(again) == run_id(manifest), "as peers hand it on"


def test_a_field_that_was_left_out_is_written_once_it_has_a_value() -> None:
    manifest = load(without("training.seed", "training.total_steps", "data.num_tokens"))
    digested = manifest.model_copy(update={"data": Data(num_tokens=9)})
    changed = override(digested, ["training.seed=0"])
    assert changed.left_out == {"training.total_steps", "data.num_tokens"}
    again = load(to_toml(changed))
    assert (again.data.num_tokens, again.left_out) == (9, {"training.total_steps"}) and run_id(again) == run_id(changed)
    assert run_id(override(manifest, [])) == run_id(manifest)


def test_tables_may_be_left_out_and_nothing_is_no_manifest() -> None:
    assert load("[wire]\n[data]\nsource = 'a.txt'\n").data == Data(source="a.txt")
    assert canonical_bytes(load("[wire]\n[data]\nsource = 'a.txt'\n")) == b'{"data":{"source":"a.txt"}}'
    with pytest.raises(UsageError, match="manifest: names no field; `swarmnet init` writes a manifest"):
        load("# [data]\n")
    for hostile in ("[" * 5000, "name = " + "[" * 5000, "a." * 2000 + "b = 1", "", "\x00"):
        with pytest.raises(UsageError) as caught:
            load(f"{hostile}\n")
        assert len(str(caught.value)) < 5000


def test_a_later_format_has_other_defaults_and_a_field_more(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {text: run_id(load(text)) for text in (without("training.max_discarded"), without("format"), "name = 'x'\n")}
    was = {"training.max_discarded": Manifest().training.max_discarded, "averaging.inner_steps": 7}
    monkeypatch.setattr(schema, "FORMATS", {1: was, 2: {}})
    monkeypatch.setattr(file, "FORMATS", schema.FORMATS)
    assert {text: run_id(load(text)) for text in old} == old
    first, second = load("name = 'x'\n"), load("format = 2\n")
    assert (first.format, first.averaging.inner_steps) == (1, 7) and (second.format, second.averaging.inner_steps) == (
        2,
        20,
    )
    assert load(to_toml(first)) == first and load(to_toml(second)) == second


def test_every_field_says_what_it_is() -> None:
    whole = to_toml(override(Manifest(), ["lora.r=4"]))
    said = whole.replace("\n# ", " ")
    for path, field in leaves(Manifest):
        assert field.description and f"\n{path[-1]} = " in whole and f" {field.description}" in said, path
    assert max(map(len, whole.splitlines())) <= 120


def test_a_table_that_says_nothing_is_in_no_file_and_no_hash() -> None:
    """Versions that do not know it take part in the run."""
    assert "lora" not in DEFAULT and "lora" not in json.loads(canonical_bytes(Manifest()))
    assert load(DEFAULT).left_out == frozenset()
    adapted = override(load(DEFAULT), ["lora.r=4"])
    again = load(to_toml(adapted))
    assert again == adapted and again.lora.r == 4 and run_id(again) == run_id(adapted) != run_id(Manifest())
    assert completed_hash(again) != completed_hash(Manifest()) == completed_hash(load("[wire]\n"))


@given(st.text(max_size=50).map(lambda text: text + "\n"))
def test_any_text_is_a_manifest_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert load(text).left_out


@pytest.mark.parametrize("text", ["a\u200bb", "corpus.txt\u200d", "\ufeffa", "a\u202eb", "a\x00", "a\nb", "\xad"])
def test_invisible_characters_are_refused_where_they_would_make_another_run(text: str) -> None:
    for where in ("name", "data.source", "data.tokenizer"):
        with pytest.raises(UsageError, match=f"{where} = .*holds the invisible character U"):
            override(Manifest(), [f"{where}={json.dumps(text)}"])
    assert override(Manifest(), ["data.source=می\u200cخواهم \u202fé.txt"]).data.source.endswith("é.txt")


def test_files(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + DEFAULT.encode())
    assert load(path) == load(str(path)) == Manifest()
    path.write_bytes(b"\xff")
    for where, words in ((path, "is not UTF-8"), (str(tmp_path), "cannot be read: Is a directory")):
        with pytest.raises(UsageError, match=words):
            load(where)


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("training.seed=7", ("training", "seed"), 7),
        (" training.seed = 7", ("training", "seed"), 7),
        ("cut.layers=[1, 2, 3]", ("cut", "layers"), (1, 2, 3)),
        ("optimizer.learning_rate=1", ("optimizer", "learning_rate"), 1.0),
        ("name=a plain = string", ("name",), "a plain = string"),
        ('name="7"', ("name",), "7"),
        ("model.attention_bias=true", ("model", "attention_bias"), True),
    ],
)
def test_overrides(assignment: str, path: tuple[str, ...], value: object) -> None:
    changed: object = override(Manifest(), [assignment])
    for name in path:
        changed = getattr(changed, name)
    assert changed == value and type(changed) is type(value)


# ---------------------------------------------------------------- the manifest by its hash


MANIFEST = Manifest(name="genuine")
RUN = run_id(MANIFEST)
OTHER = to_toml(override(MANIFEST, ["training.seed=1"]))

SAYS: dict[str, Answer | Exception | None] = {
    "honest": ManifestData(to_toml(MANIFEST)),
    "reformatted": ManifestData("# a comment\n" + to_toml(MANIFEST)),
    "liar": ManifestData(OTHER),
    "junk": ManifestData("/etc/passwd"),
    "newer": ManifestData(to_toml(MANIFEST) + "\n[later]\nkey = 1\n"),
    "trainer": Rejected(RejectCode.NOT_SERVED, "a trainer serves tokens only"),
    "confused": Running(),
    "dead": PeerGone("refused", definite=True),
    "silent": None,
    "busy": Busy(1.0, version=-1),
}


def fetch(*peers: str, **says: Script) -> tuple[Manifest | None, list[PeerId], dict[str, SwarmError]]:
    transport, failures = FakeTransport(lambda peer, request: [Accepted(), SAYS[peer]], **says), {}

    async def whom() -> list[PeerId]:
        return [PeerId(peer) for peer in peers if peer != "late" or transport.asked]

    on_failure = lambda peer, error: failures.update({peer: error})  # noqa: E731
    found = asyncio.run(fetch_manifest(transport, RUN, whom, on_failure=on_failure))
    assert {request for _, request in transport.requests} <= {ManifestRequest()} and not any(transport.payloads)
    return found, transport.asked, failures


def test_one_honest_peer_is_enough_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "PATIENCE_S", 0.01)
    found, asked, failures = fetch("liar", "junk", "newer", "trainer", "confused", "dead", "silent", "honest", "never")
    assert found == MANIFEST and asked[-1] == "honest"
    assert {peer: type(error) for peer, error in failures.items()} == {
        "liar": BadMessage,
        "junk": BadMessage,
        "newer": BadMessage,
        "trainer": Refused,
        "confused": PeerGone,
        "dead": PeerGone,
        "silent": PeerTimeout,
    }
    assert "manifest of another run" in str(failures["liar"]) and "'liar'" in str(failures["liar"])
    assert "unknown key" in str(failures["newer"]) and "\n" not in str(failures["newer"])


def test_who_appears_meanwhile_is_asked_next() -> None:
    assert fetch("late", "dead", "confused", late=SAYS["honest"])[:2] == (MANIFEST, ["dead", "late"])


def test_who_is_busy_is_asked_again_and_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "BUSY_S", 0.0)
    found, asked, failures = fetch("busy", "dead")
    assert found is None and asked == ["busy", "dead", *["busy"] * (joining._ROUNDS - 1)]
    assert isinstance(failures["busy"], PeerTimeout) and "busy with other newcomers" in str(failures["busy"])
    assert fetch("soon", soon=in_turn(SAYS["busy"], SAYS["busy"], SAYS["honest"]))[0] == MANIFEST


def test_nobody_has_it() -> None:
    found, asked, failures = fetch("liar", "dead")
    assert found is None and asked == ["liar", "dead"] == list(failures)
    assert fetch() == (None, [], {})
    assert fetch("reformatted", "liar") == (MANIFEST, ["reformatted"], {}), "the first genuine answer ends it"


@given(st.text(max_size=200))
def test_any_text_is_genuine_or_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        genuine(text, RUN, peer=PeerId("liar"))


# ---------------------------------------------------------------- what is valid, and perhaps not meant


def lasting(steps: int, *, sync: str = "local", **averaging: object) -> Manifest:
    mode, codec = ("fp32", "fp16") if sync == "local" else ("deterministic", "small")
    training, numerics = Training(total_steps=steps), Numerics(mode=mode)
    return Manifest(training=training, numerics=numerics, averaging=Averaging(sync=sync, codec=codec, **averaging))


@pytest.mark.parametrize(
    ("steps", "averaging", "said"),
    [
        *((steps, {}, "outer momentum never sets in") for steps in (60, 61)),
        *((steps, {}, f"outer momentum sets in only after step 60 of {steps}") for steps in (62, 120)),
        *((steps, {}, "") for steps in (121, 800)),
        (300, {"partners": "pairs", "outer_warmup_steps": 150}, "outer momentum sets in only after step 150 of 300"),
        *((30, {name: 0}, "") for name in ("outer_warmup_steps", "outer_momentum")),
        (60, {"sync": "exact"}, ""),
        *((steps, {"sync": "overlap", "overlap_after": 40}, "no step overlaps another") for steps in (40, 3)),
        *((steps, {"sync": "overlap", "overlap_after": steps - 1}, "") for steps in (41, 3)),
    ],
)
def test_a_run_that_ends_before_what_it_asks_for_sets_in_is_told(steps: int, averaging: dict, said: str) -> None:
    lines = remarks(lasting(steps, **averaging))
    assert len(lines) == bool(said) and all(
        line.startswith("note: ") and said in line and "\n" not in line for line in lines
    )
    assert remarks(Manifest()) == []


@pytest.mark.parametrize("steps", [2, 40, 60, 61, 62, 100])
def test_it_never_sets_in_where_no_outer_step_is_other_than_plain(steps: int) -> None:
    plan = OuterPlan(10, inner_steps=20, fragments=1, total_steps=steps, warmup_steps=60)
    ever = any(plan.due(step) and not plan.plain(step) for step in range(steps))
    assert ("never" in remarks(lasting(steps))[0]) == (not ever)
