"""``mirror``: a PostgreSQL schema as tables of a lake, all at one LSN; ``mirror_at`` reads them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pg_cdc_source.errors import OptionError, TransientError, short_text
from pg_cdc_source.lake.bring import Mark
from pg_cdc_source.lake.directories import require_known
from pg_cdc_source.lake.first_files import FIRST_FILES
from pg_cdc_source.lake.ledger import TEMPLATE, Ledger
from pg_cdc_source.lake.shape import Shapes
from pg_cdc_source.lake.sink import Applied
from pg_cdc_source.lake.targets import NOT_FOR_DELTA_RS, Targets
from pg_cdc_source.mirrors.batches import Batches, not_known_to_keep
from pg_cdc_source.mirrors.catalog_names import is_path
from pg_cdc_source.mirrors.lakes import Lake
from pg_cdc_source.mirrors.sessions import absolute, errors_of_jvm, is_connect, require_one_place
from pg_cdc_source.mirrors.spark_table import SparkTable
from pg_cdc_source.options.names import QualifiedName, parse_tables
from pg_cdc_source.options.texts import option_texts
from pg_cdc_source.options.value_parsers import duration
from pg_cdc_source.spark.own_trigger import OWN_TRIGGER, OwnTrigger
from pg_cdc_source.spark.pgcdc import HAS_LIMITS
from pg_cdc_source.spark.register import register

log = logging.getLogger(__name__)

Format = Literal["delta", "iceberg", "deltalake"]


def mirror(
    spark: SparkSession,
    *,
    url: str,
    tables: str | Sequence[str],
    slot: str,
    target: str,
    checkpoint: str,
    ledger: str | None = None,
    format: Format = "deltalake",
    mode: str | Mapping[str, str] = "merge",
    deletes: Literal["hard", "soft"] = "hard",
    onSchemaChange: Literal["evolve", "additive", "fail"] = "evolve",  # noqa: N803 (options are named as Spark's are)
    autoCompact: bool = True,  # noqa: N803
    jsonAs: Literal["string", "variant"] = "string",  # noqa: N803
    asString: str | Sequence[str] = (),  # noqa: N803
    numericAs: str = "string",  # noqa: N803
    unrepresentable: Literal["error", "null"] = "error",
    once: bool = False,
    interval: str | int = "0s",
    on_batch: Callable[[Applied], None] | None = None,
    **options: str | int | bool,
) -> StreamingQuery:
    """Keep tables of a lake equal to PostgreSQL's. After each batch all of them stand at the ledger's LSN.

    ``target`` is a template with ``{table}`` and ``{schema}``: of a table's name in a catalog, or of a path. ``ledger``
    is the ledger's name or path, by default the template with ``_pgcdc`` for the table. ``format``: ``delta`` and
    ``iceberg`` are written by Spark's SQL, ``deltalake`` by delta-rs in Spark's tasks. ``mode`` is for all tables or by
    their names and with ``*`` for all others. ``onSchemaChange``: which changes of columns are taken over.
    ``autoCompact``: small files of a table are written together after every 50 commits to it. ``jsonAs``: what ``json``
    and ``jsonb`` are in the lake. ``asString``: columns that have PostgreSQL's text there, as ``schema.table.column``.
    ``numericAs``: what ``numeric`` without a precision is. ``unrepresentable``: whether a value that the lake's type
    cannot hold sets its table aside, or is NULL. With ``once``, what is there is taken, and the query ends.
    ``interval``: how long to wait at least between two batches, as in ``30s``, unless more waits than a batch may hold.
    ``on_batch`` is called after each batch, with its row of the ledger and how many rows it had of each table. Other
    options are those of ``pgcdc``.

    With Spark Connect, a process of the server's applies the batches, and calls ``on_batch``, which is pickled for it.

    Raises OptionError.
    """
    for name in options:
        if name.lower() in _OWN_OPTIONS:
            raise OptionError(f"mirror() sets the option {name} itself", remedy="leave it out")
        if name.lower() == _MESSAGES:
            raise OptionError(
                f"{name} is not used in a mirror, whose lake has no place for messages",
                remedy="read them by a stream of their own, with its own slot and checkpoint",
            )
    seconds = _interval(interval, once)
    as_string = asString if isinstance(asString, str) else ", ".join(asString)
    shapes = Shapes.of(mode, deletes, format, onSchemaChange, jsonAs, as_string, numericAs, unrepresentable)
    texts = option_texts({"url": url, "tables": tables, "slot": slot, **options})
    if format != "deltalake" and "maxbytesperbatch" not in map(str.lower, texts):
        texts["maxBytesPerBatch"] = _BYTES_PER_MERGE
    _require_known(texts["tables"], shapes)
    _require_whole_tables(texts, shapes)
    forbidden = NOT_FOR_DELTA_RS if format == "deltalake" else ""
    targets = Targets.of(_place(spark, target), None if ledger is None else _place(spark, ledger), forbidden)
    staging = f"{absolute(spark, checkpoint)}/pgcdc-staging"
    for path in (targets.template, targets.ledger) if format == "deltalake" else (staging,):
        require_known(path)
        require_one_place(spark, path)

    def open_lake(spark: SparkSession) -> Lake:
        return _lake(spark, format, targets, staging, shapes, compacts=autoCompact)

    lake = open_lake(spark)
    # The disk of Spark Connect's client is another one. There, the first batch looks.
    is_elsewhere = format == "deltalake" and is_connect(spark)
    with _reading_lake(spark):
        unknown = () if is_elsewhere else not_known_to_keep(lake, shapes.digest)
    register(spark)
    reader = spark.readStream.format("pgcdc").options(**texts)
    reader = reader.options(envelope="arrow", onSchemaChange="emit").option(FIRST_FILES, lake.first_files.text)
    # A query of Connect's outlives its client for a while, so it is the server that ends it.
    is_by_spark = once and (HAS_LIMITS or is_connect(spark))
    if not is_by_spark:
        reader = reader.option(OWN_TRIGGER, OwnTrigger(once, seconds).text)
    # Hundreds of tables take a while to look at, and Spark meanwhile asks a process of its own for the stream's schema.
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(lake.require_shapes, unknown)
        stream = reader.load()
        with _reading_lake(spark):
            looking.result()
    writer = stream.writeStream.queryName(f"mirror {slot}").option("checkpointLocation", checkpoint)
    if is_by_spark:
        writer = writer.trigger(availableNow=True)
    query = writer.foreachBatch(Batches(checkpoint, targets, shapes.digest, format, open_lake, on_batch, lake)).start()
    if once and not is_by_spark:
        threading.Thread(target=_stop_when_done, args=(query,), name="pgcdc-stop-when-done", daemon=True).start()
    return query


@contextlib.contextmanager
def _reading_lake(spark: SparkSession) -> Iterator[None]:
    """Raise TransientError for what PySpark passes on as the JVM has it, with a stack of a hundred lines."""
    try:
        yield
    except errors_of_jvm(spark) as error:
        raise TransientError(
            f"the ledger and the tables cannot be read: {short_text(error)}",
            remedy="see that the catalog and the store can be reached; then start the mirror again",
        ) from None


def _stop_when_done(query: StreamingQuery) -> None:
    """End a query that reads the present alone, when it finds nothing any more."""
    from py4j.protocol import Py4JError  # a client of Spark Connect has none, and does not come here

    try:
        query.processAllAvailable()
        query.stop()
    except (PySparkException, Py4JError, OSError) as error:
        # The query has failed, which it says by itself; or the JVM is gone, and the query with it.
        log.debug("not waited for any longer: %s", error)


# Spark's merges have a cost for each batch, and a batch of this size is one that Spark's tasks share.
_BYTES_PER_MERGE = "512MB"
_OWN_OPTIONS = frozenset(("envelope", "onschemachange", "dbtable"))
# Messages are in no table.
_MESSAGES = "messageprefixes"
# With these the stream lacks rows that PostgreSQL has, or says nothing of rows that are gone.
_OF_LOGS = {"startfrom": ("slot", "now"), "onnewtable": ("changes",), "ontruncate": ("ignore",)}


def _interval(interval: str | int, once: bool) -> float:
    """How many seconds. Raises OptionError."""
    try:
        seconds = duration("0s", "1d")(str(interval))
    except OptionError as error:
        raise OptionError(f"interval: {error.what}", remedy=error.remedy) from None
    if seconds and once:
        raise OptionError("interval is of no use with once, which takes what is there", remedy="leave one of them out")
    return seconds


def _require_known(tables: str, shapes: Shapes) -> None:
    """Raise OptionError where a table that mode or asString names is none that the stream may have."""
    patterns = parse_tables(tables)
    for table in shapes.by_table:
        schema, name = QualifiedName.parse(table).parts
        if not any(pattern.matches(schema, name) for pattern in patterns):
            raise OptionError(
                f"mode or asString names {table}, and the option tables ({tables}) does not have it",
                remedy="name a table of the mirror as schema.table, as PostgreSQL spells it",
            )


def _require_whole_tables(options: Mapping[str, str], shapes: Shapes) -> None:
    """Raise OptionError where tables are to be PostgreSQL's, and the stream is told to leave something out."""
    if _are_logs(options["tables"], shapes):
        return
    for name, value in options.items():
        if value.strip().lower() in _OF_LOGS.get(name.lower(), ()):
            raise OptionError(
                f"{name}={value}: with it tables of the lake would not have PostgreSQL's rows, and the ledger would "
                "say that they do",
                remedy="leave it out; or keep logs of changes, with the mode append for all tables",
            )


