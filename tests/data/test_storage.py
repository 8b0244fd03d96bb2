"""Data on servers yield the same tokens as on a disk, also through transient failures."""

import functools
import io
import json
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from noloco_jax import storage
from noloco_jax.config import DataConfig
from noloco_jax.data import load_tokenizer
from noloco_jax.errors import TransientError, UserError
from support.data_makers import check_data, open_streams, write_counting, write_json_lines, write_rows
from support.stores import STORES

pytestmark = pytest.mark.usefixtures("waits")
BATCHES = 40
_RESOLVED = "{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture(scope="module")
def servers():
    """Return a function that starts the server of a scheme at most once."""
    with ExitStack() as stack:
        yield functools.cache(lambda scheme: stack.enter_context(closing(STORES[scheme]())))


@pytest.fixture
def start(servers, monkeypatch, clear_caches):
    """Return a function that starts a server, points the environment to it and clears its faults and requests."""

    def start(scheme):
        pytest.importorskip({"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp"}.get(scheme, "fsspec"))
        server = servers(scheme)
        if scheme == "s3":
            monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)  # its own come before ours
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        if scheme == "gs":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
        if scheme == "hf":
            from huggingface_hub import constants

            monkeypatch.setenv("HF_ENDPOINT", server.address)  # for subprocesses
            monkeypatch.setattr(constants, "ENDPOINT", server.address)
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.address}/{_RESOLVED}")
            clear_caches()
            server.contents.requests.clear()
            server.contents.faults.clear()
        if scheme != "gs":
            server.requests.clear()
            server.faults.clear()
        return server

    return start


@pytest.fixture
def clear_caches():
    """Return a function that clears the caches about servers, as in a new process."""

    def forget():
        for known in (
            storage._list_files,
            storage.remote_facts,
            storage._file_system,
        ):
            known.cache_clear()

    forget()
    yield forget
    forget()


def moved_to(config: DataConfig, root: Path, address: str) -> DataConfig:
    """Return the configuration with its paths moved from `root` to `address`."""
    moved = {name: getattr(config, name).replace(str(root), address) for name in ("path", "validation_path")}
    return replace(config, **moved)


def single_files(config: DataConfig) -> DataConfig:
    """Return the configuration with the first file of each folder, for servers without listings."""
    first = {name: min(map(str, Path(getattr(config, name)).iterdir())) for name in ("path", "validation_path")}
    return replace(config, **first)


def first_ids(config: DataConfig, num_replicas: int = 2, count: int = BATCHES) -> list[list[int]]:
    """Return the input ids of each replica's first batches."""
    streams = open_streams(config, num_replicas)
    try:
        return [np.ravel([next(stream)["input_ids"] for _ in range(count)]).tolist() for stream in streams]
    finally:
        for stream in streams:
            stream.close()


def write_data(kind: str, root: Path, scheme: str = "s3") -> DataConfig:
    config, _ = write_counting(kind, root / "data", 60, files=5)
    return single_files(config) if scheme == "http" else config


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [("s3", "parquet"), ("s3", "text"), ("hf", "parquet"), ("gs", "jsonl"), ("http", "jsonl")],
)
def test_a_server_yields_the_same_tokens_as_the_disk(tmp_path, start, scheme, kind):
    config = write_data(kind, tmp_path, scheme)
    remote = moved_to(config, tmp_path, start(scheme).upload(tmp_path))
    assert first_ids(remote) == first_ids(config)


