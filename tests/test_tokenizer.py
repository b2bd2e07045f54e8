"""Tokenizers: exact ids, what identifies them, and the bytes each id stands for."""

import json

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tokenizer
from scripts import train_tokenizer
from tests.conftest import documents, make_table

TEXTS = ["plain", "", "naïve café ☕ 日本語", "tabs\tand\nlines", "<|endoftext|> is only text here"]


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    make_table(folder / "db", [*documents(100), *TEXTS * 3])
    out = folder / "tokenizer.json"
    train_tokenizer.main(["--db", str(folder / "db"), "--vocab-size", "400", "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def word_file(tmp_path_factory):
    """A 70,000-word vocabulary: ids that do not fit 16 bits."""
    words = {f"w{i}": i for i in range(70_000)} | {"[UNK]": 70_000, "</s>": 70_001}
    model = Model(models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    model.save(str(path))
    return path


def test_byte_ids_are_the_utf8_bytes():
    byte = tokenizer.load_tokenizer("byte")
    ids = byte.encode(pa.array([*TEXTS, None]))
    assert ids.to_pylist() == [list(text.encode()) for text in TEXTS] + [[]]
    assert ids.type == pa.list_(pa.uint16())
    sliced = byte.encode(pa.array(["skipped", *TEXTS]).slice(1, 3))
    assert sliced.to_pylist() == [list(text.encode()) for text in TEXTS[:3]]
    assert [byte.decode(i) for i in ids.to_pylist()[:-1]] == TEXTS


def test_bpe_decodes_what_it_encoded_and_never_emits_eos(bpe_file):
    bpe = tokenizer.load_tokenizer(f"bpe:{bpe_file}")
    ids = bpe.encode(pa.array([*TEXTS, None])).to_pylist()
    assert [bpe.decode(i) for i in ids[:-1]] == TEXTS and ids[-1] == []
    assert bpe.vocab_size == 400 and bpe.eos_id not in set(np.concatenate(ids).tolist())


def test_token_bytes_add_up_to_the_texts(bpe_file):
    for spec in ("byte", f"bpe:{bpe_file}"):
        codec = tokenizer.load_tokenizer(spec)
        lengths = codec.token_bytes()
        for text, ids in zip(TEXTS, codec.encode(pa.array(TEXTS)).to_pylist(), strict=True):
            assert lengths[ids].sum() == len(text.encode())
        assert lengths[codec.eos_id] == 0 and len(lengths) == codec.vocab_size


def test_hf_directory_gives_the_same_ids_as_its_tokenizer_file(bpe_file, tmp_path):
    fast = PreTrainedTokenizerFast(tokenizer_file=str(bpe_file), eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path)
    ours, theirs = (tokenizer.load_tokenizer(s) for s in (f"hf:{tmp_path}", f"bpe:{bpe_file}"))
    assert ours.encode(pa.array(TEXTS)) == theirs.encode(pa.array(TEXTS))
    assert tokenizer.identity(ours).agrees_with(tokenizer.identity(theirs))


def test_identity_differs_where_ids_differ(bpe_file, tmp_path):
    changed = json.loads(bpe_file.read_text())
    vocabulary = changed["model"]["vocab"]
    a, b = list(vocabulary)[50:52]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    ids = [tokenizer.identity(tokenizer.load_tokenizer(f"bpe:{f}")) for f in (bpe_file, other)]
    assert not ids[0].agrees_with(ids[1])


def test_ids_of_a_large_vocabulary_take_32_bits(word_file):
    words = tokenizer.load_tokenizer(f"bpe:{word_file}")
    ids = words.encode(pa.array(["w1 w65535 w65536 w69999"]))
    assert ids.type == pa.list_(pa.uint32()) and ids.to_pylist() == [[1, 65535, 65536, 69999]]
    assert tokenizer.id_type(65536) == pa.uint16() and tokenizer.id_type(65537) == pa.uint32()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gpt2", "give byte, hf:<name or directory> or bpe:<tokenizer.json>"),
        ("bpe:", "give byte"),
        ("bpe:/nowhere/tokenizer.json", "cannot load it"),
        ("hf:/nowhere", "cannot load it"),
    ],
)
def test_unknown_tokenizer_is_refused_in_one_line(spec, words):
    with pytest.raises(SystemExit) as refusal:
        tokenizer.load_tokenizer(spec)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_tokenizer_without_end_of_text_is_refused(tmp_path):
    Model(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(SystemExit, match="no end-of-text token"):
        tokenizer.load_tokenizer(f"bpe:{tmp_path / 't.json'}")


def test_tokenizer_file_is_not_overwritten_unasked(tmp_path, bpe_file):
    before = bpe_file.read_bytes()
    make_table(tmp_path / "db", documents(5))
    flags = ["--db", str(tmp_path / "db"), "--out", str(bpe_file), "--vocab-size", "300"]
    with pytest.raises(SystemExit, match="exists, and a table may have been tokenized with it"):
        train_tokenizer.main(flags)
    assert bpe_file.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--vocab-size", "200"], "give at least 257"),
        (["--filter", "id < 0"], "no text to learn from"),
        (["--filter", "bogus > 1"], "No field named bogus"),
        # Lance alone would read as far as the first 1
        (["--filter", "id > 1 id < 9"], "--filter id > 1 id < 9: "),
        (["--out", "/nowhere/t.json"], "there is no directory /nowhere"),
        (["--text-column", "body"], "no column 'body': name it with --text-column"),
    ],
)
def test_train_tokenizer_refuses_bad_input_in_one_line(tmp_path, flags, words):
    make_table(tmp_path / "db", documents(5))
    with pytest.raises(SystemExit) as refusal:
        train_tokenizer.main(
            ["--db", str(tmp_path / "db"), "--out", str(tmp_path / "t.json"), *flags]
        )
    assert words in str(refusal.value) and not (tmp_path / "t.json").exists()


def test_table_whose_text_is_all_null_is_nothing_to_learn_from(tmp_path):
    make_table(tmp_path / "db", [None, None])
    with pytest.raises(SystemExit, match="no text to learn from"):
        train_tokenizer.main(["--db", str(tmp_path / "db"), "--out", str(tmp_path / "t.json")])
