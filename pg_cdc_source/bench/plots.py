"""One plot for each question: medians as bars with all rounds on them, then the time series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pg_cdc_source.bench.question import Answer, Spread

_OURS, _PEER, _ROUND = "#2a78b8", "#a7adb4", "#20262d"


def plot(answer: Answer, caption: str, path: Path) -> None:
    """Draw a question's first measures, and to their right its time series."""
    question = answer.question
    titles = list(dict.fromkeys(title for samples in answer.samples.values() for title in samples[-1].series))
    panels = question.plotted + len(titles)
    height = 1.9 + 0.45 * len(answer.samples) if not titles else 4.2
    figure = Figure(figsize=(4.6 * panels + 1.4, height), layout="constrained")
    (axes,) = figure.subplots(1, panels, squeeze=False)
    for axis, measure in zip(axes, question.measures[: question.plotted], strict=False):
        _draw_bars(axis, answer, measure, 0.3 if titles else 0.6)
        axis.set_yticks(
            range(len(answer.samples)), list(answer.samples) if axis is axes[0] else [""] * len(answer.samples)
        )
    for axis, title in zip(axes[question.plotted :], titles, strict=True):
        _draw_series(axis, answer, title)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="both", color="#e6e8ea", zorder=0)
    figure.suptitle(question.title, fontsize=11, x=0.01, ha="left", wrap=True)
    figure.supxlabel(caption, fontsize=7, color="#6b7178", x=0.01, ha="left")
    figure.savefig(path, dpi=140)


def _draw_bars(axis: Any, answer: Answer, measure: str, height: float) -> None:
    for i, (name, samples) in enumerate(answer.samples.items()):
        values = [sample.measures[measure] for sample in samples if measure in sample.measures]
        if not values:
            continue
        median = Spread.of(values).median
        axis.barh(i, median, height=height, color=_color(answer, name), zorder=2)
        axis.plot(values, [i] * len(values), "|", color=_ROUND, markersize=9, zorder=3)
        axis.annotate(
            number_text(median), (max(values), i), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axis.invert_yaxis()
    axis.margins(x=0.16)
    axis.set_xlim(left=0)
    axis.set_xlabel(measure)


def _draw_series(axis: Any, answer: Answer, title: str) -> None:
    for name, samples in answer.samples.items():
        if line := samples[-1].series.get(title):
            color = _color(answer, name)
            # Not clipped, because the axis would cut off a line at zero.
            axis.plot(*zip(*line, strict=True), ".-", ms=2, lw=1, color=color, label=name, clip_on=False, zorder=3)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel(title)
    axis.legend(frameon=False, fontsize=8)


def _color(answer: Answer, name: str) -> str:
    """The connector's contenders stand out: those with targets, or all if no contender has one."""
    ours = {target.of for target in answer.question.targets}
    return _OURS if name in ours or not ours else _PEER


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
