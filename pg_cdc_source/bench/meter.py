"""Measure a piece of work: wall time, CPU of the clients, CPU of the server, memory.

CPU is what the kernel accounts to whole process trees. A process that has ended is counted through the parent that
waited for it, so short-lived backends are counted as well. One whose parent has ended first is this process's child
from then on (``adopt_orphans``), as Spark's workers are whose daemon is killed. Spark's daemon waits for none of its
workers: those that end after a minute without work are counted as they were last seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from pg_cdc_source.bench.question import Sample

WATCH_SECONDS = 0.1
LOOKS = 100


class Meter:
    """Measures the work of this process, of all that it has started, and of the server with the given postmaster."""

    def __init__(self, postmaster_pid: int, home: Path) -> None:
        """``home`` is the run's directory for temporary files. It identifies keepers, which are not our children."""
        adopt_orphans()
        self._me = psutil.Process()
        self._postmaster = psutil.Process(postmaster_pid)
        self._home = str(home)
        self._clients = CpuOf(self._client_processes)
        self._server = CpuOf(self._server_processes)

    def measure(self, work: Callable[[], int]) -> Sample:
        """Run ``work``, which returns how many rows it has read."""
        clients, server, start = self._clients.read(), self._server.read(), time.perf_counter()
        rows = work()
        wall = time.perf_counter() - start
        client_cpu, server_cpu = self._clients.read() - clients, self._server.read() - server
        # The kernel counts hundredths; sums of them may differ in their last bits.
        if min(client_cpu, server_cpu) < -0.005:
            raise RuntimeError(
                f"CPU that was counted before is gone: {client_cpu} s of clients, {server_cpu} s of server"
            )
        return Sample(timings(rows, wall, client_cpu, server_cpu))

    def _client_processes(self) -> set[psutil.Process]:
        return {self._me, *self._me.children(recursive=True), *self._keepers()} - self._server_processes()

    def _server_processes(self) -> set[psutil.Process]:
        return {self._postmaster, *self._postmaster.children(recursive=True)}

    def _keepers(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    "pg_cdc_source.snapshot.keeper" in process.cmdline()
                    and process.environ().get("TMPDIR") == self._home
                ):
                    yield process


_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have descendants whose parent ends become this process's children, and not init's. Linux alone can do it.

    Those that end then stay zombies until this process does, with their CPU.
    """
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def timings(rows: int, wall_s: float, client_cpu_s: float, server_cpu_s: float) -> dict[str, float]:
    """The measures that all contenders have."""
    return {
        "rows": rows,
        "wall_s": wall_s,
        "client_cpu_s": client_cpu_s,
        "server_cpu_s": server_cpu_s,
        "wall_us_per_row": wall_s * 1e6 / rows,
        "client_cpu_us_per_row": client_cpu_s * 1e6 / rows,
        "server_cpu_us_per_row": server_cpu_s * 1e6 / rows,
        "cpu_us_per_row": (client_cpu_s + server_cpu_s) * 1e6 / rows,
        "rows_per_s": rows / wall_s,
    }


class CpuOf:
    """The CPU seconds of ``processes``, with those that have ended."""

    def __init__(self, processes: Callable[[], set[psutil.Process]]) -> None:
        self._processes = processes
        self._uncounted: dict[psutil.Process, float] = {}  # as they were last seen

    def read(self) -> float:
        """Each is counted once, also if one ends meanwhile."""
        for _ in range(LOOKS):
            found = self._processes()
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                seen = {process: _cpu_seconds(process) for process in found}
                uncounted = {process for process in found if _is_waited_for_by_nobody(process)}
                if self._processes() == found:
                    gone = {process: cpu_s for process, cpu_s in self._uncounted.items() if process not in seen}
                    self._uncounted = gone | {process: seen[process] for process in uncounted}
                    return sum(seen.values()) + sum(gone.values())
        raise RuntimeError(f"the processes changed during {LOOKS} attempts to read their CPU")


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _is_waited_for_by_nobody(process: psutil.Process) -> bool:
    """Whether the parent ignores the end of its children, which the kernel then counts nowhere."""
    parent = process.ppid()
    if sys.platform != "linux" or parent == 0:
        return False
    ignored = int(Path(f"/proc/{parent}/status").read_text().split("SigIgn:")[1].split()[0], base=16)
    return bool(ignored >> (signal.SIGCHLD - 1) & 1)


@contextmanager
def watching(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` repeatedly in a thread until the block ends, which then raises what ``look`` has raised."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            while not stop.wait(WATCH_SECONDS):
                look()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=watch, name="bench-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


class Peak:
    """The most resident memory that any one of some processes has had, as the kernel reports it at each look."""

    def __init__(self, processes: Callable[[], Iterator[psutil.Process]]) -> None:
        self._processes = processes
        self.bytes = 0

    def look(self) -> None:
        for process in self._processes():
            # A process that has ended has no such line.
            with contextlib.suppress(OSError, IndexError, psutil.Error):
                self.bytes = max(self.bytes, peak_rss_bytes(process.pid))


def peak_rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
