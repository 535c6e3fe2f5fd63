"""What a run has found: as tables, as JSON, and as one picture for each question."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from pg_cdc_source.bench.lab import Scale
from pg_cdc_source.bench.machine import Commit, Machine
from pg_cdc_source.bench.question import Answer, Series, Spread, Verdict

JSON_NAME = "results.json"

_MOST_POINTS = 500

_OURS, _PEER, _ROUND = "#2a78b8", "#a7adb4", "#20262d"


@dataclass(frozen=True, slots=True)
class Report:
    """All answers of one run, and what they were measured on."""

    command: str
    started: str
    machine: Machine
    commit: Commit | None
    versions: Mapping[str, str]
    scale: Scale
    table_bytes: Mapping[str, int]
    answers: tuple[Answer, ...]


def as_json(report: Report) -> dict[str, Any]:
    return {
        "command": report.command,
        "started": report.started,
        "machine": asdict(report.machine),
        "commit": None if report.commit is None else asdict(report.commit),
        "versions": dict(report.versions),
        "scale": asdict(report.scale),
        "table_bytes": dict(report.table_bytes),
        "questions": [_answer_as_json(answer) for answer in report.answers],
    }


def _answer_as_json(answer: Answer) -> dict[str, Any]:
    question = answer.question
    contenders = {
        name: {
            "medians": {measure: asdict(answer.spread(name, measure)) for measure in samples[0].measures},  # type: ignore[arg-type]
            "rounds": [dict(sample.measures) for sample in samples],
            "series": [_thinned(sample.series) for sample in samples if sample.series],
        }
        for name, samples in answer.samples.items()
    }
    return {
        "name": question.name,
        "title": question.title,
        "notes": question.notes,
        "contenders": contenders,
        "missing": [asdict(missing) for missing in answer.missing],
        "targets": [
            {
                "what": str(verdict.target),
                "bound": f"{verdict.target.is_} {verdict.target.bound:g}",
                "value": None if verdict.value is None else asdict(verdict.value),
                "met": verdict.met,
            }
            for verdict in answer.verdicts()
        ],
    }


def _thinned(series: Mapping[str, Series]) -> dict[str, Series]:
    # The pictures have all of them; what is kept beside them shall not be megabytes.
    return {title: points[:: max(1, -(-len(points) // _MOST_POINTS))] for title, points in series.items()}


def write(report: Report, directory: Path) -> None:
    """Write the JSON and the pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / JSON_NAME).write_text(json.dumps(as_json(report), indent=1) + "\n")
    for answer in report.answers:
        plot(answer, report, directory / f"{answer.question.name}.png")


# --- the terminal ----------------------------------------------------------------------------------------------------


def print_json(report: Report) -> None:
    print(json.dumps(as_json(report)))


def print_tables(report: Report) -> None:
    # A redirected output has no width of its own.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    machine = report.machine
    console.print(f"{machine.cpu}, {machine.cores} cores, {machine.memory_gb:g} GB; {report.started}", style="dim")
    console.print(", ".join(f"{name} {version}" for name, version in report.versions.items()), style="dim")
    if machine.busy_cores > machine.cores / 4:
        console.print(f"[bold yellow]Other work took {machine.busy_cores:g} cores when this began.[/]")
    for answer in report.answers:
        _print_answer(answer, console)


def _print_answer(answer: Answer, console: Console) -> None:
    question = answer.question
    rounds = max((len(samples) for samples in answer.samples.values()), default=0)
    console.print(f"[bold]{question.name}[/]: {question.title}")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"median of {rounds} (least to most)")
    for measure in question.measures:
        table.add_column(measure, justify="right")
    for name in answer.samples:
        spreads = [answer.spread(name, measure) for measure in question.measures]
        table.add_row(name, *("" if spread is None else _spread(spread) for spread in spreads))
    for missing in answer.missing:
        table.add_row(missing.name, f"[yellow]missing: {missing.reason}[/]")
    console.print(table)
    if question.notes:
        console.print(question.notes, style="dim")
    for verdict in answer.verdicts():
        console.print(_verdict(verdict))
    console.print()


def _verdict(verdict: Verdict) -> str:
    target = verdict.target
    wanted = f"{target.is_} {target.bound:g}"
    if verdict.value is None:
        return f"[yellow]?[/] {target}: not measured; wanted {wanted}"
    mark = "[green]✓[/]" if verdict.met else "[bold red]✗[/]"
    return f"{mark} {target}: {_spread(verdict.value)}; wanted {wanted}"


def _spread(spread: Spread) -> str:
    median = _number(spread.median)
    return median if spread.least == spread.most else f"{median} ({_number(spread.least)} to {_number(spread.most)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# --- pictures --------------------------------------------------------------------------------------------------------


def plot(answer: Answer, report: Report, path: Path) -> None:
    """Draw a question: medians as bars with every round on them, and beside them what was watched over time."""
    question = answer.question
    names = list(answer.samples)
    titles = list(dict.fromkeys(title for samples in answer.samples.values() for title in samples[-1].series))
    panels = question.plotted + len(titles)
    height = 1.9 + 0.45 * len(names) if not titles else 4.2
    figure = Figure(figsize=(4.6 * panels + 1.4, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)
    for axis, measure in zip(axes[0], question.measures[: question.plotted], strict=False):
        for i, name in enumerate(names):
            values = [sample.measures[measure] for sample in answer.samples[name] if measure in sample.measures]
            if not values:
                continue
            median = Spread.of(values).median
            axis.barh(i, median, height=0.3 if titles else 0.6, color=_color(answer, name), zorder=2)
            axis.plot(values, [i] * len(values), "|", color=_ROUND, markersize=9, zorder=3)
            axis.annotate(
                _number(median), (max(values), i), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
            )
        axis.set_yticks(range(len(names)), names if axis is axes[0][0] else [""] * len(names))
        axis.invert_yaxis()
        axis.margins(x=0.16)
        axis.set_xlim(left=0)
        axis.set_xlabel(measure)
    for axis, title in zip(axes[0][question.plotted :], titles, strict=True):
        for name in names:
            if line := answer.samples[name][-1].series.get(title):
                color = _color(answer, name)
                # What stays at zero is not to be cut off by the axis.
                axis.plot(*zip(*line, strict=True), ".-", ms=2, lw=1, color=color, label=name, clip_on=False, zorder=3)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("seconds")
        axis.set_ylabel(title)
        axis.legend(frameon=False, fontsize=8)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="both", color="#e6e8ea", zorder=0)
    figure.suptitle(question.title, fontsize=11, x=0.01, ha="left", wrap=True)
    figure.supxlabel(
        f"{report.machine.cpu}, {report.machine.cores} cores; median of {max(map(len, answer.samples.values()))};"
        f" {report.command}",
        fontsize=7,
        color="#6b7178",
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=140)


def _color(answer: Answer, name: str) -> str:
    """Ours stand out: the contenders that targets are about, or all where they are all ours."""
    ours = {target.of for target in answer.question.targets}
    return _OURS if name in ours or not ours else _PEER
