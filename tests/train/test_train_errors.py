"""Mismatches of config, workdir and data: a one-line error, exit status 2, nothing overwritten.

Refusals before compilation are tested in the tests' own process, all others in a real one.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_jax.cluster.workdir_lock import WorkdirLock
from noloco_jax.config import TrainConfig, from_dict, load_config
from noloco_jax.data import ByteTokenizer
from noloco_jax.errors import UserError
from noloco_jax.metrics import memory
from noloco_jax.model.huggingface import save_folder
from noloco_jax.train import inputs, phases
from noloco_jax.train.inputs import given_weights
from noloco_jax.train.phases import check_end
from noloco_jax.train.run import train
from support import processes
from support.data_makers import write_c4
from support.model_makers import random_params
from support.processes import UNLISTED
from support.texts import lines_of_words

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def trained(config) -> Path:
    """Return the workdir of a run that ended at step 8."""
    return processes.trained(config, "trained", "--config.num_steps=8")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def error_lines(output: str) -> list[str]:
    """Return the error lines; an interrupted thread of Orbax may leave part of its own line before one."""
    return re.findall(r"(?:^|\s)(error: .*)", output, re.MULTILINE)


def train_here(config: Path, workdir: Path, *overrides: str, dry_run: bool = False) -> int:
    return train(load_config(str(config), overrides), workdir, dry_run=dry_run)


def refusal(config: Path, workdir: Path, *overrides: str, dry_run: bool = False) -> str:
    """Return the one-line error of a refused start, and check that the workdir is unchanged."""
    before = contents(workdir)
    with pytest.raises(UserError) as raised:
        train_here(config, workdir, *overrides, dry_run=dry_run)
    assert contents(workdir) == before
    [line] = str(raised.value).splitlines()
    return line


def test_a_workdir_in_use_is_refused(config, tmp_path):
    with WorkdirLock(tmp_path):
        line = refusal(config, tmp_path)
    assert re.fullmatch(
        rf"\S+ is in use by the trainer on \S+ \(process {os.getpid()}, since \d{{4}}-\d\d-\d\d [^)]*\): "
        "wait for its end, stop it, or give another --workdir",
        line,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.model.num_layers=3"], "model.num_layers=2, the config has 3: give --config.model.num_layers=2"),
        (["--config.method=diloco"], "method='noloco', the config has 'diloco'"),
        (["--config.data.add_bos=False"], "data.add_bos=True, the config has False: give --config.data.add_bos=True"),
        (["--config.num_replicas=2"], "give --config.elastic=merge to make 2 of the 4"),
        (["--config.num_replicas=8", "--config.elastic=merge"], "give --config.elastic=copy to make 8 of the 4"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(config, trained, arguments, message):
    assert message in refusal(config, trained, "--config.num_steps=24", *arguments)


@pytest.fixture
def no_compiling(monkeypatch):
    def fail(*_: object) -> NoReturn:
        pytest.fail("compilation began before the refusal")

    monkeypatch.setattr(phases, "compile_run", fail)


def test_another_tokenizer_is_refused_before_anything_is_compiled(config, trained, monkeypatch, no_compiling):
    monkeypatch.setattr(ByteTokenizer, "fingerprint", "of other tokens")
    line = refusal(config, trained, "--config.num_steps=24")
    assert "data with tokenizer 'byte', this run's has 'of other tokens'" in line


def test_pieces_of_another_length_are_refused_before_anything_is_compiled(config, trained, no_compiling):
    line = refusal(config, trained, "--config.num_steps=24", "--config.data.sequence_length=1024")
    assert "piece_bytes (by data.sequence_length) 256, this run's has 2048" in line


def test_from_step_resumes_from_an_earlier_checkpoint_and_reports_changed_settings(config, trained, tmp_path):
    workdir = tmp_path / "back"
    shutil.copytree(trained, workdir)
    changes = ["--config.num_steps=12", "--config.outer.sync_every=2", "--config.eval_every=0"]
    [(status, output)] = processes.run(config, workdir, "--from_step=4", *changes)
    assert status == 0, output
    _, _, after = output.partition("resuming from the checkpoint of step 4\n")
    changed = ["num_steps: 8 before, 12 now", "outer.sync_every: 4 before, 2 now", "eval_every: 12 before, 0 now"]
    assert after.splitlines()[:3] == changed
    assert sorted(path.name for path in (workdir / "checkpoints_set_aside").iterdir()) == ["8"]
    evaluated = [line["step"] for line in processes.metrics(workdir) if line["kind"] == "eval"]
    assert evaluated == [12]  # only at the end


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_file_in_the_place_of_a_folder_is_refused(config, tmp_path, name):
    workdir = tmp_path / "workdir"
    if name:
        workdir.mkdir()
    (workdir / name).write_text("")
    for dry_run in (True, False):
        assert f"{workdir / name} is in the way" in refusal(config, workdir, dry_run=dry_run)


def test_a_memory_estimate_above_the_device_memory_warns(config, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda _: 3 << 10)
    with pytest.warns(UserWarning, match=r"estimated at [\d.]+ [KM]iB a device, and the first one here has 3 KiB: "):
        assert train_here(config, tmp_path / "workdir", dry_run=True) == 0


def test_a_dry_run_writes_nothing_and_describes_the_method_with_its_defaults(config, tmp_path, capsys):
    flags = ["--config.method=diloco", "--config.outer.lr=0.6", "--config.outer.sync_every=3"]
    assert train_here(config, tmp_path / "workdir", *flags, dry_run=True) == 0
    assert "all average every 3 steps (Nesterov, alpha 0.9, beta 0.6)" in capsys.readouterr().out
    assert not (tmp_path / "workdir").exists()


def test_the_banner_tells_of_a_run_without_an_outer_step(config, tmp_path, capsys):
    flags = ["--config.num_steps=8", "--config.outer.sync_every=50"]
    assert train_here(config, tmp_path / "workdir", *flags, dry_run=True) == 0
    assert "none, as 8 steps have no outer step: lower outer.sync_every=50" in capsys.readouterr().out


def test_an_empty_sample_prompt_without_bos_is_refused(config, tmp_path):
    line = refusal(config, tmp_path, "--config.sample_tokens=5", "--config.data.add_bos=False")
    assert "sample_prompt='' has no tokens" in line


def of_steps(**values: object) -> TrainConfig:
    return from_dict({"inner": {"warmup_steps": 0}, **values})


def saved_at(step: int, **values: object) -> Any:
    """Return what a checkpoint of a step says of its run."""
    return SimpleNamespace(step=step, config=of_steps(**values))


@pytest.mark.parametrize("num_steps", [4, 8])
def test_a_run_that_would_end_without_its_last_step_is_refused(num_steps):
    with pytest.raises(UserError, match=f"step 8 of 16, and num_steps={num_steps} leaves no step.*num_steps=9 or more"):
        check_end(num_steps, saved_at(8, num_steps=16))


def test_a_run_that_has_ended_or_goes_on_is_not_refused():
    for before, now in [(16, 9), (8, 4), (8, 8), (8, 9)]:
        check_end(now, saved_at(8, num_steps=before))


def test_weights_that_lie_beside_another_tokenizer_are_refused(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    config = from_dict({"model": sizes, "init_from": str(tmp_path / "model")})
    save_folder(config.init_from, random_params(config.model), config.model, ByteTokenizer(), max_position_embeddings=8)
    given_weights(config, ByteTokenizer())
    path = tmp_path / "model" / "tokenizer.json"
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": words}))
    with pytest.raises(UserError, match=r"data\.tokenizer='byte' makes other token ids than the tokenizer"):
        given_weights(config, ByteTokenizer())


def test_weights_that_are_not_finite_are_refused_at_the_start_naming_the_array(tmp_path, monkeypatch):
    """The rate is not to blame for them."""
    config = from_dict({"init_from": str(tmp_path)})
    params = {"blocks": {"up": np.ones((2, 3), np.float32)}, "embed": np.full((4, 3), np.nan, np.float32)}
    monkeypatch.setattr(inputs, "load_params", lambda *_: params)
    with pytest.raises(UserError, match=r"has values in \['embed'\] that are not finite") as refused:
        given_weights(config, None)
    assert "lr" not in str(refused.value)


def test_a_disk_without_room_for_a_checkpoint_is_told_before_anything_is_compiled_but_not_once_a_run_is_over(
    config, trained, tmp_path, monkeypatch, no_compiling
):
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**10, 2**10))
    assert "KiB are free: make room" in refusal(config, trained, "--config.num_steps=24")
    with pytest.warns(UserWarning, match="KiB are free: make room"):
        assert train_here(config, trained, "--config.num_steps=24", dry_run=True) == 0
    assert train_here(config, trained, "--config.num_steps=8") == 0


def test_a_dry_run_refuses_a_checkpoint_with_missing_arrays(config, trained, tmp_path):
    workdir = tmp_path / "no_arrays"
    shutil.copytree(trained, workdir)
    for path in (workdir / "checkpoints/8/state").rglob("d/*"):
        path.unlink()
    line = refusal(config, workdir, "--config.num_steps=24", dry_run=True)
    assert re.search(r"checkpoints/8 cannot be read \(state/\S+ is missing\): give --from_step=", line)


def test_a_dry_run_reports_the_number_of_verified_files(config, trained, capsys):
    assert train_here(config, trained, "--config.num_steps=24", dry_run=True) == 0
    number = len(contents(trained / "checkpoints/8").keys() - UNLISTED)
    assert f"the checkpoint of step 8 is as it was saved: {number} files, " in capsys.readouterr().out


def test_an_error_of_one_process_is_named_by_it_and_ends_all(config, tmp_path):
    """Every fourth document, replica 2's, is empty."""
    texts = [f"{number} {line}" for number, line in enumerate(lines_of_words(480))]
    write_c4(tmp_path / "validation", [texts])
    texts[2::4] = [""] * 120
    write_c4(tmp_path / "c4", [texts])
    fields = {"data.kind": "jsonl", "data.path": tmp_path / "c4", "data.validation_path": tmp_path / "validation"}
    fields |= {"data.add_bos": False, "data.add_eos": False}
    run = processes.start(config, tmp_path, *(f"--config.{name}={value}" for name, value in fields.items()), number=2)
    results = processes.finish(run)
    assert (results[1][0], results[0][0]) == (2, 1), processes.report(results)
    [line] = error_lines(results[1][1])
    assert "the documents of replica 2 of 4 hold no token" in line and "process 1 on" in line


def test_a_dry_run_with_a_wandb_project_requires_the_package(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = load_config(str(config))
    with pytest.raises(UserError, match="pip install wandb"):
        train(run, tmp_path / "run", wandb_project="p", dry_run=True)
    assert not (tmp_path / "run").exists()


def test_sampling_from_token_id_data_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    ids = pa.array([[1, 2, 3, 4] * 20] * 50)
    pq.write_table(pa.table({"input_ids": ids, "labels": ids}), tmp_path / "data/train-0.parquet")
    fields = {
        "num_replicas": 2,
        "num_steps": 1,
        "sample_tokens": 5,
        "inner": {"warmup_steps": 0},
        "data": {"kind": "parquet", "path": str(tmp_path / "data")},
    }
    with pytest.raises(UserError, match="sample_tokens=5 needs a tokenizer, and the data are token ids"):
        train(from_dict(fields), tmp_path / "run")
