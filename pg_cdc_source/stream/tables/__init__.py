"""Which tables a stream reads, by the catalog as it is now.

``source_session`` asks the server, ``stream_plan`` is what comes of it, with a scan of each table from ``table_scans``.
``members`` are what offsets keep of the tables. ``publication_watch`` finds, at the pace of ``look_pace``, what has
changed: tables that came (``published_tables``), that go (``leaving``), or that cannot be read (``refused_tables``).
``slot_history`` tells whether slot and server are still those of the checkpoint.
"""
