"""Addresses in flags, and local copies of bucket folders for libraries that read the file system."""

from pathlib import Path

import pytest

from noloco_jax.errors import UserError
from noloco_jax.storage import objects
from noloco_jax.storage.local_copies import Address, mark_as_copy, named, new_folder, readable_folder, workdir_of_flag
from support import buckets


@pytest.fixture(params=["s3", "gs"])
def address(request, servers, monkeypatch):
    yield Address(buckets.new_bucket(servers(request.param), monkeypatch))
    buckets.forget()


@pytest.mark.parametrize("text", ["s3://bucket/run", "s3://bucket//run/", "s3:///bucket/run"])
def test_spellings_of_a_bucket_folder_give_one_address(text):
    assert workdir_of_flag(text) == Address("s3://bucket/run")
    assert workdir_of_flag("runs/one") == Path("runs/one")


@pytest.mark.parametrize(
    "text", ["s3://bucket", "gs://", "s3://bucket/../run", "hf://datasets/a/b", "https://host/run"]
)
def test_an_address_that_names_no_bucket_folder_is_refused(text):
    with pytest.raises(UserError, match=r"give|mount"):
        workdir_of_flag(text)


def test_a_path_in_a_local_copy_is_named_by_its_address(tmp_path):
    mark_as_copy(tmp_path / "copy", "s3://bucket/run")
    assert named(tmp_path / "copy/checkpoints/4") == "s3://bucket/run/checkpoints/4"
    assert named(tmp_path / "copy") == "s3://bucket/run"
    assert named(tmp_path / "other") == str(tmp_path / "other")


def test_a_new_folder_is_uploaded_whole_or_not_at_all(address, tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(address, "config.json", tmp_path / "first") as folder:
        folder.mkdir(parents=True)
        (folder / "weights").write_text("1")
        raise ZeroDivisionError
    assert objects.list_objects(address) == []
    with new_folder(address, "config.json", tmp_path / "second") as folder:
        folder.mkdir(parents=True)
        assert named(folder) == address
        for name in ("config.json", "weights"):
            (folder / name).write_text(name)
    assert objects.list_objects(address) == ["config.json", "weights"]
    with pytest.raises(UserError, match="already holds something"), new_folder(address, "config.json", tmp_path):
        pass


def test_a_bucket_folder_is_read_as_a_local_one(address, tmp_path):
    for name in ("config.json", "model.safetensors", "training_args.bin"):
        objects.write_object(f"{address}/{name}", name.encode())
    with readable_folder(address, (".json", ".safetensors")) as folder:
        assert {file.name: file.read_text() for file in folder.iterdir()} == {
            name: name for name in ("config.json", "model.safetensors")
        }
    with readable_folder(str(tmp_path), ()) as folder:
        assert folder == tmp_path
    with pytest.raises(UserError, match="there is no such folder"), readable_folder(f"{address}/no", ()):
        pass
