"""``register``: the formats' names for a session."""

from __future__ import annotations

from weakref import WeakSet

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pg_cdc_source.spark.pgcdc import PgCdcDataSource
from pg_cdc_source.spark.pgsnapshot import PgSnapshotDataSource
from pg_cdc_source.spark.workers_python import warn_of_other_python

_registered: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """Make the formats known to a session by name; needed where Spark's look-up of ``pyspark_*`` packages is off.

    Logs what to set where Spark's Python processes would not find the package.
    """
    warn_of_other_python(spark)
    for source in (PgSnapshotDataSource, PgCdcDataSource):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # Spark 4.0 refuses a name that its look-up has found already; what it has found is this very class.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
    _registered.add(spark)


def ensure_registered(spark: SparkSession) -> None:
    """Do so the first time: Spark warns of a format that it has already."""
    if spark not in _registered:
        register(spark)
