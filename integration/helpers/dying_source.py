"""A stream's source process that can be killed at any moment; its checkpoint and its sink are files, as with Spark.

Run as a program, this imports everything once, and forks a process for each line of JSON from its standard input: the
options, and a directory. The process runs batch after batch until it is killed, or until the stream refuses::

    offsets/N        where batch N ends; written before its rows are read
    rows/N           its rows; those that came before, of a batch that comes again, are rows/N.1, rows/N.2, …
    commits/N        the batch is over
    refused          why the stream has ended
    log              what the processes have said

Files are put in place at once. A fork takes some milliseconds, a new Python a second.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import psutil

REFUSED = 3


class Files:
    """The checkpoint and the sink of one query."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("offsets", "rows", "commits"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    @property
    def newest(self) -> int:
        """The number of the newest batch whose end is known; -1 for none."""
        return max(
            (int(path.name) for path in (self.directory / "offsets").iterdir() if path.name.isdigit()), default=-1
        )

    @property
    def is_under_way(self) -> bool:
        """Whether the newest batch is not over."""
        return self.newest >= 0 and not self.is_committed(self.newest)

    def is_committed(self, number: int) -> bool:
        return (self.directory / "commits" / str(number)).exists()

    def offset(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "offsets" / str(number)).read_text())
        return found

    def processes(self, number: int) -> set[str]:
        """The process that began a batch, and the one that ended it."""
        return {(self.directory / part).read_text() for part in (f"offsets/{number}.pid", f"commits/{number}")}

    def was_repeated(self, number: int) -> bool:
        return len(self.processes(number)) == 2

    def rows(self, number: int) -> list[dict[str, Any]]:
        return self._read(self.directory / "rows" / str(number))

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def rows_before(self, number: int) -> list[list[dict[str, Any]]]:
        """What the batch had when it came before."""
        return [self._read(path) for path in (self.directory / "rows").glob(f"{number}.*[0-9]")]

    def _read(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def put(self, kind: str, name: object, text: str) -> None:
        path = self.directory / kind / str(name)
        new = path.with_name("new")
        new.write_text(text)
        new.replace(path)

    def put_rows(self, number: int, rows: list[dict[str, Any]]) -> None:
        path = self.directory / "rows" / str(number)
        if path.exists():
            os.link(path, path.with_name(f"{number}.{len(list(path.parent.glob(f'{number}.*')))}"))
        self.put("rows", number, "".join(f"{json.dumps(row, default=str)}\n" for row in rows))


class SourceProcesses:
    """Starts source processes, one at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._pid: int | None = None

    def start(self, options: dict[str, str], directory: Path) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([options, str(directory)]).encode() + b"\n")
        self._pid = int(self._answer())

    def status(self, patience_seconds: float = 0.0) -> int | None:
        """How the process has ended, as ``Popen.returncode`` has it; None while it runs."""
        assert self._pid is not None
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], patience_seconds)[0]:
            return None
        self._pid = None
        return int(self._answer())

    def kill(self) -> int:
        """Kill the process, if it runs; how it has ended."""
        assert self._pid is not None
        os.kill(self._pid, signal.SIGKILL)
        status = self.status(30.0)
        assert status is not None, "a process that was killed is still there"
        return status

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._pid is not None:
            self.kill()

    def running(self) -> list[str]:
        """What was started and has not ended."""
        children = psutil.Process(self._server.pid).children(recursive=True)
        return [str(child) for child in children if child.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        self.end()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        assert self._server.wait(30) == 0
        self._server.stdout.close()

    def _answer(self) -> bytes:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the process that starts others has ended"
        return line


def follow(options: dict[str, str], files: Files) -> None:
    """Run batches for ever, as Spark does from its checkpoint."""
    from driving import copied

    from pg_cdc_source.postgres import trees
    from pg_cdc_source.spark.pgcdc import HAS_LIMITS, PgCdcDataSource

    # Some share a batch, some are too large for that.
    trees.read_sizes = lambda session, oids: {oid: (oid % 2) << 40 for oid in oids}
    source = PgCdcDataSource(options)
    reader = copied(source).streamReader(source.schema())

    def run(number: int) -> None:
        start = files.offset(number - 1) if number else reader.initialOffset()
        rows: list[dict[str, Any]] = []
        for partition in copied(reader.partitions(start, files.offset(number))):
            for batch in copied(reader).read(partition):
                rows += batch.to_pylist()
        files.put_rows(number, rows)
        files.put("commits", number, str(os.getpid()))

    number = files.newest
    if files.is_under_way:
        run(number)
    while True:
        start = files.offset(number) if number >= 0 else reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit()) if HAS_LIMITS else reader.latestOffset()
        if json.dumps(end) == json.dumps(start):
            continue
        number += 1
        files.put("offsets", f"{number}.pid", str(os.getpid()))
        files.put("offsets", number, json.dumps(end))
        if number:
            reader.commit(start)
        run(number)


def _run(line: str) -> int:
    from pg_cdc_source.errors import PgCdcError

    options, directory = json.loads(line)
    files = Files(Path(directory))
    with (files.directory / "log").open("a", buffering=1) as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format=f"{os.getpid()} %(asctime)s %(message)s")
    try:
        follow(options, files)
    except PgCdcError as error:
        files.put(".", "refused", str(error))
        return REFUSED
    except BaseException:
        traceback.print_exc()
    return 1


def main() -> None:
    import driving
    import pytest

    driving.prepare(pytest.MonkeyPatch())
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pid = 0
    for line in sys.stdin:
        if pid:
            os.waitpid(pid, 0)
        pid = os.fork()
        if pid == 0:
            os._exit(_run(line))
        os.write(answers, f"{pid}\n".encode())
        # It stays a zombie until the next line: nobody kills another process that has got its pid.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        os.write(answers, f"{status}\n".encode())


if __name__ == "__main__":
    main()
