"""Check what is installed here: versions, and whether the accelerator is in use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psycopg2
import psycopg2.extensions
import pyarrow

import pg_cdc_source
from pg_cdc_source.cli.preflight.findings import Checks
from pg_cdc_source.values import native


def check_installation(checks: Checks) -> bool:
    """Say what is installed; returns whether there is a Spark whose Python processes can be looked at."""
    checks.add("package", "ok", f"pg-cdc-source {pg_cdc_source.__version__}")
    checks.add("Python", "ok", platform.python_version())
    has_spark = _check_pyspark(checks)
    if pyarrow.__version__ == "25.0.0":
        checks.add(
            "pyarrow", "warning", "25.0.0 reads Parquet files wrongly on ARM", "install another version of pyarrow"
        )
    else:
        checks.add("pyarrow", "ok", pyarrow.__version__)
    libpq = psycopg2.extensions.libpq_version()
    version = psycopg2.__version__.split()[0]
    checks.add("psycopg2", "ok", f"{version} with libpq {libpq // 10000}.{libpq % 10000}")
    _check_accelerator(checks)
    return has_spark


def _check_pyspark(checks: Checks) -> bool:
    try:
        import pyspark
    except ModuleNotFoundError:
        checks.add("PySpark", "ok", "not installed; drivers and executors need it")
        return False
    if int(pyspark.__version__.split(".")[0]) < 4:
        remedy = "install 4.0 or later: earlier versions have no Python data sources"
        checks.add("PySpark", "wrong", pyspark.__version__, remedy)
        return False
    checks.add("PySpark", "ok", pyspark.__version__)
    return True


def _check_accelerator(checks: Checks) -> None:
    if native.LIBRARY is not None:
        checks.add("accelerator", "ok", "compiled and in use")
    elif os.environ.get(native.ENVIRONMENT) == "off":
        text = f"turned off by {native.ENVIRONMENT}=off; NumPy does the work, more slowly"
        checks.add("accelerator", "ok", text, f"unset {native.ENVIRONMENT} to use it")
    elif not is_installed(here := package_directory()):
        checks.add(
            "accelerator",
            "warning",
            f"not compiled in {here}, a checkout and not an installed package; NumPy does the work, more slowly",
            "install the package (pip install .), and keep the checkout out of PYTHONPATH",
        )
    else:
        checks.add(
            "accelerator",
            "warning",
            "not compiled: no C compiler was found at installation; NumPy does the work, more slowly",
            "install a C compiler (Debian: gcc libc6-dev), then the package again with pip's --force-reinstall"
            " --no-cache-dir",
        )


def package_directory() -> Path:
    """The directory that the package is imported from."""
    return Path(str(pg_cdc_source.__file__)).parent


def is_installed(directory: Path) -> bool:
    """Whether pip installed the package into this directory."""
    try:
        distribution = importlib.metadata.distribution("pg-cdc-source")
    except importlib.metadata.PackageNotFoundError:
        return False
    # Only an installation has a RECORD, and an editable one records no file of the package.
    record = distribution.read_text("RECORD") or ""
    installed = "pg_cdc_source/__init__.py," in record
    return installed and Path(str(distribution.locate_file("pg_cdc_source"))).resolve() == directory.resolve()
