"""Programs that several processes need at the same time: one compiles, and nobody waits for it in vain."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from noloco_jax.spmd import compile_once
from noloco_jax.spmd.compile_once import Lowered, compile_all

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""
COMPILE = """
import sys, jax, jax.numpy as jnp
from noloco_jax.spmd.compile_once import Lowered, compile_all
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
lowered = jax.jit(lambda x: jnp.linalg.svd(x @ x.T)[1]).lower(jnp.ones((16, 8)))
print("ready", flush=True)
sys.stdin.readline()
events.clear()
compile_all([Lowered("program", lowered)], 1)
print(sum(event.endswith("cache_misses") for event in events))
"""


class Program:
    """Program that takes a while to compile; `log` tells when it begins and ends."""

    def __init__(self, text: str, log: list[str], seconds: float = 0.2):
        self._text, self._log, self._seconds = text, log, seconds

    def as_text(self) -> str:
        return self._text

    def compile(self, options: Any) -> str:
        self._log.append("begins")
        time.sleep(self._seconds)
        self._log.append("ends")
        return self._text


@pytest.fixture
def cache(tmp_path) -> Iterator[Any]:
    """The folder of JAX's compilation cache, which the tests' environment switches off."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)


def compile_in_each(programs: list[Any]) -> None:
    """Compile each program as a process of its own does, all at the same time."""
    with ThreadPoolExecutor() as threads:
        for one in [threads.submit(compile_all, [Lowered("program", one)], 1) for one in programs]:
            one.result(60)


def test_the_first_compiles_alone_and_all_others_at_once_after_it(cache):
    log: list[str] = []
    compile_in_each([Program("same", log, seconds=0.5) for _ in range(4)])
    assert log[:2] == ["begins", "ends"] and log[2:5] == ["begins"] * 3
    assert not list(cache.iterdir())


@pytest.mark.parametrize("different", ["text", "cache off"])
def test_other_programs_and_those_that_are_not_kept_are_not_waited_for(different, cache):
    if different == "cache off":
        jax.config.update("jax_enable_compilation_cache", False)
    log: list[str] = []
    texts = ["same", "other"] if different == "text" else ["same", "same"]
    compile_in_each([Program(text, log, seconds=0.5) for text in texts])
    assert log == ["begins", "begins", "ends", "ends"]


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_process_that_dies_or_stops_while_it_compiles_is_not_waited_for(end, cache, monkeypatch):
    cache.mkdir()
    with compile_once._lock_of(Lowered("program", Program("same", []))) as file:  # type: ignore[arg-type]
        assert file is not None
    command, log = [sys.executable, "-c", HOLD, file.name], list[str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            if end == "stopped":
                monkeypatch.setattr(compile_once, "_LONGEST_WAIT", 0.5)
            waiting = threading.Thread(target=compile_in_each, args=([Program("same", log)],))
            waiting.start()
            time.sleep(0.2)
            assert not log
            if end == "killed":
                holder.kill()
            waiting.join(30)
            assert log == ["begins", "ends"]
        finally:
            holder.kill()


def test_a_process_that_was_forked_while_one_compiled_keeps_no_lock(cache):
    one: Any = Lowered("program", Program("same", []))  # type: ignore[arg-type]
    with compile_once._lock_of(one) as waiting:
        with compile_once._lock_of(one) as first:
            assert first is not None and waiting is not None and compile_once._has(first, first=True)
            inherited = os.dup(first.fileno())
        assert compile_once._has(waiting, first=False)
        os.close(inherited)


def test_while_another_process_compiles_a_program_the_next_one_is_compiled_on_the_one_core_here(cache):
    """Two islands with two programs and one core each: each of them begins with another one."""
    began = list[str]()

    class Noted(Program):
        def compile(self, options: Any) -> str:
            began.append(self._text)
            return super().compile(options)

    def island() -> None:
        compile_all([Lowered(text, Noted(text, [], 0.5)) for text in ("one", "other")], 1)  # type: ignore[arg-type]

    with ThreadPoolExecutor() as threads:
        for one in [threads.submit(island) for _ in range(2)]:
            one.result(60)
    assert sorted(began[:2]) == ["one", "other"]


def test_of_two_processes_with_an_empty_cache_one_compiles_a_program_and_the_other_takes_it(tmp_path):
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert sorted(int(output) for output in outputs) == [0, 1]
