"""Documents of files: records with a column, compressed ones, saved data sets; and files of ids made from them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet

from swarmnet.cli.frame import run
from swarmnet.data import source as sources
from swarmnet.data.documents import documents_of
from swarmnet.data.source import load_tokens
from swarmnet.errors import UsageError
from swarmnet.local.prepare import absolute

TEXTS = ["one", "zwölf\n", "", "\N{SNOWMAN}"]
DOCUMENTS = [text.encode() for text in TEXTS]


def table(column: str = "text", texts: list[str | None] | None = None) -> arrow.Table:
    return arrow.table({"id": list(range(len(texts or TEXTS))), column: texts or TEXTS})


def jsonl(column: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, column: text}).encode() + b"\n" for text in TEXTS)


def zst(path: Path, content: bytes) -> None:
    with arrow.output_stream(str(path), compression="zstd") as file:
        file.write(content)


def stream(path: Path, rows: arrow.Table) -> None:
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)


def saved(folder: Path, texts: list[list[str]]) -> Path:
    """What `datasets.Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(texts):05}.arrow" for number in range(len(texts))]
    for name, part in zip(names, texts, strict=True):
        stream(folder / name, table(texts=list(part)))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_records_give_their_column_whatever_the_format(tmp_path):
    parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=2)
    stream(tmp_path / "b.arrow", table())
    with arrow.OSFile(str(tmp_path / "c.arrow"), "wb") as file, arrow.ipc.new_file(file, table().schema) as writer:
        writer.write_table(table(), max_chunksize=3)
    (tmp_path / "d.jsonl").write_bytes(jsonl())
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(jsonl()))
    zst(tmp_path / "f.ndjson.zst", jsonl())
    for path in sorted(tmp_path.iterdir()):
        assert list(documents_of(path)) == DOCUMENTS, path.name
    assert list(documents_of(tmp_path)) == 6 * DOCUMENTS


def test_large_strings_are_strings(tmp_path):
    rows = arrow.table({"text": arrow.array(TEXTS, arrow.large_string())})
    parquet.write_table(rows, tmp_path / "a.parquet")
    assert list(documents_of(tmp_path / "a.parquet")) == DOCUMENTS


def test_compressed_text_is_one_document(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a\nb"))
    zst(tmp_path / "b.txt.zst", b"c\nd")
    assert list(documents_of(tmp_path)) == [b"a\nb", b"c\nd"]


def test_a_column_is_named_behind_the_path(tmp_path):
    parquet.write_table(table("content"), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(jsonl("content"))
    ids = b"".join(document + b"\0" for document in DOCUMENTS)
    for name in ("a.parquet#content", "b.jsonl#content"):
        assert load_tokens(name, base=tmp_path).ids.tobytes() == ids
    assert load_tokens(f"{tmp_path}#content").ids.tobytes() == 2 * ids


def test_a_file_with_the_mark_in_its_name_is_that_file(tmp_path):
    (tmp_path / "c#.txt").write_bytes(b"sharp")
    (tmp_path / "a.txt#b").write_bytes(b"it")
    assert load_tokens("c#.txt", base=tmp_path).ids.tobytes() == b"sharp\0"
    assert load_tokens("a.txt#b", base=tmp_path).ids.tobytes() == b"it\0"


def test_a_saved_data_set_is_its_files_in_its_order(tmp_path):
    folder = saved(tmp_path / "set", [["b", "a"], ["c"]])
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    assert list(documents_of(folder)) == [b"c", b"b", b"a"]


def test_of_several_splits_train_is_taken(tmp_path):
    saved(tmp_path / "all/train", [["t"]])
    saved(tmp_path / "all/test", [["no"]])
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(documents_of(tmp_path / "all")) == [b"t"]
    assert list(documents_of(tmp_path / "all/test")) == [b"no"]


def said(path: Path, column: str = "text") -> str:
    with pytest.raises(UsageError) as error:
        list(documents_of(path, column))
    return str(error.value)


def test_what_is_wrong_is_said_with_the_place_and_what_to_do(tmp_path):
    parquet.write_table(table("content"), tmp_path / "a.parquet")
    assert "name one as SOURCE#content" in said(tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"text": [1, 2]}), tmp_path / "n.parquet")
    assert "has no column of text 'text': it has none" in said(tmp_path / "n.parquet")
    parquet.write_table(table(texts=["a", None]), tmp_path / "null.parquet")
    assert "has a row without a text" in said(tmp_path / "null.parquet")
    (tmp_path / "b.jsonl").write_bytes(jsonl("content"))
    assert "line 1" in said(tmp_path / "b.jsonl") and "SOURCE#content" in said(tmp_path / "b.jsonl")
    for name in ("x.parquet", "x.arrow", "x.txt.gz", "x.jsonl.zst"):
        (tmp_path / name).write_bytes(b"not what its name says")
        assert name in said(tmp_path / name)
    cut = gzip.compress(jsonl())
    (tmp_path / "cut.jsonl.gz").write_bytes(cut[: len(cut) // 2])
    assert "cut.jsonl.gz" in said(tmp_path / "cut.jsonl.gz")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/state.json").write_text('{"_data_files": [{"filename": "../a.parquet"}]}')
    assert "outside its folder" in said(tmp_path / "set")
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict/dataset_dict.json").write_text("{}")
    assert "without 'train'" in said(tmp_path / "dict")


def test_processes_elsewhere_get_the_whole_path_and_the_column(tmp_path):
    (tmp_path / "blob").write_bytes(jsonl("content"))
    (tmp_path / "b.jsonl").symlink_to("blob")  # as a cache of downloads has it: the ending is the link's
    assert absolute("b.jsonl#content", tmp_path) == f"{tmp_path}/b.jsonl#content"


# ---------------------------------------------------------------- files of ids


def test_tokenize_writes_what_loading_the_text_gives(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 7)  # several blocks
    (tmp_path / "b.jsonl").write_bytes(jsonl())
    (tmp_path / "out").mkdir()  # in nobody's way: the file's name has an ending
    assert run(["tokenize", str(tmp_path / "b.jsonl"), str(tmp_path / "out")]) == 0
    out = tmp_path / "out.u8.bin"
    text, ids = load_tokens(str(tmp_path / "b.jsonl")), load_tokens(str(out))
    assert isinstance(ids.ids, np.memmap) and ids.sha256 == text.sha256
    assert f"--data {out}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.jsonl", "out", "out.u8.bin"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["b.jsonl", "there"], "exists already"),
        (["b.jsonl", "no/where"], "no such folder"),
        (["b.jsonl", "x.u32.bin"], "ends in .u8.bin"),
        (["missing.txt", "x"], "does not exist"),
        (["there.u8.bin", "x"], "holds token ids already"),
        (["bad.jsonl", "x"], "bad.jsonl, line 1"),
        (["b.jsonl", "x", "--tokenizer", "what"], "unknown tokenizer"),
    ],
)
def test_tokenize_says_what_is_wrong_and_leaves_nothing(words, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(jsonl())
    (tmp_path / "bad.jsonl").write_bytes(b"{")
    (tmp_path / "there.u8.bin").write_bytes(b"ids")
    assert run(["tokenize", *words]) == 2
    assert says in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.jsonl", "bad.jsonl", "there.u8.bin"]
