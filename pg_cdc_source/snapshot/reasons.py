"""How the keeper's error reaches the readers: as the literal in a mark's query, which they read in pg_stat_activity.

A reason is the error's code, a space, and what happened with its remedy, compressed and in base 85: that alphabet has
neither quotes nor backslashes, so nothing has to be unquoted. The code comes first because PostgreSQL cuts queries at
``track_activity_query_size`` bytes (1,024 unless set, 100 at least) and shows nothing with ``track_activities`` off:
readers raise an error of the keeper's class with as much of its text as there is.
"""

from __future__ import annotations

import base64
import re
import zlib

from pg_cdc_source.errors import DefiniteError, PgCdcError, error_of

# One statement, so that whoever sees the name and the lock, which says whom the mark is for, sees the reason as well.
REASON_QUERY = "SELECT %s AS reason, set_config('application_name', %s, false), pg_advisory_lock_shared(%s, %s)"

_QUERY = re.compile(r"SELECT '([A-Z_]+) ([^']*)('?)")
_SEPARATOR = "\0"
_UNKNOWN = "the snapshot of this action could not be made or has ended"
_SEE_LOG = "the driver's standard error says why"


def to_reason(error: PgCdcError) -> str:
    """The literal that stands for an error."""
    text = f"{error.what}{_SEPARATOR}{error.remedy}"
    return f"{error.code} {base64.b85encode(zlib.compress(text.encode(), 9)).decode()}"


def error_in(query: str) -> PgCdcError:
    """The error in a mark's query, as far as PostgreSQL shows that."""
    found = _QUERY.match(query)
    if found is None:
        return DefiniteError(_UNKNOWN, remedy=_SEE_LOG)
    code, reason, end = found.groups()
    # Five characters stand for four bytes; of those that were cut off, a few make no byte.
    what, separator, remedy = _decompressed(reason if end else reason[: len(reason) // 5 * 5]).partition(_SEPARATOR)
    if end and separator:
        return error_of(code, what, remedy)
    # A remedy that was cut might say the opposite.
    return error_of(code, what if separator else f"{what} …" if what else _UNKNOWN, _SEE_LOG)


def _decompressed(reason: str) -> str:
    """The text, or its beginning where the reason was cut."""
    try:
        return zlib.decompressobj().decompress(base64.b85decode(reason)).decode(errors="ignore")
    except (ValueError, zlib.error):
        return ""
