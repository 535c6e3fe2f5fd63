"""A hot standby of a server that the tests have started: made, stopped, and promoted."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from databases import connect
from losses import RestartableServer
from psycopg2.extensions import make_dsn, parse_dsn
from watch import wait_until

# The name of the standby's physical slot on its primary.
PHYSICAL_SLOT = "standby"


class Standby(RestartableServer):
    """A server that follows another one, until it is promoted."""

    def promote(self) -> None:
        with connect(self.url) as session, session.cursor() as cursor:
            cursor.execute("SELECT pg_promote(true, 30)")
            assert cursor.fetchone() == (True,)

    def catch_up(self, primary: str) -> None:
        """Wait until everything that the primary has written is replayed."""
        with connect(primary) as there, there.cursor() as cursor:
            cursor.execute("SELECT pg_current_wal_flush_lsn()")
            ((target,),) = cursor.fetchall()
        with connect(self.url) as here, here.cursor() as cursor:

            def caught_up() -> bool:
                cursor.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (target,))
                return bool(cursor.fetchone() == (True,))

            wait_until(caught_up)


@contextmanager
def standby_of(primary: str, settings: Mapping[str, str]) -> Iterator[Standby]:
    """Run a hot standby of a server that runs here, fed through a physical slot of its own."""
    server = RestartableServer(primary)
    data = server.data.with_name("standby")
    with connect(primary) as session, session.cursor() as cursor:
        # It keeps WAL from here on, so that none has to be copied.
        cursor.execute("SELECT pg_create_physical_replication_slot(%s, true)", (PHYSICAL_SLOT,))
        # Only the server's own program is sure to be there, no pg_basebackup.
        start, stop = _BACKUP if session.server_version >= 150000 else _BACKUP_BEFORE_15
        cursor.execute(start)
        shutil.copytree(server.data, data, ignore=_leave_out)
        cursor.execute(stop)
        ((label,),) = cursor.fetchall()
    (data / "backup_label").write_text(label)
    (data / "standby.signal").touch()
    follow = {
        # With the database's name a standby copies failover slots too, from 17 on.
        "primary_conninfo": primary,
        "primary_slot_name": PHYSICAL_SLOT,
    }
    with (data / "postgresql.auto.conf").open("a") as conf:
        # Where ALTER SYSTEM can change them.
        conf.writelines(f"{name} = '{value}'\n" for name, value in {**follow, **settings}.items())
    owner = server.data.stat()
    for path in (data, *data.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    port = str(free_port())
    command = [*server.command, "-c", f"port={port}"]
    command[command.index("-D") + 1] = str(data)
    with contextlib.closing(Standby(make_dsn(**{**parse_dsn(primary), "port": port}), data, command)) as standby:
        standby.start()
        yield standby


_BACKUP = ("SELECT pg_backup_start('copy', true)", "SELECT labelfile FROM pg_backup_stop(false)")
_BACKUP_BEFORE_15 = (
    "SELECT pg_start_backup('copy', true, false)",
    "SELECT labelfile FROM pg_stop_backup(false, false)",
)


def _leave_out(directory: str, names: list[str]) -> list[str]:
    if Path(directory).name in ("pg_wal", "pg_replslot", "pg_stat_tmp", "pg_dynshmem"):
        return names
    return [name for name in names if name.startswith(("postmaster.", "pg_internal.init", "pgsql_tmp"))]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
