"""What holds on which versions: run the tests marked ``matrix``, and write what came out to ``matrix.json``.

    python integration/matrix.py .venv-4.0.4/bin/python .venv-4.3.0/bin/python [--postgresql 13 18] [--feature …]

Each interpreter has a Spark of its own. The newest of these runs on every PostgreSQL, the newest PostgreSQL with every
Spark, and the oldest two together. What the file has of other combinations stays; with ``--feature`` (may be repeated)
so does what it has of other features. A feature that a combination in the file did not have yet is "not run" there. The
tables of docs/versions.md are made of it: ``python tests/helpers/readme_tables.py``.

A feature holds where all of its tests pass. Before the version that a marker says (``since``), passing means that the
test has seen what the marker says instead (``before``): a clear refusal, or another way. A test that was skipped has
shown nothing, and counts as one that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("matrix.json")
POSTGRESQL = ("13", "14", "15", "16", "17", "18")

HOLDS = "yes"
NOT_RUN = "not run"

# In the order of the table.
FEATURES = (
    "one snapshot for all scans of an action",
    "ctid ranges in parallel",
    "several actions under one snapshot, and a slot at its end",
    "partitioned tables",
    "views, foreign tables, queries",
    "every type, alike in snapshot and stream",
    "generated and identity columns",
    "settings of role and database, encodings",
    "TLS, certificates, SCRAM, password and service files",
    "passwordCommand, passwordProvider",
    "snapshot of a standby",
    "stream from the snapshot on",
    "several tables in one stream, project()",
    "old values",
    "Trigger.AvailableNow",
    "transactions larger than a batch",
    "kill -9 of the driver, replay",
    "rewind of an unfinished snapshot",
    "lost sessions and restarts of the server",
    "loss is an error",
    "changed columns, TOAST, collapse()",
    "onSchemaChange=emit",
    "changeFormat=changelog",
    "tables that join, leave and come back",
    "rows again on demand, messages",
    "a lost slot made anew",
    "TRUNCATE",
    "row filters, column lists, publications of schemas",
    "stream from a standby",
    "failover slots",
    "local-cluster",
    "standalone cluster",
    "Spark Connect",
    "time zones, ANSI, Arrow's settings",
)


class Recorder:
    """A pytest plugin that keeps the features of each test and what became of it."""

    def __init__(self, versions: Mapping[str, str], features: Sequence[str] = FEATURES) -> None:
        self._versions = versions
        self._features = features
        self._shown: dict[str, set[str]] = {name: set() for name in FEATURES}
        self.failed: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            for marker in item.iter_markers("matrix"):
                if marker.args[0] in self._features:
                    item.user_properties.append(("matrix", (marker.args[0], self._shows(**marker.kwargs))))
        items[:] = [item for item in items if item.user_properties]

    def _shows(self, since: str | None = None, before: str = "refused") -> str:
        """What a test shows by passing."""
        if since is None:
            return HOLDS
        product, version = since.split(" ")
        return HOLDS if in_order(self._versions[product]) >= in_order(version) else before

    def pytest_runtest_logreport(self, report: Any) -> None:
        for feature, shows in (value for name, value in report.user_properties if name == "matrix"):
            if not report.passed:
                self.failed.setdefault(feature, []).append(report.nodeid.rpartition("/")[-1])
            elif report.when == "call":
                self._shown[feature].add(shows)

    def result(self, feature: str) -> str:
        shown = self._shown[feature]
        return "fails" if feature in self.failed or not shown else ", ".join(sorted(shown - {HOLDS})) or HOLDS


def run_here(out: Path, features: Sequence[str]) -> None:
    """Run the tests of these features with this interpreter, on the server that the environment names."""
    import psycopg2
    import pyspark
    import pytest

    # As pytest has it for the tests.
    sys.path.insert(0, str(Path(__file__).with_name("helpers")))
    from servers import postgres_server

    started = time.monotonic()
    with postgres_server() as url:
        session = psycopg2.connect(url)
        server = session.info.parameter_status("server_version").split(" ")[0]
        session.close()
        os.environ["PG_CDC_TEST_URL"] = url
        recorder = Recorder({"PostgreSQL": server, "Spark": pyspark.__version__}, features)
        arguments = ("-m", "matrix and not debian", "-p", "no:cacheprovider", str(Path(__file__).parent))
        pytest.main([*arguments], plugins=[recorder])
    found = {
        "postgresql": server,
        "spark": pyspark.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "features": {name: recorder.result(name) for name in features},
        "failed": recorder.failed,
    }
    out.write_text(json.dumps(found))


def spark_of(python: str) -> str:
    command = [python, "-c", "import pyspark; print(pyspark.__version__)"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def in_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def combinations(servers: Sequence[str], sparks: Sequence[str]) -> list[tuple[str, str]]:
    """The corners and edges of the matrix: the newest of one kind with all of the other, and the oldest of both."""
    servers, sparks = sorted(servers, key=in_order), sorted(sparks, key=in_order)
    edges = [(server, sparks[-1]) for server in servers] + [(servers[-1], spark) for spark in reversed(sparks)]
    return list(dict.fromkeys([*edges, (servers[0], sparks[0])]))


def merged(runs: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Put a run in the place of the last one of the same versions: the majors of PostgreSQL, all of Spark's.

    One of some features replaces these, and leaves the rest as it was, its versions and its time as well.
    """

    def key(run: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return in_order(run["spark"]), in_order(run["postgresql"])[:1]

    before = next((run for run in runs if key(run) == key(found)), found)
    if set(found["features"]) < set(FEATURES):
        failed = {name: tests for name, tests in before["failed"].items() if name not in found["features"]}
        of_all = {**before["features"], **found["features"]}
        found = {**before, "features": of_all, "failed": {**failed, **found["failed"]}}
    return sorted([*(run for run in runs if key(run) != key(found)), found], key=key)


def complete(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The run with every feature, in the order of the table."""
    return {**run, "features": {name: run["features"].get(name, NOT_RUN) for name in FEATURES}}


def main(pythons: Sequence[str], servers: Sequence[str], features: Sequence[str]) -> int:
    by_spark = {spark_of(python): python for python in pythons}
    failed = False
    for server, spark in combinations(servers, list(by_spark)):
        print(f"PostgreSQL {server}, Spark {spark}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "run.json")
            environment = {**os.environ, "PG_CDC_TEST_VERSION": server}
            subprocess.run([by_spark[spark], __file__, "--here", str(out), *features], env=environment, check=True)
            found = json.loads(out.read_text())
        runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
        renewed = [complete(run) for run in merged(runs, found)]
        RESULTS.write_text(json.dumps({"runs": renewed}, indent=2, ensure_ascii=False) + "\n")
        failed |= bool(found["failed"])
        print(f"{found['minutes']:g} min; failed: {found['failed'] or 'nothing'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        run_here(Path(sys.argv[2]), sys.argv[3:])
    else:
        parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
        parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter that has a Spark")
        parser.add_argument("--postgresql", nargs="+", choices=POSTGRESQL, default=POSTGRESQL, metavar="MAJOR")
        parser.add_argument("--feature", action="append", choices=FEATURES, metavar="FEATURE", help="run only this one")
        given = parser.parse_args()
        sys.exit(main(given.pythons, given.postgresql, given.feature or FEATURES))
