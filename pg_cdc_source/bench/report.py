"""What a run has found: as tables on the terminal, as JSON, and as plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pg_cdc_source.bench.lab import Scale
from pg_cdc_source.bench.machine import Commit, Machine
from pg_cdc_source.bench.plots import number_text, plot
from pg_cdc_source.bench.question import Answer, Series, Spread, Verdict

JSON_NAME = "results.json"

_MOST_POINTS = 500


@dataclass(frozen=True, slots=True)
class Report:
    """All answers of one run, and what it ran on."""

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
    # The plots have all points; the JSON beside them should not become megabytes.
    return {title: points[:: max(1, -(-len(points) // _MOST_POINTS))] for title, points in series.items()}


def write_json(report: Report, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / JSON_NAME).write_text(json.dumps(as_json(report), indent=1) + "\n")


def write(report: Report, directory: Path) -> None:
    """Write the JSON and the plots."""
    write_json(report, directory)
    for answer in report.answers:
        rounds = max(map(len, answer.samples.values()))
        caption = f"{report.machine.cpu}, {report.machine.cores} cores; median of {rounds}; {report.command}"
        plot(answer, caption, directory / f"{answer.question.name}.png")


# --- the terminal ----------------------------------------------------------------------------------------------------


def print_json(report: Report) -> None:
    print(json.dumps(as_json(report)))


def print_tables(report: Report) -> None:
    # Redirected output has no width of its own.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    machine = report.machine
    console.print(f"{machine.cpu}, {machine.cores} cores, {machine.memory_gb:g} GB; {report.started}", style="dim")
    console.print(", ".join(f"{name} {version}" for name, version in report.versions.items()), style="dim")
    if machine.busy_cores > machine.cores / 4:
        console.print(f"[bold yellow]Other work used {machine.busy_cores:g} cores when the run started.[/]")
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
    median = number_text(spread.median)
    return (
        median
        if spread.least == spread.most
        else f"{median} ({number_text(spread.least)} to {number_text(spread.most)})"
    )
