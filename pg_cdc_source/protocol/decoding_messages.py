"""Logical decoding messages: what ``pg_logical_emit_message()`` wrote, and where in the stream it stands.

- A message stands between the rows of its commit, where it was written. PostgreSQL gives the end of its WAL record,
  where the next one may begin. One byte before lies no other record's beginning, since those are aligned to 8 bytes.
- A message that is not transactional is a commit of its own at that byte. A server that is asked for what comes behind
  it does not send the message again.
- ``pgcdc`` is this package's own prefix: a request to the stream, never a row.
"""

from __future__ import annotations

import json
from types import NoneType
from typing import NamedTuple

from pg_cdc_source.errors import OptionError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.options.value_parsers import OWN_PREFIX
from pg_cdc_source.protocol.pgoutput import Message

# The xid of a message that is not transactional (transam.h: InvalidTransactionId).
NO_XID = 0

# Every table of the stream, in place of names.
EVERY_TABLE = "*"


def lsn_of_its_own(message: Message) -> Lsn:
    """The LSN of a message that is not transactional, as if it were a commit."""
    return Lsn(message.lsn - 1)


def content_as_json(content: bytes) -> str:
    r"""Return a content as a JSON string: its text if it is UTF-8, else ``\x`` and hexadecimal digits."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = f"\\x{content.hex()}"
    return json.dumps(text, ensure_ascii=False)


class Asked(NamedTuple):
    """Tables that are to be read again: names in one form, or ``EVERY_TABLE``. ``slot``: whose stream; None: all."""

    tables: tuple[str, ...]
    slot: str | None = None


def write_request(asked: Asked) -> str:
    """Return the content of a message that asks for this, in ASCII: it is stored in the database's encoding."""
    request: dict[str, object] = {"snapshot": list(asked.tables)}
    return json.dumps(request if asked.slot is None else request | {"slot": asked.slot})


def read_request(content: bytes) -> Asked:
    """Return what a message with the prefix ``pgcdc`` asks for.

    Raises ValueError that says what is wrong, without the content.
    """
    try:
        request = json.loads(content.decode())
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON in UTF-8") from None
    if not isinstance(request, dict) or not {"snapshot"} <= request.keys() <= {"snapshot", "slot"}:
        raise ValueError('it is not an object with "snapshot", and maybe "slot"')
    names, slot = request["snapshot"], request.get("slot")
    if not isinstance(slot, (str, NoneType)):
        raise ValueError('"slot" is not a name')
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError('"snapshot" is not a list of names')
    if names == [EVERY_TABLE]:
        return Asked((EVERY_TABLE,), slot)
    return Asked(tuple(dict.fromkeys(map(_table, names))), slot)


def _table(text: str) -> str:
    try:
        name = QualifiedName.parse(text)
    except OptionError as error:
        raise ValueError(f'"snapshot" has a name that is none: {error.what}') from None
    if len(name.parts) != 2:
        raise ValueError(f'"snapshot" has {text!r}, which is not of the form schema.table')
    return str(name)


__all__ = [
    "EVERY_TABLE",
    "NO_XID",
    "OWN_PREFIX",
    "Asked",
    "content_as_json",
    "lsn_of_its_own",
    "read_request",
    "write_request",
]
