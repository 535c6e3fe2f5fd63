"""What is shipped with a job is found from the directory that Spark tells a source process."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from pg_cdc_source.spark.shipped_modules import find_shipped_modules


def test_modules_and_archives_beside_the_source_processs_own_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shipped_alone.py").write_text("VALUE = 1\n")
    with zipfile.ZipFile(tmp_path / "several.zip", "w") as archive:
        archive.writestr("shipped_in_archive.py", "VALUE = 2\n")
    (tmp_path / "data.csv").write_text("1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "streaming_job")])
    for _ in range(2):
        find_shipped_modules()
    assert sys.path[-2:] == [str(tmp_path), str(tmp_path / "several.zip")]
    assert importlib.import_module("shipped_alone").VALUE == 1
    assert importlib.import_module("shipped_in_archive").VALUE == 2


def test_without_such_a_directory_nothing_changes() -> None:
    before = list(sys.path)
    find_shipped_modules()
    assert sys.path == before
