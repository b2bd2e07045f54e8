"""The report of scripts/curate.py: one scan of a table version, as text and as figures.

Lengths and scores are kept as flat arrays (13 bytes a document); lengths in characters are counted
inside the scan, so that no text comes to Python.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
MAX_SOURCES = 10_000  # distinct ones that are counted apart; the rest is one more
SHOWN_SOURCES = 12
KEPT, LOW, DUPLICATE = 0, 1, 2
FATES = ("kept", "low score", "duplicate")
COLORS = ("#2a78b5", "#e8a33d", "#b9bec5")
REST = "(other sources)"
FURTHEST = 10.0  # score that still has a bin of its own
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


@dataclass
class Summary:
    """What one scan of the table found. Arrays are (rows,), in scan order."""

    name: str
    version: int
    min_score: float
    chars: np.ndarray  # int32, characters of text
    scores: np.ndarray  # float32, NaN where NULL
    fates: np.ndarray  # uint8, index into FATES
    tokens: np.ndarray | None  # int32, tokens without EOS, 0 where NULL
    sources: dict[str, np.ndarray]  # documents of each fate, int64 (3,); empty: no such column

    @property
    def by_fate(self) -> np.ndarray:
        return np.bincount(self.fates, minlength=3)


def write(table: lancedb.table.Table, args: argparse.Namespace) -> None:
    """Print the report; write it and its figures to the directory ``args.report``."""
    summary = summarise(table, args.text_column, args.min_score)
    text = "\n".join(text_lines(summary))
    try:
        (args.report / "report.txt").write_text(text + "\n", encoding="utf-8")
        draw(summary, args.report / "report.png")
    except OSError as error:
        raise SystemExit(f"--report {args.report}: {error}") from None
    print(f"\n{text}\n\nwritten to {args.report}/report.txt and report.png")


# -----------------------------------------------------------------------------
# the scan


def summarise(table: lancedb.table.Table, text_column: str, min_score: float) -> Summary:
    table.checkout_latest()
    dataset = table.to_lance()
    names = [n for n in ("source", "score", "is_dup", "n_tokens") if n in dataset.schema.names]
    if "source" in names and pa.types.is_nested(dataset.schema.field("source").type):
        names.remove("source")  # the table's own, of another meaning
    columns = {name: name for name in names} | {"chars": f"character_length(`{text_column}`)"}
    rows, done = dataset.count_rows(), 0
    found = Summary(
        table.name,
        dataset.version,
        min_score,
        np.zeros(rows, np.int32),
        np.full(rows, np.nan, np.float32),
        np.zeros(rows, np.uint8),
        np.zeros(rows, np.int32) if "n_tokens" in names else None,
        defaultdict(lambda: np.zeros(3, np.int64)),
    )
    for batch in dataset.scanner(columns=columns, batch_readahead=4).to_batches():
        here = slice(done, done + batch.num_rows)
        done += batch.num_rows
        found.chars[here] = batch["chars"].fill_null(0)
        found.scores[here] = batch["score"].to_numpy(zero_copy_only=False)
        if found.tokens is not None:
            found.tokens[here] = batch["n_tokens"].fill_null(0)
        is_low = ~(found.scores[here] >= min_score)  # also where NULL, as in the training filter
        is_dup = batch["is_dup"].fill_null(False).to_numpy(zero_copy_only=False)
        found.fates[here] = np.where(is_dup, DUPLICATE, np.where(is_low, LOW, KEPT))
        if "source" in names:
            count_sources(found.sources, batch["source"], found.fates[here])
    return found


def count_sources(counts: dict[str, np.ndarray], column: pa.Array, fates: np.ndarray) -> None:
    """Add the documents of each source and fate to ``counts``."""
    coded = column.cast(pa.string()).dictionary_encode(null_encoding="encode")
    table = np.zeros((len(coded.dictionary), 3), np.int64)
    np.add.at(table, (coded.indices.to_numpy(), fates), 1)
    for source, row in zip(coded.dictionary.to_pylist(), table, strict=True):
        name = "(no source)" if source is None else str(source)
        counts[name if name in counts or len(counts) < MAX_SOURCES else REST] += row


def largest_sources(summary: Summary) -> dict[str, np.ndarray]:
    """The sources with most documents, largest first, and the sum of all others."""
    sources = dict(summary.sources) or {"all documents": summary.by_fate}
    rest = sources.pop(REST, np.zeros(3, np.int64))
    ranked = sorted(sources.items(), key=lambda item: (-item[1].sum(), item[0]))
    rest = sum((row for _, row in ranked[SHOWN_SOURCES:]), rest)
    return dict(ranked[:SHOWN_SOURCES]) | ({REST: rest} if rest.any() else {})


# -----------------------------------------------------------------------------
# text


def text_lines(summary: Summary) -> list[str]:
    rows, fates = len(summary.fates), summary.by_fate
    lines = [
        f"curation of table {summary.name}, version {summary.version}",
        "",
        f"{'documents':<28}{rows:>14,}",
        f"{'  duplicates':<28}{fates[DUPLICATE]:>14,}{share(fates[DUPLICATE], rows)}",
        f"{f'  score < {summary.min_score:g}':<28}{fates[LOW]:>14,}{share(fates[LOW], rows)}",
        f"{'  kept':<28}{fates[KEPT]:>14,}{share(fates[KEPT], rows)}",
        "",
        f"{'source':<28}{'documents':>14}{'duplicates':>14}{'':>9}{'low score':>14}{'kept':>14}",
    ]
    for name, (kept, low, dup) in largest_sources(summary).items():
        total = kept + low + dup
        label = name if len(name) <= 27 else name[:26] + "…"
        lines.append(f"{label:<28}{total:>14,}{dup:>14,}{share(dup, total)}{low:>14,}{kept:>14,}")
    heads = ["min", *(f"{100 * q:g} %" for q in QUANTILES[1:-1]), "max", "total"]
    lines += ["", f"{'length':<14}" + "".join(f"{head:>13}" for head in heads)]
    for unit, values in (("characters", summary.chars), ("tokens", summary.tokens)):
        if values is not None:
            cells = [*np.quantile(values, QUANTILES, method="nearest"), values.sum(dtype=np.int64)]
            lines.append(f"{unit:<14}" + "".join(f"{cell:>13,}" for cell in cells))
    return [*lines, "", *score_lines(summary)]


def score_lines(summary: Summary) -> list[str]:
    """The histogram of scores, half a point a line."""
    scores, edges = score_bins(summary, 0.5)
    counts, _ = np.histogram(scores, edges)
    lines = [f"{'score':<14}{'documents':>14}{'':>9}"]
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * round(40 * count / max(counts.max(), 1))
        lines.append(
            f"{f'{low:.1f} – {high:.1f}':<14}{count:>14,}{share(count, len(scores))}  {bar}"
        )
    return lines


def score_bins(summary: Summary, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores and the edges of their bins: from 0 to 5, or further where the table's own scores go
    further. Those beyond FURTHEST are counted there."""
    scores = np.clip(summary.scores[~np.isnan(summary.scores)], -FURTHEST, FURTHEST)
    low, high = scores.min(initial=0), scores.max(initial=5)
    return scores, np.arange(np.floor(low / width), np.ceil(high / width) + 1) * width


