"""Tokenizers behind one small interface, and their identity as stored with the token column.

A tokenizer encodes Arrow text to Arrow id lists and knows its vocabulary size, its EOS id and how
many UTF-8 bytes each id stands for (which turns nats per token into bits per byte).
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

TOKENIZER_KEY = "tokenizer"  # metadata key on the token column: who wrote these ids
EOS_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")  # looked for, in this order


@dataclass(frozen=True)
class Identity:
    """What makes two tokenizers the same: stored with the token column, compared by train.py."""

    spec: str
    vocab_size: int
    eos_id: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.spec} ({self.vocab_size:,} ids, EOS {self.eos_id}, {self.fingerprint})"

    def agrees_with(self, other: "Identity") -> bool:
        """Same vocabulary. The spec may differ, as a tokenizer file may have moved; other merges or
        another normalizer over the same words are not told apart."""
        return (self.fingerprint, self.vocab_size, self.eos_id) == (
            other.fingerprint,
            other.vocab_size,
            other.eos_id,
        )


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, EOS = 256."""

    spec, vocab_size, eos_id = "byte", 257, 256

    def encode(self, texts: pa.StringArray) -> pa.ListArray:
        """Ids of each text, without EOS: list<uint16>. NULL is encoded as an empty text."""
        texts = texts.fill_null("").cast(pa.large_string()).cast(pa.large_binary())
        offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset :][: len(texts) + 1]
        data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        return pa.ListArray.from_arrays(
            pa.array(offsets - offsets[0], pa.int32()), pa.array(data.astype(np.uint16))
        )

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 length of each id: int64 (vocab_size,), 0 for EOS."""
        return np.array([1] * 256 + [0])

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint({f"<{i:#04x}>": i for i in range(256)})


class SubwordTokenizer:
    """A `tokenizers` model: ``bpe:<tokenizer.json>`` or the fast one of ``hf:<name or dir>``."""

    def __init__(self, spec: str, model, eos_id: int) -> None:
        model.encode_special_tokens = True  # a document that spells <|endoftext|> is only text
        model.no_padding()
        model.no_truncation()
        kind, _, name = spec.partition(":")
        # an absolute path means the same file from wherever a checkpoint is read
        self.spec = f"{kind}:{os.path.abspath(name)}" if os.path.exists(name) else spec
        self.model, self.eos_id = model, eos_id
        self.vocabulary: dict[str, int] = model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocabulary.values()) + 1

    def encode(self, texts: pa.StringArray) -> pa.ListArray:
        """Ids of each text, without EOS: list<uint16 or uint32>. NULL counts as an empty text."""
        encoded = self.model.encode_batch_fast(
            texts.fill_null("").to_pylist(), add_special_tokens=False
        )
        lengths = np.fromiter((len(e.ids) for e in encoded), np.int32, len(encoded))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = np.empty(offsets[-1], id_type(self.vocab_size).to_pandas_dtype())
        for i, e in enumerate(encoded):
            values[offsets[i] : offsets[i + 1]] = e.ids
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids)

    def token_bytes(self) -> np.ndarray:
        """UTF-8 length of each id's text: int64 (vocab_size,), 0 for special tokens."""
        pipeline = json.loads(self.model.to_str())
        byte_level = '"ByteLevel"' in json.dumps([pipeline["decoder"], pipeline["pre_tokenizer"]])
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, i in self.vocabulary.items():
            if byte_level:  # its alphabet spells each byte as one printable character
                lengths[i] = len(token)
            elif len(token) == 6 and token.startswith("<0x"):  # SentencePiece byte fallback
                lengths[i] = 1
            else:  # the word markers of SentencePiece and WordPiece
                lengths[i] = len(token.replace("▁", " ").removeprefix("##").encode())
        for token in pipeline["added_tokens"]:
            if token["special"]:
                lengths[token["id"]] = 0
        return lengths

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.vocabulary)


Tokenizer = ByteTokenizer | SubwordTokenizer


def brief(tokenizer: Tokenizer) -> str:
    """What decides the ids of a stream of documents, in a few words."""
    return f"{tokenizer.fingerprint}, EOS {tokenizer.eos_id}"


