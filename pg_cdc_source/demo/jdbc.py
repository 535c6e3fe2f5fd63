"""Spark's own JDBC source, which the demo and the benchmark compare with: its driver, and its options."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path

# Debian's package, because not everybody can reach Maven's repository.
JDBC_DRIVER = Path(os.environ.get("PG_CDC_JDBC_JAR") or "/usr/share/java/postgresql.jar")

_PUBLISHED = "https://repo1.maven.org/maven2/org/postgresql/postgresql/42.7.14/postgresql-42.7.14.jar"
_SHA256 = "73914527305a40cce504b0d3d90b23caf565136912d607ae8ae7c5895512332c"
_FETCHED_WITHIN_SECONDS = 10


def find_driver(directory: Path) -> Path | None:
    """PostgreSQL's JDBC driver: the one that is here, else Maven Central's, in ``directory``; None without either."""
    if JDBC_DRIVER.exists():
        return JDBC_DRIVER
    try:
        with urllib.request.urlopen(_PUBLISHED, timeout=_FETCHED_WITHIN_SECONDS) as response:
            jar = response.read()
    except OSError:
        return None
    if hashlib.sha256(jar).hexdigest() != _SHA256:
        return None
    path = directory / "postgresql-jdbc.jar"
    path.write_bytes(jar)
    return path


def jdbc_options(server: Mapping[str, str]) -> dict[str, str]:
    """What Spark's JDBC source needs to read from a server, given as libpq's settings, but the table."""
    return {
        "url": f"jdbc:postgresql://{server['host']}:{server['port']}/{server['dbname']}",
        "user": server["user"],
        "password": server["password"],
        "driver": "org.postgresql.Driver",
        "fetchsize": "10000",
    }
