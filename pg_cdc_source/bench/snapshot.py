"""Questions about snapshots: against Spark's JDBC source, against readers into Arrow, against the limit."""

from __future__ import annotations

from functools import partial

from pg_cdc_source.bench import datasets, peers, to_arrow
from pg_cdc_source.bench.datasets import Dataset
from pg_cdc_source.bench.lab import CORES, PARTITIONS, Lab
from pg_cdc_source.bench.numpy_alone import NumpyAloneSource
from pg_cdc_source.bench.question import Contender, Missing, Question, Sample, Target
from pg_cdc_source.bench.ready_batches import ReadySource, write_batch
from pg_cdc_source.demo.jdbc import jdbc_options

OURS = "pgsnapshot"
NUMPY_ALONE = "pgsnapshot, NumPy alone"
JDBC = "Spark JDBC"
LIMIT = "the limit"

MEASURES = ("wall_s", "client_cpu_s", "server_cpu_s", "rows_per_s")

# Most wall time as a multiple of JDBC's, with NumPy alone and with the accelerator.
_NUMPY_AGAINST_JDBC = 0.9
_AGAINST_JDBC = {"wide": 0.5, "skewed": 0.3, "uuid_key": 0.33, "narrow": 0.7, "text_heavy": 0.9, "numeric_time": 0.5}
_AGAINST_LIMIT = (1.5, 1.08)


# --- against Spark's JDBC source -------------------------------------------------------------------------------------


def against_jdbc(dataset: Dataset, lab: Lab) -> Question:
    table, rows = lab.table(dataset)
    jdbc = peers.missing_jdbc() or Contender(JDBC, partial(read_by_jdbc, lab, dataset, table, rows))
    least = peers.missing_program("psql", LIMIT) or Contender(LIMIT, lambda: Sample(limit.measure()))
    limit = Limit(lab, table, rows)
    how = "cut by its integer key" if dataset.key else "one partition, because the key is a UUID"
    return Question(
        f"snapshot-{dataset.name}",
        f"A snapshot of {rows:,} rows ({dataset.name}) into Spark, to a no-op sink",
        [*ours(lab, table, rows), jdbc, least],
        MEASURES,
        wall_targets(_NUMPY_AGAINST_JDBC, _AGAINST_JDBC[dataset.name], to=JDBC),
        plotted=2,
        # During the first table's runs the JVM still compiles what it runs often.
        warm_ups=3 if dataset is datasets.WIDE else 1,
        notes=f"{PARTITIONS} partitions; JDBC with fetchsize 10000, {how}. JVM warm. {OF_LIMIT}, over {CORES} cores.",
        check=partial(require_rows, lab, dataset, table, rows),
    )


def ours(lab: Lab, table: str, rows: int) -> list[Contender | Missing]:
    """The connector as it is installed, and without its accelerator if it has one."""
    installed = Contender(OURS, partial(read_by_spark, lab, table, rows))
    if missing := peers.missing_accelerator():
        return [installed, missing]
    lab.spark.dataSource.register(NumpyAloneSource)
    return [installed, Contender(NUMPY_ALONE, partial(read_by_spark, lab, table, rows, NumpyAloneSource.name()))]


def wall_targets(numpy_alone: float, accelerated: float, to: str) -> list[Target]:
    if peers.missing_accelerator():
        return [Target("wall_s", OURS, "at most", numpy_alone, to=to)]
    both = ((OURS, accelerated), (NUMPY_ALONE, numpy_alone))
    return [Target("wall_s", name, "at most", bound, to=to) for name, bound in both]


def read_by_spark(lab: Lab, table: str, rows: int, source: str = OURS, **options: str | int) -> Sample:
    """Read a table with the connector in one action, and discard the rows."""

    def work() -> int:
        settings: dict[str, str | int] = {"url": lab.url, "dbtable": table, "numPartitions": PARTITIONS, **options}
        lab.spark.read.format(source).options(**settings).load().write.format("noop").mode("overwrite").save()
        return rows

    return lab.meter.measure(work)


def require_rows(lab: Lab, dataset: Dataset, table: str, rows: int) -> None:
    """Raise RuntimeError unless a table has ``rows`` by both readers, whose timed runs discard theirs uncounted."""
    found = {OURS: lab.spark.read.format(OURS).options(url=lab.url, dbtable=table, numPartitions=PARTITIONS)}
    if peers.missing_jdbc() is None:
        found[JDBC] = lab.spark.read.format("jdbc").options(**_of_jdbc(lab, dataset, table))
    for name, reader in found.items():
        if (count := reader.load().count()) != rows:
            raise RuntimeError(f"{name} reads {count:,} rows of {table}, which has {rows:,}")


