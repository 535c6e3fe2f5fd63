"""A question about mirrors: how far a lake is behind the server while transactions come in."""

from __future__ import annotations

import bisect
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.lakes import FORMATS, missing_lake
from pg_cdc_source.bench.mirror import FIVE, SLOT, TABLES, VALUES, lake_of, make_tables, publish, shown, sizes
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.stream import until
from pg_cdc_source.lake.sink import Applied
from pg_cdc_source.mirrors.query import Format

_TRANSACTIONS_PER_SECOND = 500
_LOOK_SECONDS = 0.02


def latency(lab: Lab) -> Question:
    """From a commit to the ledger's row of the batch that has it, in the lake of each format."""
    rows, _ = sizes(lab)
    make_tables(lab, TABLES, rows)
    publish(lab, FIVE, TABLES)
    return Question(
        "mirror-latency",
        f"From the commit to the lake: {_TRANSACTIONS_PER_SECOND} transactions a second over five tables of {rows:,}",
        [
            missing_lake(format, shown(format)) or Contender(shown(format), partial(_latency, lab, format, rows))
            for format in FORMATS
        ],
        ("p50_s", "p99_s", "most_s", "batches"),
        [Target("p50_s", shown("deltalake"), "at most", 1.2)],
        plotted=2,
        most_rounds=3,
        notes=f"Default trigger; {lab.scale.latency_seconds:g} s, the first fifth of which is not counted. How far the"
        f" lake is behind the server is looked at every {_LOOK_SECONDS * 1000:g} ms. 70 % of the transactions are"
        " updates of random rows, the others inserts.",
    )


def _latency(lab: Lab, format: Format, rows: int) -> Sample:
    seconds = lab.scale.latency_seconds
    applied: list[tuple[float, int]] = []  # when, and up to which LSN

    def note(batch: Applied) -> None:
        applied.append((time.time(), batch.row.lsn))

    lab.drop_slot(SLOT)
    query = lake_of(lab, format, TABLES, FIVE).start(lab.spark, note)
    statements = [
        statement
        for table in TABLES
        for statement in (
            *[f"UPDATE {table} SET quantity = quantity + 1, changed = now() WHERE id = $1 * 7919 % {rows} + 1"] * 7,
            *[f"INSERT INTO {table} SELECT {VALUES} FROM (SELECT nextval('mirrored_ids') + {rows} AS i) AS n"] * 3,
        )
    ]
    lab.execute("CREATE SEQUENCE IF NOT EXISTS mirrored_ids")

    def reached(lsn: int) -> bool:
        return bool(applied) and applied[-1][1] >= lsn

    def work() -> int:
        with _looking(lab) as looks:
            arguments = (json.dumps(statements), str(_TRANSACTIONS_PER_SECOND), str(seconds))
            with lab.start("writer", *arguments) as writer:
                _, errors = writer.communicate(lab.url)
                if writer.returncode != 0:
                    raise RuntimeError(f"the writer failed:\n{errors[-3000:]}")
        found.extend(looks)
        # A ledger's LSN is that of a commit, and the last look may be behind the last one.
        lab.execute(f"UPDATE {TABLES[0]} SET quantity = 0 WHERE id = 1")
        until(lambda: reached(found[-1][1]), query)
        return int(_TRANSACTIONS_PER_SECOND * seconds)

    found: list[tuple[float, int]] = []
    try:
        until(lambda: reached(0), query)
        before = len(applied)
        sample = lab.meter.measure(work)
    finally:
        query.stop()
    lab.drop_slot(SLOT)
    lsns = [lsn for _, lsn in applied]
    begin = found[0][0]
    late = [
        (at - begin, applied[bisect.bisect_left(lsns, lsn)][0] - at) for at, lsn in found if at >= begin + seconds / 5
    ]
    cuts = statistics.quantiles((behind for _, behind in late), n=100)
    measures = {
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "most_s": max(b for _, b in late),
        "batches": len(applied) - before,
    }
    return Sample({**sample.measures, **measures}, {"seconds from commit to lake": tuple(late)})


@contextmanager
def _looking(lab: Lab) -> Iterator[list[tuple[float, int]]]:
    """Look at the end of the WAL all the time; yields when each look was, and its LSN."""
    looks: list[tuple[float, int]] = []
    over = threading.Event()

    def look() -> None:
        with closing(lab.connect()) as session, session.cursor() as cursor:
            while not over.wait(_LOOK_SECONDS):
                cursor.execute("SELECT pg_current_wal_flush_lsn() - '0/0'")
                ((lsn,),) = cursor.fetchall()
                looks.append((time.time(), int(lsn)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
