"""What scripts/ab.py makes of its measurements: figures, and verdicts on what was delivered."""

import statistics
from collections.abc import Iterable

import numpy as np

from metrics import human

RATE = "loader_tokens_per_second"
# unit of each measure, by the end of its name
UNITS = {
    "tokens_per_second": "tok/s",
    "bytes_per_token": "B/tok",
    "wait_share": "of time",
    "_s": "s",
    "_bytes": "B",
    "wait_ms_p50": "ms",
    "wait_ms_p95": "ms",
    "wait_ms_p99": "ms",
    "_steps": "",
    "threads": "",
    "descriptors": "",
}


def combined(mode: str, ranks: list[dict], step_tokens: float) -> dict:
    """The figures of all ranks in one mode: sums of tokens and bytes, the slowest rank's waits.

    ``step_tokens`` are those of one rank's share of a step, padding left out.
    """
    tokens = step_tokens * sum(rank["steps"] for rank in ranks)
    slowest = max(ranks, key=lambda rank: rank["wait_share"])
    waits = {f"wait_ms_p{p}": max(r[f"wait_ms_p{p}"] for r in ranks) for p in (50, 95, 99)}
    figures = {
        "tokens_per_second": step_tokens * sum(rank["steps"] / rank["seconds"] for rank in ranks),
        "steps": min(rank["steps"] for rank in ranks),
        "wait_share": slowest["wait_share"],
        **waits,
        "read_bytes_per_token": sum(rank["read_bytes"] for rank in ranks) / tokens,
        "storage_bytes_per_token": sum(rank["storage_bytes"] for rank in ranks) / tokens,
        "timeline_ms": slowest["timeline_ms"],
    }
    return {f"{mode}_{name}": value for name, value in figures.items()}


def trained(records: list[dict], steps: int) -> dict:
    """The figures of the last ``steps`` steps of a run, from its metrics.jsonl of every step."""
    rows = [row for row in records if "step_s" in row][-steps:]
    seconds = sum(row["step_s"] for row in rows)
    tokens = rows[-1]["tokens"] - rows[0]["tokens"]
    waits = [row["data_wait_ms_p50"] for row in rows]  # of one step each, the slowest rank's
    return {
        "train_tokens_per_second": tokens / (seconds - rows[0]["step_s"]),
        "train_wait_share": sum(waits) / 1e3 / seconds,
        **{f"train_wait_ms_p{p}": float(np.percentile(waits, p)) for p in (50, 95, 99)},
        "train_first_batch_s": next(r["first_batch_s"] for r in records if "first_batch_s" in r),
        "train_timeline_ms": [1e3 * row["step_s"] for row in rows],
    }


def figures(cells: list[dict]) -> dict[str, dict]:
    """Every figure by name, LABEL.CACHE.RANKS.MEASURE: the median, its unit and each repeat."""
    repeats: dict[str, tuple[str, list[float]]] = {}
    for cell in cells:
        for measure, value in cell.items():
            unit = next((u for end, u in UNITS.items() if measure.endswith(end)), None)
            if unit is not None:
                name = f"{cell['label']}.{cell['cache']}.{cell['ranks']}.{measure}"
                repeats.setdefault(name, (unit, []))[1].append(value)
    return {
        name: {"value": statistics.median(values), "unit": unit, "repeats": values}
        for name, (unit, values) in repeats.items()
    }


class Comparison:
    """A results.json: the figures of each loader in each setting (cache, ranks)."""

    def __init__(self, results: dict) -> None:
        self.results, self.figures = results, results["figures"]
        self.labels, self.settings = list(results["arms"]), results["settings"]
        cells = {(c["cache"], c["ranks"]): None for c in results["cells"]}
        self.groups = sorted(cells, key=lambda g: (g[0] != "warm", g[1]))

    def repeats(self, label: str, group: tuple[str, int], measure: str) -> list[float]:
        cache, ranks = group
        return self.figures.get(f"{label}.{cache}.{ranks}.{measure}", {"repeats": []})["repeats"]

    def median(self, label: str, group: tuple[str, int], measure: str) -> float | None:
        values = self.repeats(label, group, measure)
        return statistics.median(values) if values else None

    def pace(self) -> str:
        """How fast the device is that is pretended."""
        if self.settings["step_ms"] is not None:
            return f"{self.settings['step_ms']} ms a step"
        return f"{human(self.settings['consume_tok_s'])} tokens a second and rank"


