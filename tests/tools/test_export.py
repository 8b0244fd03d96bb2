"""`python -m noloco_jax.export` on a run's newest checkpoint."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError
from transformers import AutoTokenizer

from noloco_jax.checkpoint.given_model import opened_model
from noloco_jax.checkpoint.record import copy_inputs
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.trained_model import load_for_export, write_model_folder
from noloco_jax.config import DataConfig, ModelConfig, TrainConfig, from_dict
from noloco_jax.data import ByteTokenizer
from noloco_jax.errors import TransientError, UserError
from noloco_jax.model.huggingface import config_from_folder, load_params, save_folder
from noloco_jax.model.huggingface_config import max_positions
from noloco_jax.model.tokenizer_files import save_tokenizer
from noloco_jax.tools import export, generate
from support.model_makers import make_run, random_params
from support.paths import SHARED

TOKENIZER = SHARED / "data" / "tokenizers" / "c4_bpe_4096"

CONFIG = TrainConfig(
    num_replicas=3,
    model=ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2),
    data=DataConfig(sequence_length=128),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, make_run(workdir, CONFIG)


def exported(folder):
    config = from_dict({"model": config_from_folder(folder)}).model
    assert config == CONFIG.model
    return load_params(folder, config)


def prompted_with(folder, text):
    """The ids that `generate` continues."""
    args = generate._parser().parse_args([f"--model={folder}", f"--prompt={text}", "--max_new_tokens=9"])
    with opened_model(args) as model:
        return generate._checked_prompt(args, model)[0]


def test_the_merged_model_is_the_mean_of_the_replicas(run, tmp_path, capsys):
    workdir, replicas = run
    assert export.main([f"--workdir={workdir}", f"--out={tmp_path / 'out'}"]) == 0
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *replicas)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), exported(tmp_path / "out"), mean)
    assert "the mean of 3 replicas" in capsys.readouterr().out


def test_a_chosen_replica_is_exported_bit_for_bit(run, tmp_path):
    workdir, replicas = run
    export.main([f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--replica=1"])
    jax.tree.map(np.testing.assert_array_equal, exported(tmp_path / "out"), replicas[1])


@pytest.mark.parametrize("replica", [None, 1])
def test_a_loaded_model_keeps_no_other_replica_in_memory(run, replica):
    for leaf in jax.tree.leaves(load_for_export(run[0], replica)[0]):
        assert (leaf if leaf.base is None else leaf.base).nbytes == leaf.nbytes


def test_a_tokenizer_that_changed_since_training_is_refused(run, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "fingerprint", "other")
    with pytest.raises(UserError, match=r"trained with \(fingerprint byte, now other\): restore its files, or name it"):
        load_for_export(run[0], tokenizer=ByteTokenizer())


def prune_at_first_read(run, folder, monkeypatch, part: str) -> list[dict]:
    """Copy the run so that the checkpoint of step 7 is deleted as soon as it is read.

    Return the replicas of the newer one, of step 9.
    """
    workdir, replicas = run
    shutil.copytree(workdir, folder)
    restore, calls = orbax.checkpoint.PyTreeCheckpointer.restore, []

    def prune_and_restore(*args, **kwargs):
        if not calls:
            shutil.copytree(workdir / "checkpoints/7", folder / "checkpoints/9")
            shutil.rmtree(folder / "checkpoints/7" / part)
        calls.append(None)
        return restore(*args, **kwargs)

    monkeypatch.setattr(orbax.checkpoint.PyTreeCheckpointer, "restore", prune_and_restore)
    return replicas


@pytest.mark.parametrize("part", ["", "state"], ids=["gone", "half gone"])
def test_a_checkpoint_pruned_while_it_is_read_gives_way_to_the_newer(run, tmp_path, monkeypatch, part):
    replicas = prune_at_first_read(run, tmp_path / "run", monkeypatch, part)
    jax.tree.map(np.testing.assert_array_equal, load_for_export(tmp_path / "run", 1)[0], replicas[1])


def test_a_vanished_checkpoint_is_a_transient_error_and_not_damage(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    checkpoints = Checkpointer(tmp_path / "run", CONFIG, read_only=True)
    shutil.rmtree(tmp_path / "run/checkpoints/7")
    with pytest.raises(TransientError, match="was deleted while it was read: the same command reads the newest"):
        checkpoints.newest()
    checkpoints.close()


def test_an_export_touches_no_accelerator(run, tmp_path):
    command = [sys.executable, "-m", "noloco_jax.export", f"--workdir={run[0]}", f"--out={tmp_path / 'out'}"]
    # JAX refuses an unknown platform as soon as it looks for devices.
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_byte_model_is_exported_with_a_byte_tokenizer(run, tmp_path):
    export.main([f"--workdir={run[0]}", f"--out={tmp_path / 'out'}"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("é")["input_ids"] == [
        256,
        0xC3,
        0xA9,
    ]  # BOS first, as in training


@pytest.mark.parametrize(
    ("columns", "expected"),
    [({"input_ids": [[1, 2]], "label": [[2, 3]]}, (None, None)), ({"text": ["a"]}, (256, 257)), (None, (None, None))],
    ids=["ids", "text", "no longer there"],
)
def test_bos_and_eos_are_exported_only_if_the_tokenizer_is_known(columns, expected, tmp_path, capsys):
    path = tmp_path / "data"
    if columns is not None:
        for split in ("train", "validation"):
            path.mkdir(exist_ok=True)
            pq.write_table(pa.table(columns), path / f"{split}-0.parquet")
    data = dataclasses.replace(CONFIG.data, kind="parquet", path=str(path))
    make_run(tmp_path / "run", dataclasses.replace(CONFIG, data=data))
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"])
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == expected
    assert ("the run read token ids" in capsys.readouterr().out) == (expected == (None, None))


def test_special_tokens_that_no_document_had_are_not_exported_and_not_prompted_with(tmp_path):
    (tmp_path / "text.txt").write_text("a few words\n" * 99)
    data = dataclasses.replace(CONFIG.data, kind="text", path=str(tmp_path / "text.txt"), add_bos=False, add_eos=False)
    make_run(tmp_path / "run", dataclasses.replace(CONFIG, data=data))
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"])
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, None)
    assert prompted_with(tmp_path / "out", "ab") == [97, 98]


@pytest.mark.skipif(not TOKENIZER.is_dir(), reason="the tokenizer of ../shared is not here")
def test_transformers_finds_model_config_and_tokenizer_of_a_run(tmp_path):
    model = dataclasses.replace(CONFIG.model, vocab_size=4096)
    data = dataclasses.replace(CONFIG.data, tokenizer=str(TOKENIZER))
    make_run(tmp_path / "run", dataclasses.replace(CONFIG, model=model, data=data))
    export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"])
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    given = AutoTokenizer.from_pretrained(TOKENIZER)
    assert (config.vocab_size, config.max_position_embeddings) == (4096, 128)
    assert (config.bos_token_id, config.eos_token_id) == (given.bos_token_id, given.eos_token_id)
    assert tokenizer("A day at sea.")["input_ids"] == [given.bos_token_id, *given("A day at sea.")["input_ids"]]
    assert prompted_with(tmp_path / "out", "A day at sea.") == tokenizer("A day at sea.")["input_ids"]


def test_a_runs_tokenizer_is_found_from_another_folder_and_named_where_it_is_gone(tmp_path, monkeypatch):
    """Its path was relative; the first run has a copy of it, the second is from before its first save of one."""
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, tokenizer="tokenizer"))
    (tmp_path / "here/tokenizer").mkdir(parents=True)
    save_tokenizer(ByteTokenizer(), tmp_path / "here/tokenizer", add_bos=False)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("copied", "bare"):
        make_run(tmp_path / name, config)
    copy_inputs("tokenizer", "", tmp_path / "copied")
    monkeypatch.chdir(tmp_path)
    export.main([f"--workdir={tmp_path / 'copied'}", f"--out={tmp_path / 'a'}"])
    export.main([f"--workdir={tmp_path / 'bare'}", f"--out={tmp_path / 'b'}", "--tokenizer=here/tokenizer"])
    written = [json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path / "a", tmp_path / "b")]
    assert written[0] == written[1]
    for command in (export, generate):
        flags = ["--out=c"] if command is export else ["--prompt=A", "--max_new_tokens=9"]
        with pytest.raises(UserError, match=r"the tokenizer 'byte' is not the one .*\(fingerprint \w+, now byte\)"):
            command.main([f"--workdir={tmp_path / 'bare'}", "--tokenizer=byte", *flags])
        with pytest.raises(UserError, match=r"^--tokenizer='./gone': there is no such folder"):
            command.main([f"--workdir={tmp_path / 'bare'}", "--tokenizer=./gone", *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replica=3"], "replica 3 does not exist: the run has 0 to 2"),
        (["--workdir=nowhere"], r"nowhere/config\.json is not there"),
        (["--out=tests"], "tests already holds something"),
        (["--replicas=1"], "did you mean '--replica'"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(run, tmp_path, flags, message):
    with pytest.raises(UserError, match=message) as caught:
        export.main([f"--workdir={run[0]}", f"--out={tmp_path / 'out'}", *flags])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hub(monkeypatch):
    """Return the calls to a hub that accepts everything: (call, arguments, files and their bytes)."""
    calls = []

    def upload(api, *, folder_path, **arguments):
        files = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}
        calls.append(("upload", arguments, files))
        return "https://hub/owner/name/commit/1"

    monkeypatch.setattr(HfApi, "whoami", lambda api: {"name": "owner"})
    monkeypatch.setattr(HfApi, "create_repo", lambda api, name, **more: calls.append(("create", (name, more), {})))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    return calls


def test_a_push_is_one_commit_of_the_files_that_an_export_writes(run, tmp_path, hub, capsys):
    export.main([f"--workdir={run[0]}", f"--out={tmp_path / 'out'}"])
    capsys.readouterr()
    export.main([f"--workdir={run[0]}", "--push=owner/name", "--private"])
    assert capsys.readouterr().out == "pushed: https://hub/owner/name/commit/1\n"
    made, (name, arguments, files) = hub
    assert made == ("create", ("owner/name", {"private": True, "exist_ok": True}), {})
    assert (name, arguments["repo_id"]) == ("upload", "owner/name")
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("name", ["name", "owner/name/more", "owner/na me", "-/x"])
def test_an_invalid_name_on_the_hub_is_refused(run, hub, name):
    with pytest.raises(UserError, match="give USER/NAME"):
        export.main([f"--workdir={run[0]}", f"--push={name}"])
    assert hub == []


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (LocalTokenNotFoundError("no token"), UserError, "asks for a login to write .*: log in by"),
        (ConnectionError("no route"), TransientError, "could not be pushed .*no route.*try again"),
    ],
)
def test_no_weights_are_read_without_a_login_or_a_reachable_hub(run, hub, monkeypatch, error, kind, said):
    def fail(api):
        raise error

    monkeypatch.setattr(HfApi, "whoami", fail)
    monkeypatch.setattr(export, "load_for_export", pytest.fail)
    with pytest.raises(kind, match=said) as caught:
        export.main([f"--workdir={run[0]}", "--push=owner/name"])
    assert (type(caught.value), hub) == (kind, [])


def test_an_export_without_a_destination_is_refused(run):
    with pytest.raises(UserError, match="give --out=FOLDER, --push=USER/NAME or both"):
        export.main([f"--workdir={run[0]}"])


def test_a_model_that_began_as_another_keeps_its_length_and_generation_config_though_that_one_is_gone(tmp_path):
    """Training on shorter sequences takes no positions away."""
    params, given = random_params(CONFIG.model), tmp_path / "given"
    save_folder(given, params, CONFIG.model, max_position_embeddings=4096)
    kept = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (given / "generation_config.json").write_text(json.dumps(kept | {"bos_token_id": 1, "eos_token_id": [2, 3, 5]}))
    copy_inputs("byte", str(given), tmp_path / "run")
    shutil.rmtree(given)
    copy_inputs("byte", None, tmp_path / "run")  # a resume
    where = tmp_path / "m", params, CONFIG.model, CONFIG.data, ByteTokenizer(), "replica 0"
    lines = write_model_folder(*where, str(given), tmp_path / "run")
    assert max_positions(tmp_path / "m") == 4096
    ids = {"bos_token_id": 256, "eos_token_id": [2, 3, 5, 257]}
    assert json.loads((tmp_path / "m/generation_config.json").read_text()) == kept | ids
    assert len([*lines]) == 1
    copy_inputs("byte", "", tmp_path / "run")  # a new run in its place
    assert not (tmp_path / "run/init_from").exists()


def test_an_export_says_where_the_model_that_a_run_began_as_is_gone(tmp_path):
    params = random_params(CONFIG.model)
    where = tmp_path / "m", params, CONFIG.model, CONFIG.data, ByteTokenizer(), "replica 0"
    _, note = write_model_folder(*where, str(tmp_path / "gone"), None)
    assert "max_position_embeddings is 128" in note and max_positions(tmp_path / "m") == 128
