"""The benchmark's arithmetic: rounds, medians, ratios, verdicts; what is missing; what is measured; its files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from psycopg2 import sql

from pg_cdc_source.bench import datasets, flink_jars, peers, schedule
from pg_cdc_source.bench.lab import FULL, QUICK, Scale
from pg_cdc_source.bench.machine import Machine
from pg_cdc_source.bench.meter import CpuOf, peak_rss_bytes, timings, watching
from pg_cdc_source.bench.question import Answer, Contender, Missing, Question, Sample, Spread, Target, Verdict, ask
from pg_cdc_source.bench.report import JSON_NAME, Report, as_json, write
from pg_cdc_source.bench.run import QUESTIONS, chosen, scale


def scripted(name: str, *walls: float, log: list[str] | None = None) -> Contender:
    """A contender whose runs take what the script says."""
    script = iter(walls)

    def run() -> Sample:
        if log is not None:
            log.append(name)
        return Sample({"wall_s": next(script)})

    return Contender(name, run)


def question(*contenders: Contender | Missing, targets: tuple[Target, ...] = (), warm_ups: int = 0) -> Question:
    return Question("q", "Which is faster?", contenders, ("wall_s",), targets, warm_ups=warm_ups)


def answer_to(asked: Question, rounds: int) -> Answer:
    return ask(asked, rounds, lambda what: None)


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_each_round_begins_with_another() -> None:
    log: list[str] = []
    names = ("a", "b", "c")
    answer_to(question(*(scripted(name, *range(4), log=log) for name in names), warm_ups=1), 3)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"


def test_the_run_that_warms_up_is_not_counted() -> None:
    answer = answer_to(question(scripted("a", 100.0, 1.0, 2.0, 3.0), warm_ups=1), 3)
    assert answer.spread("a", "wall_s") == Spread(2.0, 1.0, 3.0)


def test_a_ratio_is_taken_within_each_round() -> None:
    """A round in which the machine is slow counts for both sides: no run is compared with one of another round."""
    target = Target("wall_s", "a", "at most", 0.5, to="b")
    answer = answer_to(question(scripted("a", 1.0, 10.0, 1.5), scripted("b", 2.0, 20.0, 2.0), targets=(target,)), 3)
    (verdict,) = answer.verdicts()
    assert verdict == Verdict(target, Spread(0.5, 0.5, 0.75))
    assert verdict.met


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("wall_s", "a", "at most", 2.0), True),
        (Target("wall_s", "a", "at most", 1.9), False),
        (Target("wall_s", "a", "at least", 2.0), True),
        (Target("wall_s", "a", "at least", 2.1), False),
        (Target("wall_s", "a", "at most", 1.0, to="gone"), None),
        (Target("wall_s", "gone", "at most", 1.0), None),
    ],
)
def test_a_target_is_met_missed_or_not_measured(target: Target, met: bool | None) -> None:
    asked = question(scripted("a", 2.0), Missing("gone", "not installed"), targets=(target,))
    (verdict,) = answer_to(asked, 1).verdicts()
    assert verdict.met is met


# --- what is missing -------------------------------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = peers.missing_arrow_peer("DuckDB")
    assert missing == Missing("DuckDB", "not installed: pip install duckdb duckdb-extension-postgres-scanner")
    assert peers.missing_debezium() == Missing("Debezium engine", "not installed: pip install pydbzengine")
    into_iceberg = peers.missing_debezium_into_iceberg("Debezium into Iceberg")
    assert into_iceberg is not None
    assert into_iceberg.reason == "not installed: pip install 'pydbzengine[iceberg]' 'pyiceberg[sql-sqlite]'"


def test_jars_of_flink_that_are_not_there_are_named_with_what_fetches_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flink_jars, "JARS", tmp_path / "none")
    missing = peers.missing_flink("Flink")
    assert missing is not None
    assert missing.reason.endswith("none does not exist: python -m pg_cdc_source.bench.flink_jars, which takes Maven")


def test_a_driver_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "JDBC_DRIVER", tmp_path / "none.jar")
    missing = peers.missing_jdbc()
    assert missing is not None
    assert "apt install libpostgresql-jdbc-java" in missing.reason


# --- what is measured ------------------------------------------------------------------------------------------------


def test_timings_are_given_for_each_row() -> None:
    found = timings(2_000_000, wall_s=4.0, client_cpu_s=3.0, server_cpu_s=1.0)
    assert (found["wall_us_per_row"], found["cpu_us_per_row"], found["rows_per_s"]) == (2.0, 2.0, 500_000.0)


def test_the_peak_of_a_process_is_the_most_it_ever_had() -> None:
    code = "import sys; a = b'x' * (200 << 20); del a; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 200 << 20 <= peak_rss_bytes(process.pid) < 300 << 20
        process.communicate()


def test_what_a_look_raises_ends_the_watching() -> None:
    looked = threading.Event()

    def look() -> None:
        looked.set()
        raise RuntimeError("cannot look")

    with pytest.raises(RuntimeError, match="cannot look"), watching(look):
        assert looked.wait(60)


@pytest.mark.parametrize("dataset", [v for v in vars(datasets).values() if isinstance(v, datasets.Dataset)])
def test_each_dataset_has_its_share_of_rows_and_can_be_made_in_parts(dataset: datasets.Dataset) -> None:
    assert dataset.rows(4_000_000) == int(4_000_000 * dataset.share)
    assert dataset.rows(1) == 1
    if dataset is not datasets.SKEWED:
        assert "generate_series(5, 7) AS i" in dataset.rows_between("5", "7")
    assert isinstance(sql.SQL(dataset.select), sql.SQL)


# --- the command -----------------------------------------------------------------------------------------------------


def test_only_means_a_question_or_those_that_begin_so() -> None:
    assert chosen([]) == list(QUESTIONS)
    assert chosen(["limit"]) == ["limit"]
    assert chosen(["growth", "arrow"]) == ["arrow", "growth-rows", "growth-partitions"]
    with pytest.raises(ValueError, match=r"no question speed; there are snapshot-wide, .*stream-memory"):
        chosen(["speed"])


def test_what_is_not_said_is_that_of_a_full_run_or_of_a_quick_one() -> None:
    assert scale(quick=False, rows=None, rounds=None) == FULL
    assert scale(quick=True, rows=None, rounds=None) == QUICK
    assert scale(quick=True, rows=5, rounds=7) == Scale(5, 7, QUICK.latency_seconds, 20, 200, warm_up=False)


# --- the files -------------------------------------------------------------------------------------------------------


def test_what_was_watched_is_kept_in_json_with_some_hundreds_of_its_points() -> None:
    points = tuple((float(i), 2.0 * i) for i in range(1_201))
    answer = answer_to(question(Contender("a", lambda: Sample({"wall_s": 1.0}, {"MB held": points, "none": ()}))), 1)
    machine = Machine("a cpu", 2, 24.0, "Linux", 0.1)
    told = as_json(Report("pg-cdc bench", "now", machine, None, {}, QUICK, {}, (answer,)))
    (series,) = told["questions"][0]["contenders"]["a"]["series"]
    assert series == {"MB held": points[::3], "none": ()}


def test_a_report_has_all_rounds_in_json_and_a_picture_for_each_question(tmp_path: Path) -> None:
    series = Sample({"wall_s": 2.0}, {"MB held": ((0.0, 1.0), (0.5, 3.0))})
    target = Target("wall_s", "a", "at most", 0.5, to="b")
    asked = question(scripted("a", 1.0, 3.0), Contender("b", lambda: series), Missing("c", "gone"), targets=(target,))
    machine = Machine("a cpu", 2, 24.0, "Linux", 0.1)
    report = Report("pg-cdc bench", "now", machine, None, {"python": "3"}, QUICK, {}, (answer_to(asked, 2),))
    write(report, tmp_path)
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / JSON_NAME).read_text())
    assert found == json.loads(json.dumps(as_json(report)))
    (told,) = found["questions"]
    assert told["contenders"]["a"]["rounds"] == [{"wall_s": 1.0}, {"wall_s": 3.0}]
    assert told["contenders"]["a"]["medians"] == {"wall_s": {"median": 2.0, "least": 1.0, "most": 3.0}}
    assert told["contenders"]["b"]["series"][0] == {"MB held": [[0.0, 1.0], [0.5, 3.0]]}
    assert told["missing"] == [{"name": "c", "reason": "gone"}]
    assert told["targets"] == [
        {
            "what": "wall_s of a / b",
            "bound": "at most 0.5",
            "value": {"median": 1.0, "least": 0.5, "most": 1.5},
            "met": False,
        }
    ]


# --- the schedule of docs/scale.md -----------------------------------------------------------------------------------


def test_ranges_of_one_length_fill_the_cores() -> None:
    assert schedule.makespan([1.0] * 8, 4) == 2.0
    assert schedule.makespan([1.0] * 9, 4) == 3.0
    assert schedule.makespan([], 4) == 0.0


def test_a_long_range_at_the_end_leaves_the_others_idle() -> None:
    assert schedule.makespan([1.0] * 6 + [6.0], 2) == 9.0
    assert schedule.makespan([6.0] + [1.0] * 6, 2) == 6.0


def test_ranges_are_even_and_none_is_larger_than_asked() -> None:
    costs = schedule.Costs(row_bytes=100, client_us=1.0, server_us=1.0, task_s=0.0)
    cluster = schedule.Cluster(executors=1, server_cores=100, cores_per_executor=2)
    # 150 MB in three ranges of 50 MB, half a second each, on two cores.
    found = schedule.estimate([150e6], 64e6, costs, cluster)
    assert found.parts["executors"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cluster", "wall"),
    [
        (schedule.Cluster(executors=1, server_cores=1_000, network=1e12, disk=1e12), "executors"),
        (schedule.Cluster(executors=1_000, server_cores=1, network=1e12, disk=1e12), "server"),
        (schedule.Cluster(executors=1_000, server_cores=1_000, network=1e6, disk=1e12), "network"),
        (schedule.Cluster(executors=1_000, server_cores=1_000, network=1e12, disk=1e6), "disk"),
    ],
)
def test_the_longest_part_of_the_way_is_the_wall(cluster: schedule.Cluster, wall: str) -> None:
    costs = schedule.Costs(row_bytes=100, client_us=2.0, server_us=1.0, task_s=0.01)
    assert schedule.estimate([1e12], 64e6, costs, cluster).wall == wall


def test_costs_are_what_more_rows_and_more_partitions_add() -> None:
    def medians(**measures: float) -> dict[str, object]:
        return {"medians": {name: {"median": value} for name, value in measures.items()}}

    results = {
        "table_bytes": {"wide_17": 1700},
        "questions": [
            {
                "name": "growth-rows",
                "contenders": {
                    # A second for each row, and ten for the action.
                    "1x": medians(rows=1, client_cpu_s=11.0, server_cpu_s=1.5),
                    "16x": medians(rows=17, client_cpu_s=27.0, server_cpu_s=9.5),
                },
            },
            {
                "name": "growth-partitions",
                "contenders": {"4": medians(client_cpu_s=12.0), "64": medians(client_cpu_s=18.0)},
            },
        ],
    }
    assert schedule.costs_of(results) == schedule.Costs(100.0, 1e6, 0.5e6, 0.1)


def test_a_process_that_ends_while_cpu_is_counted_is_counted_with_its_parent() -> None:
    me, ending = psutil.Process(), subprocess.Popen([sys.executable, "-c", "sum(range(10**7))"])
    child = psutil.Process(ending.pid)
    before = CpuOf(lambda: {me}).read()
    looks: list[set[psutil.Process]] = []

    def processes() -> set[psutil.Process]:
        # Seen, and gone before its CPU is looked at.
        looks.append({me} if looks else {me, child})
        ending.wait()
        return looks[-1]

    counted = CpuOf(processes).read() - before
    assert len(looks) == 3
    assert counted > 0.05


# A daemon whose worker uses CPU is killed before it, and the worker ends later, as Spark's do.
_ORPHANED = """
import os, signal, sys, time
import psutil
from pg_cdc_source.bench.meter import CpuOf, adopt_orphans
adopt_orphans()
me = psutil.Process()
burn = "sum(range(10**7)); print(flush=True); input()"
worker = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
daemon = psutil.Popen([sys.executable, "-c", worker], stdin=-1, stdout=-1)
daemon.stdout.readline()
before = CpuOf(lambda: {me, *me.children(recursive=True)}).read()
daemon.kill()
daemon.wait()
assert me.children(recursive=True), "the worker is no child"
daemon.stdin.close()
for child in me.children():
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
print(CpuOf(lambda: {me, *me.children(recursive=True)}).read() - before, before)
"""


# A daemon that waits for none of its workers, as Spark's; one has used CPU and ends.
_UNWAITED = """
import signal, sys, time
import psutil
from pg_cdc_source.bench.meter import CpuOf
burn = "sum(range(10**7)); print(flush=True); input()"
start = f"subprocess.Popen([sys.executable, '-c', {burn!r}], stdin=-1); input()"
daemon = f"import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); {start}"
me, daemon = psutil.Process(), psutil.Popen([sys.executable, "-c", daemon], stdin=-1, stdout=-1)
daemon.stdout.readline()
cpu = CpuOf(lambda: {me, *me.children(recursive=True)})
before = cpu.read()
[worker] = daemon.children()
worker.kill()
worker.wait()
assert me.children(recursive=True) == [daemon]
print(cpu.read() - before, before)
daemon.communicate(b"\\n")
"""


@pytest.mark.parametrize("program", [_ORPHANED, _UNWAITED])
def test_a_process_that_its_parent_does_not_count_is_counted(program: str) -> None:
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    grown, before = map(float, found.stdout.split())
    assert before > 0.1
    assert grown >= 0


def test_tables_of_a_grown_database_add_up() -> None:
    found = schedule.sizes(1e12, 1_000)
    assert sum(found) == pytest.approx(1e12)
    assert found[0] == pytest.approx(1_000 * found[-1])
