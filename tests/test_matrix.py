"""The matrix of docs/versions.md is of features that tests show, and what is run of it reaches every version."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import matrix
import pytest

MARKED = {
    node.args[0].value
    for path in Path(matrix.__file__).parent.rglob("test_*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.matrix"
    if isinstance(node.args[0], ast.Constant)
}


def test_every_feature_has_a_test_and_every_marked_test_a_feature() -> None:
    assert set(matrix.FEATURES) == MARKED


def test_every_run_has_every_feature_and_nothing_failed() -> None:
    for run in json.loads(matrix.RESULTS.read_text())["runs"]:
        assert tuple(run["features"]) == matrix.FEATURES, (run["postgresql"], run["spark"])
        assert run["failed"] == {}


def test_the_newest_runs_with_all_and_the_oldest_together() -> None:
    found = matrix.combinations(["18", "9", "13"], ["4.10.0", "4.0.4", "4.3.0"])
    assert found == [
        *(("9", "4.10.0"), ("13", "4.10.0"), ("18", "4.10.0")),
        *(("18", "4.3.0"), ("18", "4.0.4"), ("9", "4.0.4")),
    ]
    assert matrix.combinations(["18"], ["4.3.0"]) == [("18", "4.3.0")]


def test_a_run_takes_the_place_of_the_last_one_of_its_versions() -> None:
    whole = {"features": dict.fromkeys(matrix.FEATURES, "yes"), "failed": {}}
    runs: list[dict[str, Any]] = [
        {"postgresql": "13.22", "spark": "4.3.0", "n": 1, **whole},
        {"postgresql": "18.4", "spark": "4.3.0", "n": 2, **whole},
    ]
    found = matrix.merged(runs, {"postgresql": "13.23", "spark": "4.3.0", "n": 3, **whole})
    assert [run["n"] for run in found] == [3, 2]
    other = {"postgresql": "18.4", "spark": "4.0.4", "n": 3, **whole}
    assert [run["n"] for run in matrix.merged(runs, other)] == [3, 1, 2]


def test_a_run_of_some_features_leaves_the_others_as_they_were() -> None:
    first, second, *others = matrix.FEATURES
    versions = {"postgresql": "13.22", "spark": "4.3.0"}
    before = {**versions, "n": 1, "features": {second: "fails", others[0]: "yes"}, "failed": {second: ["test_x"]}}
    found = {**versions, "postgresql": "13.23", "n": 2, "features": {first: "refused", second: "yes"}, "failed": {}}
    (run,) = map(matrix.complete, matrix.merged([before], found))
    assert (run["n"], run["postgresql"], run["failed"]) == (1, "13.22", {})
    assert list(run["features"].items()) == [
        (first, "refused"), (second, "yes"), (others[0], "yes"), *((name, "not run") for name in others[1:])
    ]  # fmt: skip


class Report:
    """What pytest says of one step of a test."""

    def __init__(self, feature: str, shows: str, outcome: str = "passed", when: str = "call") -> None:
        self.user_properties = [("matrix", (feature, shows))]
        self.nodeid = "integration/test_x.py::test_y"
        self.passed, self.when = outcome == "passed", when


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([("yes",), ("yes",)], "yes"),
        ([("yes",), ("refused",)], "refused"),
        ([("yes",), ("yes", "failed")], "fails"),
        ([("yes", "skipped", "setup"), ("yes",)], "fails"),
        ([("yes",), ("yes", "failed", "teardown")], "fails"),
        ([("yes", "passed", "setup")], "fails"),
        ([], "fails"),
    ],
)
def test_a_feature_holds_where_all_of_its_tests_pass(reports: list[tuple[str, ...]], expected: str) -> None:
    recorder = matrix.Recorder({})
    for report in reports:
        recorder.pytest_runtest_logreport(Report(matrix.FEATURES[0], *report))
    assert recorder.result(matrix.FEATURES[0]) == expected


def test_a_marker_says_what_passing_shows_before_a_version() -> None:
    recorder = matrix.Recorder({"PostgreSQL": "16.14", "Spark": "4.1.4"})
    assert recorder._shows() == "yes"
    assert recorder._shows(since="PostgreSQL 16") == "yes"
    assert recorder._shows(since="PostgreSQL 17") == "refused"
    assert recorder._shows(since="Spark 4.2", before="in one batch") == "in one batch"
