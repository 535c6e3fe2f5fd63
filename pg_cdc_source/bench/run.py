"""Ask the questions that are wanted, one after the other, in one lab."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from rich.console import Console

from pg_cdc_source.bench import datasets, growth, snapshot, source, stream
from pg_cdc_source.bench.lab import FULL, QUICK, Lab, Scale, open_lab
from pg_cdc_source.bench.machine import read_commit, read_machine, versions
from pg_cdc_source.bench.question import Answer, Question, ask
from pg_cdc_source.bench.report import Report

# By name. What a question needs (tables, slots) is made when it is asked.
QUESTIONS: dict[str, Callable[[Lab], Question]] = {
    **{
        f"snapshot-{dataset.name}": partial(snapshot.against_jdbc, dataset)
        for dataset in (
            *(datasets.WIDE, datasets.SKEWED, datasets.UUID_KEY),
            *(datasets.NARROW, datasets.TEXT, datasets.NUMERIC),
        )
    },
    "arrow": snapshot.against_arrow_readers,
    "limit": snapshot.against_the_limit,
    "source-cpu": source.cpu,
    "source-wal": source.wal,
    # The slot with the backlog stays: after what looks at slots.
    "backlog": stream.backlog,
    "latency": stream.latency,
    "growth-rows": growth.in_rows,
    "growth-partitions": growth.in_partitions,
    "planning": growth.planning,
    "schedule": growth.schedule,
    # Last, since this starts Spark anew for each run.
    "memory": growth.memory,
    "stream-memory": stream.stream_memory,
}


def chosen(only: Sequence[str]) -> list[str]:
    """The names of the questions meant: each of ``only`` stands for itself and for those that it begins."""
    for name in only:
        if not any(question.startswith(name) for question in QUESTIONS):
            raise ValueError(f"there is no question {name}; there are {', '.join(QUESTIONS)}")
    return [name for name in QUESTIONS if not only or name.startswith(tuple(only))]


def scale(*, quick: bool, rows: int | None, rounds: int | None) -> Scale:
    """The size of a run: what is not said is that of a full one, or of a quick one."""
    whole = QUICK if quick else FULL
    return replace(whole, rows=rows or whole.rows, rounds=rounds or whole.rounds)


def command() -> str:
    """How this run was started, as one would type it."""
    return shlex.join(["pg-cdc", *sys.argv[1:]])


def run(names: Sequence[str], scale: Scale, command: str) -> Report:
    """Ask ``names`` and report; progress goes to stderr."""
    console = Console(stderr=True, highlight=False)
    machine, commit, started = read_machine(), read_commit(), datetime.now(timezone.utc)
    # Another server's binaries, as the tests take them.
    bin_dir = Path(found) if (found := os.environ.get("PG_CDC_TEST_BIN")) else None
    answers: list[Answer] = []
    with console.status("Starting PostgreSQL") as status, open_lab(scale, bin_dir) as lab:
        progress = status.update if console.is_terminal else console.print
        tools = {"postgresql": str(lab.value("SHOW server_version")), **versions()}
        for name in names:
            progress(f"{name}: making what is measured")
            answers.append(ask(QUESTIONS[name](lab), scale.rounds, progress, warm_up=scale.warm_up))
        sizes = lab.table_bytes()
    return Report(command, started.isoformat(timespec="seconds"), machine, commit, tools, scale, sizes, tuple(answers))
