"""What a test takes away while the connector runs: sessions, and servers."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg2
from databases import connect
from watch import wait_until


@contextmanager
def ending_sessions(db: str, like: str, every_seconds: float, condition: str = "true") -> Iterator[list[int]]:
    """Terminate sessions whose name is like that, again and again; yields the pids that were ended."""
    ended: list[int] = []
    stop = threading.Event()

    def end() -> None:
        with connect(db) as session, session.cursor() as cursor:
            pause_seconds = every_seconds
            while not stop.wait(pause_seconds):
                cursor.execute(
                    "SELECT pid FROM (SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                    f" AND application_name LIKE %s AND {condition}"
                    " ORDER BY random() LIMIT 1) AS one WHERE pg_terminate_backend(pid)",
                    (like,),
                )
                found = [pid for (pid,) in cursor]
                ended.extend(found)
                # What is there only now and then is waited for.
                pause_seconds = every_seconds if found else 0.02

    thread = threading.Thread(target=end)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join()


class RestartableServer:
    """A server that can be stopped and started again: one that runs, or with ``data`` and ``command`` a new one."""

    def __init__(self, url: str, data: Path | None = None, command: Sequence[str] = ()) -> None:
        self.url = url
        if data is None:
            with connect(url) as session, session.cursor() as cursor:
                cursor.execute("SHOW data_directory")
                row = cursor.fetchone()
                assert row is not None
                data = Path(row[0])
        self.data = data
        self.command = list(command) or shlex.split((data / "postmaster.opts").read_text())
        self._own: subprocess.Popen[bytes] | None = None

    def to_next_timeline(self) -> None:
        """End as a restored or promoted server does; it has to be stopped."""
        with (self.data / "postgresql.auto.conf").open("a") as conf:
            conf.write("restore_command = 'false'\n")
        (self.data / "recovery.signal").touch()

    def close(self) -> None:
        self.stop("immediate")

    def stop(self, mode: str) -> None:
        pg_ctl = Path(self.command[0]).with_name("pg_ctl")
        self._run([str(pg_ctl), "-D", str(self.data), "-m", mode, "-t", "20", "stop"]).wait()
        if self._own is not None:
            self._own.wait(20)

    def kill(self) -> None:
        """Kill all of its processes at once; it was started by :meth:`start`."""
        assert self._own is not None
        main = psutil.Process(self._own.pid)
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._own.wait(20)

    def start(self) -> None:
        self._own = None

        def answers() -> bool:
            if self._own is None or self._own.poll() is not None:
                # It does not start while a process of one that was killed has not ended yet.
                self._own = self._run(self.command)
            try:
                psycopg2.connect(self.url).close()
            except psycopg2.OperationalError:
                return False
            return True

        wait_until(answers, 120)

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        owner = self.data.stat().st_uid if os.geteuid() == 0 else None
        nowhere = subprocess.DEVNULL
        return subprocess.Popen(command, user=owner, cwd=self.data, env={"LC_ALL": "C"}, stdout=nowhere, stderr=nowhere)
