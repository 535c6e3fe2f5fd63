"""Find out whether sessions are still there."""

from __future__ import annotations

from multiprocessing.connection import wait

import psycopg2
from psycopg2.extensions import connection as Session


def is_lost(session: Session) -> bool:
    """Whether the server has ended an idle session; it says so, or hangs up, without being asked."""
    if session.closed:
        return True
    if not wait([session], 0):
        return False
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT")
    except psycopg2.Error:
        return True
    return False
