"""A server whose transaction ids are moved on, as years of writing do."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg2
from servers import SETTINGS, binaries

from pg_cdc_source.demo import embedded_postgres as embedded
from pg_cdc_source.demo.throwaway import throwaway_directory

_PASSWORD = "aging"
_TRANSACTIONS_PER_SEGMENT = 8192 * 4 * 32
_SEGMENT_BYTES = 8192 * 32
# Autovacuum would do its work in between.
_SETTINGS = {**SETTINGS, "autovacuum": "off", "fsync": "off"}


def lacking() -> str | None:
    """Why the ids of this server cannot be moved on; None where they can."""
    found = binaries()
    is_there = found is None or (found / "pg_resetwal").exists()
    return None if is_there else "pg_resetwal is not among the server's programs"


class Aging:
    """A cluster that runs now and then."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._account = embedded._unprivileged_account()
        if self._account is not None:
            shutil.chown(home, self._account)
        self._bin = embedded._reachable(binaries() or embedded._bundled_bin_dir(), home, self._account)
        embedded._initdb(self._bin, home, _PASSWORD, self._account)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Run it, and yield the URL of its superuser."""
        with embedded._running(self._bin, self._home, _SETTINGS, _PASSWORD, self._account) as url:
            yield url

    def move_on(self, xid: int, epoch: int = 0) -> None:
        """Have ``xid`` be the next transaction's: at most 2 billion from the last one. All rows are frozen before.

        ``epoch``: how often the ids began anew.
        """
        with self.running() as url:
            for database in ("template0", "template1", "postgres"):
                if database == "template0":
                    _execute(url, "postgres", "ALTER DATABASE template0 ALLOW_CONNECTIONS true")
                _execute(url, database, "VACUUM (FREEZE)")
        segment = self._home / "data" / "pg_xact" / f"{xid // _TRANSACTIONS_PER_SEGMENT:04X}"
        segment.write_bytes(bytes(_SEGMENT_BYTES))
        if self._account is not None:
            shutil.chown(segment, self._account)
        subprocess.run(
            [str(self._bin / "pg_resetwal"), "-x", str(xid), "-e", str(epoch), "-D", str(self._home / "data")],
            user=self._account,
            cwd=self._home,
            env=embedded._environment(),
            capture_output=True,
            check=True,
        )


def _execute(url: str, database: str, statement: str) -> None:
    with contextlib.closing(psycopg2.connect(url, dbname=database)) as session:
        session.autocommit = True
        with session.cursor() as cursor:
            cursor.execute(statement)


@contextlib.contextmanager
def aging() -> Iterator[Aging]:
    """A cluster in a directory that is removed afterwards."""
    with throwaway_directory("aging") as home:
        yield Aging(home)
