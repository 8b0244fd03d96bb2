"""Reading of a workdir in a bucket: what it holds, and local copies of it.

The object `contents.json` names what is whole: the steps of the checkpoints and the files beside them. It is replaced
whole, last of all that belongs together, so nothing depends on lists of objects, which some stores update late. Without
it, as in a local workdir that somebody copied to a bucket, a list decides, and a checkpoint is whole if it has digests,
which are written last.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from noloco_jax.cluster.workdir_lock import LOCK_FILE
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_bytes
from noloco_jax.patience import told_if_slow
from noloco_jax.run.digests import DIGESTS_FILE, MismatchError, read_digests
from noloco_jax.storage import objects
from noloco_jax.storage.local_copies import Address, copy_below, mark_as_copy

CHECKPOINTS = "checkpoints"
CONTENTS_FILE = "contents.json"
LISTED_FOLDERS = ("tensorboard",)  # beside the files at the top, where there is only a list
_BUCKETS_OWN = (LOCK_FILE, CONTENTS_FILE, objects.PROBE)  # never in a local copy, which has a lock of that name
_AT_ONCE = 8  # requests


class Contents(NamedTuple):
    """Content of a workdir in a bucket.

    Attributes:
      checkpoints: steps, sorted.
      files: names of the files beside them.
    """

    checkpoints: tuple[int, ...] = ()
    files: tuple[str, ...] = ()


def read_contents(address: Address) -> Contents:
    """Read what a workdir holds; nothing if it is new."""
    path = f"{address}/{CONTENTS_FILE}"
    try:
        found = objects.read_json(path)
        return Contents(tuple(map(int, found["checkpoints"])), tuple(map(_checked, found["files"])))
    except FileNotFoundError:
        return _listed(address)
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged: delete it, and checkpoints are found by a list instead") from None


def _checked(name: str) -> str:
    """Return a name; raise `ValueError` where it would leave the folder that it belongs to."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is no name of a file there")
    return name


def _listed(address: Address) -> Contents:
    names = objects.list_objects(address)
    parts = [name.split("/") for name in names]
    folders = {part[1] for part in parts if part[0] == CHECKPOINTS and len(part) > 2 and part[1].isdigit()}
    steps = [int(step) for step in folders if f"{CHECKPOINTS}/{step}/{DIGESTS_FILE}" in names]
    if len(steps) < len(folders):
        bare = min(folders - {str(step) for step in steps}, key=int)
        raise UserError(
            f"the checkpoint {address}/{CHECKPOINTS}/{bare} has no {DIGESTS_FILE}: it is not whole yet, or of an "
            "earlier version; wait until it is copied, resume it in a local workdir, or delete that folder"
        )
    beside = [name for name in names if "/" not in name or name.split("/")[0] in LISTED_FOLDERS]
    files = [name for name in beside if name not in _BUCKETS_OWN]
    return Contents(tuple(sorted(steps)), tuple(files))


def download_files(address: Address, names: Iterable[str], folder: Path) -> None:
    """Copy files of a workdir to a local folder; those that are gone are left out."""

    def download(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            objects.download_file(f"{address}/{name}", folder / name)

    at_once(download, names)


def download_newest(address: Address, folder: Path) -> int | None:
    """Copy the newest checkpoint that is there to a local workdir and return its step; None if there is none.

    A run may be saving and deleting checkpoints meanwhile.
    """
    tried: set[int] = set()
    while left := set(read_contents(address).checkpoints) - tried:
        step = max(left)
        tried.add(step)
        if download_checkpoint(address, step, folder):
            return step
    return None


def download_checkpoint(address: Address, step: int, folder: Path) -> bool:
    """Copy a checkpoint to a local workdir; False if it is gone. `Checkpointer` compares it with its digests."""
    source, target = f"{address}/{CHECKPOINTS}/{step}", folder / CHECKPOINTS / str(step)
    try:
        names = download_digests(source, target)
        size = format_bytes(sum(entry.size for entry in (read_digests(target) or {}).values()))
        with told_if_slow(f"downloading the checkpoint {source}, {size}"):
            at_once(lambda name: objects.download_file(f"{source}/{name}", target / name), names)
        return True
    except FileNotFoundError as error:
        shutil.rmtree(target, ignore_errors=True)
        if step in read_contents(address).checkpoints and objects.exists(f"{source}/{DIGESTS_FILE}"):
            raise UserError(
                f"the checkpoint {source} is not whole ({error} is missing): delete that folder to resume from the one "
                "before it, or restore it"
            ) from None
        return False


def download_digests(source: str, folder: Path) -> list[str]:
    """Copy the digests of the checkpoint at `source` to a local folder; return the names of its other files."""
    objects.download_file(f"{source}/{DIGESTS_FILE}", folder / DIGESTS_FILE)
    try:
        return [_checked(name) for name in read_digests(folder) or {}]
    except (MismatchError, ValueError) as error:
        raise UserError(
            f"the checkpoint {source} is not whole ({error}): delete that folder to resume from the one before it, "
            "or restore it"
        ) from None


def at_once(act: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `act` for every name, several at once; raise the first error."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        try:
            for _ in threads.map(act, names):
                pass
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def readable_workdir(
    workdir: Path | Address, *, checkpoints: Literal["newest", "all", "none"] = "newest"
) -> Iterator[Path]:
    """Give the folder of a workdir to read: itself, or a temporary copy of one in a bucket.

    Args:
      workdir: a local folder or an address.
      checkpoints: those that are copied beside the files.
    """
    if isinstance(workdir, Path):
        yield workdir
        return
    objects.check_bucket(workdir)
    with tempfile.TemporaryDirectory(prefix="noloco_jax-") as root:
        folder = copy_below(Path(root), workdir)
        mark_as_copy(folder, workdir)
        contents = read_contents(workdir)
        download_files(workdir, contents.files, folder)
        newest = None if checkpoints == "none" else download_newest(workdir, folder)
        for step in contents.checkpoints if checkpoints == "all" else ():
            if step != newest:
                download_checkpoint(workdir, step, folder)
        yield folder