def _are_logs(tables: str, shapes: Shapes) -> bool:
    """Whether every table that the stream may have is a log of changes."""
    patterns = parse_tables(tables)
    if all(pattern.schema is not None and pattern.name is not None for pattern in patterns):
        return all(shapes[str(pattern)].is_log for pattern in patterns)
    return all(shape.is_log for shape in (shapes.others, *shapes.by_table.values()))


def _place(spark: SparkSession, target: str) -> str:
    """A target or a ledger: a path becomes an absolute one, a table's name stays."""
    return absolute(spark, target) if is_path(target) else target


def _lake(
    spark: SparkSession,
    format: str,
    targets: Targets,
    staging: str = "",
    shapes: Shapes | None = None,
    *,
    compacts: bool = False,
) -> Lake:
    shapes = shapes or Shapes()
    # What one format needs is not there where another is used.
    if format == "deltalake":
        try:
            from pg_cdc_source.mirrors.delta_rs_lake import DeltaRsLake
        except ModuleNotFoundError as error:
            raise OptionError(
                f"the format deltalake cannot be used: {error}",
                remedy='pip install "pg-cdc-source[mirror]", on executors as well',
            ) from None
        for name, place in (("target", targets.template), ("ledger", targets.ledger)):
            if not is_path(place):
                raise OptionError(
                    f"{name} {place!r} is not a path",
                    remedy="write a path, as in './lake/{table}', or use the format delta or iceberg",
                )
        return DeltaRsLake(spark, targets, shapes, compacts=compacts)
    from pg_cdc_source.mirrors.delta import DeltaTable
    from pg_cdc_source.mirrors.iceberg import IcebergTable
    from pg_cdc_source.mirrors.iceberg_of_jvm import IcebergTableOfJvm
    from pg_cdc_source.mirrors.spark_lake import SparkLake

    kinds: dict[str, type[SparkTable]] = {
        "delta": DeltaTable,
        "iceberg": IcebergTable if is_connect(spark) else IcebergTableOfJvm,
    }
    if format not in kinds:
        raise OptionError(f"mirror() has no format {format!r}", remedy="use delta, iceberg or deltalake")
    if format == "iceberg" and is_path(targets.template):
        raise OptionError(
            f"target {targets.template!r} is a path, and Iceberg's tables are in catalogs",
            remedy="write names, as in 'lake.shop.{table}'",
        )
    return SparkLake(spark, targets, kinds[format], staging, shapes, compacts=compacts)


