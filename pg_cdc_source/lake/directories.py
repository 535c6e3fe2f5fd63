"""Directories of files in a lake: the file system of each one, as Arrow reaches it, and its path there."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow.fs as pafs

from pg_cdc_source.errors import OptionError

# What Arrow and Spark know, by Spark's names; delta-rs all but viewfs.
_SCHEMES = ("file", "s3", "s3a", "gs", "abfs", "abfss", "hdfs", "viewfs")
_URI = re.compile("([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
# container@account.dfs.core.windows.net/path; also of other clouds and of OneLake.
_OF_AZURE = re.compile(r"([^@/]+)@([^./]+)\.(?:dfs|blob)\.([^/]+)(?:/(.*))?", re.DOTALL)
_PUBLIC_AZURE = "core.windows.net"
# Of Azurite, Azure's emulator: it is the same everywhere.
_EMULATED = "devstoreaccount1"
_EMULATED_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def require_known(directory: str) -> None:
    """Raise OptionError for a URI that not all can reach who write to a lake."""
    uri = _URI.fullmatch(directory)
    if uri is None:
        return
    scheme, rest = uri.groups()
    is_elsewhere = scheme == "file" and rest.startswith("//") and not rest.startswith("///")
    is_of_azure = scheme not in ("abfs", "abfss") or _OF_AZURE.fullmatch(rest.removeprefix("//")) is not None
    if scheme not in _SCHEMES or is_elsewhere or not is_of_azure:
        raise OptionError(
            f"{directory} is no place that Arrow, delta-rs and Spark all reach",
            remedy="write s3a://bucket/…, gs://bucket/…, abfss://container@account.dfs.core.windows.net/…, hdfs://…, "
            "file:///… or a path",
        )


def find_directory(directory: str) -> tuple[pafs.FileSystem, str]:
    """Return a directory's file system, and its path there. Raises OptionError."""
    require_known(directory)
    # Hadoop's names are not Arrow's, and are not encoded.
    place = re.sub("^s3a://", "s3://", re.sub("^file:/+", "/", directory))
    scheme, separator, path = place.partition("://")
    if not separator:
        return pafs.LocalFileSystem(), place
    if scheme.startswith("abfs"):
        return _of_azure(path)
    filesystem, root = pafs.FileSystem.from_uri(f"{scheme}://{quote(path, safe='/:@')}")
    return filesystem, root


def _of_azure(path: str) -> tuple[pafs.FileSystem, str]:
    """A directory of Azure's, with the credentials that delta-rs takes from the environment; else those of its SDK.

    Arrow itself would take the container of any other cloud for a host.
    """
    found = _OF_AZURE.fullmatch(path)
    assert found is not None
    container, account, domain, rest = found.groups()
    options: dict[str, Any] = {}
    if domain != _PUBLIC_AZURE:
        options = {f"{kind}_storage_authority": f".{kind}.{domain}" for kind in ("blob", "dfs")}
    if os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("true", "1"):
        url = urlsplit(os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10000"))
        account, options = _EMULATED, {"account_key": _EMULATED_KEY}
        for kind in ("blob", "dfs"):
            options |= {f"{kind}_storage_authority": url.netloc, f"{kind}_storage_scheme": url.scheme}
    elif key := os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
        options["account_key"] = key
    elif token := os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        options["sas_token"] = token
    try:
        return pafs.AzureFileSystem(account, **options), f"{container}/{rest or ''}"
    except TypeError as error:
        # Releases before 20 know the key alone.
        raise OptionError(
            f"this PyArrow cannot reach {container} at {account}.{domain}: {error}", remedy="install a newer PyArrow"
        ) from None


def open_directory(directory: str) -> tuple[pafs.FileSystem, str]:
    """Create a directory of a file system, or take one of an object store; its file system, and its path there."""
    filesystem, root = find_directory(directory)
    if _has_directories(filesystem):
        filesystem.create_dir(root, recursive=True)
    return filesystem, root


def remove_directory(directory: str) -> None:
    """Remove a directory with all that is in it, if it is there."""
    filesystem, root = open_directory(directory)
    if _has_directories(filesystem):
        filesystem.delete_dir(root)
    else:
        filesystem.delete_dir_contents(root, missing_dir_ok=True)


def _has_directories(filesystem: pafs.FileSystem) -> bool:
    """Whether directories have to be created. An object store has objects with names that say so, also for parents
    where this process has no rights.
    """
    return filesystem.type_name in ("local", "hdfs")
