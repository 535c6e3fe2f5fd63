"""TPC-H's eight tables, filled by ``tpchgen-cli``: rows that others have made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pg_cdc_source.bench.lab import Lab
from pg_cdc_source.bench.question import Missing

# Scale 1 for a full run, in which the wide table has as many rows.
_ROWS_AT_SCALE_1 = 4_000_000


@dataclass(frozen=True, slots=True)
class Table:
    """``key`` is what JDBC partitions by; tables that are ``large`` have a target of their own."""

    columns: str
    key: str | None = None
    large: bool = False


# Columns and keys as in section 1.4 of the specification.
TABLES: Mapping[str, Table] = {
    "region": Table("r_regionkey int PRIMARY KEY, r_name char(25) NOT NULL, r_comment varchar(152)"),
    "nation": Table(
        "n_nationkey int PRIMARY KEY, n_name char(25) NOT NULL, n_regionkey int NOT NULL, n_comment varchar(152)"
    ),
    "supplier": Table(
        "s_suppkey int PRIMARY KEY, s_name char(25) NOT NULL, s_address varchar(40) NOT NULL, s_nationkey int NOT NULL,"
        " s_phone char(15) NOT NULL, s_acctbal numeric(15,2) NOT NULL, s_comment varchar(101) NOT NULL",
        "s_suppkey",
    ),
    "customer": Table(
        "c_custkey int PRIMARY KEY, c_name varchar(25) NOT NULL, c_address varchar(40) NOT NULL,"
        " c_nationkey int NOT NULL, c_phone char(15) NOT NULL, c_acctbal numeric(15,2) NOT NULL,"
        " c_mktsegment char(10) NOT NULL, c_comment varchar(117) NOT NULL",
        "c_custkey",
        large=True,
    ),
    "part": Table(
        "p_partkey int PRIMARY KEY, p_name varchar(55) NOT NULL, p_mfgr char(25) NOT NULL, p_brand char(10) NOT NULL,"
        " p_type varchar(25) NOT NULL, p_size int NOT NULL, p_container char(10) NOT NULL,"
        " p_retailprice numeric(15,2) NOT NULL, p_comment varchar(23) NOT NULL",
        "p_partkey",
        large=True,
    ),
    "partsupp": Table(
        "ps_partkey int, ps_suppkey int, ps_availqty int NOT NULL, ps_supplycost numeric(15,2) NOT NULL,"
        " ps_comment varchar(199) NOT NULL, PRIMARY KEY (ps_partkey, ps_suppkey)",
        "ps_partkey",
        large=True,
    ),
    "orders": Table(
        "o_orderkey int PRIMARY KEY, o_custkey int NOT NULL, o_orderstatus char(1) NOT NULL,"
        " o_totalprice numeric(15,2) NOT NULL, o_orderdate date NOT NULL, o_orderpriority char(15) NOT NULL,"
        " o_clerk char(15) NOT NULL, o_shippriority int NOT NULL, o_comment varchar(79) NOT NULL",
        "o_orderkey",
        large=True,
    ),
    "lineitem": Table(
        "l_orderkey int, l_partkey int NOT NULL, l_suppkey int NOT NULL, l_linenumber int,"
        " l_quantity numeric(15,2) NOT NULL, l_extendedprice numeric(15,2) NOT NULL, l_discount numeric(15,2) NOT NULL,"
        " l_tax numeric(15,2) NOT NULL, l_returnflag char(1) NOT NULL, l_linestatus char(1) NOT NULL,"
        " l_shipdate date NOT NULL, l_commitdate date NOT NULL, l_receiptdate date NOT NULL,"
        " l_shipinstruct char(25) NOT NULL, l_shipmode char(10) NOT NULL, l_comment varchar(44) NOT NULL,"
        " PRIMARY KEY (l_orderkey, l_linenumber)",
        "l_orderkey",
        large=True,
    ),
}


def missing_tables(shown: str) -> Missing | None:
    return None if _generator() else Missing(shown, "its tables are not installed: pip install tpchgen-cli")


def make_tables(lab: Lab) -> int:
    """Fill the tables, if they are not there, and return how many rows they have together."""
    if not lab.value("SELECT to_regclass('lineitem') IS NOT NULL"):
        files = lab.scratch()
        # Below 0.01 partsupp has a key twice.
        scale = f"{max(0.01, lab.scale.rows / _ROWS_AT_SCALE_1):g}"
        subprocess.run([str(_generator()), "csv", "-q", "-s", scale, "--output-dir", files], check=True)
        for name, table in TABLES.items():
            lab.execute(f"CREATE TABLE {name} ({table.columns})")
            with lab.admin.cursor() as cursor, (files / f"{name}.csv").open() as rows:
                cursor.copy_expert(f"COPY {name} FROM STDIN (FORMAT csv, HEADER)", rows)
            # Sets the hint bits, which the first reader would otherwise write.
            lab.execute(f"VACUUM (FREEZE, ANALYZE) {name}")
        shutil.rmtree(files)
    counts = " + ".join(f"(SELECT count(*) FROM {name})" for name in TABLES)
    return int(lab.value(f"SELECT {counts}"))


def _generator() -> str | None:
    return shutil.which("tpchgen-cli", path=Path(sys.executable).parent) or shutil.which("tpchgen-cli")
