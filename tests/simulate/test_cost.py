"""Bytes that replicas send by the cost model, against the trainer's own programs."""

import pytest

from noloco_jax.config import from_dict
from noloco_jax.model.kind import num_params
from noloco_jax.run.messages import messages_of
from noloco_jax.simulate.cost import Setting, all_reduce, group_exchange

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


def sent(method: str, num_replicas: int, **outer) -> tuple[int, float]:
    """Return (parameters, bytes that a replica sends in an outer step)."""
    config = from_dict({"method": method, "num_replicas": num_replicas, "model": MODEL, "outer": outer})
    messages = messages_of(config, {"replica": 1, "stage": 1, "fsdp": 1, "tensor": 1})
    return num_params(config.model)[0], messages.mean_of_outer_steps


@pytest.mark.parametrize("group", [(4, 2), (5, 2), (4, 4), (6, 3), (5, 3), (7, 4)], ids=str)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_bytes_of_a_group_exchange_equal_those_of_the_outer_program(group, wire):
    num_replicas, n = group
    params, expected = sent("noloco", num_replicas, group_size=n, wire=wire)
    setting = Setting(params=params, replicas=num_replicas, group_size=n, wire=wire)
    assert group_exchange(setting)[0] == pytest.approx(expected, rel=1e-3)  # shards are whole numbers of weights


def test_bytes_of_an_all_reduce_equal_those_of_dilocos_outer_program():
    params, expected = sent("diloco", 4)
    assert all_reduce(Setting(params=params, replicas=4))[0] == expected


def test_modulo_windows_cost_one_more_latency():
    coded, windowed = (Setting(params=1e6, latency=0.2, wire=wire) for wire in ("int4", "modulo4"))
    bytes_sent, seconds = group_exchange(windowed)
    assert bytes_sent == group_exchange(coded)[0]  # a window and a check in place of a scale
    assert seconds == pytest.approx(2 * 0.2 + 8 * bytes_sent / windowed.bandwidth)
