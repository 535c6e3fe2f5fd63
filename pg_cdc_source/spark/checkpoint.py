"""The checkpoint of a query that does not run: the offset that its next batch begins at, to be read and replaced.

Spark writes a file for each batch: into ``offsets`` when it is planned, into ``commits`` when it is done. The first has
a line for its version, one for the query's settings, and one for each source, in JSON (OffsetSeqLog).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.lake.directories import find_directory
from pg_cdc_source.offsets import StreamOffset

_VERSION = "v1"
_LINES_BEFORE_SOURCES = 2


class Checkpoint:
    """``offset`` is the end of the last batch that is done, for the stream that reads ``slot``.

    ``unfinished`` is the end of a batch behind it that was planned only, None where there is none. Raises DefiniteError
    where no batch is done, and for what Spark of today does not write.
    """

    def __init__(self, directory: str, slot: str) -> None:
        self._directory, self._slot = directory, slot
        with self._named("read", "see what the error says"):
            self._filesystem, self._root = find_directory(directory)
            planned, done = self._numbers("offsets"), self._numbers("commits")
            if not planned or not done or max(done) not in planned:
                raise DefiniteError(
                    f"{directory} is no checkpoint of a query that has done a batch",
                    remedy="name the directory that the query has for its checkpoint",
                )
            self.batch = max(done)
            self._lines, self._line, self.offset = self._read(self.batch)
            self.unfinished = self._read(max(planned))[2] if max(planned) > self.batch else None

    def require_done(self) -> None:
        """Raise DefiniteError where a batch was planned and is not done."""
        if self.unfinished is not None:
            raise DefiniteError(
                f"batch {self.batch + 1} of the checkpoint was planned, and is not done",
                remedy="let the query go on with the old server until it has read everything, and stop it then "
                "(once=True); with asynchronous progress tracking, run it once without",
            )

    def replace(self, offset: StreamOffset) -> None:
        """Have the next batch begin at ``offset``. One that is ``unfinished`` is forgotten. Raises DefiniteError."""
        with self._named("changed", "mend what the error says, and run the command again: the slot is there now"):
            self._replace(offset)

    def _replace(self, offset: StreamOffset) -> None:
        lines = list(self._lines)
        lines[self._line] = json.dumps(offset.to_json())
        if self.unfinished is not None:
            self._remove(str(self.batch + 1))
            self._remove(f".{self.batch + 1}.crc")
        # Hadoop's checksum of the file as it was; without one, the file is read as it is.
        self._remove(f".{self.batch}.crc")
        path = f"{self._root}/offsets/{self.batch}"
        if self._filesystem.type_name not in ("local", "hdfs"):
            # An object is there as a whole, or as it was.
            self._write(path, lines)
            return
        self._write(f"{path}.new", lines)
        if self._filesystem.type_name == "hdfs":
            # It renames to nothing that is there.
            self._remove(str(self.batch))
        self._filesystem.move(f"{path}.new", path)

    @contextlib.contextmanager
    def _named(self, done: str, remedy: str) -> Iterator[None]:
        """Raise DefiniteError for an error of the storage."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise DefiniteError(
                f"the checkpoint {self._directory} could not be {done}: {error}", remedy=remedy
            ) from None

    def _remove(self, name: str) -> None:
        path = f"{self._root}/offsets/{name}"
        if self._filesystem.get_file_info(path).type != pafs.FileType.NotFound:
            self._filesystem.delete_file(path)

    def _write(self, path: str, lines: list[str]) -> None:
        with self._filesystem.open_output_stream(path) as stream:
            stream.write("\n".join(lines).encode())

    def _read(self, batch: int) -> tuple[list[str], int, StreamOffset]:
        """The lines of a batch's offsets, which of them is the stream's, and its offset."""
        with self._filesystem.open_input_file(f"{self._root}/offsets/{batch}") as stream:
            lines = str(stream.read().decode()).split("\n")
        if lines[0] != _VERSION:
            raise DefiniteError(
                f"the checkpoint's offsets have version {lines[0]!r}, this release knows {_VERSION}",
                remedy="see whether a newer release of this package reads it",
            )
        found = {i: given for i, line in enumerate(lines) if (given := _of_a_stream(i, line)) is not None}
        mine = [i for i, given in found.items() if given["slot"] == self._slot]
        if len(mine) != 1:
            slots = ", ".join(sorted({str(given["slot"]) for given in found.values()}))
            raise DefiniteError(
                f"the checkpoint has {len(mine)} streams of slot {self._slot}; its streams read {slots or 'no slot'}",
                remedy="name the slot of the query",
            )
        offset = StreamOffset.from_json(found[mine[0]])
        assert offset is not None, "the first offset has no slot"
        return lines, mine[0], offset

    def _numbers(self, log: str) -> list[int]:
        selector = pafs.FileSelector(f"{self._root}/{log}", allow_not_found=True)
        return [int(file.base_name) for file in self._filesystem.get_file_info(selector) if file.base_name.isdecimal()]


def _of_a_stream(i: int, line: str) -> Mapping[str, Any] | None:
    """The offset in a line, None where it is none of a stream of this package."""
    if i < _LINES_BEFORE_SOURCES or not line.startswith("{"):
        return None
    found: dict[str, Any] = json.loads(line)
    return found if {"system", "slot", "lsn"} <= found.keys() else None
