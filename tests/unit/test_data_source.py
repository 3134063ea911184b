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

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens, tokenizer_of
from swarmnet.data.tokenizer import Bytes, spelled
from swarmnet.data.tokens import verify
from swarmnet.errors import UsageError
from swarmnet.manifest.file import load


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
    content = "\N{BOM}naïve\r\n\ttext \N{SNOWMAN}".encode()
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


NOT_JSON = (b"{", b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[" * 100_000)
NO_TEXT = (b"3", b"[]", b"null", b'"text"', b'{"txt": "a"}', b'{"text": 5}', b'{"text": null}')


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        *(("a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n", r"a\.jsonl, line 3: not JSON") for line in NOT_JSON),
        *(("a.jsonl", line, r'a\.jsonl, line 1: expected an object with a string "text"') for line in NO_TEXT),
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 text \(byte 3\)"),
        *((source, b"", "corpus:small") for source in ("", "missing.txt", "corpus:large")),
        ("x" * 5000, b"", "cannot read data source"),
    ],
)
def test_a_source_that_cannot_be_read_is_named_with_its_place(tmp_path, source, content, message):
    if content:
        write(tmp_path / source, content)
    with pytest.raises(UsageError, match=message):
        load_tokens(source, base=tmp_path)


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
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000000000000,)}\n"
    write(tmp_path / "far.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    write(tmp_path / "open.npy", b"\x93NUMPY\x01\x00\x04\x00('<\n")
    refused = dict.fromkeys(("a.npy", "far.npy", "open.npy"), "not a .npy")
    for name, message in (refused | {"zip.npy": "one array|not a .npy", "odd.bin": "no whole number"}).items():
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


@pytest.fixture
def chat_tokenizer(tmp_path):
    """Bytes, special tokens, and `<eot>`, which its file does not mark as special."""
    library = pytest.importorskip("tokenizers")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = library.Tokenizer(library.models.BPE(dict(zip(sorted(alphabet), range(256), strict=True)), []))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<|im_end|>", "<|im_start|>", "<\uff5cend\uff5c>"])  # 256 to 259
    tokenizer.add_tokens(["<eot>", "<tool>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


GUESSED = "guessed: no file in the folder of tokenizer.json names one"
ENDS = [
    ({}, 257, f"documents end with '<|im_end|>' ({GUESSED})"),
    ({"config": {"eos_token_id": 259}}, 259, "documents end with '<\uff5cend\uff5c>' (eos_token_id of config.json)"),
    (
        {"config": {"eos_token_id": [9999, 256, 257]}},
        256,
        "config.json names 9999, which is no token; config.json names '<|im",
    ),
    (
        {"config": {"eos_token_id": 256}, "tokenizer_config": {"eos_token": "<eot>"}},
        256,
        "tokenizer_config.json names '<eot>'",
    ),
    (
        {"tokenizer_config": {"eos_token": {"content": "<eot>"}}},
        260,
        "documents end with '<eot>' (eos_token of tokenizer_c",
    ),
    (
        {"special_tokens_map": {"eos_token": "</s>"}},
        256,
        "documents end with '</s>' (eos_token of special_tokens_map.json)",
    ),
    ({"generation_config": {"eos_token_id": [256]}}, 256, "(eos_token_id of generation_config.json)"),
    (
        {"config": {"eos_token_id": True}, "tokenizer_config": [], "special_tokens_map": {"eos_token": None}},
        257,
        GUESSED,
    ),
]


@pytest.mark.parametrize(("files", "end", "says"), ENDS)
def test_the_checkpoint_says_what_ends_a_document(tmp_path, chat_tokenizer, files, end, says, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", b'{"text": "ab"}\n' * 200)
    for name, content in files.items():
        write(tmp_path / f"{name}.json", json.dumps(content).encode())
    tokens = load_tokens("a.jsonl", "tokenizer.json")
    assert tokens.num_tokens == 600 and set(tokens.ids[2::3].tolist()) == {end}
    assert run(["init", "--data", "a.jsonl", "--tokenizer", "tokenizer.json"]) == 0
    assert says in capsys.readouterr().out


def test_without_an_end_token_init_says_so(tmp_path, capsys, monkeypatch):
    library = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save("tokenizer.json")
    write(tmp_path / "a.txt", b"a " * 500)
    assert run(["init", "--data", "a.txt", "--tokenizer", "tokenizer.json"]) == 0
    assert "no end token: documents are joined (`swarmnet tokenize --end-token`)" in capsys.readouterr().out
    write(tmp_path / "config.json", b"{")
    assert run(["init", "again.toml", "--data", "a.txt", "--tokenizer", "tokenizer.json"]) == 2
    assert "config.json: is not JSON" in capsys.readouterr().err


SPELLED = "a</s>b<|im_end|><|im_start|>c<eot><tool>"


def test_text_that_spells_a_special_token_is_text_and_counted(tmp_path, chat_tokenizer, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tokenizer_config.json", b'{"eos_token": "<eot>"}')
    write(tmp_path / "a.txt", SPELLED.encode())
    tokens = load_tokens("a.txt", "tokenizer.json")
    # `<tool>` is a word of the vocabulary that its file does not call special.
    assert [each for each in tokens.ids.tolist() if each > 255] == [261, 260]
    assert tokens.num_tokens == len(SPELLED) - len("<tool>") + 2
    assert "the text spells a special token 4 times: ordinary text" in tokens.notes[1]
    words = tokenizer_of("tokenizer.json", tmp_path)
    assert [len(piece) for piece in words.encode([b"</s>"])] == [5]
    assert words.of_prompt("<|im_start|>") == [258]  # a person who types it means it
    command = ["tokenize", "a.txt", "ids", "--tokenizer", "tokenizer.json", "--special-tokens", "--end-token", "</s>"]
    assert run(command) == 0
    assert load_tokens("ids.u16.bin", "ids").ids[[1, -1]].tolist() == [256, 256]
    said = capsys.readouterr().out
    assert "documents end with '</s>'\n" in said and "3 times: 3 became it" in said
    assert run([*command[:-1], "<nope>", "--force"]) == 2 and "has no such token" in capsys.readouterr().err
    assert run([*command[:-1], "", "--force"]) == 0 and "no end token" in capsys.readouterr().out


def test_a_special_token_that_cannot_be_split_is_counted(tmp_path):
    library = pytest.importorskip("tokenizers")
    scores = [("<unk>", 0.0), ("</s>", 0.0), *((each, -2.0) for each in "ab</s>")]
    words = library.Tokenizer(library.models.Unigram(scores, 0, False))
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "a.txt", b"a</s>b")
    assert "1 times: 1 became it" in load_tokens("a.txt", "tokenizer.json", base=tmp_path).notes[1]


def test_a_run_of_before_is_told_why_its_ids_are_others(tmp_path, chat_tokenizer, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", json.dumps({"text": SPELLED}).encode() * 1 + b'\n{"text": "b"}\n' * 300)
    write(tmp_path / "config.json", b'{"eos_token_id": 256}')
    # As it was: the first of six names, and special tokens wherever a text spells them.
    before = ["--tokenizer", "tokenizer.json", "--special-tokens", "--end-token", "<|im_end|>"]
    assert run(["tokenize", "a.jsonl", "before", *before]) == 0
    assert run(["init", "--data", "before.u16.bin", "--tokenizer", "tokenizer.json"]) == 0
    manifest = load(tmp_path / "run.toml").data
    verify(load_tokens("before.u16.bin", "tokenizer.json"), manifest)
    with pytest.raises(
        UsageError, match=r"here documents end with '</s>' .*spells a special token 3 times.*--special-tok"
    ):
        verify(load_tokens("a.jsonl", "tokenizer.json"), manifest)


def changed(path: Path, **model: object) -> None:
    data = json.loads(path.read_bytes())
    data["model"] |= model
    path.write_text(json.dumps(data))


def test_what_makes_ids_random_is_switched_off(tmp_path, chat_tokenizer):
    changed(chat_tokenizer, dropout=0.5, merges=[["a", "b"], ["ab", "ab"]], vocab={"a": 0, "b": 1, "ab": 2, "abab": 3})
    write(tmp_path / "a.txt", b"ab" * 400)
    assert set(load_tokens("a.txt", "tokenizer.json", base=tmp_path).ids[:-1].tolist()) == {3}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"vocab": {"a": 2**31}}, "ids must be below 2\\^31"),
        ({"merges": [["a", "no"]]}, "is not a tokenizer.json: .*Token `no` out of vocabulary"),
        ({"continuing_subword_prefix": "\u00e9\u00e9", "merges": [["a", "b"]]}, "is not a tokenizer.json"),  # it panics
        ({"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0}}, "cannot encode a document: .*Missing"),
    ],
)
def test_what_the_library_says_of_a_tokenizer_is_one_line(tmp_path, chat_tokenizer, model, says):
    changed(chat_tokenizer, **model)
    write(tmp_path / "a.txt", b"ab")
    with pytest.raises(UsageError, match=says):
        load_tokens("a.txt", "tokenizer.json", base=tmp_path)


def test_more_documents_than_a_batch_keep_their_order(tmp_path, word_tokenizer):
    write(tmp_path / "a.jsonl", b"".join(b'{"text": "%s"}\n' % w for w in [b"hello", b"world"] * 400))
    assert load_tokens("a.jsonl", "tokenizer.json", base=tmp_path).ids.tolist() == [1, 3, 2, 3] * 400


def test_a_bad_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    write(tmp_path / "a.txt", b"x")
    write(tmp_path / "broken.json", b"{}")
    os.mkfifo(tmp_path / "pipe.json")
    refused = {
        "broken.json": "is not a tokenizer.json",
        "missing.json": "cannot read tokenizer",
        "pipe.json": "no regular",
    }
    for name, message in refused.items():
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
