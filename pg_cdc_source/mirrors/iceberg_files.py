"""Files that tasks have staged become an Iceberg table's own: moved to where its data are, and added by one commit.

Their columns have the numbers that Iceberg gives those of a new table (``FileWriter``), so renaming or dropping columns
later does with these files what it does with Iceberg's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
from pyspark.sql import SparkSession

from pg_cdc_source.lake.directories import open_directory

log = logging.getLogger(__name__)

_AT_ONCE = 8


def has_columns(table: Any, names: Sequence[str]) -> bool:
    """Whether the table has no partitions, and its columns are flat, with these names and the numbers 1, 2, …."""
    columns = list(table.schema().columns())
    return (
        table.spec().isUnpartitioned()
        and [(column.fieldId(), column.name()) for column in columns] == list(enumerate(names, 1))
        and all(column.type().isPrimitiveType() for column in columns)
    )


def take_over(spark: SparkSession, table: Any, files: Sequence[Mapping[str, Any]], said: Mapping[str, str]) -> bool:
    """Add ``files``, which tasks have staged, in a commit with these properties.

    False where they cannot be moved to where the table's data are: all of them are still where they were then. Behind
    any other error it may be called again.
    """
    try:
        _move(table, files[0])
    except (pa.ArrowException, OSError) as error:
        if not all(_is_there(*_staged(file)) for file in files):
            raise
        log.info("files of %s are written again: %s", table.name(), error)
        return False
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pgcdc-files") as pool:
        list(pool.map(lambda file: _move(table, file), files[1:]))
        found = list(pool.map(lambda file: _data_file(spark, table, file), files))
    append = table.newAppend()
    for file in found:
        append.appendFile(file)
    for name, value in said.items():
        append.set(name, value)
    append.commit()
    return True


def _move(table: Any, file: Mapping[str, Any]) -> None:
    directory, _, name = _place(table, file).rpartition("/")
    filesystem, root = open_directory(directory)
    staged_in, staged = _staged(file)
    if not staged_in.equals(filesystem):
        raise OSError(f"{directory} is in another file system than {file['place']}")
    # An attempt before this one may have moved it.
    if _is_there(staged_in, staged):
        filesystem.move(staged, f"{root}/{name}")


def _staged(file: Mapping[str, Any]) -> tuple[pafs.FileSystem, str]:
    directory, _, name = file["place"].rpartition("/")
    filesystem, root = open_directory(directory)
    return filesystem, f"{root}/{name}"


def _is_there(filesystem: pafs.FileSystem, path: str) -> bool:
    return bool(filesystem.get_file_info(path).type != pafs.FileType.NotFound)


def _place(table: Any, file: Mapping[str, Any]) -> str:
    return str(table.locationProvider().newDataLocation(file["name"]))


def _data_file(spark: SparkSession, table: Any, file: Mapping[str, Any]) -> Any:
    iceberg: Any = spark._jvm
    iceberg = iceberg.org.apache.iceberg
    opened = table.io().newInputFile(_place(table, file))
    metrics = iceberg.parquet.ParquetUtil.fileMetrics(opened, iceberg.MetricsConfig.forTable(table))
    if file["unbounded"]:
        numbers = [table.schema().findField(name).fieldId() for name in file["unbounded"]]
        bounds = (_without(spark, found, numbers) for found in (metrics.lowerBounds(), metrics.upperBounds()))
        counts = metrics.valueCounts(), metrics.nullValueCounts(), metrics.nanValueCounts()
        metrics = iceberg.Metrics(metrics.recordCount(), metrics.columnSizes(), *counts, *bounds)
    builder = iceberg.DataFiles.builder(table.spec()).withInputFile(opened).withFormat("parquet")
    return builder.withMetrics(metrics).build()


def _without(spark: SparkSession, bounds: Any, numbers: Sequence[int]) -> Any:
    """Return bounds of a file without those of columns."""
    jvm: Any = spark._jvm
    found = jvm.java.util.HashMap(bounds or {})
    for number in numbers:
        found.remove(number)
    return found
