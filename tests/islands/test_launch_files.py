"""Launch files of islands for Kubernetes and Slurm; their scripts run a few lines of shell in place of the islands."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from noloco_jax.islands.keys import load_keys, make_keys
from noloco_jax.islands.roster import Roster, read_roster
from support.counted import in_time
from support.paths import ROOT

LAUNCH = ROOT / "launch"


def documents() -> dict[str, dict[str, Any]]:
    found = list(yaml.safe_load_all((LAUNCH / "islands.yaml").read_text()))
    return {document["kind"]: document for document in found}


def pod_of(kind: str) -> dict[str, Any]:
    return documents()[kind]["spec"]["template"]["spec"]


def roster_in(tmp_path: Path) -> Roster:
    (tmp_path / "roster.toml").write_text(documents()["ConfigMap"]["data"]["roster.toml"])
    return read_roster(tmp_path / "roster.toml")


def test_every_kubernetes_document_fits_its_schema():
    assert {*documents()} == {"ConfigMap", "Service", "StatefulSet", "Deployment"}
    for document in documents().values():
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_pods_match_the_names_and_addresses_of_the_rosters_islands(tmp_path):
    roster, found = roster_in(tmp_path), documents()
    islands, service = found["StatefulSet"], found["Service"]
    name = islands["metadata"]["name"]
    assert roster.names == tuple(f"{name}-{i}" for i in range(islands["spec"]["replicas"]))
    [container] = pod_of("StatefulSet")["containers"]
    port = container["ports"][0]["containerPort"]
    assert islands["spec"]["serviceName"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == islands["spec"]["template"]["metadata"]["labels"]
    for island in roster.islands:
        assert str(island.address) == f"{island.name}.{service['metadata']['name']}:{port}"
    assert f"--config.num_replicas={len(roster.names)}" in container["command"]


def test_each_pod_mounts_the_complete_keys_of_its_own_island(tmp_path):
    roster, pod = roster_in(tmp_path), pod_of("StatefulSet")
    make_keys(roster, tmp_path / "keys", 30)
    [volume] = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    made = [path for name in roster.names for path in (tmp_path / "keys" / name).iterdir()]
    secret = {f"{path.parent.name}.{path.name}": path for path in made}
    assert {item["key"] for item in volume["items"]} == {*secret}
    for item in volume["items"]:
        mounted = tmp_path / "mounted" / item["path"]
        mounted.parent.mkdir(parents=True, exist_ok=True)
        mounted.write_bytes(secret[item["key"]].read_bytes())
        mounted.chmod(volume["defaultMode"])
    [mount] = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "keys"]
    for name in roster.names:
        load_keys(tmp_path / "mounted" / mount["subPathExpr"].replace("$(POD_NAME)", name), name)


def start_pod(folder: Path, lines: str) -> subprocess.Popen[str]:
    """Start the pod's command, with `lines` of shell in place of Python."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/bash\n{lines}\n")
    fake.chmod(0o755)
    [container] = pod_of("StatefulSet")["containers"]
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "POD_NAME": "island-2"}
    return subprocess.Popen(container["command"], env=environment, stdout=subprocess.PIPE, text=True)


def test_the_pods_command_passes_on_arguments_and_exit_status(tmp_path):
    said, _ = (process := start_pod(tmp_path, 'echo "$@"; exit 2')).communicate(timeout=60)
    assert process.returncode == 2
    assert said.split() == [
        *("-m", "noloco_jax.island", "train", "--name=island-2", "--roster=/roster/roster.toml", "--keys=/keys"),
        *("--workdir=/runs/island-2", "--config=configs/c4_125m.py", "--config.num_replicas=4"),
        "--config.data.path=/data/c4/en",
    ]


def test_a_terminated_pod_saves_before_it_exits(tmp_path):
    lines = "trap 'sleep 0.5; echo saved; exit 75' TERM; echo ready; while :; do sleep 0.1; done"
    process = start_pod(tmp_path, lines)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "saved\n" and process.returncode == 75


def test_a_pod_with_a_finished_island_stays_until_it_is_terminated(tmp_path):
    (tmp_path / "sleep").write_text(f'#!/bin/bash\ntouch {tmp_path}/idle\nexec {shutil.which("sleep")} "$@"\n')
    (tmp_path / "sleep").chmod(0o755)
    process = start_pod(tmp_path, "exit 0")
    assert in_time(lambda: (tmp_path / "idle").exists())
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


# Slurm.

FAKE_PYTHON = f"""#!/bin/bash
if [ "$3" = keys ]; then exec {sys.executable} "$@"; fi
echo "$@"
exit "$STATUS"
"""


def run_task(folder: Path, number: int, count: int = 3, status: int = 0, *arguments: str) -> tuple[int, list[str]]:
    """Run one task of a job array with stand-ins for Slurm and training; return its exit status and output lines."""
    (folder / "bin").mkdir(exist_ok=True)
    programs = {"python": FAKE_PYTHON, "srun": '#!/bin/bash\nexec "$@"\n'}
    programs["scontrol"] = '#!/bin/bash\necho scontrol "$@"\n'
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    variables = {"COUNT": count, "ID": number, "MIN": 0, "MAX": count - 1}
    environment = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in variables.items()}
    environment |= {"SLURM_ARRAY_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(ROOT), "PYTHONPATH": str(ROOT)}
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHON": "python", "STATUS": str(status)}
    done = subprocess.run(
        ["bash", LAUNCH / "islands.sbatch", *(arguments or ("--config=a.py", f"--workdir={folder / 'runs'}"))],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout.splitlines()


def test_array_tasks_are_islands_of_one_run_and_later_tasks_know_earlier_addresses(tmp_path):
    runs = tmp_path / "runs"
    host = subprocess.run(["hostname", "-f"], capture_output=True, text=True, check=True).stdout.strip()
    assert run_task(tmp_path, 0)[0] == 0
    status, lines = run_task(tmp_path, 2)
    expected = [
        *("-m", "noloco_jax.island", "train", "--config=a.py", "--config.num_replicas=3"),
        *(f"--roster={runs}/island2/roster.toml", "--name=island2", f"--keys={runs}/keys/island2"),
        *(f"--address={host}:7072", f"--workdir={runs}/island2"),
    ]
    assert status == 0 and lines == [" ".join(expected)]
    first, last = (read_roster(runs / f"island{i}" / "roster.toml") for i in (0, 2))
    assert first.version == last.version
    assert [str(island.address) for island in first.islands][1:] == ["island1.invalid:7071", "island2.invalid:7072"]
    assert [str(island.address) for island in last.islands][::2] == [f"{host}:7070", f"{host}:7072"]
    for name in last.names:
        load_keys(runs / "keys" / name, name)


@pytest.mark.parametrize(("status", "requeued"), [(75, ["scontrol requeue 17_0"]), (2, [])])
def test_a_stopped_task_is_requeued_and_one_with_a_user_error_is_not(tmp_path, status, requeued):
    found, lines = run_task(tmp_path, 0, status=status)
    assert found == status and [line for line in lines if line.startswith("scontrol")] == requeued


@pytest.mark.parametrize(
    ("count", "arguments", "line"),
    [(1, ("--workdir=x",), "give --array=0-M"), (2, ("--config=a.py",), "--workdir=DIR is missing")],
)
def test_a_missing_array_or_workdir_is_reported(tmp_path, count, arguments, line):
    status, lines = run_task(tmp_path, 0, count, 0, *arguments)
    assert status == 2 and line in lines[-1]
