"""The launchers: several processes on this machine, Slurm, Kubernetes, and the XLA flags that they set."""

import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import kubernetes_validate
import pytest
import yaml

from noloco_jax.config import load_config
from noloco_jax.spmd.mesh import mesh_shape
from support import processes
from support.paths import ROOT

LAUNCH = ROOT / "launch"


def local(number: int, code: str, **variables: str) -> subprocess.Popen[str]:
    """Start local.sh with processes that run `code`, in which `i` is the process number."""
    code = f"import os, signal, sys, time; i = int(os.environ['JAX_PROCESS_ID']); {code}"
    return subprocess.Popen(
        ["bash", str(LAUNCH / "local.sh"), str(number), sys.executable, "-u", "-c", code],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    [(status, output)] = processes.finish([process])
    return status, output.splitlines()


def test_every_line_of_local_processes_names_its_process():
    status, lines = result(local(3, "print('first'); print('second')"))
    assert status == 0
    assert sorted(lines) == sorted(f"[{i}] {word}" for i in range(3) for word in ("first", "second"))


COUNT = "open(str(i), 'a').write('x'); starts = len(open(str(i)).read()); "  # in a folder of the test's own


@pytest.mark.parametrize(
    ("number", "code", "restarts", "status", "starts", "told"),
    [
        (2, "time.sleep(900 if i else 0); sys.exit(1)", 2, 1, 3, "starting all 2 again, at most 0 times more"),
        (1, "sys.exit(2)", 2, 2, 1, ""),
        (1, "sys.exit(0 if starts > 1 else 75)", 0, 0, 2, ""),
        (3, "sys.exit(7) if i == 0 else time.sleep(900)", 0, 7, 1, "process 0 exited with 7"),
        (2, "os.kill(os.getpid(), signal.SIGKILL) if i == 0 else time.sleep(900)", 0, 137, 1, ""),
    ],
    ids=["failures", "wrong input", "stopped by a signal", "one fails", "one is killed"],
)
def test_local_processes_end_together_and_start_again_where_it_may_help(
    tmp_path, monkeypatch, number, code, restarts, status, starts, told
):
    monkeypatch.chdir(tmp_path)
    ended, lines = result(local(number, COUNT + code, RESTARTS=str(restarts)))
    assert ended == status and (tmp_path / "0").read_text() == "x" * starts
    assert told in "\n".join(lines)


PLACE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
PRINT_PLACE = f"print(*(os.environ[name] for name in {PLACE}))"


def test_local_processes_get_coordinator_count_and_number():
    status, lines = result(local(2, PRINT_PLACE, PORT="12345"))
    assert status == 0
    assert sorted(lines) == ["[0] 127.0.0.1:12345 2 0", "[1] 127.0.0.1:12345 2 1"]


@pytest.mark.parametrize("variable", ["NODE", "JOB_COMPLETION_INDEX"])
def test_processes_are_numbered_consecutively_across_machines(variable):
    machine = {"NODES": "3", variable: "2", "JAX_COORDINATOR_ADDRESS": "first:12345"}
    status, lines = result(local(2, PRINT_PLACE, **machine))
    assert status == 0
    assert sorted(lines) == ["[4] first:12345 6 4", "[5] first:12345 6 5"]


def test_a_pod_index_without_nodes_means_a_single_machine():
    status, lines = result(local(1, PRINT_PLACE, PORT="12345", JOB_COMPLETION_INDEX="3"))
    assert (status, lines) == (0, ["[0] 127.0.0.1:12345 1 0"])


@pytest.mark.parametrize(
    "variables",
    [{"JAX_COORDINATOR_ADDRESS": "a:1"}, {"NODE": "1"}, {"NODE": "2", "JAX_COORDINATOR_ADDRESS": "a:1"}],
    ids=["no number", "no address", "beyond the last"],
)
def test_a_machine_of_several_needs_its_number_and_the_coordinator_address(variables):
    status, [line] = result(local(1, PRINT_PLACE, NODES="2", **variables))
    assert status == 2
    assert line.startswith("error: NODES=2 with NODE=") and "a NODE from 0 to 1, and HOST:PORT" in line


def with_gpus(folder: Path, number: int) -> dict[str, str]:
    """Write an nvidia-smi that lists `number` GPUs; return the environment variables that make local.sh use it."""
    tool = folder / "nvidia-smi"
    lines = "".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i}e-1)\\n" for i in range(number))
    tool.write_text(f"""#!/bin/sh\n[ "$*" = --list-gpus ] && printf '{lines}'\n""")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "JAX_PLATFORMS": ""}


