"""Flink CDC beside the mirror: the same tables, by Iceberg's sink, from the same slot."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pg_cdc_source.bench import peers
from pg_cdc_source.bench.flink_jars import JARS
from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.meter import timings
from pg_cdc_source.bench.question import Sample

_SOURCE = Path(__file__).with_name("FlinkMirror.java")
# What Flink's own scripts open to Kryo, as far as this job needs it.
_OPEN = [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in ("lang", "nio", "time", "util")]


class FlinkMirror:
    """Iceberg tables that Flink writes. Its files are below the lab's ``home``."""

    def __init__(self, lab: Lab, tables: Sequence[str], publication: str, slot: str) -> None:
        self._lab, self._tables, self._publication, self._slot = lab, tables, publication, slot
        self._home = lab.scratch()
        self._warehouse, self._loaded, self._classes = (self._home / name for name in ("at", "loaded", "classes"))
        self._class_path = os.pathsep.join(map(str, [self._classes, *sorted(JARS.glob("*.jar"))]))

    def load(self) -> None:
        """Compile the job, let it bring the first rows, and remember the tables as they are then."""
        self._home.mkdir()
        # Flink's tasks do not find classes that `java File.java` keeps in memory.
        compiler = [peers.java(), "-m", "jdk.compiler/com.sun.tools.javac.Main"]
        self._lab.program([*compiler, "-cp", self._class_path, "-d", self._classes, _SOURCE])
        self._run(0)
        self._warehouse.rename(self._loaded)

    def follow(self, changes: int) -> Sample:
        """Bring so many changes into the tables as they were loaded, and check what these hold then."""
        shutil.rmtree(self._warehouse, ignore_errors=True)
        # Their metadata have whole paths.
        shutil.copytree(self._loaded, self._warehouse)
        found: dict[str, Any] = {}

        def work() -> int:
            found.update(self._run(changes))
            return changes

        server_cpu_s = self._lab.meter.measure(work).measures["server_cpu_s"]
        wanted = {"rows": changes, "tables": [self._held(table) for table in self._tables]}
        if (got := {name: found[name] for name in wanted}) != wanted:
            raise RuntimeError(f"Flink's tables are not PostgreSQL's: {got} instead of {wanted}")
        return Sample(timings(changes, found["wall_s"], found["client_cpu_s"], server_cpu_s))

    def _run(self, changes: int) -> dict[str, Any]:
        server = self._lab.server
        where = (server["host"], server["port"], server["user"], server["dbname"], self._slot, self._publication)
        machine = [peers.java(), "-Xmx4g", f"-Djava.io.tmpdir={self._home}", *_OPEN, "-cp", self._class_path]
        output = self._lab.program([*machine, "FlinkMirror", *where, self._warehouse, str(changes), *self._tables])
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found

    def _held(self, table: str) -> list[int]:
        """A table's rows, and the sum of the first four bytes of their MD5, as FlinkMirror.java has them."""
        values = "id, customer, quantity, price, note, (extract(epoch FROM changed) * 1000000)::bigint"
        hashed = f"('x' || left(md5(concat_ws('|', {values})), 8))::bit(32)::bigint"
        return [
            self._lab.value(f"SELECT count(*) FROM {table}"),
            int(self._lab.value(f"SELECT sum({hashed}) FROM {table}")),
        ]
