"""What a slot has sent and Spark has not committed.

``slot_reader`` has the thread and the lock. It fills ``buffer``, which assembles and decodes, keeps ``chunks`` (beyond
some size in files, ``spill``), and cuts ``batches`` from them. ``server_watch`` notices a server that shuts down
meanwhile.
"""