PRINT_GPUS = "print(os.environ.get('JAX_LOCAL_DEVICE_IDS', 'all'))"


@pytest.mark.parametrize(
    ("number", "gpus", "variables", "taken"),
    [
        (3, 3, {}, ["0", "1", "2"]),
        (1, 2, {}, ["all"]),
        (2, 1, {"JAX_PLATFORMS": "cpu"}, ["all", "all"]),
        (2, 4, {"CUDA_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),  # JAX numbers the visible GPUs from 0
        (2, 4, {"CUDA_VISIBLE_DEVICES": "GPU-2e-1,GPU-3e-1"}, ["0", "1"]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": ""}, ["all", "all"]),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "-1"}, ["all", "all"]),
        (3, 2, {}, "error: 3 processes want a GPU each and there are 2: "),
        (3, 4, {"CUDA_VISIBLE_DEVICES": "2,3"}, "error: 3 processes want a GPU each and there are 2: "),
    ],
)
def test_local_processes_take_a_visible_gpu_each_and_start_only_if_there_are_enough(
    tmp_path, monkeypatch, number, gpus, variables, taken
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    status, lines = result(local(number, PRINT_GPUS, **with_gpus(tmp_path, gpus) | variables))
    if isinstance(taken, str):
        assert status == 2 and len(lines) == 1
        assert lines[0].startswith(taken) and "JAX_PLATFORMS=cpu" in lines[0]
    else:
        assert (status, sorted(lines)) == (0, [f"[{k}] {gpu}" for k, gpu in enumerate(taken)])


def test_nvidia_smi_lines_that_name_no_gpu_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    variables = with_gpus(tmp_path, 2)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9\n"
    )
    assert result(local(2, PRINT_GPUS, **variables))[0] == 0
    tool.write_text("#!/bin/sh\nprintf 'GPU 0: H100 (UUID: GPU-0e-1)\\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\\n'\n")
    status, [line] = result(local(2, PRINT_GPUS, **variables))
    assert status == 2 and "there are 1" in line


def pause_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while line not in process.stdout.readline():
        pass


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_the_local_launcher_lets_its_processes_save(number, expected):
    """Each saves at SIGTERM and exits with 75, as the trainer does."""
    code = "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(75))); print('ready'); time.sleep(900)"
    launcher = local(1, code)
    pause_until(launcher, "ready")
    launcher.send_signal(number)
    status, lines = result(launcher)
    assert status == expected
    assert lines == ["[0] saved"]


def test_a_second_interrupt_ends_local_processes_at_once():
    launcher = local(1, "signal.signal(signal.SIGTERM, lambda *_: print('deaf')); print('ready'); time.sleep(900)")
    pause_until(launcher, "ready")
    launcher.send_signal(signal.SIGINT)
    pause_until(launcher, "deaf")
    while launcher.poll() is None:  # bash may lose an interrupt that arrives while it handles the one before
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert result(launcher)[0] == 130


def test_the_local_launcher_refuses_a_call_without_a_number():
    called = subprocess.run(["bash", LAUNCH / "local.sh", "python"], capture_output=True, text=True)
    assert called.returncode == 2
    assert "usage: bash launch/local.sh N COMMAND" in called.stderr


@pytest.mark.parametrize("path", sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")]), ids=lambda path: path.name)
def test_launch_scripts_parse(path):
    subprocess.run(["bash", "-n", path], check=True)


def xla_flags(**variables: str) -> str:
    called = subprocess.run(
        ["bash", "-c", f'source "{LAUNCH}/xla_flags.sh"; echo "$XLA_FLAGS"'],
        env={"PATH": os.environ["PATH"]} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return called.stdout.strip()


def test_jaxlib_accepts_every_xla_flag():
    """An unknown one would abort the process."""
    environment = os.environ | {"XLA_FLAGS": xla_flags(), "JAX_PLATFORMS": "cpu"}
    called = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True, text=True
    )
    assert called.returncode == 0, called.stderr


def test_xla_flags_set_by_the_user_are_kept():
    mine = "--xla_gpu_enable_latency_hiding_scheduler=false"
    flags = xla_flags(XLA_FLAGS=mine).split()
    assert flags[0] == mine
    assert len([flag for flag in flags if flag.startswith("--xla_gpu_enable_latency_hiding_scheduler=")]) == 1
    assert len(flags) == len(xla_flags().split())


def kubernetes() -> tuple[dict, dict]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def test_the_kubernetes_file_fits_its_schema():
    for document in kubernetes():
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_kubernetes_pods_find_the_coordinator_pod():
    service, job = kubernetes()
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    name, subdomain = job["metadata"]["name"], pod["subdomain"]
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    port = service["spec"]["ports"][0]["port"]
    assert variables["JAX_COORDINATOR_ADDRESS"] == f"{name}-0.{subdomain}:{port}"
    assert int(variables["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert variables["XLA_FLAGS"].split() == xla_flags().split()


def test_kubernetes_and_slurm_restart_preempted_jobs():
    rules = kubernetes()[1]["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert actions == {2: "FailJob", 75: "Ignore"}
    script = (LAUNCH / "slurm.sbatch").read_text()
    assert re.search(r'-eq 75 \]; then\n.*\n +scontrol requeue "\$SLURM_JOB_ID"', script)


class Example(NamedTuple):
    """Requests of a launch file: machines, processes and GPUs of each, and the trainer's arguments."""

    nodes: int
    processes: int
    gpus: int
    command: str


def slurm_example() -> Example:
    script = (LAUNCH / "slurm.sbatch").read_text().replace("\\\n#", "")
    options = r"--nodes=(\d+) --ntasks-per-node=(\d+) --gpus-per-node=(\d+) (.*)"
    [(nodes, tasks, gpus, command)] = re.findall(options, script)
    return Example(int(nodes), int(tasks), int(gpus), command)


def kubernetes_example() -> Example:
    job = kubernetes()[1]["spec"]
    [container] = job["template"]["spec"]["containers"]
    shell, script, number, *command = container["command"]
    assert (shell, script) == ("bash", "launch/local.sh")
    return Example(
        job["completions"], int(number), container["resources"]["limits"]["nvidia.com/gpu"], " ".join(command)
    )


@pytest.mark.parametrize("example", [slurm_example, kubernetes_example])
def test_launch_examples_start_one_process_per_gpu_and_use_all_gpus(example):
    nodes, processes_each, gpus, command = example()
    assert processes_each == gpus
    [path] = re.findall(r"--config=(\S+)", command)
    config = load_config(str(ROOT / path), re.findall(r"--config\.\S+", command))
    assert math.prod(mesh_shape(config.mesh, config.num_replicas, nodes * gpus).values()) == nodes * gpus


def test_files_named_in_launchers_exist():
    texts = [path.read_text() for path in LAUNCH.iterdir() if path.suffix != ".md"]
    named = {name for text in texts for name in re.findall(r"\b(?:launch|configs)/[\w.]+\.(?:sh|py|sbatch|yaml)", text)}
    assert named
    assert [name for name in sorted(named) if not Path(ROOT, name).exists()] == []


def test_the_image_has_the_manifests_name_and_holds_all_files_that_they_and_the_package_need():
    text = (LAUNCH / "Dockerfile").read_text()
    copied = {source for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for source in line.split()}
    ignored, *kept = (LAUNCH / "Dockerfile.dockerignore").read_text().split()
    assert (ignored, {line[1:] for line in kept if line[0] == "!"}) == ("*", copied)
    manifests = "".join((LAUNCH / name).read_text() for name in ("kubernetes.yaml", "islands.yaml"))
    named = set(re.findall(r"\b((?:launch|configs)/[\w.]+\.(?:sh|py))", manifests))
    assert named and {name.split("/")[0] for name in named} | {"noloco_jax", "pyproject.toml", "setup.py"} <= copied
    assert set(re.findall(r"image: (\S+)", manifests)) == set(
        re.findall(r"docker (?:build|push) .*?(\S+/\S+:\w+)", text)
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"EXTRAS=(\w+)", text)) <= extras.keys()


def gpu(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """Run gpu.sh with an interpreter that prints its arguments, and fails for pytest."""
    interpreter = folder / "python"
    interpreter.write_text('#!/bin/sh\necho "run: $*"\n[ "$2" != pytest ]\n')
    interpreter.chmod(0o755)
    command = ["bash", LAUNCH / "gpu.sh", folder / "out", *parts]
    environment = os.environ | {"PYTHON": str(interpreter), "BENCH": "--steps=3 --config.data.batch_size=2"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_gpu_parts_run_in_order_and_continue_after_a_failed_one(tmp_path):
    ended = gpu(tmp_path)
    assert ended.returncode == 1
    runs = [line.split()[2] for line in ended.stdout.splitlines() if line.startswith("run: -m")]
    assert runs == ["pytest", "noloco_jax.train", *8 * ["noloco_jax.bench"], "noloco_jax.compare"]
    assert "== tests failed" in ended.stdout and ended.stdout.count("failed") == 1
    log = (tmp_path / "out/four.log").read_text()
    assert f"--json={tmp_path}/out/four.json" in log and "--steps=3 --config.data.batch_size=2" in log
