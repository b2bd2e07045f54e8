"""The plots of scripts/ab.py's report."""

import statistics
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from metrics import human
from scripts.ab_figures import RATE, Comparison, about_machine, in_group, number

OURS, OTHERS, CEILING = "#d1495b", "#5b8fb9", "#b9bec5"
DPI = 130
TITLE = {"x": 0.01, "ha": "left", "fontweight": "bold", "fontsize": 10}


def draw(report: Comparison, out: Path) -> list[str]:
    """Draw what there are figures for, as NAME.png in ``out``. Returns the names."""
    machine, drawn = report.results["machine"], []
    footer = f"{about_machine(machine)}, commit {(machine['git_commit'] or 'unknown')[:8]}"
    footer = footer.replace(", Python", ",\nPython")
    if report.results.get("interrupted"):
        footer += "; interrupted: turns are missing"
    for name, plot in PLOTS.items():
        if (figure := plot(report)) is not None:
            figure.text(0.01, 0.005, footer, fontsize=6, color="#666666")
            FigureCanvasAgg(figure).print_png(out / f"{name}.png")
            drawn.append(name)
    return drawn


def color(label: str) -> str:
    return {"elastic": OURS, "synthetic": CEILING}.get(label.partition(" ")[0], OTHERS)


def bars(
    report: Comparison, measure: str, title: str, unit: str, show: Callable[[float], str], log: bool
) -> Figure | None:
    """One panel for each setting: medians as bars, lowest and highest as whiskers."""
    groups = [g for g in report.groups if any(report.repeats(x, g, measure) for x in report.labels)]
    if not groups:
        return None
    height = 1.3 + 0.28 * len(report.labels)
    figure = Figure(figsize=(2.4 + 3.4 * len(groups), height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.08, 1, 0.92))
    figure.suptitle(title, **TITLE)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        panel(axes, report, group, measure, show, log)
        axes.set_title(in_group(group), fontsize=9)
        axes.set_xlabel(unit, fontsize=8)
    return figure


def panel(
    axes: Axes,
    report: Comparison,
    group: tuple,
    measure: str,
    show: Callable[[float], str],
    log: bool,
) -> None:
    for place, label in enumerate(reversed(report.labels)):
        values = report.repeats(label, group, measure)
        if not values:
            where = axes.get_yaxis_transform()
            axes.text(0.02, place, "no figure", va="center", fontsize=7, transform=where)
            continue
        middle = statistics.median(values)
        error = [[middle - min(values)], [max(values) - middle]]
        axes.barh(place, middle, color=color(label), height=0.68)
        axes.errorbar(middle, place, xerr=error, color="#333333", linewidth=0.9, capsize=2)
        text = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
        axes.annotate(show(middle), (max(values), place), **text)
    axes.set_yticks(range(len(report.labels)), reversed(report.labels), fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if log:
        axes.set_xscale("log")
    axes.margins(x=0.22)


def throughput(report: Comparison) -> Figure | None:
    figure = bars(report, RATE, "Loader alone", "tokens a second, all ranks (log)", human, True)
    for axes in figure.axes if figure else ():
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
    return figure


def wait(report: Comparison) -> Figure | None:
    mode = next((m for m in ("sleep", "train") if m in report.settings["modes"]), None)
    if mode is None:
        return None
    title = {
        "sleep": f"Idle for want of data: a pretended device that takes {report.pace()}",
        "train": "train.py idle for want of data",
    }
    show = "{:.1%}".format
    figure = bars(
        report, f"{mode}_wait_share", title[mode], "share of time, worst rank", show, False
    )
    for axes in figure.axes if figure else ():
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlim(0, 1.18)
    return figure


def start(report: Comparison) -> Figure | None:
    title = "From opening the loader to its first step"
    return bars(report, "first_batch_s", title, "seconds (log)", "{:.3g} s".format, True)


def timeline(report: Comparison) -> Figure | None:
    """The steps of each loader's first turn, one panel each, one scale."""
    modes = [m for m in ("sleep", "train", "loader") if m in report.settings["modes"]]
    for mode in modes:
        shown, key = {}, f"{mode}_timeline_ms"
        for cell in report.results["cells"]:
            if key in cell and (cell["cache"], cell["ranks"]) == report.groups[0]:
                shown.setdefault(cell["label"], cell[key])
        if shown:
            return timelines(shown, mode, report.groups[0])
    return None


def timelines(shown: dict[str, list[float]], mode: str, group: tuple[str, int]) -> Figure:
    figure = Figure(figsize=(7.5, 0.9 + 0.72 * len(shown)), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))
    kind = {"sleep": "computing pretended", "train": "train.py", "loader": "loader alone"}[mode]
    figure.suptitle(f"Step by step ({kind}, {in_group(group)}, first turn)", **TITLE)
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    low, high = (f(map(f, shown.values())) for f in (min, max))
    for axes, (label, times) in zip(panels, shown.items(), strict=True):
        axes.plot(range(1, len(times) + 1), times, color=color(label), linewidth=0.9)
        axes.set_yscale("log")
        axes.set_yticks([low, high], [number(low), number(high)])
        axes.minorticks_off()
        axes.set_ylabel("ms (log)", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.set_title(label, fontsize=8, loc="left", pad=2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step of the measured window", fontsize=8)
    return figure


PLOTS = {"throughput": throughput, "wait": wait, "start": start, "timeline": timeline}
