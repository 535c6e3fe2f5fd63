"""Ask the chosen questions one after the other, in one lab."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from rich.console import Console

from pg_cdc_source.bench import (
    datasets,
    first_result,
    growth,
    latency,
    leaves,
    mirror,
    mirror_latency,
    mirror_size,
    small_tables,
    snapshot,
    source,
    stream,
    tpch,
)
from pg_cdc_source.bench.lab import FULL, QUICK, Lab, Scale, open_lab
from pg_cdc_source.bench.machine import read_commit, read_machine, versions
from pg_cdc_source.bench.question import Answer, Question, ask
from pg_cdc_source.bench.report import Report

# In the order in which they are asked. A question's tables and slots are created when it is asked.
QUESTIONS: dict[str, Callable[[Lab], Question]] = {
    **{
        f"snapshot-{dataset.name}": partial(snapshot.against_jdbc, dataset)
        for dataset in (
            *(datasets.WIDE, datasets.SKEWED, datasets.UUID_KEY),
            *(datasets.NARROW, datasets.TEXT, datasets.NUMERIC),
        )
    },
    "small": small_tables.one,
    "small-many": small_tables.many,
    "first": first_result.first_result,
    "leaves-small": leaves.small,
    "leaves-medium": leaves.medium,
    "tpch": tpch.snapshots,
    "tpch-ranges": tpch.default_ranges,
    "arrow": snapshot.against_arrow_readers,
    "limit": snapshot.against_the_limit,
    "source-cpu": source.cpu,
    "source-wal": source.wal,
    # After the questions that look at slots, because the slot with the backlog stays.
    "backlog": stream.backlog,
    "mirror-backlog": mirror.backlog,
    "mirror-tables": mirror.among_many,
    "mirror-keys": mirror_size.keys,
    "mirror-reading": mirror_size.reading,
    "mirror-first": tpch.first_rows,
    "mirror-latency": mirror_latency.latency,
    "latency": latency.latency,
    "growth-rows": growth.in_rows,
    "growth-partitions": growth.in_partitions,
    "planning": growth.planning,
    "schedule": growth.schedule,
    # Last, because these restart Spark for each run, or look at its processes.
    "memory": growth.memory,
    "stream-memory": stream.stream_memory,
}


def chosen(only: Sequence[str]) -> list[str]:
    """The names of the questions that equal one of ``only`` or start with it; all of them if it is empty."""
    for name in only:
        if not any(question.startswith(name) for question in QUESTIONS):
            raise ValueError(f"there is no question {name}; there are {', '.join(QUESTIONS)}")
    return [name for name in QUESTIONS if not only or name.startswith(tuple(only))]


def scale(*, quick: bool, rows: int | None, rounds: int | None) -> Scale:
    """The scale of a run: that of a full or a quick one, except for what is given."""
    whole = QUICK if quick else FULL
    return replace(whole, rows=rows or whole.rows, rounds=rounds or whole.rounds)


def command() -> str:
    """The command line of this run."""
    words = sys.argv[1:]
    # Where the results go is of no use to anybody else.
    kept = [w for i, w in enumerate(words) if "--out" not in (w.partition("=")[0], *words[max(0, i - 1) : i])]
    return shlex.join(["pg-cdc", *kept])


def run(names: Sequence[str], scale: Scale, command: str) -> Generator[Report, None, None]:
    """Ask the questions ``names``; after each one, report the answers so far. Progress goes to stderr."""
    console = Console(stderr=True, highlight=False)
    machine, commit, started = read_machine(), read_commit(), datetime.now(timezone.utc)
    # The binaries of another server, chosen as in the tests.
    bin_dir = Path(found) if (found := os.environ.get("PG_CDC_TEST_BIN")) else None
    answers: list[Answer] = []
    with console.status("Starting PostgreSQL") as status, open_lab(scale, bin_dir) as lab:
        progress = status.update if console.is_terminal else console.print
        tools = {"postgresql": str(lab.value("SHOW server_version")), **versions()}
        for name in names:
            progress(f"{name}: preparing")
            answers.append(ask(QUESTIONS[name](lab), scale.rounds, progress, warm_up=scale.warm_up))
            began, sizes = started.isoformat(timespec="seconds"), lab.table_bytes()
            yield Report(command, began, machine, commit, tools, scale, sizes, tuple(answers))
