"""The keeper's process: ``python -m pg_cdc_source.snapshot.keeper``, started by ``launch`` with settings on stdin."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time

from pg_cdc_source.errors import PgCdcError
from pg_cdc_source.logs import FORMAT
from pg_cdc_source.snapshot.driver import Process
from pg_cdc_source.snapshot.keeper.handshake import READY, TAKEN, Settings, answer_of
from pg_cdc_source.snapshot.keeper.server import Keeper

_DRIVER_LOOK_SECONDS = 5.0


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    # What a provider of passwords prints is no answer; nor may it go into a session, which would get the number of a
    # descriptor that is closed.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
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
    with answers:
        print(answer, file=answers)
    if ready:
        threading.Thread(target=_end_with, args=(settings.driver,), name="driver's end", daemon=True).start()
        keeper.run()
    # Threads may still wait for a server that does not answer; sessions end with the process.
    os._exit(0)


def _end_with(driver: Process) -> None:
    """End the process some seconds behind the driver, also where a server that hangs keeps the keeper busy."""
    while driver.runs():
        time.sleep(_DRIVER_LOOK_SECONDS)
    time.sleep(_DRIVER_LOOK_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
