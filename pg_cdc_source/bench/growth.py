"""Questions about growth: rows, partitions, memory, planning, and a simulated schedule against a real one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

from pyspark.sql import DataFrame

from pg_cdc_source import open_snapshot
from pg_cdc_source.bench import datasets
from pg_cdc_source.bench.lab import CORES, PARTITIONS, Lab
from pg_cdc_source.bench.meter import Peak, watching
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.schedule import makespan
from pg_cdc_source.bench.snapshot import read_by_spark
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot import source
from pg_cdc_source.snapshot.scan import make_plan

RUN, SIMULATED = "run", "simulated"

# Multiples of the run's rows. The largest is 16 times the smallest.
_SIZES = {"1x": 0.25, "4x": 1.0, "16x": 4.0}
_PARTITION_COUNTS = (1, 4, 16, 64)


def in_rows(lab: Lab) -> Question:
    tables = {name: lab.table(datasets.WIDE, times) for name, times in _SIZES.items()}
    return Question(
        "growth-rows",
        f"Tables of {', '.join(f'{rows:,}' for _, rows in tables.values())} rows (wide): time for each row",
        [Contender(name, partial(read_by_spark, lab, *table)) for name, table in tables.items()],
        ("wall_us_per_row", "cpu_us_per_row", "wall_s"),
        [Target("wall_us_per_row", "16x", "at most", 1.1, to="1x")],
        notes=f"{PARTITIONS} partitions.",
    )


def in_partitions(lab: Lab) -> Question:
    table, rows = lab.table(datasets.WIDE)
    return Question(
        "growth-partitions",
        f"{rows:,} rows (wide) in more and more partitions: time for each row",
        [
            Contender(str(count), partial(read_by_spark, lab, table, rows, numPartitions=count))
            for count in _PARTITION_COUNTS
        ],
        ("wall_us_per_row", "cpu_us_per_row", "wall_s"),
        [
            # One partition can use only one core of each side.
            Target("wall_us_per_row", "64", "at most", 1.1, to="4"),
            Target("cpu_us_per_row", "64", "at most", 1.1, to="1"),
        ],
        plotted=2,
    )


def memory(lab: Lab) -> Question:
    tables = {name: lab.table(datasets.WIDE, times) for name, times in _SIZES.items()}

    def run(table: str, rows: int) -> Sample:
        # New workers, which have read nothing else.
        lab.restart_spark()
        peak = Peak(lab.spark_processes)
        with watching(peak.look):
            sample = read_by_spark(lab, table, rows)
        return Sample({**sample.measures, "worker_peak_mb": peak.bytes / 1e6})

    return Question(
        "memory",
        f"Tables of {', '.join(f'{rows:,}' for _, rows in tables.values())} rows (wide): memory of a Python worker",
        [Contender(name, partial(run, *table)) for name, table in tables.items()],
        ("worker_peak_mb", "wall_s"),
        [Target("worker_peak_mb", name, "at most", 300) for name in tables],
        warm_ups=0,
        most_rounds=3,
        notes="The most resident memory of any one Python process below the JVM, as the kernel reports it.",
    )


def planning(lab: Lab) -> Question:
    """Planning grows with the number of tables and with the ranges of a table: both are measured."""
    count, ranges = lab.scale.planned_tables, lab.scale.planned_ranges
    lab.execute("CREATE SCHEMA planned")
    with lab.admin.cursor() as cursor:
        for i in range(count):
            cursor.execute(f"CREATE TABLE planned.t{i} (id int PRIMARY KEY, name text, price numeric(10,2))")
    table, _ = lab.table(datasets.WIDE)

    def plan_tables() -> int:
        with open_snapshot(lab.url, tables=["planned.t0"]) as snapshot:
            for i in range(count):
                options = parse_snapshot_options({**snapshot.options, "dbtable": f"planned.t{i}"})
                source.plan_ranges(make_plan(options), options)
        return count

    def load_tables() -> int:
        for i in range(count // 10):
            lab.spark.read.format("pgsnapshot").options(url=lab.url, dbtable=f"planned.t{i}").load()
        return count // 10

    def plan_ranges() -> int:
        options: dict[str, str | int] = {"url": lab.url, "dbtable": table, "numPartitions": ranges}
        frame = lab.spark.read.format("pgsnapshot").options(**options).load()
        # Spark plans the partitions when it makes the RDD; that runs no task.
        return int(frame._jdf.queryExecution().toRdd().getNumPartitions())

    def each(work: Callable[[], int]) -> Sample:
        measures = lab.meter.measure(work).measures
        return Sample({**measures, "planned": measures["rows"], "ms_each": measures["wall_us_per_row"] / 1e3})

    return Question(
        "planning",
        f"Planning {count:,} tables, and {ranges:,} ranges of one",
        [
            Contender("tables, in Python", partial(each, plan_tables)),
            Contender("tables, loaded in Spark", partial(each, load_tables)),
            Contender("ranges, in Spark", partial(each, plan_ranges)),
        ],
        ("ms_each", "wall_s", "planned"),
        most_rounds=3,
        notes="Spark loads a tenth of the tables.",
    )


def schedule(lab: Lab) -> Question:
    """Compare the simulation with a run: tables of different sizes, in ranges that do not fit the cores evenly."""
    calibrating, calibrated_rows = lab.table(datasets.WIDE)
    small, small_rows = lab.table(datasets.WIDE, 0.001)
    # Tables and their partitions, in the order in which Spark starts them.
    tables = [(*lab.table(datasets.WIDE, times), parts) for times, parts in ((0.25, 1), (1.0, 3), (0.5, 2))]
    total = sum(rows for _, rows, _ in tables)

    def run() -> Sample:
        def work() -> int:
            frames = [
                lab.spark.read.format("pgsnapshot").options(url=lab.url, dbtable=table, numPartitions=parts).load()
                for table, _, parts in tables
            ]
            union = functools.reduce(DataFrame.union, frames)
            union.write.format("noop").mode("overwrite").save()
            return total

        return lab.meter.measure(work)

    def load_small() -> int:
        lab.spark.read.format("pgsnapshot").options(url=lab.url, dbtable=small).load()
        return 1

    def simulated() -> Sample:
        # A nearly empty table tells the fixed cost of an action, and loading it the part of that for each table.
        fixed_s = read_by_spark(lab, small, small_rows, numPartitions=1).measures["wall_s"]
        load_s = lab.meter.measure(load_small).measures["wall_s"]
        wall_s = read_by_spark(lab, calibrating, calibrated_rows).measures["wall_s"]
        row_s = max(0.0, wall_s - fixed_s) * CORES / calibrated_rows
        lengths = [rows / parts * row_s for _, rows, parts in tables for _ in range(parts)]
        return Sample({"wall_s": fixed_s + (len(tables) - 1) * load_s + makespan(lengths, CORES)})

    return Question(
        "schedule",
        f"{total:,} rows of three tables in six ranges of different sizes: run, and simulated",
        [Contender(RUN, run), Contender(SIMULATED, simulated)],
        ("wall_s",),
        [
            Target("wall_s", RUN, "at most", 1.15, to=SIMULATED),
            Target("wall_s", RUN, "at least", 0.85, to=SIMULATED),
        ],
        notes="Simulated from the cost of a row in even ranges and of a nearly empty table, both measured again in each"
        " round.",
    )