def _of_jdbc(lab: Lab, dataset: Dataset, table: str) -> dict[str, str | int]:
    options: dict[str, str | int] = {**jdbc_options(lab.server), "dbtable": table}
    if dataset.key is not None:
        ends = {bound: lab.value(f"SELECT {bound}({dataset.key}) FROM {table}") for bound in ("min", "max")}
        options |= {"partitionColumn": dataset.key, "numPartitions": PARTITIONS}
        options |= {"lowerBound": ends["min"], "upperBound": ends["max"]}
    return options


def read_by_jdbc(lab: Lab, dataset: Dataset, table: str, rows: int) -> Sample:
    options = _of_jdbc(lab, dataset, table)

    def work() -> int:
        lab.spark.read.format("jdbc").options(**options).load().write.format("noop").mode("overwrite").save()
        return rows

    return lab.meter.measure(work)


# --- against readers into Arrow --------------------------------------------------------------------------------------


def against_arrow_readers(lab: Lab) -> Question:
    table, rows = lab.table(datasets.WIDE)
    contenders: list[Contender | Missing] = [Contender(OURS, partial(lab.in_own_process, "to_arrow", OURS, table))]
    contenders.append(
        peers.missing_accelerator()
        or Contender(NUMPY_ALONE, partial(lab.in_own_process, "to_arrow", NUMPY_ALONE, table))
    )
    for name in peers.ARROW_PEERS:
        run = Contender(name, partial(lab.in_own_process, "to_arrow", name, table))
        contenders.append(peers.missing_arrow_peer(name) or run)
    return Question(
        "arrow",
        f"{rows:,} rows (wide) into Arrow in one Python process",
        contenders,
        ("client_cpu_us_per_row", "wall_s", "client_cpu_s", "server_cpu_s", "peak_rss_mb"),
        [Target("client_cpu_s", OURS, "at most", 1.0, to=name) for name in peers.ARROW_PEERS],
        notes="Each run is a new process; imports are not counted. ADBC returns numerics as strings, the others typed.",
    )


# --- against the limit -----------------------------------------------------------------------------------------------


class Limit:
    """The least that reading a table into Spark takes: what PostgreSQL and Spark need by themselves."""

    def __init__(self, lab: Lab, table: str, rows: int) -> None:
        self._lab, self._table, self._rows = lab, table, rows
        self._path = lab.home / f"ready-{table}.arrow"
        batch = next(to_arrow.ours(lab.url, table))
        write_batch(batch, self._path)
        self.rows_per_batch: int = batch.num_rows
        lab.spark.dataSource.register(ReadySource)

    def measure(self) -> dict[str, float]:
        spark = self._lab.meter.measure(self._give_ready_batches).measures
        # Scaled to the table's rows; the file's batches may hold a few fewer.
        spark_cpu_s = spark["client_cpu_us_per_row"] * self._rows / 1e6
        copied = self._lab.meter.measure(partial(copy_by_psql, self._lab, self._table, self._rows)).measures
        client_cpu_s, server_cpu_s = spark_cpu_s + copied["client_cpu_s"], copied["server_cpu_s"]
        wall_s = (server_cpu_s + client_cpu_s) / CORES
        return {"wall_s": wall_s, "client_cpu_s": client_cpu_s, "server_cpu_s": server_cpu_s}

    def _give_ready_batches(self) -> int:
        batches = max(1, self._rows // self.rows_per_batch)
        options: dict[str, str | int] = {"path": str(self._path), "batches": batches, "partitions": PARTITIONS}
        read = self._lab.spark.read.format(ReadySource.name()).options(**options)
        read.load().write.format("noop").mode("overwrite").save()
        return batches * self.rows_per_batch


def against_the_limit(lab: Lab) -> Question:
    table, rows = lab.table(datasets.WIDE)
    limit = Limit(lab, table, rows)
    return Question(
        "limit",
        f"{rows:,} rows (wide) into Spark, and the least that PostgreSQL and Spark alone would need",
        [
            *ours(lab, table, rows),
            peers.missing_program("psql", LIMIT) or Contender(LIMIT, lambda: Sample(limit.measure())),
        ],
        ("wall_s", "client_cpu_s", "server_cpu_s"),
        wall_targets(*_AGAINST_LIMIT, to=LIMIT),
        notes=f"{OF_LIMIT} of {limit.rows_per_batch:,} rows, over {CORES} cores.",
    )


OF_LIMIT = "The limit: CPU of COPY (FORMAT binary) to psql, which throws it away, and of Spark taking ready batches"


def copy_by_psql(lab: Lab, table: str, rows: int) -> int:
    """Have psql read all rows, and throw them away."""
    program = peers.find_program("psql")
    assert program is not None
    lab.program([program, "-X", "-c", f"\\copy {table} TO '/dev/null' (FORMAT binary)"])
    return rows
