"""The arithmetic of docs/scale.md: how long a large snapshot takes on a cluster, from the measured costs of a row.

The executors' cores, the server's cores, the network and the disk each need their own time, and the longest one is the
snapshot's. How ranges fill the cores is simulated. The question ``schedule`` compares the simulation with a run.

``python -m pg_cdc_source.bench.schedule benchmarks/results.json`` prints the tables of docs/scale.md.
"""

from __future__ import annotations

import functools
import heapq
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The estimated case: 10 TB, in ranges of the default size.
_TOTAL, _RANGE = 10e12, 64e6
EXECUTORS = (4, 8, 16, 32, 64)
CORES_PER_EXECUTOR = 4


def makespan(seconds: Sequence[float], cores: int) -> float:
    """When the last task ends, if tasks start in order, each on the first free core, as in Spark."""
    free = [0.0] * cores
    for length in seconds:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a row costs on each side, and a task in itself. ``row_bytes`` of heap are about the same on the wire."""

    row_bytes: float
    client_us: float
    server_us: float
    task_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a snapshot runs on. Bandwidths are in bytes per second."""

    executors: int
    server_cores: int
    network: float = 10e9 / 8
    disk: float = 2e9
    cores_per_executor: int = CORES_PER_EXECUTOR

    @property
    def cores(self) -> int:
        return self.executors * self.cores_per_executor


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that each part needs by itself; the longest is the wall time."""

    parts: Mapping[str, float]

    @property
    def wall(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def seconds(self) -> float:
        return self.parts[self.wall]


def estimate(table_bytes: Sequence[float], range_bytes: float, costs: Costs, cluster: Cluster) -> Estimate:
    """Estimate a snapshot of tables, each cut into even ranges of at most ``range_bytes``."""
    total = sum(table_bytes)
    rows = total / costs.row_bytes
    return Estimate(
        {
            "executors": makespan(_task_seconds(table_bytes, range_bytes, costs), cluster.cores),
            "server": rows * costs.server_us / 1e6 / cluster.server_cores,
            "network": total / cluster.network,
            "disk": total / cluster.disk,
        }
    )


def _task_seconds(table_bytes: Sequence[float], range_bytes: float, costs: Costs) -> list[float]:
    tasks = []
    for size in table_bytes:
        count = max(1, -int(-size // range_bytes))
        tasks += [costs.task_s + size / count / costs.row_bytes * costs.client_us / 1e6] * count
    return tasks


def sizes(total: float, tables: int) -> list[float]:
    """Table sizes as in a database that has grown: the k-th largest has 1/k of the largest one's size."""
    harmonic = sum(1 / k for k in range(1, tables + 1))
    return [total / harmonic / k for k in range(1, tables + 1)]


# --- from a run's results --------------------------------------------------------------------------------------------


def costs_of(results: Mapping[str, Any]) -> Costs:
    """Read the costs out of results.json: how CPU grows with the rows and with the partitions of the wide table."""
    questions = {question["name"]: question["contenders"] for question in results["questions"]}

    def growth(question: str, less: str, more: str, measure: str) -> float:
        one, other = (questions[question][name]["medians"][measure]["median"] for name in (less, more))
        return float(other - one)

    in_rows = functools.partial(growth, "growth-rows", "1x", "16x")
    largest = int(questions["growth-rows"]["16x"]["medians"]["rows"]["median"])
    task_s = growth("growth-partitions", "4", "64", "client_cpu_s") / (64 - 4)
    return Costs(
        row_bytes=results["table_bytes"][f"wide_{largest}"] / largest,
        client_us=in_rows("client_cpu_s") * 1e6 / in_rows("rows"),
        server_us=in_rows("server_cpu_s") * 1e6 / in_rows("rows"),
        task_s=max(0.0, task_s),
    )


def print_tables(costs: Costs) -> None:
    print(
        f"A row: {costs.row_bytes:.0f} bytes, {costs.client_us:.2f} µs of an executor's core, {costs.server_us:.2f} µs"
        f" of the server's. A task: {costs.task_s * 1e3:.0f} ms. Ranges of 64 MB.\n"
    )
    tables = {"one table": [_TOTAL], "1,000 tables": sizes(_TOTAL, 1_000)}
    print(f"| executors of {CORES_PER_EXECUTOR} cores, their CPU alone | {' | '.join(tables)} |")
    print("| --- | --- | --- |")
    for executors in EXECUTORS:
        found = [estimate(each, _RANGE, costs, Cluster(executors, 16)).parts["executors"] for each in tables.values()]
        print(f"| {executors} | {' | '.join(map(_duration, found))} |")
    print("\n| however many executors | at least |\n| --- | --- |")
    for server_cores in (16, 64):
        parts = estimate([_TOTAL], _RANGE, costs, Cluster(1, server_cores)).parts
        print(f"| {server_cores} cores of the server | {_duration(parts['server'])} |")
    print(f"| network of 10 Gbit/s | {_duration(parts['network'])} |")
    print(f"| disk of 2 GB/s | {_duration(parts['disk'])} |")


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    print_tables(costs_of(json.loads(Path(sys.argv[1]).read_text())))
