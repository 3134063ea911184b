"""The manifest's file: complete, closed, commented, and errors that say what, where and what to do."""

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
from swarmnet.errors import UsageError
from swarmnet.manifest import file, schema
from swarmnet.manifest.file import canonical_bytes, load, override, run_id, to_toml
from swarmnet.manifest.schema import (
    FORMATS,
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

DEFAULT = to_toml(Manifest())

above0 = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
count = st.integers(0, LARGEST_INTEGER)
positive = st.integers(1, LARGEST_INTEGER)
text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"]))
digest = st.just("") | st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    layers = draw(st.just("auto") | st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any).map(tuple))
    stages, num_layers = (2, 4) if layers == "auto" else (len(layers), sum(layers))
    timers = sorted(draw(st.lists(above0, min_size=2, max_size=2, unique=True)))
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
        data=Data(
            source=draw(text),
            tokenizer=draw(text),
            num_tokens=draw(count),
            tokens_sha256=draw(digest),
            tokens_root=draw(digest),
        ),
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
        protocol=Protocol(suspect_s=timers[0], long_silence_s=timers[1]),
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


@pytest.mark.parametrize("written", ["1", "1.0", "1e0", "1.00", "+1.0"])
def test_a_float_may_be_written_in_any_way(written: str) -> None:
    manifest = load(DEFAULT.replace("clip_norm = 1.0", f"clip_norm = {written}"))
    assert run_id(manifest) == run_id(Manifest())


