"""Sources: what is read, in which order, and what each mistake is answered with."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.data.source import load_tokens, tokenizer_of
from swarmnet.data.tokenizer import Bytes, spelled
from swarmnet.errors import UsageError


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_the_standard_library_is_this_pythons_own_text():
    tokens = load_tokens("stdlib")
    text = tokens.ids.tobytes()
    root = Path(sysconfig.get_paths()["stdlib"])
    assert text.startswith((root / "__future__.py").read_bytes() + b"\0")
    assert text.endswith((root / "zoneinfo/_zoneinfo.py").read_bytes() + b"\0")
    assert (root / "json/decoder.py").read_bytes() + b"\0" in text
    assert tokens.num_tokens > 5_000_000 and tokens.vocab_size == 256


def test_the_standard_library_leaves_out_packages_tests_and_what_a_build_writes(tmp_path, monkeypatch):
    kept = ("abc.py", "json/__init__.py", "testing.py", "unittest/case.py")
    left_out = (
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/x.py",
        "json/tests/x.py",
        "idlelib/idle_test/x.py",
        "__pycache__/x.py",
        "sitecustomize.py",
        "_sysconfigdata__linux.py",
        "notes.txt",
        "lib-dynload/x.so",
    )
    for name in kept + left_out:
        write(tmp_path / name, name.encode())
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert load_tokens("stdlib").ids.tobytes() == b"".join(name.encode() + b"\0" for name in kept)


def test_text_is_taken_byte_by_byte(tmp_path):
    content = "\N{BOM}naïve\r\n\ttext \N{SNOWMAN}\0".encode()
    write(tmp_path / "a.txt", content)
    tokens = load_tokens("a.txt", base=tmp_path)
    assert tokens.ids.dtype == np.uint8 and tokens.ids.tobytes() == content + b"\0"


def test_a_folder_is_read_by_sorted_relative_path_without_hidden_files(tmp_path):
    files = {"b.txt": b"2", "a/z.md": b"1", "a.txt": b"0", "c/d/e": b"3", "B.txt": b"A", ".git/x": b"no", "a/.x": b"no"}
    for name, content in files.items():
        write(tmp_path / name, content)
    assert load_tokens(str(tmp_path)).ids.tobytes() == b"A\x000\x001\x002\x003\0"


def test_json_lines_give_their_text_field(tmp_path):
    rows = [{"text": "one"}, {"id": 3, "text": "zwölf\n"}, {"text": ""}]
    write(tmp_path / "a.jsonl", b"\n\n".join(json.dumps(row).encode() for row in rows))
    assert load_tokens("a.jsonl", base=tmp_path).ids.tobytes() == "one\0zwölf\n\0\0".encode()


def test_json_lines_in_a_folder_give_their_text_field_too(tmp_path):
    write(tmp_path / "b/part-0.jsonl", b'{"text": "one", "url": "x"}\n{"text": "two"}\n')
    write(tmp_path / "c.txt", b"three")
    write(tmp_path / "a.md", b'{"text": "as it is"}')
    assert load_tokens(str(tmp_path)).ids.tobytes() == b'{"text": "as it is"}\0one\0two\0three\0'
    write(tmp_path / "b/part-1.jsonl", b'{"txt": "four"}\n')
    with pytest.raises(UsageError, match=r"part-1\.jsonl, line 1: expected an object"):
        load_tokens(str(tmp_path))


@pytest.mark.parametrize("line", [b"{", b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[" * 100_000])
def test_a_broken_json_line_is_named(tmp_path, line):
    write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UsageError, match=r"a\.jsonl, line 3: not JSON"):
        load_tokens("a.jsonl", base=tmp_path)


@pytest.mark.parametrize("line", [b"3", b"[]", b"null", b'"text"', b'{"txt": "a"}', b'{"text": 5}', b'{"text": null}'])
def test_a_json_line_without_text_is_named(tmp_path, line):
    write(tmp_path / "a.jsonl", line)
    with pytest.raises(UsageError, match=r'a\.jsonl, line 1: expected an object with a string "text"'):
        load_tokens("a.jsonl", base=tmp_path)


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path):
    write(tmp_path / "fine.txt", b"fine")
    write(tmp_path / "latin.txt", b"caf\xe9")
    with pytest.raises(UsageError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        load_tokens(".", base=tmp_path)


@pytest.mark.parametrize("source", ["", "missing.txt", "corpus:large"])
def test_an_unknown_source_lists_what_there_is(tmp_path, source):
    with pytest.raises(UsageError, match="corpus:small"):
        load_tokens(source, base=tmp_path)


def test_a_name_the_system_refuses_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read data source"):
        load_tokens("x" * 5000, base=tmp_path)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", b"a")
    write(tmp_path / "closed/b.txt", b"b")
    scandir = os.scandir

    def guarded(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(UsageError, match=r"cannot read .*closed.*: Permission denied"):
        load_tokens(".", base=tmp_path)


def test_an_empty_source_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "blank.jsonl", b"\n \n")
    write(tmp_path / "empty.bin", b"")
    np.save(tmp_path / "empty.npy", np.empty(0, np.uint16))
    write(tmp_path / "empty.txt", b"")
    write(tmp_path / "texts" / "a.txt", b"")
    write(tmp_path / "texts" / "b.txt", b"")
    for source in ("empty", "blank.jsonl", "empty.bin", "empty.npy", "empty.txt", "texts"):
        with pytest.raises(UsageError, match="holds no t"):
            load_tokens(source, base=tmp_path)


def test_progress_counts_documents_and_tokens(tmp_path):
    seen = []
    write(tmp_path / "1", b"ab")
    write(tmp_path / "2", b"")
    load_tokens(".", base=tmp_path, progress=lambda documents, tokens: seen.append((documents, tokens)))
    assert seen == [(1, 3), (2, 4)]


# ---------------------------------------------------------------- files of token ids


@pytest.mark.parametrize(("kind", "dtype"), [("", "<u2"), (".u8", "u1"), (".u16", "<u2"), (".u32", "<u4")])
def test_bin_files_are_mapped_with_the_type_their_name_says(tmp_path, kind, dtype):
    name = f"a{kind}.bin"
    ids = np.array([3, 0, 200, 7], dtype=dtype)
    write(tmp_path / name, ids.tobytes())
    tokens = load_tokens(name, "ids", base=tmp_path)
    assert isinstance(tokens.ids, np.memmap) and tokens.ids.dtype == np.dtype(dtype)
    assert tokens.ids.tolist() == ids.tolist() and tokens.vocab_size == 201


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "i2", "i4", "i8", "u8", ">u2", ">i4"])
def test_npy_files_say_their_type(tmp_path, dtype):
    ids = np.array([3, 0, 100, 7]).astype(dtype)
    np.save(tmp_path / "a.npy", ids)
    tokens = load_tokens("a.npy", "ids", base=tmp_path)
    assert tokens.ids.dtype in (np.uint8, np.uint16, np.uint32) and tokens.ids.tolist() == ids.tolist()
    assert tokens.sha256 == hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), np.uint16), "one dimension"),
        (np.zeros(3), "one dimension"),
        (np.array([3, -1]), "token id -1"),
        (np.array([1 << 31]), "token id 2147483648"),
        (np.array([1 << 31], np.uint32), "token id 2147483648"),
        (np.array([None, "x"]), "not a .npy file"),
    ],
)
def test_unusable_npy_files_are_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(UsageError, match=message):
        load_tokens("a.npy", "ids", base=tmp_path)


def test_damaged_token_files_are_refused(tmp_path):
    write(tmp_path / "a.npy", b"\x93NUMPY")
    write(tmp_path / "zip.npy", b"PK\x05\x06" + bytes(18))
    write(tmp_path / "odd.bin", b"abc")
    for name, message in (("a.npy", "not a .npy"), ("zip.npy", "one array|not a .npy"), ("odd.bin", "no whole number")):
        with pytest.raises(UsageError, match=message):
            load_tokens(name, "ids", base=tmp_path)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    write(tmp_path / "a.bin", np.array([3, 255], "<u2").tobytes())
    write(tmp_path / "b.bin", np.array([3, 256], "<u2").tobytes())
    assert load_tokens("a.bin", base=tmp_path).vocab_size == 256
    with pytest.raises(UsageError, match="token id 256, but tokenizer 'bytes' knows only 256"):
        load_tokens("b.bin", base=tmp_path)


def test_text_needs_a_tokenizer(tmp_path):
    write(tmp_path / "a.txt", b"x")
    with pytest.raises(UsageError, match="is text"):
        load_tokens("a.txt", "ids", base=tmp_path)
    with pytest.raises(UsageError, match="unknown tokenizer 'gpt2'"):
        load_tokens("a.txt", "gpt2", base=tmp_path)


# ---------------------------------------------------------------- tokenizer.json


@pytest.fixture
def word_tokenizer(tmp_path):
    library = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2, "</s>": 3, "[CLS]": 300}
    tokenizer = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.post_processor = library.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 300)])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_any_tokenizer_json_encodes_each_document_whole_and_ends_it(tmp_path, word_tokenizer):
    rows = [{"text": "hello world hello"}, {"text": ""}, {"text": "you"}]
    write(tmp_path / "a.jsonl", b"\n".join(json.dumps(row).encode() for row in rows))
    tokens = load_tokens("a.jsonl", "tokenizer.json", base=tmp_path)
    assert tokens.ids.tolist() == [1, 2, 1, 3, 3, 0, 3]
    assert tokens.ids.dtype == np.uint16 and tokens.vocab_size == 301
    assert tokens.tokenizer_sha256 == hashlib.sha256(word_tokenizer.read_bytes()).hexdigest()


def test_more_documents_than_a_batch_keep_their_order(tmp_path, word_tokenizer):
    write(tmp_path / "a.jsonl", b"".join(b'{"text": "%s"}\n' % w for w in [b"hello", b"world"] * 400))
    assert load_tokens("a.jsonl", "tokenizer.json", base=tmp_path).ids.tolist() == [1, 3, 2, 3] * 400


def test_a_bad_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    write(tmp_path / "a.txt", b"x")
    write(tmp_path / "broken.json", b"{}")
    for name, message in (("broken.json", "is not a tokenizer.json"), ("missing.json", "cannot read tokenizer")):
        with pytest.raises(UsageError, match=message):
            load_tokens("a.txt", name, base=tmp_path)


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'swarmnet-train\[tokenizers\]'"):
        load_tokens("corpus:small", "tokenizer.json", base=tmp_path)


def test_a_prompt_goes_on_and_ids_are_text_again(tmp_path, word_tokenizer):
    words = tokenizer_of("tokenizer.json", tmp_path)
    assert words.of_prompt("hello world") == [1, 2] and words.decode([2, 1, 299]) == "world hello"
    plain = tokenizer_of("bytes", None)
    assert plain.of_prompt("é") == [0xC3, 0xA9]
    assert plain.decode([0xC3, 0xA9, 0, 0xFF, 300, 65]) == "é\n\N{REPLACEMENT CHARACTER}A"
    with pytest.raises(UsageError, match="unknown tokenizer 'ids'"):
        tokenizer_of("ids", None)
    for each in (plain, words):
        with pytest.raises(UsageError, match="the prompt is no UTF-8: character 2 of it"):
            each.of_prompt("a\udcff")


@given(st.text(max_size=60), st.binary(max_size=60))
def test_a_text_that_comes_byte_by_byte_shows_whole_characters(prompt, more):
    plain, before = Bytes(), prompt.encode()
    pieces = list(spelled(plain, before, more))
    assert "".join(pieces) == plain.decode(more)
    assert list(spelled(plain, [0x41], "a€b".encode())) == ["a", "", "", "€", "b", ""]


def test_a_word_that_follows_is_spelled_as_in_a_text(tmp_path, word_tokenizer):
    words = tokenizer_of("tokenizer.json", tmp_path)
    assert list(spelled(words, [1], [2, 1, 299] + [1] * 40))[:3] == [" world", " hello", ""]
    assert "".join(spelled(words, [1] * 30, [2] * 50)) == " world" * 50
