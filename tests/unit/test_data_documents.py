"""Documents of files: records with a column, compressed ones, saved data sets; and files of ids made from them."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import compute, parquet

from swarmnet.cli.frame import run
from swarmnet.data import source as sources
from swarmnet.data.documents import Reading, documents_of
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
    (tmp_path / "a#b.txt").write_bytes(b"it")
    assert load_tokens("c#.txt", base=tmp_path).ids.tobytes() == b"sharp\0"
    assert load_tokens("a#b.txt", base=tmp_path).ids.tobytes() == b"it\0"


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


def said(path: Path) -> str:
    with pytest.raises(UsageError) as error:
        list(documents_of(path))
    return str(error.value)


def test_what_is_wrong_is_said_with_the_place_and_what_to_do(tmp_path):
    parquet.write_table(table("content"), tmp_path / "a.parquet")
    assert "name one as SOURCE#content" in said(tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"text": [1, 2]}), tmp_path / "n.parquet")
    assert "has no column of text 'text'; 'text' holds int64: it has none" in said(tmp_path / "n.parquet")
    parquet.write_table(table(texts=["a", None]), tmp_path / "null.parquet")
    assert "null.parquet, row 2, column 'text': a row without a text" in said(tmp_path / "null.parquet")
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


# ---------------------------------------------------------------- columns

LONG = b"caf\xe9 au lait, and longer than a view holds itself"
WORDS = arrow.array(["one", "a text that is longer than a view holds itself", "one"])
CODED = WORDS.dictionary_encode()
KINDS = {
    **{kind: WORDS.cast(kind) for kind in ("string", "large_string", "string_view", "binary", "large_binary")},
    "binary_view": WORDS.cast(arrow.binary_view()),
    "dictionary": CODED,
    "dictionary of views": arrow.DictionaryArray.from_arrays(CODED.indices, CODED.dictionary.cast("string_view")),
    "runs": compute.run_end_encode(WORDS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_text_is_read(tmp_path, kind):
    rows = arrow.table({"text": KINDS[kind]})
    stream(tmp_path / "a.arrow", rows)
    found = [text.encode() for text in WORDS.to_pylist()]
    assert list(documents_of(tmp_path / "a.arrow")) == found
    if kind not in ("dictionary of views", "runs"):  # pyarrow cannot write them
        parquet.write_table(rows, tmp_path / "a.parquet")
        assert list(documents_of(tmp_path / "a.parquet")) == found


def unchecked(kind: arrow.DataType, texts: list[bytes]) -> arrow.Array:
    """What writers in other languages leave: strings that nobody has looked at."""
    raw = arrow.array(texts).cast("binary_view" if str(kind) == "string_view" else "binary")
    return arrow.Array.from_buffers(kind, len(raw), raw.buffers())


STRINGS = unchecked(arrow.string(), [b"fine", LONG, b"fine, too"])
NOT_UTF8 = {
    "string": STRINGS,
    "string_view": unchecked(arrow.string_view(), [b"fine", LONG, b"fine, too"]),
    "binary": arrow.array([b"fine", LONG, b"fine, too"]),
    "dictionary": arrow.DictionaryArray.from_arrays(arrow.array([0, 1, 2]), STRINGS),
}


@pytest.mark.parametrize("kind", NOT_UTF8)
def test_a_row_that_is_not_utf8_is_named_or_skipped(tmp_path, kind):
    path = tmp_path / "a.arrow"
    stream(path, arrow.table({"text": NOT_UTF8[kind]}))
    assert "a.arrow, row 2, column 'text' is not UTF-8 text (byte 3)" in said(path)
    reading = Reading(skip_bad=True)
    assert list(documents_of(path, reading)) == [b"fine", b"fine, too"]
    assert reading.skipped == 1 and "row 2" in reading.first_bad


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (arrow.array([["a"]]), "list<"),
        (arrow.array([{"a": "b"}]), "struct<a: string>"),
        (arrow.array([None]), "null"),
        (arrow.array([b"ab"], arrow.binary(2)), "fixed_size_binary[2]"),
    ],
)
def test_a_column_that_is_no_text_is_named_with_its_type(tmp_path, values, kind):
    parquet.write_table(arrow.table({"text": values}), tmp_path / "a.parquet")
    assert f"'text' holds {kind}" in said(tmp_path / "a.parquet")


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    twice = arrow.table([WORDS, WORDS], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    stream(tmp_path / "a.arrow", twice)
    assert "has 2 columns 'text'" in said(tmp_path / "a.parquet") and "has 2 columns 'text'" in said(
        tmp_path / "a.arrow"
    )
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a", "of": {"text": "b"}}\n{"text": "a", "text": "b"}')
    assert 'a.jsonl, line 2: the object has "text" more than once' in said(tmp_path / "a.jsonl")


def test_checks_that_a_format_offers_are_made(tmp_path):
    page = tmp_path / "page.parquet"
    rows = arrow.table({"text": [f"row {number} of a page" for number in range(200)]})
    plain = {"compression": None, "use_dictionary": False, "write_statistics": False}
    parquet.write_table(rows, page, write_page_checksum=True, **plain)
    content = bytearray(page.read_bytes())
    content[content.index(b"row 77")] ^= 1
    page.write_bytes(content)
    assert "page.parquet cannot be read as parquet" in said(page) and "CRC" in said(page)

    whole = tmp_path / "whole.arrow"
    stream(whole, table())
    ends = {"open": whole.read_bytes()[:-8], "cut": whole.read_bytes()[:-90], "more": whole.read_bytes() + bytes(16)}
    for name, content in ends.items():
        (tmp_path / f"{name}.arrow").write_bytes(content)
        assert f"{name}.arrow cannot be read as arrow" in said(tmp_path / f"{name}.arrow")

    # An offset that leads out of the file's memory.
    far = tmp_path / "far.arrow"
    stream(far, arrow.table({"text": ["x" * 777, "y" * 55]}))
    offsets, wrong = (np.array([end, 832], "<i4").tobytes() for end in (777, 2**30))
    far.write_bytes(far.read_bytes().replace(offsets, wrong))
    assert "far.arrow cannot be read as arrow" in said(far)

    for name in ("empty.txt.gz", "empty.jsonl.zst"):
        (tmp_path / name).write_bytes(b"")
        assert f"{name} is empty" in said(tmp_path / name)


# ---------------------------------------------------------------- entries and names


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


ENTRIES = {
    "a named pipe": ("z.txt", fifo),
    "a socket": ("z.txt", unix_socket),
    "a link to a folder": ("z", lambda path: path.symlink_to(".")),
    "No such file": ("z.txt", lambda path: path.symlink_to("nowhere")),
    "symbolic links": ("z.txt", lambda path: path.symlink_to("z.txt")),
    "is not UTF-8: rename": (os.fsdecode(b"z\xe9.txt"), lambda path: path.write_bytes(b"z")),
    "'.csv' are not read": ("z.csv", lambda path: path.write_bytes(b"z")),
    "'.bin' are not read": ("z.bin", lambda path: path.write_bytes(b"zz")),
    "z.parquet cannot be read": ("z.parquet", lambda path: path.write_bytes(b"PAR1")),
    "no column of text 'text'": ("z.parquet", lambda path: parquet.write_table(table("content"), path)),
}


@pytest.mark.parametrize("says", ENTRIES)
def test_an_entry_that_cannot_be_read_is_refused_before_any_text_is(tmp_path, says, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.txt").write_bytes(b"not UTF-8, which nobody must have noticed yet: \xff")
    name, make = ENTRIES[says]
    make(tmp_path / "set" / name)
    assert run(["init", "run.toml", "--data", "set"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["/dev/null", "pipe", os.fsdecode(b"z\xe9.txt"), "~nobody-has-this-name/a", "x" * 5000]
)
@pytest.mark.parametrize("command", [["init", "run.toml", "--data"], ["local", "--out", "out", "--data"]])
def test_a_source_that_cannot_be_read_is_refused(tmp_path, command, name, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / os.fsdecode(b"z\xe9.txt")).write_bytes(b"z")
    assert run([*command, name]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("swarmnet: error: ") and ("is not UTF-8: rename it" in error) == ("\udce9" in name)


def test_links_to_files_and_odd_names_are_read_in_one_order(tmp_path):
    (tmp_path / "set/x.jsonl").mkdir(parents=True)
    for name in ("set/B.txt", "set/b.txt", "set/a\nb.txt", "set/x.jsonl/c.TXT", "outside"):
        (tmp_path / name).write_text(name)
    (tmp_path / "set/link.txt").symlink_to("../outside")
    found = [document.decode() for document in documents_of(tmp_path / "set")]
    assert found == ["set/B.txt", "set/a\nb.txt", "set/b.txt", "outside", "set/x.jsonl/c.TXT"]


@pytest.mark.parametrize(
    "ending",
    ["csv", "json", "tsv", "html", "pdf", "zip", "bz2", "feather", "npy", "json.gz", "txt.bz2", "parquet.gz", "bak"],
)
def test_an_unknown_ending_is_refused_with_the_known_ones(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(b'{"text": "could be read as text"}')
    assert "are not read" in said(path) and ".jsonl .ndjson .parquet .arrow" in said(path) and ".txt" in said(path)


ENCODED = {
    "holds NUL characters": ["utf-16-le", "utf-16-be", "utf-32-le"],
    "with the mark of UTF-16: iconv -f UTF-16": ["utf-16"],
    "with the mark of UTF-32: iconv -f UTF-32": ["utf-32"],
    "is not UTF-8 text": ["latin-1"],
}


@pytest.mark.parametrize(("says", "encoding"), [(says, each) for says, some in ENCODED.items() for each in some])
def test_text_in_another_encoding_is_refused_in_words(tmp_path, says, encoding):
    (tmp_path / "a.txt").write_bytes("Café".encode(encoding))
    assert says in said(tmp_path / "a.txt")
    if encoding != "latin-1":
        (tmp_path / "a.jsonl").write_bytes('{"text": "Café"}\n{"text": "au lait"}\n'.encode(encoding))
        assert "a.jsonl, line 1: not JSON in UTF-8" in said(tmp_path / "a.jsonl")


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


def test_tokenize_leaves_out_what_is_no_text_and_counts_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.jsonl").write_bytes(b'{"text": "a"}\n{oops\n{"text": 3}\n{"text": "a\\u0000b"}\n{"text": "b"}\n')
    (tmp_path / "set/b.txt").write_bytes(b"caf\xe9")
    parquet.write_table(table(texts=["c", None]), tmp_path / "set/c.parquet")
    assert run(["tokenize", "set", "ids", "--skip-bad"]) == 0
    assert (tmp_path / "ids.u8.bin").read_bytes() == b"a\0b\0c\0"
    assert "left out 5 documents; the first: set/a.jsonl, line 2: not JSON" in capsys.readouterr().out
    assert run(["tokenize", "set", "more"]) == 2
    assert "a.jsonl, line 2: not JSON" in (said := capsys.readouterr().err) and "--skip-bad" in said