def test_order_comments_and_layout_do_not_show_in_the_run_id() -> None:
    data = tomllib.loads(DEFAULT)
    lines = []
    for name in sorted(data, key=lambda key: (isinstance(data[key], dict), key)):
        if isinstance(data[name], dict):
            lines.append(f"[{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in sorted(data[name].items(), reverse=True)]
        else:
            lines.append(f"{name} = {_toml(data[name])}")
    assert run_id(load("\n".join(lines) + "\n")) == run_id(Manifest())


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


@pytest.mark.parametrize("path", [path for path, _ in leaves(Manifest)], ids=dotted)
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
    said = DEFAULT.replace("\n# ", " ")
    for path, field in leaves(Manifest):
        assert field.description and f"\n{path[-1]} = " in DEFAULT and f" {field.description}\n" in said, path


def test_a_written_file_fits_the_screen() -> None:
    assert max(map(len, DEFAULT.splitlines())) <= 120


BAD = [
    (
        "learning_rate = 0.002",
        "learning_rat = 0.002",
        "run.toml: optimizer.learning_rat: unknown key; did you mean optimizer.learning_rate?",
    ),
    ("[wire]", "[wir]", "run.toml: wir: unknown key; did you mean wire?"),
    ("format = 1", "format = 1\nseed = 4", "run.toml: seed: unknown key; did you mean training.seed?"),
    (
        "[wire]",
        "[wire]\nqqq = 1",
        "run.toml: wire.qqq: unknown key; known here: activations, gradients, slow, slow_mbit (or a later "
        "swarmnet wrote it: upgrade this one, docs/upgrading.md)",
    ),
    (
        "total_steps = 60",
        "total_steps = 60.0",
        "run.toml: training.total_steps = 60.0: must be an integer (optimizer steps",
    ),
    (
        "total_steps = 60",
        'total_steps = "60"',
        'run.toml: training.total_steps = "60": must be an integer (optimizer steps',
    ),
    (
        "total_steps = 60",
        "total_steps = true",
        "run.toml: training.total_steps = true: must be an integer (optimizer steps",
    ),
    ("total_steps = 60", "total_steps = 0", "run.toml: training.total_steps = 0: must be above 0 (optimizer steps"),
    ("total_steps = 60", "total_steps = 2024-01-01", 'run.toml: training.total_steps = "2024-01-01": must be an int'),
    ("total_steps = 60", "total_steps = {a = 1}", 'run.toml: training.total_steps = {"a": 1}: must be a value'),
    ("total_steps = 60", f"total_steps = {2**53}", "run.toml: training.total_steps = 9007199254740992: must be at"),
    ("eps = 1e-08", "eps = inf", "run.toml: optimizer.eps = Infinity: must be a finite number (added"),
    ("eps = 1e-08", "eps = nan", "run.toml: optimizer.eps = NaN: must be a finite number (added"),
    ("beta1 = 0.9", "beta1 = 1.0", "run.toml: optimizer.beta1 = 1.0: must be below 1.0 (decay"),
    ('layers = "auto"', 'layers = "all"', "run.toml: cut.layers = \"all\": must be 'auto', or must be a list in [ ]"),
    ('mode = "deterministic"', 'mode = "exact"', "run.toml: numerics.mode = \"exact\": must be 'deterministic',"),
    ('tokens_sha256 = ""', 'tokens_sha256 = "12"', 'run.toml: data.tokens_sha256 = "12": must match ^([0-9a-f]{64})?'),
    ("num_heads = 4", "num_heads = 3", "run.toml: model: num_heads = 3 must be a multiple of num_kv_heads = 2"),
    ("stages = 3 ", "stages = 9 ", "run.toml: cut.stages = 9 is more than model.num_layers = 6"),
    ('layers = "auto"', "layers = [1, 2]", "run.toml: cut.layers names 2 stages, cut.stages = 3"),
    ('policy = "open"', 'policy = "friends"', "run.toml: admission.policy"),
    ('policy = "open"', 'policy = "invite"', 'run.toml: admission: policy = "invite" goes with a key'),
    ('key = ""', 'key = "ssh-ed25519 AAAA"', "run.toml: admission.key"),
    ("suspect_s = 3.0", "heartbeat_s = 0.5", "run.toml: protocol.heartbeat_s is no longer a field: delete the line"),
    ("suspect_s = 3.0", "suspect_s = 30.0", "run.toml: protocol: suspect_s = 30.0 <= long_silence_s = 15.0"),
    ('codec = "int64"', 'codec = "fp32"', 'run.toml: averaging.codec = "fp32": averaging.sync = "exact" aggregates in'),
    ('codec = "int64"', 'codec = "sparse:0.1"', 'run.toml: averaging.codec = "sparse:0.1": averaging.sync = "exact" '),
    ('codec = "int64"', 'codec = "topk:0.01"', 'run.toml: averaging.codec = "topk:0.01": must be "small" or "int64" '),
    ('codec = "int64"', 'codec = "bf16"', 'run.toml: averaging.codec = "bf16": must be "small" or "int64" (sync'),
    ('mode = "deterministic"', 'mode = "fp32"', 'run.toml: numerics.mode = "fp32": averaging.sync = "exact" aggregate'),
    (
        "format = 1",
        "format = 2",
        "run.toml: format = 2: this version of swarmnet reads format 1: upgrade it (docs/upgr",
    ),
    ("format = 1", "format = true", "run.toml: format = true: must be an integer"),
    ("format = 1", "format = [1]", "run.toml: format = [1]: must be an integer"),
    ("format = 1", "format = ", "run.toml: is not valid TOML: Invalid value (at line 3, column"),
    (
        'reducer = "sum"',
        'reducer = "norm_clip"',
        'run.toml: averaging.reducer = "norm_clip": averaging.sync = "exact" aggregates integers: write averaging.re',
    ),
    ('reducer = "sum"', 'reducer = "mean"', 'run.toml: averaging.reducer = "mean": must be '),
    ("norm_factor = 2.0", "norm_factor = 0", "run.toml: averaging.norm_factor = 0: must be above 0"),
    *(
        (
            f"{name} = {default}",
            f"{name} = {other}",
            f"run.toml: averaging: {name} has no effect without {chooser}: leave it at its default, {default}",
        )
        for name, default, other, chooser in (
            ("overlap_after", "40", "7", 'sync = "overlap"'),
            ("inner_steps", "20", "9", 'sync = "local"'),
            ("partners", '"all"', '"pairs"', 'sync = "local"'),
            ("outer_warmup_steps", "60", "0", 'sync = "local"'),
            ("norm_factor", "2.0", "3.0", 'reducer = "norm_clip"'),
            ("clip_radius", "1.0", "0.5", 'reducer = "centered_clip"'),
            ("clip_iterations", "5", "3", 'reducer = "centered_clip"'),
        )
    ),
]


@pytest.mark.parametrize(("good", "bad", "line"), BAD, ids=[bad for _, bad, _ in BAD])
def test_bad_input_is_one_line_that_says_where_and_what(good: str, bad: str, line: str) -> None:
    assert good in DEFAULT
    with pytest.raises(UsageError) as caught:
        load(DEFAULT.replace(good, bad, 1), where="run.toml")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["[" * 5000, "name = " + "[" * 5000, "a." * 2000 + "b = 1", "", "\x00"])
def test_hostile_text_is_refused_like_any_other(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(f"{text}\n")
    assert len(str(caught.value)) < 5000


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
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + DEFAULT.encode())
    assert load(tmp_path / "marked.toml") == Manifest()
    path = tmp_path / "run.toml"
    with pytest.raises(UsageError, match=r"run\.toml: no such file"):
        load(path)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load(str(tmp_path))
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8"):
        load(path)
    path.write_text(DEFAULT, encoding="utf-8")
    assert load(path) == load(str(path)) == Manifest()


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


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("training.seed", "--set training.seed: write section.key=value"),
        (".seed=1", "--set .seed=1: write section.key=value"),
        ("training.sed=1", "--set: training.sed: unknown key; did you mean training.seed?"),
        ("training=1", "--set: training = 1: must be a table"),
        ("training.seed=1\nx=2", '--set: training.seed = "1\\nx=2": must be an integer'),
        ("name=7", "--set: name = 7: must be a string in quotes"),
    ],
)
def test_bad_overrides(assignment: str, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        override(Manifest(), [assignment])
    assert str(caught.value).startswith(line)
