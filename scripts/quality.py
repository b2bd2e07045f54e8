"""What a score means: 5 points, less what each published heuristic below objects to.

A rule is a function of a document that returns a severity: 0 where the published filter keeps the
document, rising to 1 at a value that no reasonable document has. ``RULES`` says what each severity
of 1 costs in points. A score of 5 passes every rule; below 1.0, the default of ``--min-score``,
several rules fail badly, or one says the text is not text at all.

The sources filter web prose. Where a published threshold would drop source code it is widened, and
the rule says so; C4's "no curly bracket" and Gopher's "two stop words" are the two main ones.

- Gopher: Rae et al. 2021, arXiv 2112.11446, section A.1.1 (quality) and Table A1 (repetition)
- C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2
- FineWeb: Penedo et al. 2024, arXiv 2406.17557, section 3.6
- Codex: Chen et al. 2021, arXiv 2107.03374, section 3.1

This module imports neither torch nor lancedb: worker processes load it.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

MAX_SCORE = 5.0
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
CODE_WORDS = {
    *("def", "class", "return", "import", "from", "if", "else", "for", "while", "in", "not"),
    *("self", "function", "func", "fn", "end", "var", "let", "const", "int", "void", "char"),
    *("public", "static", "struct", "include", "use", "package", "select", "where"),
}
SENTENCE_ENDS = (".", "!", "?", '"', "'", "”", "’", "。", "！", "？", "」", "؟", "।")
CODE_ENDS = (":", ";", ",", ")", "]", "}", "{", "(", ">")
BULLETS = ("•", "‣", "▪", "●", "◦", "–", "- ", "* ")
SHORT_LINE = 30  # characters, FineWeb's

_SPACE = bytes(b for b in range(128) if chr(b).isspace())
_NOT_ALNUM = bytes(b for b in range(128) if not chr(b).isalnum())
_NOT_CONTROL = bytes(b for b in range(256) if (b >= 32 and b != 127) or b in _SPACE)
_LETTER = re.compile(r"[^\W\d_]")
# Scripts that put no space between words: Thai to Burmese, Khmer, kana, ideographs
_UNSPACED = re.compile(r"[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{1,4}")


class Document(NamedTuple):
    """A text taken apart once, for all rules."""

    text: str
    lines: list[str]  # stripped, without empty ones
    vocabulary: list[str]  # the distinct words: whitespace-separated, case kept
    words: np.ndarray  # int64 (n_words,): index into the vocabulary
    lengths: np.ndarray  # int64 (n_words,): characters of each word


def take_apart(text: str) -> Document:
    spaced = text if text.isascii() else _UNSPACED.sub(r" \g<0> ", text)
    index: dict[str, int] = {}
    words = np.array([index.setdefault(word, len(index)) for word in spaced.split()], np.int64)
    lengths = np.fromiter(map(len, index), np.int64, len(index))[words]
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    return Document(text, lines, list(index), words, lengths)


def ramp(value: float, good: float, bad: float) -> float:
    """0 up to ``good``, 1 from ``bad`` on, linear between; ``bad`` may be the smaller one."""
    return min(max((value - good) / (bad - good), 0.0), 1.0)


# -----------------------------------------------------------------------------
# length and words


def few_words(doc: Document) -> float:
    return ramp(len(doc.words), 50, 5)


def many_words(doc: Document) -> float:
    return ramp(len(doc.words), 100_000, 1_000_000)


def short_words(doc: Document) -> float:
    return ramp(doc.lengths.mean(), 3, 2)


def long_words(doc: Document) -> float:
    """Base64, minified code and run-together text have no spaces where words end."""
    return ramp(doc.lengths.mean(), 10, 25)


def words_without_letters(doc: Document) -> float:
    """Gopher asks for 80 % of words with a letter; in code operators and numbers are words."""
    has_letter = np.array([_LETTER.search(word) is not None for word in doc.vocabulary])
    return ramp(has_letter[doc.words].mean(), 0.6, 0.25)


def no_stop_words(doc: Document) -> float:
    """Two of Gopher's eight stop words, or of common keywords."""
    found = (STOP_WORDS | CODE_WORDS) & {word.lower() for word in doc.vocabulary}
    return ramp(len(found), 2, 0)


# -----------------------------------------------------------------------------
# symbols


def hashes_and_ellipses(doc: Document) -> float:
    ellipses = doc.text.count("...") + doc.text.count("…")
    return ramp(max(doc.text.count("#"), ellipses) / len(doc.words), 0.1, 0.5)


def curly_brackets(doc: Document) -> float:
    """C4 drops any page with a curly bracket; here only text that is full of them is touched."""
    return ramp((doc.text.count("{") + doc.text.count("}")) / len(doc.text), 0.03, 0.15)


def few_letters_or_digits(doc: Document) -> float:
    """Share of non-space bytes that are ASCII letters or digits, or belong to other scripts."""
    raw = doc.text.encode(errors="replace")
    return ramp(len(raw.translate(None, _NOT_ALNUM)) / len(raw.translate(None, _SPACE)), 0.5, 0.25)


def control_characters(doc: Document) -> float:
    """Binary data, or text decoded with the wrong encoding (U+FFFD)."""
    raw = doc.text.encode(errors="replace")
    bad = len(raw.translate(None, _NOT_CONTROL)) + doc.text.count("\ufffd")
    return ramp(bad / len(doc.text), 0.001, 0.02)


def lorem_ipsum(doc: Document) -> float:
    return float("lorem ipsum" in doc.text.lower())


# -----------------------------------------------------------------------------
# lines


def bullet_lines(doc: Document) -> float:
    return ramp(_share(doc.lines, lambda line: line.startswith(BULLETS)), 0.9, 1.0)


