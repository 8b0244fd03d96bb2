import dataclasses

import numpy as np
import pytest

from noloco_jax.bench.routers import agreements, loads, main
from noloco_jax.config import DataConfig, ModelConfig, TrainConfig
from noloco_jax.errors import UserError
from support.model_makers import make_run

CONFIG = TrainConfig(
    num_replicas=2,
    eval_batches=2,
    model=ModelConfig(kind="moe", hidden_size=16, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=2),
    data=DataConfig(kind="text", sequence_length=16, batch_size=2),
)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text("Experts of a mixture share the tokens out. " * 40)
    return dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, path=str(tmp_path / "text.txt")))


def test_load_is_the_busiest_experts_tokens_over_the_mean():
    experts = np.array([[[[[0, 1], [0, 2], [0, 3]]]], [[[[0, 1], [2, 3], [3, 2]]]]])  # (2, 1, 1, 3, 2)
    np.testing.assert_allclose(loads(experts, 4), [(3 / 1.5 + 2 / 1.5) / 2])


def test_agreement_is_the_share_of_experts_in_common_in_any_order():
    experts = np.array([[[[[0, 1], [0, 2]]]], [[[[1, 0], [3, 2]]]]])
    np.testing.assert_allclose(agreements(experts), [0.75])


def test_a_run_gets_a_line_for_every_layer(config, tmp_path, capsys):
    make_run(tmp_path / "run", config)  # the second replica's weights are three times the first's
    main([f"--workdir={tmp_path / 'run'}"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["layer 0", "layer 1"]
    assert "agreement 100.0 %" not in lines[1]


def test_a_dense_run_is_refused(config, tmp_path):
    make_run(tmp_path / "run", dataclasses.replace(config, model=dataclasses.replace(config.model, kind="llama")))
    with pytest.raises(UserError, match="has no routers"):
        main([f"--workdir={tmp_path / 'run'}"])
