"""The report of scripts/ab.py, from its results.json alone: report.md and four plots."""

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from metrics import human
from scripts import ab_plots
from scripts.ab_figures import RATE, Comparison, about_machine, all_of, in_group, in_words, number

RESOURCES = ("pss_bytes", "threads", "descriptors", "shm_bytes", "loader_read_bytes_per_token")
# how each loader shuffles, reads, and finds its place again
ABOUT = {
    "elastic": ("documents, of the whole table", "two threads", "by block number"),
    "lancedb": ("documents, of the whole table", "threads", "by its state, same ranks"),
    "lance": ("blocks, of the whole epoch", "one thread", "by block number"),
    "mosaic": ("shards, then blocks in a window (py1e)", None, "by sample number"),
    "parquet-random": ("blocks, of the whole epoch", "one thread", "by block number"),
    "parquet-seq": ("once, when written", "the loop itself", "by block number"),
    "memmap": ("blocks, of the whole epoch", "one thread", "by block number"),
    "webdataset": ("shards, then blocks in a buffer", None, "by reading again"),
    "litdata": ("chunks, then blocks in each", None, "by its state"),
    "synthetic": ("none: the same step for ever", "nothing", "nothing to find"),
}


def write(results: dict, out: Path) -> None:
    """Write report.md and its plots into ``out``, and say where."""
    out.mkdir(parents=True, exist_ok=True)
    report = Report(results)
    drawn = ab_plots.draw(report, out)
    text = "\n".join(report.lines(drawn))
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    print(f"written: {out / 'report.md'}")


