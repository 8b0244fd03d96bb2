#!/usr/bin/env bash
# A Zstandard file that is cut off within its frame ends without an error in the package zstandard: its stream_reader
# gives less text and then the end of the file, as after a complete one. Python's own reader (compression.zstd, here
# its backport) and pyarrow raise at the same place.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zstandard==0.25.0 backports.zstd==1.8.0 pyarrow==26.0.1
"$folder/venv/bin/python" - <<'PYTHON'
import io, platform, random
from importlib.metadata import version

import pyarrow, zstandard
from backports import zstd

print("Python", platform.python_version(), *(f"{name} {version(name)}" for name in ("zstandard", "backports.zstd", "pyarrow")))
letters = random.Random(0)
text = b"".join(letters.randbytes(20).hex().encode() + b"\n" for _ in range(20_000))
truncated = zstd.compress(text)[:-3000]


def read(opened):
    received = 0
    try:
        while block := opened.read(1 << 16):
            received += len(block)
    except Exception as error:
        return received, f"{type(error).__name__}: {error}"
    return received, "no error"


results = {
    "zstandard": read(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(truncated))),
    "backports.zstd": read(zstd.open(io.BytesIO(truncated))),
    "pyarrow": read(pyarrow.CompressedInputStream(pyarrow.BufferReader(truncated), "zstd")),
}
for name, (received, end) in results.items():
    print(f"{name:15} {received} of {len(text)} bytes, then {end}")
assert 0 < results["zstandard"][0] < len(text) and results["zstandard"][1] == "no error"
assert all(results[name][1] != "no error" for name in ("backports.zstd", "pyarrow"))
PYTHON
