"""Questions about TPC-H's tables: snapshots of all, the ranges of the largest, and a lake's first rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pg_cdc_source.bench import peers
from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.lakes import Lake, missing_lake, scratch_namespace
from pg_cdc_source.bench.mirror import publish
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.snapshot import JDBC, LIMIT, OF_LIMIT, OURS, Limit
from pg_cdc_source.bench.tpch_tables import TABLES, make_tables, missing_tables
from pg_cdc_source.demo.jdbc import jdbc_options
from pg_cdc_source.mirrors.query import Format

_PARTITIONS = 2
_PUBLICATION = _SLOT = "bench_tpch"
_BY_DEFAULT, _IN_TWO = f"{OURS}, default", f"{OURS}, numPartitions=2"
_JDBC_ICEBERG = "Spark JDBC, iceberg"

# A format and its options.
_Source = tuple[str, Mapping[str, str]]


def snapshots(lab: Lab) -> Question:
    """All tables one after another."""
    if missing := missing_tables(OURS):
        return Question("tpch", "TPC-H's tables", [missing], ())
    rows = make_tables(lab)
    large = [name for name, table in TABLES.items() if table.large]
    return Question(
        "tpch",
        f"TPC-H: eight tables with {rows:,} rows, one after another into Spark, to a no-op sink",
        [
            Contender(OURS, partial(_read_all, lab, _ours)),
            peers.missing_jdbc() or Contender(JDBC, partial(_read_all, lab, _jdbc)),
            peers.missing_program("psql", LIMIT) or Contender(LIMIT, _limit(lab)),
        ],
        ("wall_s", "client_cpu_s", "server_cpu_s", *(f"{name}_s" for name in large)),
        [
            Target("wall_s", OURS, "at most", 0.7, to=JDBC),
            *(Target(f"{name}_s", OURS, "at most", 0.9, to=JDBC) for name in large),
        ],
        warm_ups=2,
        notes=f"{_PARTITIONS} partitions; JDBC with fetchsize 10000, cut by the first column of the key."
        f" {OF_LIMIT}, table by table.",
        check=partial(_require_rows, lab, [_ours] if peers.missing_jdbc() else [_ours, _jdbc], rows),
    )


def default_ranges(lab: Lab) -> Question:
    """The largest table in as many ranges as the connector makes by itself, and in two."""
    if missing := missing_tables(_BY_DEFAULT):
        return Question("tpch-ranges", "TPC-H's lineitem", [missing], ())
    make_tables(lab)
    two = {"numPartitions": str(_PARTITIONS)}
    return Question(
        "tpch-ranges",
        "TPC-H's lineitem, to a no-op sink, in the ranges that are made by default, and in two",
        [
            Contender(_BY_DEFAULT, partial(_read_one, lab, {})),
            Contender(_IN_TWO, partial(_read_one, lab, two)),
        ],
        ("wall_s", "client_cpu_s", "server_cpu_s"),
        [Target("wall_s", _BY_DEFAULT, "at most", 1.03, to=_IN_TWO)],
        warm_ups=2,
    )


def first_rows(lab: Lab) -> Question:
    """All tables into a new lake: by the mirror, and by a JDBC read and a write of each."""
    if missing := missing_tables(_shown("iceberg")):
        return Question("mirror-first", "TPC-H's tables into a lake", [missing], ())
    rows = make_tables(lab)
    publish(lab, _PUBLICATION, list(TABLES))
    formats: tuple[Format, ...] = ("deltalake", "iceberg")
    return Question(
        "mirror-first",
        f"TPC-H: eight tables with {rows:,} rows into a new lake",
        [
            *(missing_lake(f, _shown(f)) or Contender(_shown(f), partial(_mirror, lab, f, rows)) for f in formats),
            peers.missing_jdbc()
            or missing_lake("iceberg", _JDBC_ICEBERG)
            or Contender(_JDBC_ICEBERG, partial(_write_all, lab, rows)),
        ],
        ("wall_s", "client_cpu_s", "server_cpu_s", "rows_per_s"),
        [Target("wall_s", _shown(format), "at most", 0.75, to=_JDBC_ICEBERG) for format in formats],
        most_rounds=3,
        notes=f"The mirror's time has the start of its stream and its ledger in it. JDBC: {_PARTITIONS} partitions, one"
        " table after another.",
    )


def _shown(format: Format) -> str:
    return f"mirror(), {format}"


def _ours(lab: Lab, table: str) -> _Source:
    return OURS, {"url": lab.url, "dbtable": table, "numPartitions": str(_PARTITIONS)}


def _jdbc(lab: Lab, table: str) -> _Source:
    options = {**jdbc_options(lab.server), "dbtable": table}
    if (key := TABLES[table].key) is not None:
        ends = {bound: str(lab.value(f"SELECT {bound}({key}) FROM {table}")) for bound in ("min", "max")}
        options |= {"partitionColumn": key, "numPartitions": str(_PARTITIONS)}
        options |= {"lowerBound": ends["min"], "upperBound": ends["max"]}
    return "jdbc", options


def _read(lab: Lab, source: _Source) -> int:
    format, options = source
    lab.spark.read.format(format).options(**options).load().write.format("noop").mode("overwrite").save()
    return 1


def _require_rows(lab: Lab, sources_of: Sequence[Callable[[Lab, str], _Source]], rows: int) -> None:
    """Raise RuntimeError unless all tables have ``rows`` by each reader, whose timed runs discard theirs uncounted."""
    for source_of in sources_of:
        sources = [source_of(lab, table) for table in TABLES]
        found = sum(lab.spark.read.format(name).options(**options).load().count() for name, options in sources)
        if found != rows:
            raise RuntimeError(f"{sources[0][0]} reads {found:,} rows of {rows:,}")


def _read_one(lab: Lab, options: Mapping[str, str]) -> Sample:
    return lab.meter.measure(partial(_read, lab, (OURS, {"url": lab.url, "dbtable": "lineitem", **options})))


def _read_all(lab: Lab, source_of: Callable[[Lab, str], _Source]) -> Sample:
    sources = {table: source_of(lab, table) for table in TABLES}
    each: dict[str, float] = {}

    def work() -> int:
        for table, source in sources.items():
            each[f"{table}_s"] = lab.meter.measure(partial(_read, lab, source)).measures["wall_s"]
        return len(sources)

    return Sample({**lab.meter.measure(work).measures, **each})


def _limit(lab: Lab) -> Callable[[], Sample]:
    limits = {table: Limit(lab, table, lab.value(f"SELECT count(*) FROM {table}")) for table in TABLES}

    def measure() -> Sample:
        found = {table: limit.measure() for table, limit in limits.items()}
        total = {name: sum(of[name] for of in found.values()) for name in ("wall_s", "client_cpu_s", "server_cpu_s")}
        return Sample({**total, **{f"{table}_s": of["wall_s"] for table, of in found.items()}})

    return measure


def _mirror(lab: Lab, format: Format, rows: int) -> Sample:
    lab.drop_slot(_SLOT)
    lake = Lake(format, lab.home, lab.url, list(TABLES), _PUBLICATION, _SLOT)

    def work() -> int:
        came = lake.bring(lab.spark)
        if came != rows:
            raise RuntimeError(f"the mirror took {came:,} rows of {rows:,}")
        return came

    try:
        return lab.meter.measure(work)
    finally:
        lake.remove()
        lab.drop_slot(_SLOT)


def _write_all(lab: Lab, rows: int) -> Sample:
    with scratch_namespace(lab.home) as namespace:

        def work() -> int:
            for table in TABLES:
                format, options = _jdbc(lab, table)
                lab.spark.read.format(format).options(**options).load().writeTo(f"{namespace}.{table}").create()
            return rows

        return lab.meter.measure(work)
