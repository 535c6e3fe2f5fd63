"""What tells keepers apart: the driver, database and role they serve, and each process from its successor.

A keeper's name is its token, 10 characters for the driver JVM, database and role, and 6 random ones for this very
process. So tasks never take a snapshot from a successor that does not know what its predecessor gave out.

The server is not part of it. Keepers are looked for on the server itself, and one server has many addresses: two scans
of an action that name it ``localhost`` and ``127.0.0.1`` are to have one snapshot.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import socket

from pg_cdc_source.snapshot.driver import Process

_TOKEN_CHARACTERS = 10  # 50 bits
_PROCESS_CHARACTERS = 6
ANY_TOKEN = f"[a-z2-7]{{{_TOKEN_CHARACTERS}}}"  # a regular expression of PostgreSQL's


def token_of(driver: Process, database: str, role: str) -> str:
    """Tell the driver, and the database and role of a session, from every other on the same server."""
    identity = [socket.gethostname(), driver.pid, driver.started, database, role]
    return _base32(hashlib.sha256(json.dumps(identity).encode()).digest(), _TOKEN_CHARACTERS)


def new_name(token: str) -> str:
    """A name for a keeper process that begins now."""
    return token + _base32(secrets.token_bytes(4), _PROCESS_CHARACTERS)


def name_pattern(token: str) -> str:
    """The regular expression of PostgreSQL's for the names that ``new_name`` gives."""
    return f"{token}[a-z2-7]{{{_PROCESS_CHARACTERS}}}"


def lock_key(token: str) -> int:
    """The key of the advisory lock that the one keeper of this token holds."""
    return int.from_bytes(hashlib.sha256(f"pgsnapshot:{token}".encode()).digest()[:8], "big", signed=True)


def _base32(octets: bytes, characters: int) -> str:
    """Five bits a character: application_name has 63 bytes, and a snapshot's id needs some 20 of them."""
    return base64.b32encode(octets).decode().lower()[:characters]
