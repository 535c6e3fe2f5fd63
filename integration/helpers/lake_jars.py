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
from sessions import archive_option

# Neither is released for every Spark.
DELTA, DELTA_SPARKS = "4.4.0", ("4.0", "4.1", "4.2")
ICEBERG, ICEBERG_SPARKS = "1.11.0", ("4.0", "4.1")
# Hadoop without its native library starts a `chmod` for each file. This is its local file system, less that.
BARE_FILES = "com/globalmentor/hadoop-bare-naked-local-fs/0.1.0/hadoop-bare-naked-local-fs-0.1.0.jar"
MAVEN = os.environ.get("MAVEN_URL", "https://repo1.maven.org/maven2")
CACHE = Path(sys.prefix, "lake-jars")
# What archive_classes.py has made of them and of Spark's classes.
CLASSES = Path(sys.prefix, "lake-classes.jsa")

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


def present() -> list[Path]:
    """The jars of all formats that can be tested here."""
    found = [jar for format in ("delta", "iceberg") if lacking(format) is None for jar in jars(format)]
    return [*found, CACHE / BARE_FILES] if found else []


def lacking(format: str) -> str | None:
    """Why tables of a format cannot be tested here; None if they can."""
    wanted = jars(format)
    if not wanted:
        return f"{format} has no release for Spark {_SPARK}"
    if not all(jar.exists() for jar in (*wanted, CACHE / BARE_FILES)):
        return f"the jars of {format} are not here: python integration/helpers/lake_jars.py"
    return None


def conf(warehouse: Path) -> dict[str, str]:
    """Settings of a session with all formats that can be tested here."""
    # To compile a plan of a few rows, which never comes again, takes a quarter of what a merge of theirs takes.
    settings = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    # A fifth of it was to write plans out for a UI that is off.
    settings |= {"spark.sql.debug.maxToStringFields": "0", "spark.sql.ui.explainMode": "simple"}
    if classes := present():
        settings["spark.hadoop.fs.file.impl"] = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"
    extensions = []
    if lacking("delta") is None:
        extensions.append("io.delta.sql.DeltaSparkSessionExtension")
        settings["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        settings["spark.sql.warehouse.dir"] = str(warehouse / "delta")
        settings["spark.databricks.delta.snapshotPartitions"] = "1"
    if lacking("iceberg") is None:
        extensions.append("org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        settings["spark.sql.catalog.lake"] = "org.apache.iceberg.spark.SparkCatalog"
        settings["spark.sql.catalog.lake.type"] = "hadoop"
        settings["spark.sql.catalog.lake.warehouse"] = str(warehouse / "iceberg")
    settings["spark.sql.extensions"] = ",".join(extensions)
    for where in ("driver", "executor"):
        settings[f"spark.{where}.extraClassPath"] = os.pathsep.join(map(str, classes))
    if CLASSES.exists():
        settings["spark.driver.extraJavaOptions"] = archive_option(CLASSES)
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
    wanted = [*jars("delta"), *jars("iceberg")]
    for jar in [*wanted, CACHE / BARE_FILES] if wanted else []:
        if not jar.exists():
            print(jar.name)
            _fetch(jar)
