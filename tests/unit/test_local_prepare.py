"""From options to a manifest on disk."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from swarmnet.data.source import read_tokens
from swarmnet.errors import UsageError
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import choose, prepare, resume
from swarmnet.manifest.file import load, to_toml
from swarmnet.manifest.schema import Admission, Data, Manifest, Model
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.admission_files import Owner, OwnPass, admissions_of
from swarmnet.net.identity import Identity


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The path of a text."""
    (tmp_path / "text.txt").write_text("abc " * 2000)
    return str(tmp_path / "text.txt")


def test_sums_are_exact_and_small_unless_something_else_is_said(tmp_path: Path) -> None:
    usual = choose(LocalOptions(stages=2, steps=7, seed=3))
    assert (usual.numerics.mode, usual.averaging.codec) == ("deterministic", "small")
    assert (usual.cut.stages, usual.training.total_steps, usual.training.seed) == (2, 7, 3)
    assert choose(LocalOptions(numerics="deterministic")).averaging.codec == "small"
    fast = choose(LocalOptions(numerics="fast"))
    assert (fast.numerics.mode, fast.averaging.codec) == ("fast", "small")
    assert choose(LocalOptions(set=("averaging.codec=int64",))).averaging.codec == "int64"
    wide = tmp_path / "wide.toml"
    wide.write_text(to_toml(choose(LocalOptions(set=("averaging.codec=int64",)))))
    assert choose(LocalOptions(manifest=wide, numerics="deterministic")).averaging.codec == "int64"
    assert choose(LocalOptions(manifest=wide, numerics="fast")).averaging.codec == "int64"


def test_more_stages_than_layers_get_more_layers() -> None:
    assert choose(LocalOptions(stages=9)).model.num_layers == 9
    assert choose(LocalOptions(stages=2)).model.num_layers == Model().num_layers


def test_num_parameters_counts_every_tensor() -> None:
    model = Model(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
    )
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8  # q, k, v, o
    assert model.num_parameters == 2 * (attention + 3 * 8 * 12 + 2 * 8) + 2 * 10 * 8 + 8
    biased = model.model_copy(update={"attention_bias": True, "tie_embeddings": True})
    assert biased.num_parameters == model.num_parameters + 2 * (8 + 4 + 4) - 10 * 8
    normed = model.model_copy(update={"attention_bias": True, "output_bias": True, "qk_norm": True})
    assert normed.num_parameters == model.num_parameters + 2 * (8 + 4 + 4 + 8 + 2 * 4)


def test_what_children_read_is_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 200)
    options = LocalOptions(data=str(tmp_path / "text.txt"), set=("training.microbatches=5",))
    prepared = prepare(options, tmp_path / "out")
    assert not (tmp_path / "out").exists()  # nothing is left of what is refused later
    prepared.write()
    assert prepared.exact and prepared.lossless
    assert load(prepared.path) == prepared.manifest
    assert prepared.manifest.training.microbatches == 5
    tokens = read_tokens(prepared.manifest.data)
    assert prepared.manifest.data.num_tokens == tokens.num_tokens and len(tokens.sha256) == 64
    assert prepare(options, tmp_path / "again").run_id == prepared.run_id


def test_a_manifest_file_keeps_its_own_run(tmp_path: Path, text: str) -> None:
    theirs = choose(LocalOptions(stages=4, steps=9, seed=5, data="text.txt", numerics="fast"))
    (tmp_path / "theirs.toml").write_text(to_toml(theirs))
    options = LocalOptions(manifest=tmp_path / "theirs.toml", set=("wire.activations=bf16",))
    prepared = prepare(options, tmp_path / "out")
    manifest = prepared.manifest
    assert (manifest.cut.stages, manifest.training.total_steps, manifest.training.seed) == (4, 9, 5)
    assert manifest.numerics.mode == "fast" and not prepared.lossless and not prepared.exact
    assert manifest.data.source == text  # relative to the file that named it


