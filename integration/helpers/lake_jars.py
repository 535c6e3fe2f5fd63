"""Jars of Delta and Iceberg: they are fetched once, and a session that has them.

python integration/helpers/lake_jars.py     # fetch those for the installed Spark
"""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
from pathlib import Path

import pyspark

# Neither is released for every Spark.
DELTA, DELTA_SPARKS = "4.4.0", ("4.0", "4.1", "4.2")
ICEBERG, ICEBERG_SPARKS = "1.11.0", ("4.0", "4.1")
MAVEN = os.environ.get("MAVEN_URL", "https://repo1.maven.org/maven2")
CACHE = Path(sys.prefix, "lake-jars")

_SPARK = ".".join(pyspark.__version__.split(".")[:2])


def jars(format: str) -> list[Path]:
    """The jars of a format for this Spark, whether they have been fetched or not; none if there are none."""
    names = {
        "delta": [
            f"io/delta/delta-spark_{_SPARK}_2.13/{DELTA}/delta-spark_{_SPARK}_2.13-{DELTA}.jar",
            f"io/delta/delta-storage/{DELTA}/delta-storage-{DELTA}.jar",
        ]
        if _SPARK in DELTA_SPARKS
        else [],
        "iceberg": [
            f"org/apache/iceberg/iceberg-spark-runtime-{_SPARK}_2.13/{ICEBERG}/"
            f"iceberg-spark-runtime-{_SPARK}_2.13-{ICEBERG}.jar"
        ]
        if _SPARK in ICEBERG_SPARKS
        else [],
    }
    return [CACHE / name for name in names[format]]


def lacking(format: str) -> str | None:
    """Why tables of a format cannot be tested here; None if they can."""
    wanted = jars(format)
    if not wanted:
        return f"{format} has no release for Spark {_SPARK}"
    if not all(jar.exists() for jar in wanted):
        return f"the jars of {format} are not here: python integration/helpers/lake_jars.py"
    return None


def conf(warehouse: Path) -> dict[str, str]:
    """Settings of a session with all formats that can be tested here."""
    # To compile a plan of a few rows, which never comes again, takes a quarter of what a merge of theirs takes.
    settings = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    extensions, classes = [], []
    if lacking("delta") is None:
        classes += jars("delta")
        extensions.append("io.delta.sql.DeltaSparkSessionExtension")
        settings["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        settings["spark.sql.warehouse.dir"] = str(warehouse / "delta")
        settings["spark.databricks.delta.snapshotPartitions"] = "1"
    if lacking("iceberg") is None:
        classes += jars("iceberg")
        extensions.append("org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        settings["spark.sql.catalog.lake"] = "org.apache.iceberg.spark.SparkCatalog"
        settings["spark.sql.catalog.lake.type"] = "hadoop"
        settings["spark.sql.catalog.lake.warehouse"] = str(warehouse / "iceberg")
    settings["spark.sql.extensions"] = ",".join(extensions)
    for where in ("driver", "executor"):
        settings[f"spark.{where}.extraClassPath"] = os.pathsep.join(map(str, classes))
    return settings


def _fetch(jar: Path) -> None:
    url = f"{MAVEN}/{jar.relative_to(CACHE)}"
    with urllib.request.urlopen(url, timeout=120) as response:  # noqa: S310 - https, or what the user has set
        found = response.read()
    with urllib.request.urlopen(f"{url}.sha1", timeout=120) as response:  # noqa: S310
        wanted = response.read().decode().split()[0]
    if hashlib.sha1(found, usedforsecurity=False).hexdigest() != wanted:
        raise SystemExit(f"{url} does not have the checksum {wanted}")
    jar.parent.mkdir(parents=True, exist_ok=True)
    jar.write_bytes(found)


if __name__ == "__main__":
    CACHE.mkdir(exist_ok=True)
    for format in ("delta", "iceberg"):
        for jar in jars(format):
            if not jar.exists():
                print(jar.name)
                _fetch(jar)
