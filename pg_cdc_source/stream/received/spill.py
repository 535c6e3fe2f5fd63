"""Files for what is too much for memory. They have no name, so nothing stays behind, however the process ends."""

from __future__ import annotations

import contextlib
import os
import tempfile

from pg_cdc_source.errors import DefiniteError

FILE_BYTES = 64 << 20


class Spill:
    """Byte strings in one file, each known by its place. ``users`` counts those still needed; the owner counts.

    The file is closed with the last who has this, if nobody does so before.
    """

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="pg_cdc_source-spill-")  # noqa: SIM115 - closed with its owner
        except OSError as error:
            raise _no_room(error) from error
        self._end = 0
        self.users = 0

    @property
    def is_large(self) -> bool:
        """Whether the next byte string should go to another file: a file can only be given up as a whole."""
        return self._end >= FILE_BYTES

    def append(self, data: bytes) -> tuple[int, int]:
        """Add a byte string, and return its place. Raises DefiniteError where there is no room."""
        place = self._end, len(data)
        try:
            self._file.seek(self._end)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from error
        self._end += len(data)
        return place

    def read(self, place: tuple[int, int]) -> bytes:
        at, length = place
        return os.pread(self._file.fileno(), length, at)

    def __del__(self) -> None:
        # Where it could not be opened, there is none.
        if hasattr(self, "_file"):
            self.close()

    def close(self) -> None:
        # What could not be written is tried once more, and nobody wants it.
        with contextlib.suppress(OSError):
            self._file.close()


def _no_room(error: OSError) -> DefiniteError:
    directory = tempfile.tempdir or "one of the directories for temporary files"
    return DefiniteError(
        f"changes that wait for Spark cannot be written into a file in {directory} on the driver: {error.strerror}",
        remedy="make room there, or set TMPDIR to a directory that has some, and start the query again",
    )
