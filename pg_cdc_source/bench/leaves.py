"""Questions about tables of many partitions, which Spark's JDBC source reads in one query of the root."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pg_cdc_source.bench import datasets, peers
from pg_cdc_source.bench.lab import FULL, Lab
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.snapshot import JDBC, MEASURES, OURS, read_by_jdbc, require_rows

_EACH = "ms_a_leaf"
_WIDE = replace(datasets.WIDE, key=None)  # without a key, JDBC reads in one query


def small(lab: Lab) -> Question:
    return _against_jdbc(lab, "leaves-small", 2_000, 100, 3.0)


def medium(lab: Lab) -> Question:
    return _against_jdbc(lab, "leaves-medium", 200, 50_000, 0.8)


def _against_jdbc(lab: Lab, name: str, leaves: int, rows_each: int, at_most: float) -> Question:
    """The number of leaves follows the run's scale."""
    leaves = max(2, leaves * lab.scale.rows // FULL.rows)
    table = name.replace("-", "_")
    _create(lab, table, leaves, rows_each)
    rows = leaves * rows_each
    jdbc = peers.missing_jdbc() or Contender(JDBC, partial(read_by_jdbc, lab, _WIDE, table, rows))
    return Question(
        name,
        f"A snapshot of {leaves:,} partitions of {rows_each:,} rows (wide) into Spark, to a no-op sink",
        [Contender(OURS, partial(_read_both, lab, table, rows, leaves)), jdbc],
        (*MEASURES, _EACH),
        [Target("wall_s", OURS, "at most", at_most, to=JDBC), Target(_EACH, OURS, "at most", 0.3)],
        plotted=2,
        notes="Default options; JDBC in one query of the root, with fetchsize 10000. JVM warm."
        f" {_EACH} is what it takes longer than the same rows in one table, for each partition.",
        check=partial(require_rows, lab, _WIDE, table, rows),
    )


def _create(lab: Lab, table: str, leaves: int, rows_each: int) -> None:
    lab.execute(f"CREATE TABLE {table} ({datasets.WIDE_COLUMNS}) PARTITION BY RANGE (id)")
    for i in range(leaves):
        first = 1 + i * rows_each
        lab.execute(
            f"CREATE UNLOGGED TABLE {table}_{i} PARTITION OF {table} FOR VALUES FROM ({first}) TO ({first + rows_each})"
        )
    lab.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    lab.execute(f"INSERT INTO {table} {datasets.WIDE.select.format(rows=leaves * rows_each)}")
    lab.execute(f"CREATE UNLOGGED TABLE {table}_whole AS SELECT * FROM {table}")
    for name in (table, f"{table}_whole"):
        lab.execute(f"VACUUM (FREEZE, ANALYZE) {name}")


def _read_both(lab: Lab, table: str, rows: int, leaves: int) -> Sample:
    measures = _read(lab, table, rows).measures
    whole = _read(lab, f"{table}_whole", rows).measures
    return Sample({**measures, _EACH: (measures["wall_s"] - whole["wall_s"]) * 1000 / leaves})


def _read(lab: Lab, table: str, rows: int) -> Sample:
    def work() -> int:
        frame = lab.spark.read.format("pgsnapshot").options(url=lab.url, dbtable=table).load()
        frame.write.format("noop").mode("overwrite").save()
        return rows

    return lab.meter.measure(work)
