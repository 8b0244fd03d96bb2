"""The files in configs/: they load, they stand alone, and they hold the paper's numbers."""

import dataclasses

import pytest

from noloco_jax.config import TrainConfig, load_config
from noloco_jax.errors import UserError
from support.paths import CONFIGS

RUNS = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "paper")
PAPER = sorted(f"{data}_{size}" for data in ("c4", "reddit") for size in ("125m", "1b", "7b"))


def load(name: str, argument: str = "", *overrides: str) -> TrainConfig:
    suffix = f":{argument}" if argument else ""
    return load_config(f"{CONFIGS / name}.py{suffix}", overrides)


def required_flags(name: str) -> list[str]:
    """Flags that the user has to give on the command line."""
    return ["--config.data.tokenizer=byte"] if name == "c4_tiny" else []


def test_every_file_is_a_consistent_configuration_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in RUNS:
        assert load(name, "", *required_flags(name)).method == "noloco", name


# hidden, layers, heads, FFN, lr, tokens in a step
TABLE = {
    "125m": (768, 12, 12, 3072, 6e-4, 2**19),
    "1b": (2048, 24, 32, 8192, 2e-4, 2**20),
    "7b": (4096, 32, 32, 16384, 1.2e-4, 2**21),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models_have_the_papers_numbers(name):
    config = load(name)
    hidden, layers, heads, ffn, lr, tokens = TABLE[name.rpartition("_")[2]]
    model, inner, outer, data = config.model, config.inner, config.outer, config.data
    assert (model.hidden_size, model.num_layers, model.num_heads, model.intermediate_size) == (
        hidden,
        layers,
        heads,
        ffn,
    )
    assert (model.num_kv_heads, model.vocab_size, model.dtype, model.param_dtype) == (
        heads,
        128_002,
        "bfloat16",
        "float32",
    )
    assert (inner.lr, inner.warmup_steps, inner.clip_norm, inner.weight_decay) == (lr, 1000, 1.0, 0.0)
    assert inner.min_lr == pytest.approx(lr / 10)
    assert (outer.momentum, outer.lr, outer.sync_every, outer.group_size) == (0.5, 0.7, 50, 2)
    assert outer.order == "independent"
    assert (config.num_steps, data.sequence_length) == (25_000, 1024)
    assert config.num_replicas * data.batch_size * data.sequence_length == tokens


def test_the_global_batch_does_not_depend_on_the_replicas():
    for argument in ("noloco,replicas=16", "noloco,replicas=4,stages=2", "ddp,replicas=1"):
        config = load("c4_125m", argument)
        assert config.num_replicas * config.data.batch_size == 512, argument


def test_the_replicas_flag_divides_the_global_batch_like_the_argument():
    assert load("c4_1b", "", "--config.num_replicas=32") == load("c4_1b", "noloco,replicas=32")


@pytest.mark.parametrize("replicas", [3, 12, 24])
def test_replicas_that_do_not_divide_the_global_batch_are_refused(replicas):
    message = f"num_replicas={replicas} does not divide the 512 sequences of a step"
    for argument, flags in ((f"ddp,replicas={replicas}", []), ("ddp", [f"--config.num_replicas={replicas}"])):
        with pytest.raises(UserError, match=message) as refused:
            load("c4_125m", argument, *flags)
        assert "\n" not in str(refused.value)
        assert load("c4_125m", argument, *flags, "--config.data.batch_size=7").data.batch_size == 7


def test_an_invalid_argument_is_refused():
    for argument in ("nolocco", "noloco,replica=4", "noloco,replicas=x", "noloco,stages", "noloco,groups=4"):
        with pytest.raises(UserError, match=r"c4_1b\.py"):
            load("c4_1b", argument)


@pytest.mark.parametrize("name", [*PAPER, "c4_tiny"])
def test_best_changes_only_optimizer_and_outer_step_for_any_number_of_replicas(name):
    plain, best = load(name, "", *required_flags(name)), load(name, "best", *required_flags(name))
    assert (best.inner.optimizer, best.outer.fragments, best.outer.wire) == ("muon", 8, "modulo4")
    assert best.inner.adam_lr == plain.inner.lr and best.inner.min_lr == pytest.approx(best.inner.lr / 10)
    assert dataclasses.replace(best, inner=plain.inner, outer=plain.outer) == plain
    if name != "c4_tiny":
        chosen = {
            argument: load(name, f"best,replicas={argument}", "--config.data.batch_size=1").outer
            for argument in ("4", "6", "16", "20", "16,groups=2")
        }
        assert {argument: (outer.order, outer.group_size, outer.sync_every) for argument, outer in chosen.items()} == {
            "4": ("hypercube", 2, 5),
            "6": ("passes", 2, 5),
            "16": ("hypercube", 4, 8),
            "20": ("passes", 4, 8),
            "16,groups=2": ("hypercube", 2, 5),
        }