def test_other_data_than_agreed_is_refused(tmp_path: Path, text: str) -> None:
    prepared = prepare(LocalOptions(data=text), tmp_path / "out")
    prepared.write()
    (tmp_path / "text.txt").write_text("abd " * 2000)
    with pytest.raises(UsageError):
        read_tokens(prepared.manifest.data)
    with pytest.raises(UsageError):
        prepare(LocalOptions(manifest=prepared.path), tmp_path / "again")


def test_other_windows_have_another_root(tmp_path: Path, text: str) -> None:
    prepared = prepare(LocalOptions(data=text), tmp_path / "out")
    prepared.write()
    again = prepare(LocalOptions(manifest=prepared.path), tmp_path / "again")
    assert again.run_id == prepared.run_id
    longer = LocalOptions(manifest=prepared.path, set=("training.sequence_length=65",))
    root = prepare(longer, tmp_path / "longer").manifest.data.tokens_root
    assert len(root) == 64 and root != prepared.manifest.data.tokens_root


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"--set model\.vocab_size=256"):
        prepare(LocalOptions(data=text, set=("model.vocab_size=100",)), tmp_path / "out")


def test_a_codec_that_is_not_installed_is_refused_before_anything_is_read_or_written(tmp_path: Path) -> None:
    line = r"averaging\.codec: codec acme\.sign: no installed distribution .* install the one that brings it"
    options = LocalOptions(data="nowhere.txt", set=("averaging.sync=local", "averaging.codec=acme.sign"))
    with pytest.raises(UsageError, match=line):
        prepare(options, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "run.toml").write_text(to_toml(choose(options)))
    with pytest.raises(UsageError, match=line):
        resume(tmp_path)


def test_a_text_too_short_for_one_microbatch_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"too few for a microbatch .* lower\s+training\.sequence_length"):
        prepare(LocalOptions(data=text, set=("training.sequence_length=9000",)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "pure"),
    [
        ((), True),
        (("averaging.sync=overlap",), True),
        (("numerics.mode=fast",), True),
        (("averaging.sync=local",), False),
    ],
)
def test_one_process_is_the_measure_where_it_does_not_show_who_computed_what(
    tmp_path: Path, text: str, settings: tuple[str, ...], pure: bool
) -> None:
    assert prepare(LocalOptions(data=text, set=settings), tmp_path / "out").pure == pure


def test_bad_settings_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nonsense"):
        prepare(LocalOptions(set=("training.nonsense=1",)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flag_beside_a_manifest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "theirs.toml"
    path.write_text(to_toml(choose(LocalOptions())))
    with pytest.raises(UsageError, match=r"^--stages: cut.stages = 99 is more than model.num_layers"):
        choose(LocalOptions(manifest=path, typed=(("--stages", "cut.stages=99"),)))


def test_a_swarm_by_invitation_has_an_owner_of_its_own_who_invites_its_peers(tmp_path: Path) -> None:
    """A manifest's real owner need not be here."""
    there = Identity.generate().peer
    given = Manifest(admission=Admission(policy="invite", key=there), data=Data(source="corpus:small"))
    (tmp_path / "given.toml").write_text(to_toml(given))
    for number, options in enumerate(
        (LocalOptions(data="corpus:small", admission="invite"), LocalOptions(manifest=tmp_path / "given.toml"))
    ):
        prepared = prepare(options, tmp_path / str(number))
        prepared.write()
        owner, file = prepared.manifest.admission.key, prepared.path.with_suffix(".invitation")
        assert owner not in ("", there) and Owner(prepared.path, RunTerms.of(prepared.manifest)).run == prepared.run_id
        identity = Identity.generate()
        mine = OwnPass(
            admissions_of(RunTerms.of(prepared.manifest)), identity, "stage", tmp_path, given=str(file), now=time.time()
        )
        assert mine.shown and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_open_swarm_invites_nobody(tmp_path: Path) -> None:
    prepared = prepare(LocalOptions(data="corpus:small"), tmp_path / "out")
    prepared.write()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.toml"]
