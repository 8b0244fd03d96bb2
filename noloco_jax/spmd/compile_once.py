"""Compilation of programs side by side, each by one of the machine's processes that need it at the same time.

The first process to come holds a lock beside JAX's compilation cache while it compiles. The others wait, and then take
the program from the cache. They compile themselves, all at once, if it is not there: the first one has died, which
frees the lock, or could not keep the program. So nobody waits for longer than for one compilation.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import jax

_LONGEST_WAIT = 1800.0  # seconds for another process, which may be stopped
_POLL_SECONDS = 0.02
_MAX_THREADS = 32  # programs that wait; those that compile are as many as the caller says


class Lowered(NamedTuple):
    """Program to compile, and XLA options for it by name."""

    name: str
    program: jax.stages.Lowered
    options: Mapping[str, Any] | None = None


class Compiled(NamedTuple):
    """Compiled program, and the seconds that it took, without waiting for other programs or processes."""

    program: jax.stages.Compiled
    seconds: float


def compile_all(programs: Iterable[Lowered], num_at_once: int) -> dict[str, Compiled]:
    """Compile programs as they come, so many at a time, and return them by name.

    While another process compiles one of them, others are compiled here: processes that start together share the work.
    """
    cores = threading.Semaphore(num_at_once)
    with ThreadPoolExecutor(_MAX_THREADS, "compile") as threads:
        compiling = {one.name: threads.submit(_compiled_once, one, cores) for one in programs}
        return {name: one.result() for name, one in compiling.items()}


def _compiled_once(lowered: Lowered, cores: threading.Semaphore) -> Compiled:
    with _lock_of(lowered) as lock:
        with cores:
            if lock is None or _has(lock, first=True):
                return _compile(lowered)
        deadline = time.monotonic() + _LONGEST_WAIT
        while not _has(lock, first=False) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        with cores:
            return _compile(lowered)


def _compile(lowered: Lowered) -> Compiled:
    started = time.perf_counter()
    program = lowered.program.compile(dict(lowered.options) if lowered.options else None)
    return Compiled(program, time.perf_counter() - started)


@contextlib.contextmanager
def _lock_of(lowered: Lowered) -> Iterator[IO[str] | None]:
    """Give the open file that stands for a program; None where other processes cannot take it from this one's cache.

    Processes of one run compile side by side, as only the first of them keeps programs.
    """
    folder = _setting("jax_compilation_cache_dir")
    is_kept = _setting("jax_enable_compilation_cache") and folder and "://" not in folder
    if not is_kept or jax.process_count() > 1:
        yield None
        return
    parts = (lowered.program.as_text(), lowered.options, jax.devices()[0].device_kind, os.environ.get("XLA_FLAGS"))
    name = hashlib.sha256(repr((jax.__version__, *parts)).encode()).hexdigest()
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, f"compiling-{name}"), "a+")  # noqa: SIM115
    except OSError:  # read-only, or full
        yield None
        return
    with file:
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_UN)  # as closing it leaves the lock to processes forked meanwhile
            with contextlib.suppress(OSError):  # another process was faster
                os.unlink(file.name)


def _has(lock: IO[str], first: bool) -> bool:
    """Take the lock if that is possible now: alone as the first, with others after it."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if first else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # JAX declares no such attribute
