"""Sessions, and what is asked of the server: catalog, slots, snapshots, publications, replication.

- Sessions: ``connection`` opens them (``passwords``, ``services``, ``backoff``), ``kept_session`` keeps one,
  ``answers`` bounds how long it is waited for. ``libpq`` has what psycopg2 lacks, ``search_path`` says whose names a
  statement means; ``connect_errors``, ``server_errors`` and ``translated_messages`` turn what libpq and the server say
  into this package's errors. ``instances`` tells servers apart.
- The catalog: ``catalog``, ``first_look``, ``columns``, ``trees``, ``table_layouts``, ``attached``, ``lasting_keys``;
  ``horizon`` says which transactions such a look has seen, ``xids`` how long ago they were.
- ``publication``: what is published, by a map of its own.
- Slots: ``slots``, ``slot_creation``, ``slot_checks``, ``slot_metrics``.
- Rows and changes: ``snapshots`` and ``exported_snapshots``, ``locks`` and ``lock_waits``, ``copy_out``,
  ``replication``, ``decoding_messages``.
"""
