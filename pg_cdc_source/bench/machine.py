"""What the measurements ran on: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from pg_cdc_source.bench import flink_jars, peers
from pg_cdc_source.demo.jdbc import JDBC_DRIVER

# The distributions that are compared or measured.
_DISTRIBUTIONS = (
    *("pg-cdc-source", "pyspark", "pyarrow", "numpy", "psycopg2-binary"),
    *("adbc-driver-postgresql", "connectorx", "duckdb", "duckdb-extension-postgres-scanner"),
    *("pydbzengine", "pyiceberg"),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine. ``busy_cores`` is its load average over the last minute."""

    cpu: str
    cores: int
    memory_gb: float
    system: str
    busy_cores: float


@dataclass(frozen=True, slots=True)
class Commit:
    """The checkout that the command was started in; ``changed`` if its files differ from the commit."""

    id: str
    changed: bool


def read_machine() -> Machine:
    memory_gb = round(psutil.virtual_memory().total / 1e9, 1)
    return Machine(_cpu_name(), os.cpu_count() or 1, memory_gb, platform.platform(), round(os.getloadavg()[0], 2))


def versions() -> dict[str, str]:
    """Versions by name, of what is installed."""
    found = {"python": platform.python_version()}
    if line := _first_line(peers.java(), "--version"):
        found["java"] = line.removeprefix("openjdk ")
    if JDBC_DRIVER.exists():
        with zipfile.ZipFile(JDBC_DRIVER) as jar:
            manifest = jar.read("META-INF/MANIFEST.MF").decode()
        found["jdbc"] = manifest.split("Implementation-Version:", 1)[-1].split()[0]
    if (program := peers.find_program("pg_recvlogical")) and (line := _first_line(str(program), "--version")):
        found["pg_recvlogical"] = line.split(") ", 1)[-1]
    if flink_jars.JARS.is_dir():
        found |= flink_jars.VERSIONS
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read_commit() -> Commit | None:
    head, changes = (_first_line("git", *what) for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")))
    return None if head is None else Commit(head, changes is not None)


def _first_line(*command: str) -> str | None:
    """The first line that a program prints; None if it is missing, fails or prints nothing."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(result.stdout.splitlines()), None)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
