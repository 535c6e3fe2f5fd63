"""What is shipped with a job is found from the directory that Spark tells a source process."""

from __future__ import annotations

import importlib
import os
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


def test_what_is_shipped_later_is_found_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "growing.zip"

    def ship(name: str) -> None:
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
        with zipfile.ZipFile(archive, "a") as file:
            file.writestr(f"{name}_in_archive.py", "VALUE = 2\n")
        # As if within one tick of the file system's clock, by which an importer tells that there is something new.
        os.utime(tmp_path, (0, 0))

    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "streaming_job")])
    for name in ("shipped_first", "shipped_later"):
        ship(name)
        find_shipped_modules()
        assert importlib.import_module(name).VALUE == 1
        assert importlib.import_module(f"{name}_in_archive").VALUE == 2


def test_without_such_a_directory_nothing_changes() -> None:
    before = list(sys.path)
    find_shipped_modules()
    assert sys.path == before
