"""Places in a lake, as Arrow reaches them."""

from __future__ import annotations

import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.directories import find_directory, open_directory, require_known

AZURE = ("AZURE_STORAGE_USE_EMULATOR", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN")


def test_places_in_object_stores_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing answers there: no object is made that would stand for a directory.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("orders", "two w\u00f6rds", "a%20b", "dt=2026-11-30"):
        for scheme in ("s3", "s3a"):
            filesystem, root = open_directory(f"{scheme}://lake/shop/{name}")
            assert (filesystem.type_name, root) == ("s3", f"lake/shop/{name}")


@pytest.mark.parametrize(
    ("place", "root", "key"),
    [
        ("abfss://lake@shop.dfs.core.windows.net/two words/t", "lake/two words/t", "c2VjcmV0"),
        ("abfs://lake@shop.dfs.core.windows.net", "lake/", ""),
        # Arrow takes these for the container t of a host, without a word.
        ("abfss://lake@shop.dfs.core.usgovcloudapi.net/t", "lake/t", "c2VjcmV0"),
        ("abfss://work@onelake.dfs.fabric.microsoft.com/shop.Lakehouse/t", "work/shop.Lakehouse/t", ""),
    ],
)
def test_containers_of_azure_are_those_that_delta_rs_and_spark_mean(
    place: str, root: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in AZURE:
        monkeypatch.delenv(name, raising=False)
    if key:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    # Nothing is asked before a file is opened.
    filesystem, found = find_directory(place)
    assert (filesystem.type_name, found) == ("abfs", root)


@pytest.mark.parametrize(
    "place",
    [
        *("wasbs://lake@shop.blob.core.windows.net/t", "az://lake/t", "abfss://lake/t", "gcs://lake/t", "S3A://lake/t"),
        *("oss://lake/t", "file://host/t", "dbfs:/t"),
    ],
)
def test_places_that_not_all_reach_are_refused(place: str) -> None:
    with pytest.raises(OptionError, match="is no place that Arrow, delta-rs and Spark all reach") as refused:
        find_directory(place)
    assert "abfss://container@account" in refused.value.remedy


@pytest.mark.parametrize(
    "place", ["/lake/t", "/lake/a:b", "file:/lake/t", "file:///lake/t", "hdfs://name/t", "gs://b/t"]
)
def test_places_that_all_reach_are_taken(place: str) -> None:
    require_known(place)
