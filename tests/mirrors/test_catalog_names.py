"""Names of the lake's tables as SQL has them."""

from __future__ import annotations

import pytest

from pg_cdc_source.errors import OptionError
from pg_cdc_source.lake.targets import Targets
from pg_cdc_source.mirrors.catalog_names import ledger_in_sql, namespace_of, table_in_sql


@pytest.mark.parametrize(
    ("template", "table", "name"),
    [
        ("lake.shop.{table}", "public.orders", "`lake`.`shop`.`orders`"),
        ("lake.{schema}.{table}", "sales.orders", "`lake`.`sales`.`orders`"),
        ("lake.shop.{schema}_{table}", "sales.orders", "`lake`.`shop`.`sales_orders`"),
        ("lake.shop.{table}", 'public."a.b"', "`lake`.`shop`.`a.b`"),
        ("lake.`a.b`.{table}", "public.orders", "`lake`.`a.b`.`orders`"),
        ("lake.shop.{table}", 'public."a`b"', "`lake`.`shop`.`a``b`"),
        ("/lake/{table}", "public.orders", "delta.`/lake/orders`"),
        ("s3a://bucket/{schema}/{table}", "public.orders", "delta.`s3a://bucket/public/orders`"),
    ],
)
def test_a_table_has_a_name_in_sql(template: str, table: str, name: str) -> None:
    assert table_in_sql(Targets(template, "ledger"), table, "delta") == name


@pytest.mark.parametrize(
    ("template", "ledger", "name"),
    [
        ("lake.shop.{table}", None, "`lake`.`shop`.`_pgcdc`"),
        ("lake.{schema}.{table}", "lake.meta.ledger", "`lake`.`meta`.`ledger`"),
        ("lake.my-db.{schema}_{table}", "lake.my-led._pgcdc", "`lake`.`my-led`.`_pgcdc`"),
        ("lake.`my-db`.{table}", None, "`lake`.`my-db`.`_pgcdc`"),
        # As mirror_at() has it, which knows nothing but the ledger.
        ("lake.{table}", "lake.`a.b`.`c``d`", "`lake`.`a.b`.`c``d`"),
        ("/lake/{table}", None, "delta.`/lake/_pgcdc`"),
        ("lake.{schema}.{table}", "/meta/ledger", "delta.`/meta/ledger`"),
    ],
)
def test_so_has_the_ledger(template: str, ledger: str | None, name: str) -> None:
    assert ledger_in_sql(Targets.of(template, ledger), "delta") == name


@pytest.mark.parametrize("name", ["lake..orders", "lake.`orders", "lake.a`b`", "lake.", "``"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="is not the name of a table"):
        ledger_in_sql(Targets(name, name), "delta")


@pytest.mark.parametrize(
    ("name", "namespace"),
    [("`lake`.`shop`.`a.b`", "`lake`.`shop`"), ("a.b", "a"), ("orders", None), ("delta.`/a.b/c`", "delta")],
)
def test_a_namespace_is_all_but_the_last_part(name: str, namespace: str | None) -> None:
    assert namespace_of(name) == namespace
