"""Make ``pgcdc`` known to Spark, which imports every package named ``pyspark_*`` and takes its DefaultSource."""

from __future__ import annotations

import logging

try:
    from pg_cdc_source.spark.pgcdc import PgCdcDataSource as DefaultSource
except Exception as error:
    # Spark looks all such packages up at once: one that raises makes every Python data source of the session unknown.
    # The message reaches the driver's log, where whoever misses the format looks.
    log = logging.getLogger("pg_cdc_source")
    log.warning("the format pgcdc is not available: %s: %s", type(error).__name__, error)
else:
    __all__ = ["DefaultSource"]
