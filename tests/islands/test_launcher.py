"""The launcher launch/islands.sh, with a few lines of Python in place of the islands; and once with real ones."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from noloco_jax.islands.roster import read_roster
from noloco_jax.model.huggingface import config_from_folder
from support import processes
from support.paths import ROOT
from support.platforms import QUICK_TO_COMPILE

# Stands in for `noloco_jax.island`: each command prints its arguments, and `train` also runs a test's lines.
FAKE = """
import os, pathlib, signal, sys, time
command, arguments = sys.argv[1], sys.argv[2:]
print("fake", command, *arguments)
if command == "train":
    flags = dict(argument.split("=", 1) for argument in arguments)
    name, workdir = flags["--name"], pathlib.Path(flags["--workdir"])
    with (workdir / "starts").open("a") as file:
        file.write("start\\n")
    starts = len((workdir / "starts").read_text().splitlines())
    def until_stopped():
        signal.signal(signal.SIGTERM, lambda *_: (print("goodbye", flush=True), os._exit(75)))
        (workdir / "ready").touch()
        time.sleep(60)
    exec(os.environ["LINES"])
"""


class Launcher:
    """A running launch/islands.sh, whose workdir is `folder`/runs."""

    def __init__(self, folder: Path, *arguments: str, lines: str = "", **variables: str):
        (folder / "fake.py").write_text(FAKE)
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\nif [ "$1" = -m ]; then shift 2; exec {sys.executable} -u {folder}/fake.py "$@"; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        self.runs = folder / "runs"
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "launch" / "islands.sh"), *arguments],
            env=os.environ | {"PYTHON": str(python), "LINES": lines, "PYTHONPATH": str(ROOT)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ready(self, *names: str) -> None:
        wait_until(lambda: all((self.runs / name / "ready").exists() for name in names))

    def result(self) -> tuple[int, list[str]]:
        [(status, output)] = processes.finish([self.process], patience=120)
        return status, output.splitlines()

    def log(self, name: str) -> str:
        return (self.runs / name / "log").read_text()

    def starts(self, name: str) -> int:
        return len((self.runs / name / "starts").read_text().splitlines())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def launch(tmp_path):
    def start(number: int, *arguments: str, **options: str) -> Launcher:
        return Launcher(tmp_path, str(number), f"--workdir={tmp_path / 'runs'}", *arguments, **options)

    return start


def test_every_island_gets_its_flags_and_a_report_and_a_merge_follow(launch):
    launcher = launch(3, "--config=a.py", "--config.num_steps=7")
    status, lines = launcher.result()
    runs = launcher.runs
    roster = read_roster(runs / "roster.toml")
    assert status == 0 and roster.names == ("island0", "island1", "island2")
    for name in roster.names:
        mine = f"--name={name} --keys={runs}/keys/{name} --workdir={runs}/{name}"
        given = f"fake train --config=a.py --config.num_steps=7 --config.num_replicas=3 --roster={runs}/roster.toml"
        assert launcher.log(name).splitlines() == [f"{given} {mine}"]
    folders = " ".join(f"{runs}/{name}" for name in roster.names)
    assert (runs / "keys.log").read_text() == f"fake keys --roster={runs}/roster.toml --out={runs}/keys\n"
    assert lines[-2:] == [
        f"fake report --out={runs}/islands.png --workdirs {folders}",
        f"fake merge --out={runs}/merged --evaluate --workdirs {folders}",
    ]


def test_the_first_islands_log_is_shown(launch):
    status, lines = launch(2, lines="print(f'hello from {name}')").result()
    assert status == 0
    assert "hello from island0" in lines and "hello from island1" not in lines


def test_only_the_killed_island_is_restarted(launch):
    launcher = launch(2, lines="if name == 'island1' and starts < 3: os.kill(os.getpid(), 9)")
    status, lines = launcher.result()
    assert status == 0
    assert (launcher.starts("island0"), launcher.starts("island1")) == (1, 3)
    assert lines.count("[launcher] island1 was ended (exit status 137): it starts again") == 2


def test_an_island_that_keeps_failing_is_given_up_and_the_others_are_merged(launch):
    launcher = launch(3, lines="if name == 'island1': sys.exit(1)")
    status, lines = launcher.result()
    assert status == 1 and launcher.starts("island1") == 11
    assert (launcher.starts("island0"), launcher.starts("island2")) == (1, 1)
    left = f"--workdirs {launcher.runs}/island0 {launcher.runs}/island2"
    assert lines[-3:] == [
        f"fake report --out={launcher.runs}/islands.png {left}",
        f"fake merge --out={launcher.runs}/merged --evaluate {left}",
        "[launcher] 2 of 3 islands have come to the end",
    ]


def test_a_user_error_of_one_island_is_reported_once_and_the_others_continue(launch):
    fails = "print('error: it is all wrong'); sys.exit(2)"
    waits = "while not (workdir.parent / 'over').exists(): time.sleep(0.02)"
    launcher = launch(3, lines=f"if name == 'island2': {fails}\n{waits}")
    wait_until(lambda: (launcher.runs / "island2/log").exists() and "error" in launcher.log("island2"))
    time.sleep(1.0)  # the launcher polls five times a second
    assert launcher.process.poll() is None
    (launcher.runs / "over").touch()
    status, lines = launcher.result()
    assert status == 2 and launcher.starts("island2") == 1
    assert "[launcher] island2 exited with 2 and is given up, the others go on; its log ends with" in lines
    assert lines.count("error: it is all wrong") == 1
    assert sum("fake merge" in line and "island2" not in line for line in lines) == 1


def test_nothing_is_merged_if_every_island_exits_with_a_user_error(launch):
    status, lines = launch(2, lines="sys.exit(2)").result()
    assert status == 2 and not any("fake merge" in line or "fake report" in line for line in lines)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_stops_all_islands_gracefully(launch, sent, status):
    launcher = launch(2, lines="until_stopped()")
    launcher.ready("island0", "island1")
    launcher.process.send_signal(sent)
    found, lines = launcher.result()
    assert found == status
    assert launcher.log("island0").endswith("goodbye\n") and launcher.log("island1").endswith("goodbye\n")
    assert "[launcher] all islands have stopped: the same command resumes" in lines
    assert any("fake report" in line for line in lines) and not any("fake merge" in line for line in lines)


def test_a_second_interrupt_kills_all_islands_immediately(launch):
    deaf = "signal.signal(signal.SIGTERM, lambda *_: (workdir / 'deaf').touch())"
    launcher = launch(2, lines=f"{deaf}; (workdir / 'ready').touch(); time.sleep(60)")
    launcher.ready("island0", "island1")
    started = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    wait_until(lambda: all((launcher.runs / name / "deaf").exists() for name in ("island0", "island1")))
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.result()[0] == 130
    assert time.monotonic() - started < 30


def test_a_second_launcher_of_a_folder_is_refused_while_the_first_runs(launch, tmp_path):
    first = launch(2, lines="until_stopped()")
    first.ready("island0", "island1")
    status, [line] = launch(2).result()
    assert status == 2 and line.startswith(f"error: islands of {tmp_path}/runs are running")
    first.process.send_signal(signal.SIGTERM)
    assert first.result()[0] == 75
    assert launch(2).result()[0] == 0  # the same command resumes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: usage: bash launch/islands.sh N"),
        (["1", "--workdir=runs"], "error: usage: bash launch/islands.sh N"),
        (["2", "--config=a.py"], "error: --workdir=DIR is missing"),
        (["2", "--config=a.py", "--workdir"], "error: --workdir=DIR is missing"),
    ],
)
def test_missing_or_invalid_arguments_are_reported_in_one_line(tmp_path, arguments, line):
    status, [found] = Launcher(tmp_path, *arguments).result()
    assert status == 2 and found.startswith(line)


def test_a_changed_number_of_islands_is_refused(launch):
    assert launch(2).result()[0] == 0
    status, lines = launch(3).result()
    assert status == 2 and re.match(r"error: .*roster\.toml is of 2 islands: give their number", lines[-1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="cores to share out")
def test_cores_are_shared_out(launch):
    launcher = launch(2, lines="print(sorted(os.sched_getaffinity(0)))")
    launcher.result()
    shares = [set(eval(launcher.log(name).splitlines()[-1])) for name in ("island0", "island1")]
    assert not shares[0] & shares[1] and shares[0] | shares[1] == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(3, ["0 None", "1 None", "2 None"]), (2, ["0 0.45", "1 0.45", "0 0.45"])]
)
def test_gpus_are_shared_out(launch, tmp_path, monkeypatch, gpus, expected):
    for name in ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nseq 0 {gpus - 1}\n")
    tool.chmod(0o755)
    lines = "print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('XLA_CLIENT_MEM_FRACTION'))"
    launcher = launch(3, lines=lines, PATH=f"{tmp_path}:{os.environ['PATH']}", JAX_PLATFORMS="")
    assert launcher.result()[0] == 0
    assert [launcher.log(f"island{i}").splitlines()[-1] for i in range(3)] == expected


def test_twelve_islands_share_the_memory_of_one_gpu_unless_the_user_sets_the_fraction(launch, tmp_path, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    machine = {"CUDA_VISIBLE_DEVICES": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAX_PLATFORMS": ""}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    lines = "print(os.environ.get('XLA_CLIENT_MEM_FRACTION'))"
    for given, expected in (({}, "0.07"), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".05"}, "None")):
        launcher = launch(12, lines=lines, **machine, **given)
        assert launcher.result()[0] == 0
        assert {launcher.log(f"island{i}").splitlines()[-1] for i in range(12)} == {expected}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_islands_train_and_are_merged_by_one_command(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words and then some more of them\n" * 2000)
    config = tmp_path / "config.py"
    config.write_text(f"""
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({{
        "method": "noloco", "num_steps": 12, "eval_batches": 2,
        "inner": {{"warmup_steps": 2}}, "outer": {{"sync_every": 3}},
        "model": {{"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}},
        "data": {{"kind": "text", "path": "{tmp_path / "text"}", "sequence_length": 16, "batch_size": 2}},
    }})
""")
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "islands.sh"), "2", f"--config={config}", f"--workdir={tmp_path / 'runs'}"],
        env=os.environ | {"PYTHON": sys.executable, "XLA_FLAGS": " ".join(QUICK_TO_COMPILE)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"│ island1 │ +4 │ +[0-4] of [0-4] │", done.stdout), done.stdout
    assert "the mean of 2 of 2 islands, all after the same round" in done.stdout
    assert re.search(r"merged model: validation perplexity \d+\.\d+", done.stdout)
    assert (tmp_path / "runs" / "islands.png").read_bytes().startswith(b"\x89PNG")
    assert config_from_folder(tmp_path / "runs" / "merged")["hidden_size"] == 16
