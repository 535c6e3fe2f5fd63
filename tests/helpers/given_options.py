"""Options as tests give them: what is read of them, or the error's text."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.given import parse_connection_options
from pg_cdc_source.options.snapshot_options import SnapshotOptions, parse_snapshot_options
from pg_cdc_source.options.stream_options import StreamOptions, parse_stream_options

TABLE = {"dbtable": "public.orders"}


STREAM = {**TABLE, "slot": "orders_1"}


def parse(**options: str) -> SnapshotOptions:
    return parse_snapshot_options({**TABLE, **options})


def parse_query(**options: str) -> SnapshotOptions:
    return parse_snapshot_options({"query": "SELECT 1", **options})


def parse_stream(**options: str) -> StreamOptions:
    return parse_stream_options({**STREAM, **options})


def keywords(**options: str) -> dict[str, str]:
    """What libpq is handed in the end."""
    connection = parse_connection_options(options)
    text = make_dsn(connection.conninfo, **dict(connection.keywords))
    return dict(parse_dsn(text)) if text else {}


def refused(options: Mapping[str, str]) -> str:
    with pytest.raises(OptionError) as error:
        parse_snapshot_options(options)
    return str(error.value)


def refused_stream(options: Mapping[str, str]) -> str:
    with pytest.raises(OptionError) as error:
        parse_stream_options(options)
    return str(error.value)
