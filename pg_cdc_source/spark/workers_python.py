"""Say before Spark fails that its Python processes will not find this package: they run another Python.

Spark runs PYSPARK_PYTHON, or else the ``python3`` of the PATH, which is not that of a virtual environment that is not
activated. The user would see some thirty lines of Spark's, with a ``ModuleNotFoundError`` among them.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_LOOK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pg_cdc_source') is None)"
_WITHIN_SECONDS = 30


def warn_of_other_python(spark: SparkSession) -> None:
    """Log what to set where the Python that Spark runs on this host lacks the package."""
    try:
        context = spark.sparkContext
    except PySparkException:
        return  # Connect's server runs its own
    command = shutil.which(context.pythonExec)
    if command is None or os.path.abspath(command) == os.path.abspath(sys.executable):
        return
    # What is added to the session (addPyFile, --py-files) may bring the package. The name is PySpark's own affair.
    if getattr(context, "_python_includes", None):
        return
    try:
        lacks = subprocess.run(
            [command, "-c", _LOOK], stdin=subprocess.DEVNULL, capture_output=True, timeout=_WITHIN_SECONDS, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return  # Spark says it as well as this could
    if lacks:
        log.warning(
            "Spark runs its Python processes with %s, which does not have pg_cdc_source; this process is %s\n"
            "  Remedy: set the variable PYSPARK_PYTHON=%s before Spark starts, or install the package there",
            *(command, sys.executable, sys.executable),
        )