class Report(Comparison):
    """The figures as tables: a row for each loader, a column for each setting."""

    def table(self, title: str, show: Callable[[list[float]], str], *measures: str) -> list[str]:
        """A Markdown table with a column for each group that has the measures; several share a
        cell."""
        groups = [
            g for g in self.groups if any(self.repeats(x, g, measures[0]) for x in self.labels)
        ]
        cells = {
            label: [
                " / ".join(show(self.repeats(label, g, m)) for m in measures).strip(" /")
                for g in groups
            ]
            for label in self.labels
        }
        heads = [f"{title}, {in_group(group)}" for group in groups]
        return markdown(["loader", *heads], cells) if groups else []

    # -------------------------------------------------------------------------

    def lines(self, drawn: list[str]) -> Iterator[str]:
        s, m = self.settings, self.results["manifest"]
        yield "# What a loader costs"
        yield ""
        if self.results.get("interrupted"):
            yield "**The comparison was interrupted: repeats are missing.**\n"
        yield (
            f"{m['blocks']:,} blocks of {m['seq_len']:,} tokens an epoch, packed once and given to "
            f"every loader; {s['global_batch']:,} blocks a step on any number of ranks, "
            f"{s['batch_size']} a micro-batch, {s['num_workers']} workers, at most "
            f"{s['prefetch_mb']} MB read ahead. {self.turns()}"
        )
        yield from self.section("Throughput", "throughput", drawn)
        yield "Loader alone, no model, tokens a second of all ranks:\n"
        yield from self.table("tok/s", spread, RATE)
        yield from self.ratios()
        yield from self.section("What a training waits for", "wait", drawn)
        yield from self.waits()
        yield from self.section("Start and resume", "start", drawn)
        yield (
            "Seconds from opening the loader to its first step, in a new process. Warm, the order "
            "of the epoch that elastic works out at its first start is there already:\n"
        )
        yield from self.table("s", seconds, "first_batch_s")
        yield (
            "\nResumed at 1 / 50 / 99 % of an epoch, as far as the check came; afterwards, in the "
            "same process:\n"
        )
        yield from self.table("s", seconds, *(f"resume_{part}_s" for part in (1, 50, 99)))
        yield from self.section("Step times", "timeline", drawn)
        yield from self.section("What it takes", "", drawn)
        yield from self.resources()
        yield from self.section("What it delivers", "", drawn)
        yield from self.delivered()
        yield from self.section("How it was measured", "", drawn)
        yield from self.method()

    def turns(self) -> str:
        done = max((len(figure["repeats"]) for figure in self.figures.values()), default=0)
        if done < 2:
            return "One turn of all loaders, each in fresh processes: no spread is known."
        return (
            f"Medians of {done} turns of all loaders, every turn of a loader in fresh processes; "
            "in brackets the lowest and the highest."
        )

    def section(self, title: str, plot: str, drawn: list[str]) -> Iterator[str]:
        yield f"\n## {title}\n"
        if plot in drawn:
            yield f"![{title}]({plot}.png)\n"

    def ratios(self) -> Iterator[str]:
        """Each loader's throughput against elastic's of the same turn."""
        columns = [g for g in self.groups if self.repeats("elastic", g, RATE)]
        others = [
            label
            for label, arm in self.results["arms"].items()
            if arm["arm"] != "synthetic" and label != "elastic"
        ]
        cells = {label: [self.ratio(label, group) for group in columns] for label in others}
        if columns:
            yield "\nelastic against it, median of the ratios of each turn:\n"
            yield from markdown(["loader", *map(in_group, columns)], cells)

    def ratio(self, label: str, group: tuple[str, int]) -> str:
        ours, theirs = (self.repeats(name, group, RATE) for name in ("elastic", label))
        pairs = [a / b for a, b in zip(ours, theirs, strict=False)]  # one may have failed midway
        return f"{statistics.median(pairs):.3g}x" if pairs else ""

    def waits(self) -> Iterator[str]:
        s = self.settings
        if "sleep" in s["modes"]:
            yield f"A device that takes {self.pace()}; share of time without data, worst rank:\n"
            yield from self.table("waits", percent, "sleep_wait_share")
            fewest = min(
                min(self.repeats(label, group, "sleep_steps"), default=math.inf)
                for label in self.labels
                for group in self.groups
            )
            yield (
                "\nA step's wait in ms, median / 95th / 99th percentile of at least "
                f"{number(fewest)} steps, worst rank:\n"
            )
            yield from self.table("ms", plain, *(f"sleep_wait_ms_p{p}" for p in (50, 95, 99)))
        if "train" in s["modes"]:
            yield f"\ntrain.py itself, {s['model']}, {s['train_steps']} steps:\n"
            yield from self.table("tok/s", spread, "train_tokens_per_second")
            yield "\nThe slowest rank's wait in each step there, as a share and in ms:\n"
            yield from self.table("waits", percent, "train_wait_share")
            yield ""
            yield from self.table("ms", plain, *(f"train_wait_ms_p{p}" for p in (50, 95, 99)))

    def resources(self) -> Iterator[str]:
        group, arms = self.groups[0] if self.groups else ("warm", 1), self.results["arms"]
        tokens = self.results["manifest"]["blocks"] * self.results["manifest"]["seq_len"]
        yield (
            f"Peaks over all processes ({in_group(group)}); the synthetic loader shows what torch "
            "takes. Bytes read are those of read calls: what is mapped, and what elastic reads by "
            "io_uring, shows only in the bytes from storage (cold). Writing leaves out the "
            "packing, which is the same for all. The table is on disk with its text and all its "
            "columns.\n"
        )
        cold = next((g for g in self.groups if g[0] == "cold"), None)
        heads = ["loader", "memory (PSS)", "threads", "descriptors", "/dev/shm", "read, B/token"]
        heads += ["from storage, B/token"] * bool(cold) + ["writing, s", "on disk, B/token"]
        cells = {}
        for label in self.labels:
            get = [self.median(label, group, measure) for measure in RESOURCES]
            row = [human(v) + "B" if v is not None else "" for v in get[:1]]
            row += [number(get[1]), number(get[2])]
            row += [human(get[3]) + "B" if get[3] is not None else "", number(get[4])]
            if cold:
                row.append(number(self.median(label, cold, "loader_storage_bytes_per_token")))
            row.append(number(arms[label].get("seconds")))
            size = arms[label].get("bytes")
            cells[label] = [*row, number(size / tokens) if size else ""]
        yield from markdown(heads, cells)

    def delivered(self) -> Iterator[str]:
        arms = self.results["arms"]
        yield (
            "Hashes of an epoch's blocks against those of the packing. Displacement is a block's "
            "mean distance from its place there: 0 in that order, 1 in a random one.\n"
        )
        ranks = sorted({int(r) for arm in arms.values() for r in arm["checks"]})
        heads = [f"epoch, {r} rank{'s' * (r > 1)}" for r in ranks]
        heads += ["same steps on all ranks", "resumes exactly", "displacement"]
        heads += ["shuffles", "read by", "finds its place"]
        cells = {
            label: [*self.checked(arm, ranks), *self.about(arm)] for label, arm in arms.items()
        }
        yield from markdown(["loader", *heads], cells)
        failures = [(label, k, v) for label, arm in arms.items() for k, v in arm["failed"].items()]
        if failures:
            yield "\nFailed, with the reason:\n"
            yield from (f"- `{label}` ({what}): {why}" for label, what, why in failures)

    def about(self, arm: dict) -> tuple[str, str, str]:
        """How it shuffles, reads and finds its place; ``None`` stands for the workers."""
        shuffles, reads, resumes = ABOUT.get(arm["arm"], ("", None, ""))
        workers = self.settings["num_workers"]
        return shuffles, reads or (f"{workers} workers" if workers else "the loop itself"), resumes

    def checked(self, arm: dict, ranks: list[int]) -> list[str]:
        manifest = self.results["manifest"]
        blocks, tokens = manifest["blocks"], manifest["blocks"] * manifest["seq_len"]
        checks = {int(r): check for r, check in arm["checks"].items()}
        row = [in_words(checks[r], blocks, tokens) if r in checks else "" for r in ranks]
        if not checks:
            return [*row, "", "", ""]
        same = all(check["same_as_first"] for check in checks.values()) if len(checks) > 1 else None
        resumes = all_of(check["resumes"] for check in checks.values())
        every = [{True: "yes", False: "no", None: ""}[answer] for answer in (same, resumes)]
        return [*row, *every, number(checks[min(checks)].get("displacement"))]

    def method(self) -> Iterator[str]:
        machine, cells = self.results["machine"], self.results["cells"]
        imports = [cell["import_s"] for cell in cells if "import_s" in cell]
        if imports:
            yield (
                f"- Importing ({statistics.median(imports):.1f} s) and opening the table are over "
                "before a clock starts. A quarter of each warm window goes before it; a cold one "
                "begins at the second step and ends with the epoch at the latest."
            )
        if "cold" in self.settings["cache"]:
            stayed = max((cell.get("stayed", 0.0) for cell in cells), default=0.0)
            yield (
                "- Cold: the plan cache is empty, and the kernel was asked to drop the pages of "
                f"the loader's own files, of which at most {stayed:.0%} stayed. What the disk "
                "keeps, or the host of a virtual machine, is not known. train.py reads its "
                "validation documents from the table before its first step."
            )
        if overhead := self.results.get("overhead"):
            yield (
                f"- The harness: its clock adds {overhead['share']:.1%} to a bare loop over "
                f"{overhead['label']}, the fastest that reads anything; looking at the processes "
                f"twice a second takes {overhead['sampler']:.1%} of one core."
            )
        yield f"- Machine: {about_machine(machine)}."
        yield f"- Command: `{' '.join(machine['command'])}`"


def markdown(heads: list[str], cells: dict[str, list[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    return lines + [f"| `{label}` | {' | '.join(row)} |" for label, row in cells.items()]


def spread(values: list[float]) -> str:
    if not values:
        return ""
    low, middle, high = (human(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low} – {high})"


def seconds(values: list[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else ""


def plain(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else ""


def percent(values: list[float]) -> str:
    if not values:
        return ""
    low, middle, high = (f(values) for f in (min, statistics.median, max))
    return f"{middle:.1%} ({low:.1%} – {high:.1%})"
