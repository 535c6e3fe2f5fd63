"""Imports point one way along one line of folders, and each folder imports only the outside packages it is given."""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path

import pytest

PACKAGE = "pg_cdc_source"
# The source tree, not the installed package: what is read here is what is about to be committed.
ROOT = Path(__file__).parents[1]


def module_of(path: Path) -> str:
    """Return the dotted name below the package; the package itself is ``__init__``."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}

# Lowest first: a folder's modules, or a module of the top level, import their own place and those before it. Beside
# each place: what it imports besides this package and the standard library.
PLACES: dict[str, set[str]] = {
    "_version": set(),
    "logs": set(),
    "errors": set(),
    "offsets": set(),
    "options": {"psycopg2"},  # libpq reads its own connection strings
    "values": {"numpy", "pyarrow"},
    "protocol": {"numpy", "pyarrow"},
    "postgres": {"numpy", "psycopg2"},
    "snapshot": {"pyarrow", "psycopg2"},
    "stream": {"numpy", "pyarrow", "psycopg2"},
    "lake": {"numpy", "pyarrow"},
    "spark": {"numpy", "pyarrow", "psycopg2", "pyspark"},
    "mirrors": {"deltalake", "py4j", "pyarrow", "pyspark"},
    "__init__": set(),
    "cli": {"psycopg2", "pyarrow", "pyspark", "rich", "typer"},
    "demo": {"deltalake", "psycopg2", "pyspark", "rich"},
    "bench": {
        *("adbc_driver_postgresql", "connectorx", "deltalake", "duckdb"),
        *("duckdb_extension_postgres_scanner", "matplotlib"),
        *("numpy", "psutil", "psycopg2", "pyarrow", "pydbzengine", "pyiceberg", "pyspark", "rich"),
    },
}
ORDER = list(PLACES)
# The rooms of the largest folder, in the same way. Modules beside them may import all of them.
ROOMS_OF_STREAM = ("received", "tables", "layouts", "first_rows")
# Their users start them; a command that is not installed with them says so.
IMPORTED_BY_THE_COMMAND_ALONE = {"demo", "bench"}

# Bytes and facts in, Arrow and plans out.
NETWORK = {"asyncio", "http", "select", "selectors", "socket", "ssl", "subprocess", "threading"}
PURE = ("errors", "offsets", "options", "values", "protocol")


def place_of(module: str) -> str:
    return module.split(".")[0]


def imported_names(path: Path) -> set[str]:
    """Return the dotted names a file imports, wherever in it: ``from a import b`` gives ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names.update((node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)))
    return names


def imported_modules(path: Path) -> set[str]:
    """Return the modules of this package that a file imports; the package's own names count as ``__init__``."""
    modules = set()
    for name in imported_names(path):
        if name.startswith(f"{PACKAGE}."):
            inner = name.removeprefix(f"{PACKAGE}.")
            if inner in SOURCES:
                modules.add(inner)
            elif "." not in inner:
                modules.add("__init__")
    return modules


def imported_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(path)} - {PACKAGE}


def test_every_module_has_a_place() -> None:
    assert {place_of(module) for module in SOURCES} - set(ORDER) == set()


def test_every_place_exists() -> None:
    assert set(ORDER) - {place_of(module) for module in SOURCES} == set()


@pytest.mark.parametrize("module", [module for module in SOURCES if module != "__init__"])
def test_imports_point_to_the_same_place_or_one_before_it(module: str) -> None:
    place = ORDER.index(place_of(module))
    later = {other for other in imported_modules(SOURCES[module]) if ORDER.index(place_of(other)) > place}
    if place_of(module) == "cli":
        later = {other for other in later if place_of(other) not in IMPORTED_BY_THE_COMMAND_ALONE}
    assert later == set()


@pytest.mark.parametrize("module", [module for module in SOURCES if module.startswith("stream.")])
def test_a_room_of_the_stream_imports_those_before_it(module: str) -> None:
    def room_of(name: str) -> int:
        room = name.split(".")[1]
        return ROOMS_OF_STREAM.index(room) if room in ROOMS_OF_STREAM else len(ROOMS_OF_STREAM)

    assert module.count(".") == 1 or room_of(module) < len(ROOMS_OF_STREAM), "a room without a place"
    others = {other for other in imported_modules(SOURCES[module]) if other.startswith("stream.")}
    assert {other for other in others if room_of(other) > room_of(module)} == set()


@pytest.mark.parametrize("module", SOURCES)
def test_outside_packages_are_those_of_the_place(module: str) -> None:
    allowed = PLACES[place_of(module)] | set(sys.stdlib_module_names)
    assert imported_packages(SOURCES[module]) - allowed == set()


@pytest.mark.parametrize("module", [module for module in SOURCES if place_of(module) in PURE])
def test_pure_modules_open_no_socket_and_start_no_process_or_thread(module: str) -> None:
    assert imported_packages(SOURCES[module]) & NETWORK == set()


def test_imports_have_no_cycle() -> None:
    graph = {module: imported_modules(path) - {module, "__init__"} for module, path in SOURCES.items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("shim", ["pyspark_pgcdc", "pyspark_pgsnapshot"])
def test_the_lookup_shim_imports_only_this_package(shim: str) -> None:
    names = imported_packages(ROOT / shim / "__init__.py")
    assert names <= set(sys.stdlib_module_names)