def in_full(tokenizer: Tokenizer) -> str:
    """What a checkpoint says of the tokenizer of its run."""
    t = tokenizer
    return f"{t.vocab_size} ids, EOS {t.eos_id}, fingerprint {t.fingerprint}"


def fingerprint(vocabulary: dict[str, int]) -> str:
    """SHA-256 of the vocabulary in id order, 16 hex digits."""
    digest = hashlib.sha256()
    for token, i in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{i}\t{token}\n".encode())
    return digest.hexdigest()[:16]


def id_type(vocab_size: int) -> pa.DataType:
    """The smallest unsigned type of the table's token lists that holds every id."""
    return pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()


def load_tokenizer(spec: str) -> Tokenizer:
    """Load ``byte``, ``bpe:<tokenizer.json>`` or ``hf:<name or directory>``.

    Raises SystemExit when the file or name cannot be loaded, or has no end-of-text token.
    """
    if spec == "byte":
        return ByteTokenizer()
    kind, _, name = spec.partition(":")
    if kind not in ("hf", "bpe") or not name:
        raise SystemExit(
            f"--tokenizer {spec}: give byte, hf:<name or directory> or bpe:<tokenizer.json>"
        )
    try:
        if kind == "bpe":
            from tokenizers import Tokenizer as Model

            model = Model.from_file(name)
            known = model.get_vocab(with_added_tokens=True)
            eos = next((known[token] for token in EOS_TOKENS if token in known), None)
        else:
            from transformers import AutoTokenizer  # imports in seconds: only where asked for

            loaded = AutoTokenizer.from_pretrained(name)
            if not loaded.is_fast:
                raise ValueError("it has no fast tokenizer (tokenizer.json)")
            model, eos = loaded.backend_tokenizer, loaded.eos_token_id
    except Exception as error:  # the tokenizers library raises bare Exception
        raise SystemExit(
            f"--tokenizer {spec}: cannot load it: {' '.join(str(error).split())}"
        ) from None
    if eos is None:
        raise SystemExit(
            f"--tokenizer {spec}: it has no end-of-text token ({', '.join(EOS_TOKENS)}), "
            "which separates packed documents"
        )
    return SubwordTokenizer(spec, model, eos)


def identity(tokenizer: Tokenizer) -> Identity:
    t = tokenizer
    return Identity(t.spec, t.vocab_size, t.eos_id, t.fingerprint)


def token_field(name: str, tokenizer: Tokenizer) -> pa.Field:
    """The token column: its type follows the vocabulary, its metadata names the tokenizer."""
    metadata = {TOKENIZER_KEY: json.dumps(asdict(identity(tokenizer)))}
    return pa.field(name, pa.list_(id_type(tokenizer.vocab_size)), metadata=metadata)


def stored_identity(schema: pa.Schema, tokens_column: str) -> Identity | None:
    """Who tokenized the column, or None where the table does not say (not our column)."""
    metadata = schema.field(tokens_column).metadata or {}
    stored = metadata.get(TOKENIZER_KEY.encode())
    return Identity(**json.loads(stored)) if stored else None


def check_tokenizer(schema: pa.Schema, tokens_column: str, tokenizer: Tokenizer) -> str | None:
    """Refuse (SystemExit) a tokenizer other than the column's. Returns a notice where unknown."""
    stored, ours = stored_identity(schema, tokens_column), identity(tokenizer)
    if stored is None:
        return f"column {tokens_column} does not say who wrote it: trusting --tokenizer {ours.spec}"
    if not stored.agrees_with(ours):
        same = stored.spec == ours.spec
        mend = (
            "that file has changed: tokenize again with --overwrite"
            if same
            else (f"use --tokenizer {stored.spec}")
        )
        raise SystemExit(f"column {tokens_column} was tokenized by {stored}, not by {ours}: {mend}")
    return None


# -----------------------------------------------------------------------------
# worker processes (this module imports neither torch nor lancedb: they start in a moment)

_tokenizer: Tokenizer | None = None


def start_worker(spec: str) -> None:
    """Load the tokenizer of a worker, which is one of many and so takes one thread."""
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(spec)


def encode_rows(batch: pa.RecordBatch) -> tuple[pa.Array, pa.ListArray]:
    """Row ids and token ids of a batch of (text, ``_rowid``)."""
    return batch.column("_rowid"), _tokenizer.encode(batch.column(0))
