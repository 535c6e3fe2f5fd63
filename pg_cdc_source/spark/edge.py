"""What the data sources, ``project`` and ``collapse`` do alike at the edge to Spark."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pg_cdc_source.errors import DefiniteError, OptionError, PgCdcError
from pg_cdc_source.protocol.layout import CHANGE_FIELDS

CHANGE_NAMES = tuple(field.name for field in CHANGE_FIELDS)


@contextmanager
def short_errors() -> Iterator[None]:
    """Raise the package's errors without the frames below: Spark shows the whole stack, and the text says it all."""
    try:
        yield
    except PgCdcError as error:
        # The same object would get its frames back.
        raise copy.copy(error) from None


def execution() -> str:
    """Return what all tasks of one action have in common: the SQL execution's id, or under ``df.rdd`` the stage's."""
    context = TaskContext.get()
    if context is None:
        raise DefiniteError(
            "a partition was read outside of a Spark task",
            remedy='read with spark.read.format("pgsnapshot"): readers are for Spark alone',
        )
    return context.getLocalProperty("spark.sql.execution.id") or f"r{context.stageId()}"


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the schema that Spark makes of an Arrow schema; ``timestamp`` without a zone is TIMESTAMP_NTZ."""
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def expect_columns(df: DataFrame, names: Sequence[str], what: str) -> None:
    """Raise OptionError unless ``df`` has all these columns; ``what`` begins the message."""
    missing = [name for name in names if name not in df.columns]
    if missing:
        raise OptionError(f"{what}, and this DataFrame has no column {', '.join(missing)}", remedy="leave them in")