def ledger_at(spark: SparkSession, ledger: str, format: str) -> Ledger:
    """A mirror's ledger by its name or path. Raises OptionError."""
    at = _place(spark, ledger)
    if format == "deltalake" and not is_path(ledger):
        raise OptionError(
            f"the ledger {ledger!r} is not a path",
            remedy="give the mirror's format, as in format='iceberg'; or write a path, where that is deltalake",
        )
    # Where its tables are says the ledger itself.
    return _lake(spark, format, Targets(at, at)).ledger


def mirror_at(
    spark: SparkSession,
    ledger: str,
    lsn: int | None = None,
    *,
    format: Format = "deltalake",
) -> dict[str, DataFrame]:
    """The tables of a mirror, all as of one LSN: the newest of the ledger that is not after ``lsn``.

    Tables that were set aside then are left out, and with ``lsn`` those that are not there any more as they were: a
    table was moved away, and the stream's next rows have made another. The log names them. Raises OptionError where
    the ledger has no such row.
    """
    found = ledger_at(spark, ledger, format)
    lake = _lake(spark, format, Targets(found.said[TEMPLATE], _place(spark, ledger)))
    row = lake.ledger.last(lsn)
    if row is None:
        when = "" if lsn is None else f" at or before {lsn}"
        remedy = "wait for the mirror's first batch" if lsn is None else "choose a later LSN: its rows have them as lsn"
        raise OptionError(f"the ledger {ledger} has no row{when}", remedy=remedy)
    tables = {}
    for table, version in row.tables.items():
        if table in row.set_aside:
            log.warning("%s is set aside, and left out: %s", table, row.set_aside[table])
        elif lsn is not None and not lake.is_of(table, version, Mark(row.query, row.batch_id)):
            log.warning("%s is left out: the lake's table was moved away, and begun anew behind %d", table, row.lsn)
        else:
            tables[table] = lake.read(table, version)
    return tables