def share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):>7.1f} %"


# -----------------------------------------------------------------------------
# figures


def draw(summary: Summary, path: Path) -> None:
    """Documents by source, lengths and scores, each split by what becomes of the document."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    by_source, lengths, scores = figure.subplot_mosaic(
        [["sources", "lengths"], ["sources", "scores"]]
    ).values()
    rows, kept = len(summary.fates), summary.by_fate[KEPT]
    figure.suptitle(
        f"Table {summary.name}, version {summary.version}: {rows:,} documents, "
        f"{kept:,} kept ({100 * kept / max(rows, 1):.1f} %)",
        fontsize=14,
    )
    draw_sources(by_source, summary)
    draw_lengths(lengths, summary)
    draw_scores(scores, summary)
    for axes in (by_source, lengths, scores):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    handles = [by_source.containers[fate] for fate in range(3)]
    labels = ["kept", f"score below {summary.min_score:g}", "duplicate of an earlier document"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def draw_sources(axes: Axes, summary: Summary) -> None:
    sources = largest_sources(summary)
    names = [name if len(name) <= 24 else name[:23] + "…" for name in sources]
    names = [name.replace("$", r"\$") for name in names]  # no formula
    places = range(len(names))
    counts = np.array(list(sources.values()))
    left = np.zeros(len(names))
    for fate in range(3):
        axes.barh(places, counts[:, fate], left=left, color=COLORS[fate], height=0.7)
        left += counts[:, fate]
    for at, (total, row) in enumerate(zip(left, counts, strict=True)):
        note = f" {100 * row[DUPLICATE] / max(total, 1):.1f} % duplicates"
        axes.text(total, at, note, va="center", fontsize=9, color="#555555")
    axes.set_yticks(places, names)
    axes.margins(x=0.28)
    axes.invert_yaxis()
    axes.set(title="By source", xlabel="documents")
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.grid(axis="x", alpha=0.3)


def draw_lengths(axes: Axes, summary: Summary) -> None:
    use_tokens = summary.tokens is not None and summary.tokens.any()
    values, unit = (summary.tokens, "tokens") if use_tokens else (summary.chars, "characters")
    edges = np.geomspace(1, max(int(values.max(initial=1)), 10) * 1.001, 49)
    stacked_histogram(axes, values, edges, summary.fates)
    axes.set_xscale("log")
    empty = int((values == 0).sum())
    note = f" ({empty:,} without any not shown)" if empty else ""
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.set(title="Length", xlabel=f"{unit} per document, log scale{note}", ylabel="documents")
    axes.grid(axis="y", alpha=0.3)


def draw_scores(axes: Axes, summary: Summary) -> None:
    scores, edges = score_bins(summary, 0.25)
    # all documents in one colour: the parts of a stack cannot be compared on a log scale
    counts, *_ = axes.hist(scores, edges, color="#6b7785")
    axes.axvline(summary.min_score, color="#b02a2a", linestyle="--", linewidth=1.5)
    axes.annotate(
        f"training filter: score ≥ {summary.min_score:g}",
        (summary.min_score, 0.93),
        (6, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color="#b02a2a",
        fontsize=9,
    )
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, 8 * max(counts.max(), 1))  # headroom for the label
    title, label = "Quality score, all documents", "documents, log scale"
    axes.set(title=title, xlabel="score, points from 0 to 5", ylabel=label)
    axes.grid(axis="y", alpha=0.3)


def stacked_histogram(axes: Axes, values: np.ndarray, edges: np.ndarray, fates: np.ndarray) -> None:
    bottom, widths = np.zeros(len(edges) - 1), np.diff(edges)
    for fate in range(3):
        counts, _ = np.histogram(values[fates == fate], edges)
        axes.bar(edges[:-1], counts, widths, bottom, align="edge", color=COLORS[fate])
        bottom += counts
