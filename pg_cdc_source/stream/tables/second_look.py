"""Look at the catalog again where DDL may have come between the queries of one look.

A look is several queries, and each of them sees the catalog of its own moment. A table that is dropped or renamed in
between makes one of them fail, in any way: what it has just listed is not there, "could not open relation with OID …",
a column does not exist. One transaction for all of them would not help, since PostgreSQL's functions look at the
present catalog.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from pg_cdc_source.errors import DefiniteError, SchemaChangedError

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOKS = 3


def settled(look: Callable[[], T]) -> T:
    """The result of ``look``, which is run again where it is refused, until that is for the same reason as before."""
    refused = ""
    for _ in range(LOOKS - 1):
        try:
            return look()
        except SchemaChangedError:
            raise  # what was seen is understood
        except DefiniteError as error:
            if str(error) == refused:
                raise
            refused = str(error)
            log.debug("%s; looking again", error.what)
    return look()
