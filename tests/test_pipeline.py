"""Pipeline stages with routing between replicas, on one device and on eight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import from_dict
from noloco_jax.errors import UserError
from noloco_jax.model.llama import embed, head_kernel, init_params, logits, rms_norm, run_layers
from noloco_jax.parallel.mesh import make_mesh
from noloco_jax.parallel.programs import build_programs
from noloco_jax.parallel.routing import draw_routes, route_pool
from noloco_jax.parallel.stages import cut, map_params, uncut

N, B, T, V = 4, 4, 8, 32


def run_config(num_stages=2, routing="random", num_microbatches=2, remat="none", **mesh):
    return from_dict(
        {
            "num_replicas": N,
            "num_microbatches": num_microbatches,
            "num_steps": 20,
            "model": {
                "vocab_size": V,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_layers": 4,
                "num_heads": 2,
                "num_kv_heads": 2,
                "remat": remat,
            },
            "mesh": {"stage": num_stages, "routing": routing, **mesh},
            "inner": {"warmup_steps": 0, "lr": 1e-2, "eps": 1e-3},  # well above rounding, which Adam would blow up
            "outer": {"sync_every": 2},
            "data": {"batch_size": B, "sequence_length": T},
        }
    )


@functools.cache
def batches(num_steps):
    rng = np.random.default_rng(0)
    made = []
    for _ in range(num_steps):
        ids_NBT = rng.integers(0, V, (N, B, T + 1), dtype=np.int32)
        labels_NBT = ids_NBT[..., 1:].copy()
        labels_NBT[0, 1, 3:] = -100  # replicas with other numbers of labels
        labels_NBT[2, :, 6:] = -100
        made.append({"input_ids": ids_NBT[..., :-1].copy(), "labels": labels_NBT})
    return made


@functools.cache
def trajectory(config, num_devices, num_steps=4):
    """Losses (steps, N) and gradient norms of a run with an outer step after every second step, weights, evaluation."""
    programs = build_programs(config, make_mesh(config, jax.devices()[:num_devices]))
    params, inner, outer = programs.init(jax.random.key(0))
    losses, norms = [], []
    for step, batch in enumerate(batches(num_steps), start=1):
        batch = {name: jax.device_put(x, programs.batch[name].sharding) for name, x in batch.items()}
        params, inner, metrics = programs.inner_step(params, inner, batch, jnp.int32(step))
        losses.append(np.asarray(metrics.loss))
        norms.append(np.asarray(metrics.grad_norm))
        if step % 2 == 0:
            params, outer = programs.outer_step(params, outer, jnp.int32(step))
    evaluation = jax.tree.map(np.asarray, programs.evaluate(params, batch))
    return np.array(losses), np.array(norms), jax.tree.map(np.asarray, uncut(params)), evaluation


def assert_same_run(one, other):
    for mine, theirs in zip(one, other, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), mine, theirs)


LAYOUTS = {
    "two stages on one device": (run_config(2, "fixed"), 1),
    "4 replicas x 2 stages": (run_config(2, "fixed"), 8),
    "two replicas a device": (run_config(4, "fixed", 4, replica=2), 8),
    "2 replicas x 2 stages x fsdp 2": (run_config(2, "fixed", replica=2, fsdp=2), 8),
    "2 replicas x 2 stages x tensor 2": (run_config(2, "fixed", replica=2, tensor=2), 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fixed_routing_equals_the_model_that_is_not_cut(layout):
    assert_same_run(trajectory(*LAYOUTS[layout]), trajectory(run_config(1, "fixed", 1), 1))


def pick(tree, *index):
    return jax.tree.map(lambda x: x[index], tree)


def oracle(config, params, batch, step):
    """Losses and gradients of micro-batches pushed, one by one, through the stages of the replicas they are routed to."""
    num_stages, model = config.mesh.stage, config.model
    pool = route_pool(N, num_stages, config.seed, config.mesh.routing)
    routes = draw_routes(len(pool), config.num_microbatches + num_stages - 1, config.seed, step)
    rows = B // config.num_microbatches
    layers = model.num_layers // num_stages

    def total(params):
        losses = [0.0] * N
        for source in range(N):
            num_labels = (batch["labels"][source] != -100).sum()
            for m in range(config.num_microbatches):
                part = slice(m * rows, (m + 1) * rows)
                labels_BT = batch["labels"][source, part]
                h_BTD = embed(model, pick(params, source), batch["input_ids"][source, part])
                replica = source
                for stage in range(num_stages):
                    chosen = slice(stage * layers, (stage + 1) * layers)
                    h_BTD = run_layers(model, pick(params["blocks"], replica, chosen), h_BTD)
                    if stage < num_stages - 1:
                        replica = int(pool[routes[m + stage], stage, replica])
                last = pick({name: params[name] for name in ("norm", "head")}, replica)
                logits_BTV = rms_norm(h_BTD, last["norm"], model.norm_eps) @ head_kernel(last)
                log_p_BTV = jax.nn.log_softmax(logits_BTV)
                nll_BT = -jnp.take_along_axis(log_p_BTV, np.maximum(labels_BT, 0)[..., None], axis=-1)[..., 0]
                losses[replica] += jnp.sum(nll_BT * (labels_BT != -100)) / num_labels
        return sum(losses), jnp.stack(losses)

    return jax.grad(total, has_aux=True)(params)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (4, 4)])
def test_random_routing_equals_the_one_by_one_oracle(num_stages, num_microbatches):
    config = run_config(num_stages, "random", num_microbatches)
    losses, norms, _, _ = trajectory(config, 1)
    params = jax.tree.map(lambda x: jnp.stack([x] * N), init_params(config.model, jax.random.key(0)))
    gradients, expected = oracle(config, params, batches(4)[0], jnp.int32(1))
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    squares = [jnp.sum(jnp.square(g.reshape(N, -1)), axis=1) for g in jax.tree.leaves(gradients)]
    np.testing.assert_allclose(norms[0], np.sqrt(sum(squares)), rtol=1e-5)


RANDOM_LAYOUTS = {
    "4 replicas x 2 stages": (run_config(2), 8, run_config(2)),
    "two replicas a device": (run_config(2, replica=2), 4, run_config(2)),
    "a stage computed again": (run_config(2, replica=1, remat="stage"), 2, run_config(2)),
    "2 replicas x 4 stages": (run_config(4, num_microbatches=4, replica=2), 8, run_config(4, num_microbatches=4)),
}


@pytest.mark.parametrize("layout", RANDOM_LAYOUTS)
def test_random_routing_does_not_depend_on_the_devices(layout):
    config, num_devices, virtual = RANDOM_LAYOUTS[layout]
    assert_same_run(trajectory(config, num_devices), trajectory(virtual, 1))


def test_random_routing_is_not_fixed_routing():
    random, fixed = trajectory(run_config(2), 1), trajectory(run_config(2, "fixed"), 1)
    assert np.abs(random[0][1:] - fixed[0][1:]).max() > 1e-3


def test_evaluation_takes_fixed_routes():
    config = run_config(2)
    _, _, params, (nll_N, tokens_N) = trajectory(config, 8)
    batch = batches(4)[-1]
    for i in range(N):
        log_p_BTV = jax.nn.log_softmax(logits(config.model, pick(params, i), batch["input_ids"][i]))
        nll_BT = -jnp.take_along_axis(log_p_BTV, np.maximum(batch["labels"][i], 0)[..., None], axis=-1)[..., 0]
        live_BT = batch["labels"][i] != -100
        np.testing.assert_allclose(nll_N[i], jnp.sum(nll_BT * live_BT), rtol=1e-4)
        assert tokens_N[i] == live_BT.sum()


@pytest.mark.parametrize("num_stages", [2, 4])
def test_cutting_into_stages_and_back_changes_nothing(num_stages):
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), init_params(run_config(1, "fixed").model, jax.random.key(1)))
    state = {"moments": (params, 3), "weights": params}
    back = map_params(uncut, map_params(lambda p: cut(p, num_stages), state))
    jax.tree.map(np.testing.assert_array_equal, back, state)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_stages": 3}, ["model.num_layers=4", "mesh.stage=3"]),
        ({"num_microbatches": 3}, ["data.batch_size=4", "num_microbatches=3"]),
        ({"num_stages": 1, "remat": "stage"}, ["model.remat", "mesh.stage=1"]),
        ({"fsdp": 4, "num_microbatches": 2}, ["micro-batches of 2", "mesh.fsdp=4"]),
    ],
)
def test_stages_that_do_not_fit_are_an_error_that_names_both_numbers(changes, words):
    with pytest.raises(UserError) as error:
        make_mesh(run_config(**changes), jax.devices())
    assert all(word in str(error.value) for word in words)


def test_tied_embeddings_with_stages_are_an_error():
    config = run_config(2)
    values = dataclasses.asdict(config)
    values["model"]["tie_embeddings"] = True
    with pytest.raises(UserError, match="tie_embeddings"):
        from_dict(values)


def test_random_routing_of_one_replica_is_an_error():
    values = dataclasses.asdict(run_config(2)) | {"num_replicas": 1, "method": "local"}
    with pytest.raises(UserError, match="routing"):
        from_dict(values)
