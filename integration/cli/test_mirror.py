"""``pg-cdc mirror`` on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from commands import COMMAND
from driving import drop_slots, run
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn
from sessions import JVM_OPTIONS
from threads import at_work
from watch import wait_until


class Screen:
    """What a terminal was sent, without what moves its cursor."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._bytes = b""

    def read(self, stop: threading.Event) -> None:
        # The terminal is gone when the last process that has it open ends.
        with contextlib.suppress(OSError):
            while not stop.is_set():
                self._bytes += os.read(self._terminal, 65536)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self._bytes.decode(errors="replace"))

    @property
    def last(self) -> str:
        """What it shows, from the line above the table on."""
        return self.text.rpartition("LSN ")[2]


def test_a_terminal_shows_how_the_tables_get_on_until_ctrl_c(db: str, pg: Session, tmp_path: Path) -> None:
    run(pg, "CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a SELECT i, 0 FROM generate_series(1, 1234) i",
        "CREATE TABLE b (d date PRIMARY KEY)", "INSERT INTO b VALUES ('2026-01-01')")  # fmt: skip

    command = [COMMAND, "mirror", db, "--tables", "public.*", "--slot", "s", "--target", f"{tmp_path}/{{table}}"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*command, "--checkpoint", str(tmp_path / "checkpoint")],
        cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "JDK_JAVA_OPTIONS": JVM_OPTIONS, "COLUMNS": "100", "LINES": "40", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    screen = Screen(ours)

    def shown(*cells: str) -> str:
        """What it shows, if it has these cells; the next look may find something else."""
        assert process.poll() is None, screen.text
        last = screen.last
        return last if set(cells) <= set(re.split(r" {2,}|\n", last)) else ""

    more = 0

    def is_behind() -> bool:
        """Commit a row, also while a batch is applied."""
        nonlocal more
        more += 1
        run(pg, f"INSERT INTO a VALUES (-{more}, 0)")
        return re.search(r"rows/s +\d+\.\d s behind\n", screen.text) is not None

    try:
        with at_work(screen.read):
            last = wait_until(lambda: shown("up to date", "public.b"), 120)
            assert re.search(r"[\dA-F]+/[\dA-F]+   batch \d+   [\d,]+ rows/s   up to date\n", last), last
            assert re.search(r"public\.a +[\d,]+ +1,234 +\d+", last), last
            run(pg, "INSERT INTO b VALUES ('infinity')")
            wait_until(lambda: re.search(r"public\.b +0 +1 +\d+ +\[UNREPRESENTABLE\] .*…", shown("set aside")))
            wait_until(is_behind)
            wait_until(lambda: shown("up to date"))
            run(pg, "INSERT INTO a SELECT i, 0 FROM generate_series(10001, 110000) i")
            # In the middle of a batch. The checkpoint says so sooner than Spark's status, by which the command goes.
            wait_until(lambda: re.search(r"\d s behind\n", screen.last))
            # As Ctrl-C: all processes of the terminal get it.
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 0, screen.text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
    *_, table, end = (line.strip() for line in screen.text.splitlines() if line.strip())
    assert re.match(rf"public\.a +100,000 +{101_234 + more:,} ", table), screen.text
    assert end == "stopped; the same command goes on from here"
    assert screen.text.count("public.b is set aside: ") == 1
    assert "Exception" not in screen.text.partition("up to date")[2]
    drop_slots(pg)


@pytest.mark.parametrize(
    ("of", "tables", "said"),
    [
        ({"dbname": "nowhere"}, "public.*", 'database "nowhere" does not exist'),
        ({}, "public.nothing", "public.nothing does not exist"),
    ],
    ids=["database", "table"],
)
def test_what_ends_it_is_said_without_sparks_log(
    of: dict[str, str], tables: str, said: str, db: str, tmp_path: Path
) -> None:
    found = subprocess.run(
        [COMMAND, "mirror", make_dsn(db, **of), "--tables", tables, "--slot", "s", "--once",
         "--target", f"{tmp_path}/{{table}}", "--checkpoint", str(tmp_path / "checkpoint")],
        cwd=tmp_path, env={**os.environ, "JDK_JAVA_OPTIONS": JVM_OPTIONS}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (1, "")
    assert said in found.stderr
    assert "Remedy: " in found.stderr
    assert "\tat org.apache.spark" not in found.stderr
    if of:
        assert len(found.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["--slot", "lake-1"], 1, "[OPTION] option slot: 'lake-1' is not a name"),
        (["--slot", "s", "-o", "slotTimeuot=1s"], 1, "did you mean slotTimeout?"),
        (["--slot", "s", "-o", "onSchemaChange=additive"], 2, "use --on-schema-change instead of onSchemaChange"),
    ],
    ids=["value", "name", "own"],
)
def test_what_is_wrong_with_the_options_is_said_before_spark_starts(
    given: list[str], code: int, said: str, tmp_path: Path
) -> None:
    found = subprocess.run(
        [COMMAND, "mirror", "postgresql://nowhere.invalid/db", "--tables", "public.*", *given, "--once",
         "--target", f"{tmp_path}/{{table}}", "--checkpoint", str(tmp_path / "checkpoint")],
        cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (code, "")
    assert said in found.stderr
    assert "Traceback" not in found.stderr
