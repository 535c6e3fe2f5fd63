"""An object store that speaks S3, on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow.fs as pafs
from watch import wait_until

BUCKET = "lake"


@contextlib.contextmanager
def object_store(directory: Path) -> Iterator[Mapping[str, str]]:
    """Run one with an empty bucket ``lake``; yields what its clients have to have in their environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        # delta-rs wants to be told.
        "AWS_ALLOW_HTTP": "true",
    }
    with (directory / "object_store.log").open("wb") as log:
        program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(program, stdout=log, stderr=log, env={**os.environ, **environment})
    try:
        wait_until(lambda: process.poll() is not None or _answers(port))
        assert process.poll() is None, (directory / "object_store.log").read_text()
        store = pafs.S3FileSystem(
            access_key="anybody",
            secret_key="anything",
            region="us-east-1",
            endpoint_override=f"127.0.0.1:{port}",
            scheme="http",
            allow_bucket_creation=True,
        )
        store.create_dir(BUCKET)
        yield environment
    finally:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
