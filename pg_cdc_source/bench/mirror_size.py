"""Questions about a mirrored table: what its size adds to a small batch, and what its history adds to reading it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.lakes import FORMATS, Lake, missing_lake
from pg_cdc_source.bench.mirror import SLOT, lake_of, make_tables, publish
from pg_cdc_source.bench.question import Contender, Missing, Question, Sample, Target
from pg_cdc_source.bench.stream import until
from pg_cdc_source.lake.sink import Applied
from pg_cdc_source.mirrors.query import Format

_PUBLICATION = "bench_sized"
_KEYS, _BATCHES = 200, 7
_READS = 5


def keys(lab: Lab) -> Question:
    """A batch of 200 keys, recent ones and random ones, in a small table and in one that is 64 times as large."""
    small, large = max(1_000, lab.scale.rows // 20), lab.scale.rows * 16 // 5
    return Question(
        "mirror-keys",
        f"A batch of {_KEYS} keys in a mirrored table of {small:,} rows, and of {large:,}",
        [
            missing_lake(format, _of(format, rows))
            or Contender(_of(format, rows), partial(_batches, lab, format, rows))
            for format in FORMATS
            for rows in (small, large)
        ],
        ("recent_s", "random_s"),
        [Target("recent_s", _of(f, large), "at most", 1.2, to=_of(f, small)) for f in FORMATS],
        plotted=2,
        warm_ups=0,
        most_rounds=1,
        notes=f"From the commit to the ledger's row, median of {_BATCHES} batches, one after another.",
    )


def reading(lab: Lab) -> Question:
    """A table that many batches have changed, against the same rows written at once."""
    rows = max(1_000, lab.scale.rows // 20)
    batches = max(3, lab.scale.rows // 40_000)
    read = {format: _used_and_fresh(lab, format, rows, batches) for format in FORMATS if not missing_lake(format, "")}

    def contender(format: Format, kind: str) -> Contender | Missing:
        name = f"{format}, {kind}"
        return missing_lake(format, name) or Contender(name, read[format][kind])

    return Question(
        "mirror-reading",
        f"Reading a mirrored table of {rows:,} rows after {batches} batches, and reading it freshly written",
        [contender(format, kind) for format in FORMATS for kind in ("after batches", "fresh")],
        ("wall_s", "files"),
        [Target("wall_s", f"{format}, after batches", "at most", 1.3, to=f"{format}, fresh") for format in FORMATS],
        notes=f"Each batch changes {_KEYS} random rows. Whole tables, {_READS} times: into Arrow by delta-rs, or into"
        " a sum of hashes by Spark.",
    )


def _of(format: Format, rows: int) -> str:
    return f"{format}, {rows:,} rows"


def _batches(lab: Lab, format: Format, rows: int) -> Sample:
    table = _table(lab, rows)
    with _running(lab, lake_of(lab, format, [table], _PUBLICATION), rows) as bring:
        recent = [bring(_update(table, f"id > {rows - _KEYS}")) for _ in range(_BATCHES)]
        random = [bring(_update(table, _random_ids(rows, i))) for i in range(_BATCHES)]
    return Sample({"recent_s": statistics.median(recent), "random_s": statistics.median(random)})


def _used_and_fresh(lab: Lab, format: Format, rows: int, batches: int) -> Mapping[str, Callable[[], Sample]]:
    table = _table(lab, rows)
    lakes = {kind: lake_of(lab, format, [table], _PUBLICATION) for kind in ("after batches", "fresh")}
    with _running(lab, lakes["after batches"], rows) as bring:
        for i in range(batches):
            bring(_update(table, _random_ids(rows, i)))
    lab.drop_slot(SLOT)
    lakes["fresh"].bring(lab.spark)
    lab.drop_slot(SLOT)

    def read(lake: Lake) -> Sample:
        def work() -> int:
            for _ in range(_READS):
                lake.read(lab.spark, table)
            return _READS * rows

        measures = lab.meter.measure(work).measures
        return Sample({**measures, "files": lake.files(lab.spark, table)})

    return {kind: partial(read, lake) for kind, lake in lakes.items()}


def _table(lab: Lab, rows: int) -> str:
    table = f"sized_{rows}"
    if not lab.value("SELECT to_regclass(%s) IS NOT NULL", (table,)):
        make_tables(lab, [table], rows)
        lab.execute(f"VACUUM (FREEZE, ANALYZE) {table}")
    publish(lab, _PUBLICATION, [table])
    return table


def _update(table: str, which: str) -> str:
    return f"UPDATE {table} SET quantity = quantity + 1, changed = now() WHERE {which}"


def _random_ids(rows: int, seed: int) -> str:
    ids = f"SELECT ({seed} * {_KEYS} + k)::bigint * 7919 * 7919 % {rows} + 1 FROM generate_series(1, {_KEYS}) AS k"
    return f"id IN ({ids})"


@contextmanager
def _running(lab: Lab, lake: Lake, rows: int) -> Iterator[Callable[[str], float]]:
    """Run a mirror of a table; yields what executes a statement and returns the seconds until the ledger has it."""
    came = wanted = 0

    def note(batch: Applied) -> None:
        nonlocal came
        came += sum(batch.rows.values())

    def bring(statement: str) -> float:
        nonlocal wanted
        with lab.admin.cursor() as cursor:
            cursor.execute(statement)
            begin = time.perf_counter()
            wanted += cursor.rowcount
        until(lambda: came >= wanted, query, every_seconds=0.005)  # how long it takes is what is asked
        return time.perf_counter() - begin

    lab.drop_slot(SLOT)
    query = lake.start(lab.spark, note)
    try:
        until(lambda: came >= rows, query)
        wanted = came
        yield bring
    finally:
        query.stop()
        lab.drop_slot(SLOT)
