"""Drivers of one mirror that follow each other, because they and what they need are killed."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pyspark
from losses import RestartableServer
from watch import wait_until

_PROGRAM = Path(__file__).with_name("mirroring.py")
_BATCH_SECONDS = 180.0
HOWS = ("driver", "everything", "executor", "worker", "server")


class Drivers:
    """``kills`` counts what was killed, ``ends`` has why drivers have ended by themselves."""

    def __init__(
        self,
        directory: Path,
        server: RestartableServer,
        format: str,
        master: str,
        seed: int,
        given: Mapping[str, Any],
    ) -> None:
        """``given`` are further arguments of mirror()."""
        self.kills: Counter[str] = Counter()
        self.ends: list[str] = []
        self._directory = directory
        self._server = server
        self._format = format
        self._given = given
        self._master = master
        self._random = random.Random(f"{seed} kill")
        self._process: subprocess.Popen[bytes] | None = None
        self._started: set[psutil.Process] = set()
        self._others = set(_executors_directories())

    @property
    def batches(self) -> list[dict[str, Any]]:
        """What the drivers have said of their batches."""
        said = self._directory / "batches"
        return [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []

    @property
    def tables(self) -> set[str]:
        """The tables that the last batch's row of the ledger has, those that are set aside included."""
        return {table for batch in self.batches[-1:] for part in ("tables", "set_aside") for table in batch[part]}

    @property
    def lsn(self) -> int:
        """The LSN of the last batch's row of the ledger."""
        return max((batch["lsn"] for batch in self.batches[-1:]), default=0)

    def live_and_die(self, how: str) -> None:
        """Let some batches come, and kill something in the midst of one."""
        self.live_for(self._random.choice((1, 1, 2, 4)))
        time.sleep(self._random.uniform(0, 2))
        self.kill(how)

    def live_for(self, batches: int) -> None:
        """Run drivers until so many batches are done."""
        wanted = len(self.batches) + batches
        self.live_until(lambda: len(self.batches) >= wanted, batches * _BATCH_SECONDS)

    def live_until(self, look: Callable[[], object], seconds: float = _BATCH_SECONDS) -> None:
        """Run a driver, and another one when it has ended, until something is to be seen."""
        anew = 0

        def seen() -> bool:
            nonlocal anew
            if self._process is not None and self._process.poll() is not None:
                anew += 1
                self.ends.append((self._directory / "driver.log").read_text()[-3000:])
                assert anew < 10, self.ends[-1]
                self._process = None
            if self._process is None:
                self._start()
            return bool(look())

        wait_until(seen, seconds)

    def kill(self, how: str) -> None:
        """Kill something: a driver alone, whose executors notice that by themselves; or everything; …"""
        processes = self._processes()
        if how == "server":
            self._server.kill()
            self._server.start()
        elif how in ("executor", "worker"):
            # Without executors of their own, workers of Python are what a driver can lose.
            of = [p for p in processes if _is(p, "CoarseGrainedExecutorBackend")] if how == "executor" else []
            of = of or [p for p in processes if _is(p, "pyspark.daemon")]
            for process in self._random.sample(of, min(1, len(of))):
                _kill(process, *_children(process))
        else:
            executors = {p for p in processes if _is(p, "CoarseGrainedExecutorBackend")}
            executors |= {child for p in executors for child in _children(p)}
            _kill(*(p for p in processes if how == "everything" or p not in executors))
            assert self._process is not None
            self._process.wait(20)
            self._process = None
        self.kills[how] += 1

    def close(self) -> None:
        """Kill all that is left."""
        _kill(*self._processes(), *self._started)
        if self._process is not None:
            self._process.wait(20)
            self._process = None
        for directory in set(_executors_directories()) - self._others:
            shutil.rmtree(directory)

    def _start(self) -> None:
        given = {"maxRowsPerBatch": self._random.choice((60, 400, 2000)), **self._given}
        command: list[str | Path] = [
            sys.executable,
            _PROGRAM,
            self._directory,
            self._server.url,
            self._format,
            self._master,
            json.dumps(given),
        ]
        with (self._directory / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _processes(self) -> list[psutil.Process]:
        if self._process is None or self._process.poll() is not None:
            return []
        driver = psutil.Process(self._process.pid)
        found = [driver, *_children(driver)]
        self._started |= set(found)
        return found


def _executors_directories() -> Iterator[Path]:
    """Those of local-cluster, which are in Spark's installation, whatever its settings."""
    return Path(pyspark.__file__).parent.glob("work/app-*")


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.children(recursive=True))
    return []


def _is(process: psutil.Process, what: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(what in part for part in process.cmdline())
    return False


def _kill(*processes: psutil.Process) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
