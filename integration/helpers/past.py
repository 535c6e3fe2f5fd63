"""A server as it was at an LSN: a copy of its files that replays the WAL up to there, and waits."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from databases import connect
from losses import RestartableServer
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn, parse_dsn
from standby import free_port
from watch import wait_until


class Past(RestartableServer):
    """Goes forward only. The server that it is of keeps its WAL (``wal_keep_size``), and has some behind the LSNs."""

    def __init__(self, server: RestartableServer) -> None:
        """Copy the files of a server that is stopped."""
        data, port = server.data.with_name("past"), str(free_port())
        shutil.copytree(server.data, data, ignore=shutil.ignore_patterns("postmaster.*", "pg_internal.init"))
        (data / "recovery.signal").touch()
        owner = server.data.stat()
        for path in (data, *data.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
        settings = {
            "port": port,
            "restore_command": f'cp "{server.data}/pg_wal/%f" "%p"',
            "recovery_target_inclusive": "off",
            "recovery_target_action": "pause",
        }
        command = [*server.command, *(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))]
        command[command.index("-D") + 1] = str(data)
        super().__init__(make_dsn(**{**parse_dsn(server.url), "port": port}), data, command)
        self._command = command

    @contextmanager
    def at(self, lsn: int) -> Iterator[Session]:
        """A session that sees what was committed up to an LSN, itself included."""
        # It ends before the first record behind.
        target = f"{(lsn + 1) >> 32:X}/{(lsn + 1) & 0xFFFFFFFF:X}"
        self.command = [*self._command, "-c", f"recovery_target_lsn={target}"]
        self.start()
        try:
            with connect(self.url) as session, session.cursor() as cursor:

                def is_there() -> bool:
                    cursor.execute("SELECT pg_get_wal_replay_pause_state()")
                    return bool(cursor.fetchone() == ("paused",))

                wait_until(is_there)
                yield session
        finally:
            self.stop("fast")


def past_of(server: RestartableServer) -> contextlib.closing[Past]:
    """Stop a server, copy it, and start it again."""
    server.stop("fast")
    past = Past(server)
    server.start()
    return contextlib.closing(past)