def ellipsis_lines(doc: Document) -> float:
    return ramp(_share(doc.lines, lambda line: line.endswith(("...", "…"))), 0.3, 0.8)


def lines_without_end(doc: Document) -> float:
    """FineWeb keeps a share of at least 0.12; what ends a line of code counts as well."""
    return ramp(_share(doc.lines, lambda line: line.endswith(SENTENCE_ENDS + CODE_ENDS)), 0.12, 0)


def short_lines(doc: Document) -> float:
    return ramp(_share(doc.lines, lambda line: len(line) <= SHORT_LINE), 0.67, 1.0)


def _share(lines: list[str], test: Callable[[str], bool]) -> float:
    return sum(map(test, lines)) / len(lines)


# -----------------------------------------------------------------------------
# repetition


def duplicate_lines(doc: Document) -> float:
    return ramp(1 - len(set(doc.lines)) / len(doc.lines), 0.3, 0.9)


def duplicate_line_characters(doc: Document) -> float:
    return ramp(1 - sum(map(len, set(doc.lines))) / sum(map(len, doc.lines)), 0.2, 0.8)


def top_bigram(doc: Document) -> float:
    """Characters in the one most frequent pair of words."""
    keys = ngram_keys(doc.words, 2)
    if len(keys) < 2:
        return 0.0
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    top = counts.argmax()
    characters = counts[top] * doc.lengths[first[top] :][:2].sum() if counts[top] > 1 else 0
    return ramp(characters / doc.lengths.sum(), 0.2, 0.6)


def duplicate_ngrams(doc: Document) -> float:
    """Characters inside any later occurrence of a sequence of 10 words; none counted twice."""
    n = 10
    keys = ngram_keys(doc.words, n)
    if len(keys) < 2:
        return 0.0
    repeated = np.ones(len(keys), bool)
    repeated[np.unique(keys, return_index=True)[1]] = False
    steps = np.zeros(len(doc.words) + 1, np.int64)
    steps[: len(keys)] += repeated
    steps[n : n + len(keys)] -= repeated
    inside = np.cumsum(steps[:-1]) > 0
    return ramp(doc.lengths[inside].sum() / doc.lengths.sum(), 0.1, 0.6)


def ngram_keys(words: np.ndarray, n: int) -> np.ndarray:
    """A 64-bit hash of each run of ``n`` words: uint64 (n_words - n + 1,)."""
    count = max(len(words) - n + 1, 0)
    keys = np.zeros(count, np.uint64)
    for i in range(n):
        keys = keys * np.uint64(0x9E3779B97F4A7C15) + words[i : i + count].astype(np.uint64)
    return keys


# -----------------------------------------------------------------------------
# the score


class Rule(NamedTuple):
    cost: float  # points at severity 1
    severity: Callable[[Document], float]
    source: str


RULES = (
    Rule(4.5, few_words, "Gopher: 50 to 100,000 words"),
    Rule(1.0, many_words, "Gopher: 50 to 100,000 words"),
    Rule(3.0, short_words, "Gopher: mean word length 3 to 10"),
    Rule(3.0, long_words, "Gopher: mean word length 3 to 10"),
    Rule(3.0, words_without_letters, "Gopher: 80 % of words have a letter; widened for code"),
    Rule(1.0, no_stop_words, "Gopher: two stop words; keywords added for code"),
    Rule(1.0, hashes_and_ellipses, "Gopher: symbol-to-word ratio 0.1"),
    Rule(1.0, curly_brackets, "C4: no curly bracket; widened for code"),
    Rule(3.0, few_letters_or_digits, "Codex: a small percentage of alphanumeric characters"),
    Rule(5.0, control_characters, "none: binary data is not text"),
    Rule(2.0, lorem_ipsum, "C4: no 'lorem ipsum'"),
    Rule(1.0, bullet_lines, "Gopher: 90 % of lines start with a bullet"),
    Rule(1.0, ellipsis_lines, "Gopher: 30 % of lines end with an ellipsis"),
    Rule(1.0, lines_without_end, "FineWeb: 12 % of lines end in punctuation (C4: all)"),
    Rule(1.0, short_lines, "FineWeb: 67 % of lines have 30 characters or fewer"),
    Rule(2.0, duplicate_lines, "Gopher A1: duplicate line fraction 0.30"),
    Rule(2.0, duplicate_line_characters, "Gopher A1: duplicate line character fraction 0.20"),
    Rule(3.0, top_bigram, "Gopher A1: top 2-gram character fraction 0.20"),
    Rule(3.0, duplicate_ngrams, "Gopher A1: duplicate 10-gram character fraction 0.10"),
)


def score_document(text: str) -> float:
    """Quality from 0 to 5. An empty document scores 0."""
    doc = take_apart(text)
    if len(doc.words) == 0:
        return 0.0
    return max(MAX_SCORE - sum(rule.cost * rule.severity(doc) for rule in RULES), 0.0)


def explain(text: str) -> dict[str, float]:
    """The points each rule takes from this text: rule name to points, only those above 0."""
    doc = take_apart(text)
    if len(doc.words) == 0:
        return {"empty": MAX_SCORE}
    costs = {rule.severity.__name__: rule.cost * float(rule.severity(doc)) for rule in RULES}
    return {name: points for name, points in costs.items() if points > 0}


def score_batch(batch: pa.RecordBatch, text_column: str) -> tuple[np.ndarray, np.ndarray]:
    """Row ids, uint64, and scores, float32, of a batch; NULL is scored as an empty text."""
    scores = [score_document(text or "") for text in batch[text_column].to_pylist()]
    return batch["_rowid"].to_numpy(), np.array(scores, np.float32)
