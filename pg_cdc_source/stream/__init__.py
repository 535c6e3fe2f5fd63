"""Follow a slot: the initial snapshot, the thread that reads ahead, batches, rewind, and the tables' history.

Spark asks ``capture`` three things: where the newest batch ends, which rows it has, and to commit it. ::

    capture ──► next_offset    where a batch ends    ──► joins, membership (tables that come and go)
            ──► batch_reading  which rows it has     ──► first_rows, planned_reader
            ──► commit         what the slot confirms

- ``received``: what the slot has sent and Spark has not committed, and the thread that receives it. Nothing in there
  knows a table.
- ``tables``: which tables the stream reads, by the catalog as it is now, and whether the server is still that one.
- ``layouts``: how rows are understood that were written with other columns than a table has now.
- ``first_rows``: the rows of whole tables as of a consistent point, turned back where they are of a later one.
- Here: what puts these together. ``beginning`` finds the slot and the first offset, ``stream_parts`` has everything
  that a stream keeps in its process, and ``adoption`` takes a checkpoint to an upgraded server.

A room imports only those before it in this list.
"""
