"""The keeper's process: ``python -m pg_cdc_source.snapshot.keeper``, started by ``launch`` with settings on stdin."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.logs import FORMAT
from pg_cdc_source.snapshot.keeper.handshake import READY, TAKEN, Settings, answer_of
from pg_cdc_source.snapshot.keeper.server import Keeper


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    settings = Settings.from_json(sys.stdin.read())
    with contextlib.suppress(OSError):
        os.chdir(settings.directory)
    # The process that planning started leaves at once and is waited for; nobody would wait for the keeper.
    if os.fork():
        os._exit(0)
    keeper = Keeper(settings)
    signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
    try:
        ready = keeper.open(first=True)
        answer = READY if ready else TAKEN
    except PgCdcError as error:
        ready = False
        answer = answer_of(error)
    print(answer, flush=True)
    os.close(sys.stdout.fileno())
    if ready:
        keeper.run()
    # Threads may still wait for a server that does not answer; sessions end with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
