"""Tests that are coroutines: they run on a clock that jumps to the next timer, so that hours take seconds.

With the mark `real_time` they run on the real clock, as calls over sockets need. An error in a callback, or in a task
that nobody awaits, fails them.
"""

import asyncio
import inspect
import selectors
from typing import Any

import pytest

from noloco_jax.islands.network import is_fault


class _Selector(selectors.SelectSelector):
    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("nothing will ever happen any more: every coroutine waits for another one")
        self.now += max(timeout, 0.0)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    is_real = pyfuncitem.get_closest_marker("real_time") is not None
    faults: list[dict[str, Any]] = []  # a task that a test leaves pending is none
    with asyncio.Runner(loop_factory=None if is_real else _VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: faults.append(context))
        runner.run(pyfuncitem.obj(**arguments))
    assert not [one for one in faults if "exception" in one and is_fault(one)], faults
    return True
