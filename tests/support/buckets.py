"""Buckets of the servers in `stores`, as the environment names them to this process and to those that it starts."""

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from noloco_jax.storage import addresses, objects
from support.stores import S3, Google, send


@contextlib.contextmanager
def servers() -> Iterator[Callable[[str], S3 | Google]]:
    """Start the server of a scheme when it is first asked for."""
    with contextlib.ExitStack() as stack:
        kinds = {"s3": S3, "gs": Google}
        yield functools.cache(lambda scheme: stack.enter_context(contextlib.closing(kinds[scheme]())))


def new_bucket(server: S3 | Google, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point the environment at a server without faults, and return the address of an empty folder there."""
    forget()
    if isinstance(server, Google):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
        return f"gs://bucket/{uuid.uuid4().hex}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server.requests.clear()
    server.faults.clear()
    server.everywhere = server.lags = False
    bucket = f"bucket-{uuid.uuid4().hex}"
    send("PUT", f"{server.address}/{bucket}")
    return f"s3://{bucket}/runs/one"


def upload(folder: Path, address: str) -> None:
    """Copy a folder to an address, as a tool other than the trainer does."""
    for path in folder.rglob("*"):
        if path.is_file():
            objects.upload_file(path, f"{address}/{path.relative_to(folder).as_posix()}")


def forget() -> None:
    """Forget what this process knows of servers, as a new one would know nothing."""
    caches = addresses._list_files, addresses.remote_facts, addresses._open_file_system, addresses._opened_in_thread
    for known in caches:
        known.cache_clear()
