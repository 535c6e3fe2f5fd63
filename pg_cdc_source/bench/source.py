"""Questions about what reading costs the server: CPU of backends, retained WAL, connections."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from functools import partial

from pg_cdc_source.bench import datasets, peers
from pg_cdc_source.bench.datasets import WIDE
from pg_cdc_source.bench.lab import CORES, Lab
from pg_cdc_source.bench.meter import watching
from pg_cdc_source.bench.question import Contender, Question, Sample, Target
from pg_cdc_source.bench.snapshot import JDBC, OURS, copy_by_psql, read_by_jdbc, read_by_spark

_COPY = "COPY by psql"
_IN_ONE_PROCESS = "pgsnapshot, one process"
_WRITES_PER_SECOND = 500

# The WAL that the oldest slot retains, and the connector's sessions: the keeper's, and those of this run, because an
# earlier run's snapshot stays open for a while.
_LOOK = """
SELECT coalesce(max(pg_current_wal_lsn() - restart_lsn), 0)::float8,
       (SELECT count(*) FROM pg_stat_activity
        WHERE application_name LIKE 'pgsnapshot%%'
          AND (backend_start >= %s OR application_name NOT LIKE '%%:%%:%%'))
FROM pg_replication_slots
"""


def cpu(lab: Lab) -> Question:
    table, rows = lab.table(datasets.WIDE)

    by_psql = partial(copy_by_psql, lab, table, rows)
    jdbc = peers.missing_jdbc() or Contender(JDBC, partial(read_by_jdbc, lab, datasets.WIDE, table, rows))
    return Question(
        "source-cpu",
        f"{rows:,} rows (wide): CPU of PostgreSQL's backends",
        [
            Contender(OURS, partial(read_by_spark, lab, table, rows)),
            Contender(_IN_ONE_PROCESS, partial(lab.in_own_process, "to_arrow", OURS, table)),
            peers.missing_program("psql", _COPY) or Contender(_COPY, partial(lab.meter.measure, by_psql)),
            jdbc,
        ],
        ("server_cpu_s", "server_cpu_us_per_row", "wall_s"),
        [
            Target("server_cpu_s", OURS, "at most", 1.05, to=_COPY),
            Target("server_cpu_s", _IN_ONE_PROCESS, "at most", 1.05, to=_COPY),
        ],
        notes="Connections, planning and the keeper's snapshot are counted. psql copies everything in one session.",
    )


def wal(lab: Lab) -> Question:
    table, rows = lab.table(datasets.WIDE)
    lab.execute(f"DROP TABLE IF EXISTS written; CREATE TABLE written ({WIDE.columns})")
    return Question(
        "source-wal",
        f"WAL retained while {rows:,} rows are read and {_WRITES_PER_SECOND} transactions a second are written",
        [
            Contender(OURS, partial(_read_while_writing, lab, table, rows, None)),
            Contender("pgsnapshot that keeps its slot", lambda: _read_keeping_slot(lab, table, rows)),
        ],
        ("held_at_end_mb", "connections", "wall_s"),
        [
            Target("held_at_end_mb", OURS, "at most", 0.0),
            # Running partitions, and the keeper with its two holders.
            Target("connections", OURS, "at most", CORES + 3),
        ],
        notes="Sampled every 0.1 s from pg_replication_slots and pg_stat_activity; connections seen in two samples.",
    )


def _read_keeping_slot(lab: Lab, table: str, rows: int) -> Sample:
    slot = f"bench_{secrets.token_hex(4)}"
    sample = _read_while_writing(lab, table, rows, slot)
    lab.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    return sample


def _read_while_writing(lab: Lab, table: str, rows: int, slot: str | None) -> Sample:
    held: list[tuple[float, float]] = []
    connections = [0, 0]
    start, started_at = time.monotonic(), lab.value("SELECT clock_timestamp()")
    session = lab.connect()

    def look() -> None:
        with session.cursor() as cursor:
            cursor.execute(_LOOK, (started_at,))
            bytes_held, sessions = cursor.fetchone()
        held.append((time.monotonic() - start, bytes_held / 1e6))
        connections.append(sessions)

    # Longer than any read takes; the writer is killed when the read is done.
    statements = json.dumps([f"INSERT INTO written {WIDE.rows_between('$1', '$1')}"])
    with lab.start("writer", statements, str(_WRITES_PER_SECOND), "3600") as writer:
        assert writer.stdin is not None
        writer.stdin.write(lab.url)
        writer.stdin.close()
        with watching(look):
            sample = read_by_spark(lab, table, rows, **({} if slot is None else {"slot": slot}))
        if writer.poll() is not None:
            raise RuntimeError(f"the writer failed:\n{writer.communicate()[1][-3000:]}")
    session.close()
    # The least of two looks, so that a session that is about to end does not count beside its successor.
    lasting = max(map(min, itertools.pairwise(connections)))
    measures = {"held_at_end_mb": held[-1][1], "connections": float(lasting), **sample.measures}
    return Sample(measures, {"MB of WAL held": tuple(held)})
