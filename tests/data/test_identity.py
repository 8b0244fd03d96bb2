"""Digests of sampled contents: the changes they detect or miss, and the bytes they read."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.data import identity
from noloco_jax.data.identity import sampled_contents


@pytest.fixture(autouse=True)
def sampling(monkeypatch):
    """Sample at most 4 KiB of at most 8 files, at 16 places."""
    for name, value in {"_BYTES": 4096, "_FILES": 8, "_PLACES": 16}.items():
        monkeypatch.setattr(identity, name, value)


def write(folder, sizes):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    files = [folder / f"{k:03}" for k in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(rng.bytes(size))
    return [str(file) for file in files]


def detects(files, number, place):
    """Return True if flipping the byte at `place` of file `number` changes the digest."""
    before, path = sampled_contents(files), Path(files[number])
    content = path.read_bytes()
    path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
    after = sampled_contents(files)
    path.write_bytes(content)
    return before != after


def test_a_change_of_any_byte_of_a_small_data_set_is_detected(tmp_path):
    files = write(tmp_path, [1, 100, 0, 200])
    assert all(detects(files, number, place) for number, size in enumerate([1, 100, 0, 200]) for place in range(size))


def test_a_large_file_is_sampled_throughout_including_its_first_and_last_byte(tmp_path):
    files = write(tmp_path, [16 * 4096])
    places = range(0, 16 * 4096, 131)
    found = [place for place in places if detects(files, 0, place)]
    assert 0.04 < len(found) / len(places) < 0.09  # a sixteenth
    assert max(np.diff(found)) < 2 * 4096
    assert detects(files, 0, 0) and detects(files, 0, 16 * 4096 - 1)


def test_the_number_of_hashed_bytes_is_bounded(tmp_path, monkeypatch):
    for sizes in ([10**6], [10**5] * 8, [10**4] * 100):
        files = write(tmp_path / str(len(sizes)), sizes)
        hashed = 0

        class Counting:
            def __init__(self, content=b""):
                nonlocal hashed
                hashed += len(content)
                self._hash = hashlib.blake2b(content)
                self.digest, self.hexdigest = self._hash.digest, self._hash.hexdigest

            def update(self, content):
                nonlocal hashed
                hashed += len(content)
                self._hash.update(content)

        monkeypatch.setattr(identity, "sha256", Counting)
        sampled_contents(files)
        assert 2000 < hashed < 4096 + 2000, sizes


def test_the_digest_depends_on_contents_and_order_but_not_on_the_folder(tmp_path):
    first, second = (write(tmp_path / name, [5000, 10, 700]) for name in ("a", "b"))
    assert sampled_contents(first) == sampled_contents(second) != sampled_contents(second[::-1])


def test_only_evenly_spaced_ones_of_many_files_are_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_FILES", 3)
    files = write(tmp_path, [10] * 7)
    assert [detects(files, number, 5) for number in range(7)] == [True, False, False, True, False, False, True]