@pytest.mark.parametrize(("kind", "is_remote_first"), [("jsonl", True), ("parquet", False)])
def test_a_resume_continues_where_the_data_have_moved(tmp_path, start, kind, is_remote_first):
    """The data move from a server to a disk, or from a disk to a server."""
    local = write_data(kind, tmp_path)
    remote = moved_to(local, tmp_path, start("s3").upload(tmp_path))
    first, then = (remote, local) if is_remote_first else (local, remote)
    expected = first_ids(local, 1)[0]
    (stream,) = open_streams(first, 1)
    with closing(stream):
        seen = np.ravel([next(stream)["input_ids"] for _ in range(BATCHES // 3)]).tolist()
        state = json.loads(json.dumps(stream.get_state()))
    (stream,) = open_streams(then, 1)
    with closing(stream):
        stream.set_state(state)
        seen += np.ravel([next(stream)["input_ids"] for _ in range(BATCHES - BATCHES // 3)]).tolist()
    assert seen == expected


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [
        *(("s3", fault) for fault in (503, "cut", "stall")),
        *(("hf", 503), ("http", 503), ("http", "cut")),
    ],
)
def test_transient_request_failures_are_retried(tmp_path, start, waits, monkeypatch, scheme, fault):
    if fault == "stall":  # with the others, an answer may take as long as a busy machine needs
        monkeypatch.setattr(storage, "ANSWER_SECONDS", 1.0)
    config = write_data("jsonl", tmp_path, scheme)
    server = start(scheme)
    remote = moved_to(config, tmp_path, server.upload(tmp_path))
    faulty = server.contents if scheme == "hf" else server
    faulty.faults.extend([None, fault, None, fault])
    assert first_ids(remote, 1) == first_ids(config, 1)
    assert not faulty.faults
    assert fault == "stall" or set(waits) <= {storage.SERVER_DELAYS[0]}  # some libraries repeat by themselves


def test_a_read_that_ends_early_is_repeated(monkeypatch, waits):
    """A server may announce fewer bytes than were asked for, which ends no answer by force."""
    content, of_first_read = b"0123456789", [4]

    class Opened(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(of_first_read.pop() if of_first_read else size)

    system = SimpleNamespace(info=lambda path: {"size": len(content)}, open=lambda *_, **__: Opened(content))
    monkeypatch.setattr(storage, "_file_system", lambda scheme: system)
    assert storage.RemoteFile("s3://bucket/ends-early").read() == content
    assert waits == [storage.SERVER_DELAYS[0]]


@pytest.mark.parametrize(("scheme", "fault"), [("s3", "cut"), ("http", 503)])
def test_request_failures_that_outlast_the_retries_end_with_status_1(tmp_path, start, waits, scheme, fault):
    config = write_data("jsonl", tmp_path, scheme)
    server = start(scheme)
    remote = moved_to(config, tmp_path, server.upload(tmp_path))
    check_data(remote)
    server.faults.extend([fault] * 100)
    with pytest.raises(TransientError, match=r"31\.5 seconds of retries: the same command continues") as caught:
        first_ids(remote, 1)
    assert caught.value.exit_status == 1
    assert remote.path in str(caught.value) and "\n" not in str(caught.value)


def test_a_retried_request_does_not_read_earlier_blocks_again(tmp_path, start, waits, monkeypatch):
    monkeypatch.setattr(storage, "REQUEST_BYTES", 256)
    monkeypatch.setattr(storage, "_BUFFER", 256)
    write_json_lines(tmp_path / "a.jsonl", [f"{first} 7" for first in range(0, 7000, 7)])
    server = start("s3")
    config = DataConfig(kind="jsonl", path=f"{server.upload(tmp_path)}/a.jsonl", shuffle_buffer=1, sequence_length=7)
    (stream,) = open_streams(config, 1)
    with closing(stream):
        server.requests.clear()
        server.faults.extend([None] * 6 + [503, "cut"])
        for _ in range(100):
            next(stream)
    starts = [start for start, _ in server.ranges()]
    assert starts == sorted(starts) and len(starts) > 8
    assert len(starts) - len(set(starts)) <= 3


def test_only_the_needed_row_groups_of_a_parquet_file_are_read(tmp_path, start, monkeypatch):
    monkeypatch.setattr("noloco_jax.data.parquet._REMOTE_BUFFER_BYTES", 1 << 12)
    rows = [np.random.default_rng(k).integers(0, 1 << 20, 512).tolist() for k in range(64)]
    write_rows(tmp_path / "a.parquet", {"input_ids": rows, "labels": rows}, row_group_size=2)
    server = start("s3")
    path = f"{server.upload(tmp_path)}/a.parquet"
    config = DataConfig(kind="parquet", path=path, validation_path="", sequence_length=512, batch_size=1)
    (_, stream) = open_streams(replace(config, shuffle_buffer=1), 2)
    server.requests.clear()
    with closing(stream):
        ids = next(stream)["input_ids"]
    assert ids[0].tolist() in rows[30:34]  # the second replica begins in the middle, where one row is held out
    size = (tmp_path / "a.parquet").stat().st_size
    assert sum(stop - start for start, stop in server.ranges()) < size / 2


def resume_after(config: DataConfig, clear_caches, change) -> None:
    """Read a batch, call `change`, and resume from its state as a new process would."""
    (stream,) = open_streams(config, 1)
    with closing(stream):
        next(stream)
        state = stream.get_state()
    change()
    clear_caches()
    (stream,) = open_streams(config, 1)
    with closing(stream):
        stream.set_state(state)


@pytest.mark.parametrize("scheme", ["s3", "hf", "http"])
def test_other_contents_of_the_same_size_are_refused_at_a_resume(tmp_path, start, clear_caches, scheme):
    file = tmp_path / "data" / "a.jsonl"
    write_json_lines(file, [f"{first} 7" for first in range(1000, 2000, 7)])
    server = start(scheme)
    address = server.upload(tmp_path)
    remote = DataConfig(kind="jsonl", path=f"{address}/data/a.jsonl", sequence_length=7)

    def change():
        content = file.read_bytes().replace(b"1994 7", b"1994 6")
        if scheme == "s3":
            server.put_file(remote.path, content)
        file.write_bytes(content)
        start(scheme)  # clears the listing cache of the hub's client

    with pytest.raises(UserError, match=r"of data with file versions .* restore the former data") as caught:
        resume_after(remote, clear_caches, change)
    assert caught.value.exit_status == 2


def test_a_listed_file_that_was_deleted_ends_with_status_2(tmp_path, start, clear_caches):
    config = write_data("jsonl", tmp_path)
    server = start("s3")
    remote = moved_to(config, tmp_path, server.upload(tmp_path))
    storage.list_files(remote.path, recursive=True)
    gone = f"{remote.path}/part 1.jsonl.gz"
    server.delete(gone)
    with pytest.raises(UserError, match=f"^{gone}: there is no such file") as caught:
        first_ids(remote)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("scheme", "path", "told"),
    [
        ("s3", "s3://nowhere-at-all/in", "no such file, folder or bucket"),
        ("s3", "s3://nowhere-at-all", "no such file, folder or bucket"),
        ("s3", "{}/nothing", "no such file, folder or bucket"),
        ("gs", "gs://nowhere-at-all/in", "no such file, folder or bucket"),
        ("gs", "gs://bucket/nothing", "no such file, folder or bucket"),
        ("hf", "hf://datasets/owner/other", "no such file, folder or bucket, or it needs a login: set HF_TOKEN"),
        ("hf", "{}/nothing", "no such file, folder or bucket, or it needs a login: set HF_TOKEN"),
        ("hf", "hf://nonsense", "cannot be read"),
        ("http", "{}/nothing", "no such file"),
    ],
)
def test_a_missing_path_on_a_server_ends_with_status_2_and_one_line(tmp_path, start, waits, scheme, path, told):
    write_data("jsonl", tmp_path)
    path = path.format(start(scheme).upload(tmp_path))
    with pytest.raises(UserError, match=told) as caught:
        check_data(DataConfig(kind="jsonl", path=path))
    assert caught.value.exit_status == 2
    assert path in str(caught.value) and "\n" not in str(caught.value)
    assert not waits


def test_wrong_credentials_end_with_status_2_and_name_the_settings(tmp_path, start, waits, monkeypatch):
    from moto import settings

    config = write_data("jsonl", tmp_path)
    remote = moved_to(config, tmp_path, start("s3").upload(tmp_path))
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)  # from here on the server checks credentials
    with pytest.raises(UserError, match=r"refused.*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/\.aws") as caught:
        check_data(remote)
    assert caught.value.exit_status == 2
    assert not waits


def test_a_server_without_range_requests_is_refused(tmp_path, start, monkeypatch):
    config = write_data("jsonl", tmp_path, "http")
    server = start("http")
    remote = moved_to(config, tmp_path, server.upload(tmp_path))
    monkeypatch.setattr(server, "sends_parts", False)
    monkeypatch.setattr(storage, "REQUEST_BYTES", 64)
    monkeypatch.setattr(storage, "_BUFFER", 64)
    with pytest.raises(UserError, match="check the address, or download the file"):
        first_ids(remote, 1)


def test_a_tokenizer_is_loaded_from_a_server(tmp_path, start):
    tokenizers = pytest.importorskip("tokenizers")
    made_here = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    made_here.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    address = start("s3").upload(tmp_path)
    loaded = load_tokenizer(address)
    assert loaded.encode("abba").tolist() == [2, 1, 0]
    assert loaded.fingerprint == load_tokenizer(str(tmp_path)).fingerprint