def about_machine(machine: dict) -> str:
    versions = ", ".join(f"{k} {machine[k]}" for k in ("torch", "lancedb", "pyarrow") if machine[k])
    return (
        f"{machine['cpu']}, {machine['cpu_cores']} cores, {machine['os']}, "
        f"Python {machine['python']}, {versions}"
    )


def in_group(group: tuple[str, int]) -> str:
    cache, ranks = group
    return f"{cache}, {ranks} rank{'s' * (ranks > 1)}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# -----------------------------------------------------------------------------
# what was delivered


def verdict(
    results: list[dict], parts: list[np.ndarray], manifest: np.ndarray, seq_len: int
) -> tuple[dict, list[np.ndarray]]:
    """What one epoch of a loader was, and the sorted hashes of each of its whole steps.

    ``results`` and ``parts`` are each rank's, the latter hashes uint64 in order; ``manifest`` are
    those of the blocks (B,) that an epoch should hold, once each.
    """
    whole = results[0]["whole_steps"]
    cuts = [np.cumsum(result["blocks"])[:-1] for result in results]
    by_rank = [np.split(part, cut) for part, cut in zip(parts, cuts, strict=True)]
    steps = [np.concatenate(step) for step in zip(*by_rank, strict=True)]
    in_order, epoch = np.concatenate(steps), np.concatenate(steps[:whole])
    tokens, known = sum(result["tokens"] for result in results), np.isin(epoch, manifest)
    found = {
        "steps": min(len(steps), whole),
        "whole_steps": whole,
        "tokens": tokens,
        "padding": len(epoch) * seq_len - tokens,
        "unknown": int((~known).sum()),
        "repeated": surplus(epoch[known], manifest),
        "resumes": all_of(result["resumes"] for result in results),
    }
    if len(steps) >= whole:
        found["dropped"] = surplus(manifest, epoch)
    if len(in_order) >= len(manifest) and not surplus(manifest, in_order[: len(manifest)]):
        found["dropped"] = 0  # the epoch's last blocks are in the next step
    if known.all() and len(steps) >= whole:
        found["displacement"] = displacement(epoch, manifest)
    return found, [np.sort(step) for step in steps[:whole]]


def all_of(answers: Iterable[bool | None]) -> bool | None:
    """Whether all answers are yes; None where one is not known."""
    answers = list(answers)
    return None if None in answers else all(answers)


def surplus(a: np.ndarray, b: np.ndarray) -> int:
    """How many of ``a`` are left after taking away ``b``, each as often as it is there."""
    values, counts = np.unique(np.concatenate([a, b]), return_inverse=True)
    of_a, of_b = (np.bincount(part, minlength=len(values)) for part in np.split(counts, [len(a)]))
    return int(np.maximum(of_a - of_b, 0).sum())


def displacement(epoch: np.ndarray, manifest: np.ndarray) -> float:
    """Mean distance of blocks from their places in the manifest; 1 for a random permutation, whose
    mean is a third of their number. The n-th block of one content is its n-th there."""
    theirs, ours = (np.argsort(a, kind="stable") for a in (manifest, epoch))
    first = np.searchsorted(manifest[theirs], epoch[ours])
    nth = np.arange(len(epoch)) - np.searchsorted(epoch[ours], epoch[ours])
    places = theirs[np.minimum(first + nth, len(manifest) - 1)]
    return float(np.abs(places - ours).mean() / (len(manifest) / 3))


def in_words(check: dict, blocks: int, tokens: int) -> str:
    """One check for the table of the report."""
    part = f" (in {check['steps']:,} of {check['whole_steps']:,} steps)"
    part *= check["steps"] < check["whole_steps"]
    if check["unknown"]:
        share = check["tokens"] / tokens * check["whole_steps"] / check["steps"]
        return f"packs by itself, {share:.2%} of the tokens, {check['padding']:,} padding{part}"
    faults = [f"{check[k]:,} {k}" for k in ("repeated", "dropped") if check.get(k)]
    return (", ".join(faults) + f" of {blocks:,}" if faults else "each block once") + part
