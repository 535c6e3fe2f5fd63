"""What a session's catalogs say of a table."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pg_cdc_source.mirrors.catalog_names import namespace_of
from pg_cdc_source.mirrors.sessions import is_connect


def catalog_of(spark: SparkSession, name: str) -> tuple[str, str]:
    """The catalog of a table's name, or of a template of names, and the name in it.

    No catalog is asked, since a session begins one with the settings that it has then.
    """
    first, _, rest = name.partition(".")
    catalog = first.strip("`")
    if rest and spark.conf.get(f"spark.sql.catalog.{catalog}", None) is not None:
        return catalog, rest
    return str(spark.conf.get("spark.sql.defaultCatalog")), name


def create_namespace(spark: SparkSession, name: str, provider: str) -> None:
    """Create the namespace of a table's name in SQL where it is missing; a path has none but the ``provider``."""
    namespace = namespace_of(name)
    if namespace is not None and namespace != provider:
        spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")


def refresh(spark: SparkSession, name: str, provider: str) -> None:
    """Have the session see what others have written."""
    # Iceberg's catalogs keep tables for a while. Delta looks by itself.
    if provider == "iceberg":
        spark.catalog.refreshTable(name)


def read_properties(spark: SparkSession, name: str) -> Mapping[str, str] | None:
    """The properties of a table, as :func:`veiled` was given them; None where there is no table."""
    # PySpark prints each statement that finds no table in a catalog. Asked for a path, tableExists() fails; with Spark
    # Connect it has said no of tables that were there.
    if "/" not in name and not is_connect(spark) and not spark.catalog.tableExists(name):
        return None
    try:
        return {row["key"]: _unveiled(row["value"]) for row in spark.sql(f"SHOW TBLPROPERTIES {name}").collect()}
    except AnalysisException as error:
        if error.getCondition() not in _MISSING:
            raise
        return None


def veiled(text: str) -> str:
    """Return a property's value such that Spark shows it.

    In place of values that have ``url``, ``token``, ``secret`` and the like in them, which may be names of the user's
    tables and columns, ``SHOW TBLPROPERTIES`` has asterisks.
    """
    return _VEIL + text.encode().hex()


def _unveiled(value: str) -> str:
    return bytes.fromhex(value.removeprefix(_VEIL)).decode() if value.startswith(_VEIL) else value


_VEIL = "hex:"
_MISSING = frozenset((
    *("TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND", "PATH_NOT_FOUND"),
    *("DELTA_TABLE_NOT_FOUND", "DELTA_MISSING_DELTA_TABLE", "DELTA_PATH_DOES_NOT_EXIST"),
))  # fmt: skip
