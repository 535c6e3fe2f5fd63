"""Whether the publication still sends what the stream reads.

Newer servers pass over a publication that is gone, and a table that has left it only stops to send. So each offset
carries the publication's mark, and while a stream runs the publication is looked at every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pg_cdc_source.errors import SchemaChangedError, TransientError
from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.stream_options import StreamOptions
from pg_cdc_source.postgres import publication
from pg_cdc_source.postgres.publication import Publication
from pg_cdc_source.stream.source_session import SourceSession

WATCH_SECONDS = 2.0


class PublicationWatch:
    """Compares the publication as it was planned with what offsets say of it, and with what it is now.

    ``mark`` is what offsets carry. ``names`` are those of the stream's tables by oid, wherever they are asked for.
    """

    def __init__(self, options: StreamOptions, source: SourceSession) -> None:
        self.mark = ""
        self._options = options
        self._source = source
        self._looked_at = 0.0

    def begin(self, published: Publication, names: Mapping[int, str]) -> None:
        """Take the publication as the stream was planned with it."""
        self.mark = publication.mark_of(published, names)

    def require_unchanged(self, mark: str, names: Mapping[int, str]) -> None:
        """Raise SchemaChangedError where changes after an offset with ``mark`` may be missing."""
        if mark and (changed := publication.find_change(mark, self.mark, names)):
            raise self._unpublished(changed)

    def look_sometimes(self, names: Mapping[int, str]) -> None:
        """Look at the publication, unless that was done within the last seconds."""
        if time.monotonic() >= self._looked_at + WATCH_SECONDS:
            self.look(names)

    def look(self, names: Mapping[int, str]) -> None:
        """Raise SchemaChangedError where the publication does not send any longer what is read."""
        self._looked_at = time.monotonic()
        try:
            lost = publication.find_lost(self._source.open(), self._options.publications, self.mark, names)
        except TransientError:
            # The next look is soon enough.
            self._source.close()
            return
        if lost:
            raise self._unpublished(lost)

    def _unpublished(self, why: str) -> SchemaChangedError:
        return SchemaChangedError(
            f"publication {quoted(self._options.publication)} {why}, so changes may be missing",
            remedy="start over with a new checkpoint location and a new slot",
        )
