"""Jars of Flink, Flink CDC and Iceberg's sink: where they are, and a command that fetches them.

python -m pg_cdc_source.bench.flink_jars     # 190 MB, by Maven
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

JARS = Path(os.environ.get("PG_CDC_FLINK_JARS") or Path(sys.prefix, "flink-jars"))

# Flink CDC 3.5 and this sink of Iceberg's are both made for Flink 1.20.
VERSIONS = {"flink": "1.20.3", "flink-cdc": "3.5.0", "iceberg-flink": "1.10.1"}

_FLINK = VERSIONS["flink"]
_ARTIFACTS = (
    ("org.apache.flink", "flink-clients", _FLINK),
    ("org.apache.flink", "flink-connector-base", _FLINK),
    ("org.apache.flink", "flink-streaming-java", _FLINK),
    ("org.apache.flink", "flink-table-api-java-bridge", _FLINK),
    ("org.apache.flink", "flink-table-runtime", _FLINK),
    ("org.apache.flink", "flink-sql-connector-postgres-cdc", VERSIONS["flink-cdc"]),
    ("org.apache.iceberg", "iceberg-flink-runtime-1.20", VERSIONS["iceberg-flink"]),
    ("org.apache.hadoop", "hadoop-client-api", "3.4.1"),
    ("org.apache.hadoop", "hadoop-client-runtime", "3.4.1"),
    # What fails is thrown; all else that these log is nobody's concern here.
    ("org.slf4j", "slf4j-nop", "1.7.36"),
)


def _pom() -> str:
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version></dependency>"
        for group, name, version in _ARTIFACTS
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>pg_cdc_source</groupId><artifactId>flink-jars</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )


def _fetch() -> None:
    JARS.parent.mkdir(parents=True, exist_ok=True)
    # Beside the place, so that what is there has always been fetched whole.
    with tempfile.TemporaryDirectory(dir=JARS.parent, prefix="flink-jars-") as directory:
        pom, jars = Path(directory, "pom.xml"), Path(directory, "jars")
        pom.write_text(_pom())
        command = ["mvn", "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
        subprocess.run([*command, f"-DoutputDirectory={jars}"], check=True)
        jars.rename(JARS)


if __name__ == "__main__":
    if JARS.exists():
        print(f"{JARS} is there already")
    else:
        _fetch()
