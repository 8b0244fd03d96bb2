"""Exit statuses of errors: 1 where a retry may help, 2 where it does not."""

import re
import subprocess
import sys

import pytest
from jax.errors import JaxRuntimeError

from noloco_jax.errors import TransientError, UserError, main_with_errors
from support.paths import ROOT


def ended(error: BaseException) -> int:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as caught:
        main_with_errors(main)
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("a flag"), 2),
        (TransientError("a disk"), 1),
        (OSError(5, "Input/output error"), 1),
        (KeyError("a fault of the code"), 2),
        (JaxRuntimeError("INTERNAL: CUDA error: uncorrectable ECC error encountered"), 1),
        (JaxRuntimeError("INVALID_ARGUMENT: Argument does not match host shape"), 2),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."), 2),
        (MemoryError(), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: f"{type(value).__name__} {value}"[:60],
)
def test_only_errors_that_may_pass_have_the_status_of_a_retry(error, status):
    assert ended(error) == status


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
            r"error: out of memory \(RESOURCE_EXHAUSTED: .*raise --config.num_microbatches[^\n]*\n$",
        ),
        (KeyError("cause"), r"(?s)Traceback .*KeyError: 'cause'"),
    ],
)
def test_lack_of_memory_is_one_line_and_a_fault_of_the_code_keeps_its_traceback(error, said, capsys):
    ended(error)
    assert re.match(said, capsys.readouterr().err)


def run_program(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_an_early_ctrl_c_is_one_line_without_a_traceback():
    program = """
import os, signal
from noloco_jax.errors import main_with_errors
main_with_errors(lambda: os.kill(os.getpid(), signal.SIGINT))
"""
    assert run_program(program) == (130, "", "stopped by Ctrl-C\n")
