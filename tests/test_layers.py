"""Imports point one way: to a module's own layer and lower ones, and to the outside packages that its layer allows."""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path

import pytest

PACKAGE = "pg_cdc_source"
# The source tree, not the installed package: what is read here is what is about to be committed.
ROOT = Path(__file__).parents[1]
SOURCES = {path.stem: path for path in sorted((ROOT / PACKAGE).glob("*.py"))}

# Lowest first. Each line: the modules, and what they may import besides this package and the standard library.
LAYERS: list[tuple[set[str], set[str]]] = [
    ({"errors", "names", "conninfo", "options", "offsets"}, set()),
    (
        {
            "native",
            "binary",
            "numeric",
            "arrays",
            "text",
            "extensions",
            "types",
            "copy",
            "ctid",
            "pgoutput",
            "changes",
            "envelope",
        },
        {"numpy", "pyarrow"},
    ),
    (
        {
            *("processes", "worker", "connection", "catalog", "snapshot", "board", "keeper", "scan", "reuse", "reader"),
            *("publication", "slot", "libpq", "spill", "replication", "rewind", "stream_plan", "capture"),
        },
        {"numpy", "pyarrow", "psycopg2"},
    ),
    (
        {
            *("__init__", "batch", "stream", "frames"),
            *("cli", "preflight", "demo", "demo_stream", "shop", "embedded", "local_spark"),
        },
        {"numpy", "pyarrow", "psycopg2", "pyspark", "deltalake", "rich", "typer"},
    ),
]
LAYER_OF = {module: index for index, (modules, _) in enumerate(LAYERS) for module in modules}

# Bytes and facts in, Arrow and plans out.
NETWORK = {"asyncio", "http", "select", "selectors", "socket", "ssl", "subprocess"}
WITHOUT_NETWORK = LAYERS[0][0] | LAYERS[1][0]


def imported_names(path: Path) -> set[str]:
    """Return the dotted names a file imports, wherever in it: ``from a import b`` gives ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = f"{PACKAGE}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            names.update((start, *(f"{start}.{alias.name}" for alias in node.names)))
    return names


def imported_modules(path: Path) -> set[str]:
    """Return the modules of this package that a file imports; the package's own names count as ``__init__``."""
    modules = set()
    for name in imported_names(path):
        parts = name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1:
            modules.add(parts[1] if parts[1] in SOURCES else "__init__")
    return modules


def imported_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(path)} - {PACKAGE}


def test_every_module_has_a_layer() -> None:
    assert set(SOURCES) - set(LAYER_OF) == set()


def test_every_module_in_the_table_exists() -> None:
    assert set(LAYER_OF) - set(SOURCES) == set()


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_to_the_same_or_a_lower_layer(module: str) -> None:
    upward = {other for other in imported_modules(SOURCES[module]) if LAYER_OF[other] > LAYER_OF[module]}
    assert upward == set()


@pytest.mark.parametrize("module", SOURCES)
def test_outside_packages_are_those_of_the_layer(module: str) -> None:
    allowed = LAYERS[LAYER_OF[module]][1] | set(sys.stdlib_module_names)
    assert imported_packages(SOURCES[module]) - allowed == set()


@pytest.mark.parametrize("module", sorted(WITHOUT_NETWORK & set(SOURCES)))
def test_pure_modules_open_no_socket_and_start_no_process(module: str) -> None:
    assert imported_packages(SOURCES[module]) & NETWORK == set()


def test_imports_have_no_cycle() -> None:
    graph = {module: imported_modules(path) - {module} for module, path in SOURCES.items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("shim", ["pyspark_pgcdc", "pyspark_pgsnapshot"])
def test_the_lookup_shim_imports_only_this_package(shim: str) -> None:
    names = imported_packages(ROOT / shim / "__init__.py")
    assert names <= set(sys.stdlib_module_names)
