"""A question, the contenders that answer it in turn, and what their rounds tell.

All contenders run unmeasured first, then once in every round. Each round starts with another contender, so other work
of the machine affects all of them alike. A ratio is taken within each round, and the answer is the median over the
rounds, so a slow minute does not count against one side only.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Series = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one contender: measures, whose names carry their units, and time series."""

    measures: Mapping[str, float]
    series: Mapping[str, Series] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Missing:
    """A contender that cannot run here, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Contender:
    """A contender. ``run`` completes all of its work before it returns."""

    name: str
    run: Callable[[], Sample]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for a contender's measure, or for its multiple of the measure of the contender ``to``."""

    measure: str
    of: str
    is_: Literal["at most", "at least"]
    bound: float
    to: str | None = None

    def __str__(self) -> str:
        return f"{self.measure} of {self.of}" + (f" / {self.to}" if self.to else "")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. ``measures`` are shown in this order, and the first ``plotted`` of them are plotted.

    ``notes`` say what a reader has to know to judge the numbers. ``most_rounds`` limits the rounds of what takes long
    and varies little. ``check`` is called once, before all others; it raises where contenders have different rows.
    """

    name: str
    title: str
    contenders: Sequence[Contender | Missing]
    measures: Sequence[str]
    targets: Sequence[Target] = ()
    plotted: int = 1
    notes: str = ""
    warm_ups: int = 1
    most_rounds: int = 99
    check: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The value that a target is about; None if a contender is missing."""

    target: Target
    value: Spread | None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        compare = operator.le if self.target.is_ == "at most" else operator.ge
        return bool(compare(self.value.median, self.target.bound))


@dataclass(frozen=True, slots=True)
class Answer:
    """The samples of each contender, one for each round, in order."""

    question: Question
    samples: Mapping[str, Sequence[Sample]]
    missing: Sequence[Missing]

    def spread(self, contender: str, measure: str) -> Spread | None:
        """None if the contender has no such measure."""
        values = [sample.measures[measure] for sample in self.samples[contender] if measure in sample.measures]
        return Spread.of(values) if values else None

    def verdicts(self) -> list[Verdict]:
        return [Verdict(target, self._value(target)) for target in self.question.targets]

    def _value(self, target: Target) -> Spread | None:
        ours = self.samples.get(target.of)
        if ours is None:
            return None
        values = [sample.measures[target.measure] for sample in ours]
        if target.to is not None:
            theirs = self.samples.get(target.to)
            if theirs is None:
                return None
            values = [a / b.measures[target.measure] for a, b in zip(values, theirs, strict=True)]
        return Spread.of(values)


def ask(question: Question, rounds: int, progress: Callable[[str], None], *, warm_up: bool = True) -> Answer:
    """Run all contenders of a question in turn; ``progress`` is called with what runs now."""
    runners = [contender for contender in question.contenders if isinstance(contender, Contender)]
    missing = [contender for contender in question.contenders if isinstance(contender, Missing)]
    rounds = min(rounds, question.most_rounds)
    if question.check is not None:
        progress(f"{question.name}: the same rows")
        question.check()
    for _ in range(question.warm_ups if warm_up else 0):
        for contender in runners:
            progress(f"{question.name}: {contender.name} (warming up)")
            contender.run()
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in runners}
    for number in range(rounds):
        for contender in _rotated(runners, number):
            progress(f"{question.name}: {contender.name} ({number + 1} of {rounds})")
            samples[contender.name].append(contender.run())
    return Answer(question, samples, missing)


def _rotated(runners: Sequence[Contender], by: int) -> Iterator[Contender]:
    for i in range(len(runners)):
        yield runners[(i + by) % len(runners)]
