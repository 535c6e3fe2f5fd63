"""Bytes of COPY and pgoutput in, rows, changes and positions out: no socket, no thread, no clock."""
