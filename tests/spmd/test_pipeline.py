"""Pipeline stages with routing between replicas, on one device and on eight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import from_dict
from noloco_jax.errors import UserError
from noloco_jax.model.architecture import init_params, loss
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.pipeline.routes import draw_routes, route_pool
from noloco_jax.spmd.programs import TrainState, build_programs
from noloco_jax.spmd.stages import resize_vocabulary
from support import tiny_model
from support.initial import initial_state
from support.tiny_model import Balanced, Tiny

N, B, T, V = 4, 4, 8, 125  # stages pad the vocabulary


def run_config(
    num_stages=2,
    routing="random",
    num_microbatches=2,
    remat="none",
    vocab_size=V,
    method="noloco",
    kind=tiny_model.BALANCED,
    **mesh,
):
    return from_dict(
        {
            "method": method,
            "num_replicas": N,
            "num_microbatches": num_microbatches,
            "num_steps": 20,
            "model": {
                "kind": kind,
                "vocab_size": vocab_size,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_layers": 4,
                "num_heads": 2,
                "num_kv_heads": 2,
                "remat": remat,
            },
            "mesh": {"stage": num_stages, "routing": routing, **mesh},
            "inner": {"warmup_steps": 0, "lr": 1e-2, "eps": 1e-3},  # well above rounding, which Adam would amplify
            "outer": {"sync_every": 2} if method == "noloco" else {},
            "data": {"batch_size": B, "sequence_length": T},
        }
    )


@functools.cache
def batches(num_steps, vocab_size=V):
    rng = np.random.default_rng(0)
    made = []
    for _ in range(num_steps):
        ids_NBT = rng.integers(0, vocab_size, (N, B, T + 1), dtype=np.int32)
        labels_NBT = ids_NBT[..., 1:].copy()
        labels_NBT[0, 1, 3:] = -100  # replicas with different numbers of labels
        labels_NBT[2, :, 6:] = -100
        made.append({"input_ids": ids_NBT[..., :-1].copy(), "labels": labels_NBT})
    return made


@functools.cache
def programs_of(config, num_devices):
    return build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:num_devices]))


@functools.cache
def train(config, num_devices, num_steps=4):
    """Return losses (steps, N), gradient norms, state and evaluation of a run with its outer steps."""
    schedule = config.schedule
    programs = programs_of(config, num_devices)
    assert programs.outer_step is not None and schedule is not None
    params, inner, outer = initial_state(programs)
    losses, norms = [], []
    for step, batch in enumerate(batches(num_steps, config.model.vocab_size), start=1):
        batch = {name: jax.device_put(x, programs.batch[name].sharding) for name, x in batch.items()}
        params, inner, metrics = programs.inner_step(params, inner, batch, jnp.int32(step))
        losses.append(np.asarray(metrics.loss))
        norms.append(np.asarray(metrics.grad_norm))
        for _ in range(schedule.due(step)):
            params, outer = programs.outer_step(params, outer)
    evaluation = jax.tree.map(np.asarray, programs.evaluate(params, batch))
    return np.array(losses), np.array(norms), TrainState(params, inner, outer), evaluation


def trajectory(config, num_devices):
    """Return `train`'s result with the model's weights for the state."""
    losses, norms, state, evaluation = train(config, num_devices)
    params = jax.tree.map(np.asarray, resize_vocabulary(config.model, state.params, config.model.vocab_size))
    return losses, norms, params, evaluation


def assert_same_run(one, other):
    for mine, theirs in zip(one, other, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), mine, theirs)


def test_fixed_routing_equals_the_model_without_stages():
    """Stages on devices of their own agree by random routing, and in `test_moe`."""
    assert_same_run(trajectory(run_config(2, "fixed"), 1), trajectory(run_config(1, "fixed"), 1))


def pick(tree, *index):
    return jax.tree.map(lambda x: x[index], tree)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
def push(model, route, batch, weight):
    """Return the weighted loss of one micro-batch through the replicas on its route, and its gradient.

    The auxiliary loss has a part in the gradient alone.
    """
    ends = Balanced.from_params(model, {name: route[name] for name in ("embed", "norm", "head")})
    h_BTD = ends.embed_tokens(batch["input_ids"])
    auxiliary = 0.0
    for blocks in route["blocks"]:
        h_BTD, of_stage = Balanced.from_params(model, {"blocks": blocks}).run_blocks_in_training(h_BTD)
        auxiliary += of_stage
    log_p_BTV = jax.nn.log_softmax(ends.final_norm(h_BTD) @ route["head"])
    nll_BT = -jnp.take_along_axis(log_p_BTV, jnp.maximum(batch["labels"], 0)[..., None], axis=-1)[..., 0]
    live_BT = batch["labels"] != -100
    loss = weight * jnp.sum(nll_BT * live_BT)
    return loss + weight * jnp.sum(live_BT) * auxiliary, loss


def oracle(config, params, batch, step):
    """Return each replica's loss and gradient norm, pushing micro-batches one by one along their routes."""
    num_stages, model = config.mesh.stage, config.model
    pool = route_pool(N, num_stages, config.seed, config.mesh.routing)
    routes = draw_routes(len(pool), config.num_microbatches + num_stages - 1, config.seed, step)
    rows, layers = B // config.num_microbatches, model.num_layers // num_stages
    gradients = jax.tree.map(lambda x: np.zeros((N, *x.shape)), params)
    losses = np.zeros(N)
    for source in range(N):
        weight = 1 / (batch["labels"][source] != -100).sum()
        for m in range(config.num_microbatches):
            replicas = [source]
            for stage in range(num_stages - 1):
                replicas.append(int(pool[routes[m + stage], stage, replicas[-1]]))
            stages = [slice(stage * layers, (stage + 1) * layers) for stage in range(num_stages)]
            # All replicas start from equal weights: a route shows only in where its gradients go.
            route = params | {"blocks": [pick(params["blocks"], chosen) for chosen in stages]}
            (_, loss), gradient = push(model, route, pick(batch, source, slice(m * rows, (m + 1) * rows)), weight)
            losses[replicas[-1]] += loss
            gradients["embed"][replicas[0]] += gradient["embed"]
            for name in ("norm", "head"):
                gradients[name][replicas[-1]] += gradient[name]
            for name, total in gradients["blocks"].items():
                for replica, chosen, part in zip(replicas, stages, gradient["blocks"], strict=True):
                    total[replica, chosen] += part[name]
    squares = [np.square(g.reshape(N, -1)).sum(axis=1) for g in jax.tree.leaves(gradients)]
    return losses, np.sqrt(sum(squares))


def test_random_routing_equals_the_one_by_one_oracle():
    config = run_config(4, num_microbatches=4)
    losses, norms, _, _ = trajectory(config, 1)
    params = init_params(config.model, jax.random.key(0))
    expected_losses, expected_norms = oracle(config, params, batches(4, config.model.vocab_size)[0], jnp.int32(1))
    np.testing.assert_allclose(losses[0], expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms[0], expected_norms, rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "num_devices"),
    [({"num_stages": 1, "routing": "fixed", "replica": 2}, 2), ({"replica": 2}, 4)],
    ids=["two devices", "stages on four devices"],
)
def test_ddp_is_one_large_batch_where_replicas_have_unequal_numbers_of_labels(mesh, num_devices):
    config = run_config(method="ddp", kind=tiny_model.KIND, **mesh)
    programs, batch = programs_of(config, num_devices), batches(4)[0]
    assert len({(labels != -100).sum() for labels in batch["labels"]}) == 3
    params, inner, _ = initial_state(programs)
    placed = {name: jax.device_put(x, programs.batch[name].sharding) for name, x in batch.items()}
    _, _, metrics = programs.inner_step(params, inner, placed, jnp.int32(1))
    large = {name: x.reshape(N * B, T) for name, x in batch.items()}
    initial = init_params(config.model, jax.random.key(0))
    (expected, _), gradient = jax.value_and_grad(functools.partial(loss, config.model), has_aux=True)(initial, large)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    np.testing.assert_allclose(np.mean(metrics.loss), expected, rtol=1e-5)


@pytest.mark.parametrize(("mesh", "num_devices"), [({}, 1), ({"replica": 2}, 4)], ids=["one device", "four"])
def test_micro_batches_of_bfloat16_stages_are_summed_in_float32(mesh, num_devices):
    """The micro-batches are equal: a bfloat16 sum of 512 would stop growing at half of them."""
    number = 512
    config = run_config(2, "fixed", kind="llama", **mesh)
    model = dataclasses.replace(config.model, num_layers=2, param_dtype="bfloat16")
    data = dataclasses.replace(config.data, batch_size=number)
    config = dataclasses.replace(config, num_microbatches=number, model=model, data=data)
    programs = programs_of(config, num_devices)
    params, inner, _ = initial_state(programs)
    one = {name: x[1, :1] for name, x in batches(1)[0].items()}
    batch = {
        name: jax.device_put(np.broadcast_to(x, (N, number, T)), programs.batch[name].sharding)
        for name, x in one.items()
    }
    metrics = programs.inner_step(params, inner, batch, jnp.int32(1))[2]
    initial = init_params(model, jax.random.key(0))
    gradient, _ = jax.grad(functools.partial(loss, model), has_aux=True)(initial, one)
    norm = np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in map(np.asarray, jax.tree.leaves(gradient))))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=0.01)


TWO_A_DEVICE, FOUR_STAGES = "two replicas a device", "2 replicas x 4 stages"
RANDOM_LAYOUTS = {
    TWO_A_DEVICE: (run_config(2, replica=2), 4, run_config(2)),
    "2 stages, computed again, x fsdp 2 x tensor 2": (
        *(run_config(2, replica=1, fsdp=2, tensor=2, remat="stage"), 8),
        run_config(2),
    ),
    FOUR_STAGES: (run_config(4, num_microbatches=4, replica=2), 8, run_config(4, num_microbatches=4)),
}


@pytest.mark.parametrize("layout", RANDOM_LAYOUTS)
def test_random_routing_does_not_depend_on_the_devices(layout):
    config, num_devices, virtual = RANDOM_LAYOUTS[layout]
    assert_same_run(trajectory(config, num_devices), trajectory(virtual, 1))


def test_evaluation_takes_fixed_routes():
    config, num_devices, _ = RANDOM_LAYOUTS[TWO_A_DEVICE]
    _, _, params, (nll_N, tokens_N) = trajectory(config, num_devices)
    batch = batches(4)[-1]
    for i in range(N):
        model = Tiny.from_params(config.model, pick(params, i))
        log_p_BTV = jax.nn.log_softmax(model.logits(model.hidden(batch["input_ids"][i])))
        nll_BT = -jnp.take_along_axis(log_p_BTV, np.maximum(batch["labels"][i], 0)[..., None], axis=-1)[..., 0]
        live_BT = batch["labels"][i] != -100
        np.testing.assert_allclose(nll_N[i], jnp.sum(nll_BT * live_BT), rtol=1e-4)
        assert tokens_N[i] == live_BT.sum()


@pytest.mark.parametrize("token", [-1, V, 128])
@pytest.mark.parametrize(("num_stages", "num_devices"), [(1, 1), (2, 1), (2, 4)])
def test_a_token_outside_the_vocabulary_makes_the_loss_nan_in_every_layout(token, num_stages, num_devices):
    """The pipeline pads the vocabulary of 125 tokens to 128."""
    routing = "fixed" if num_stages == 1 else "random"
    config = run_config(num_stages, routing, replica=2 if num_devices == 4 else -1)
    programs = programs_of(config, num_devices)
    batch = {name: x.copy() for name, x in batches(4)[0].items()}
    batch["input_ids"][1, 0, 2] = token
    batch = {name: jax.device_put(x, programs.batch[name].sharding) for name, x in batch.items()}
    nll_N, _ = programs.evaluate(initial_state(programs).params, batch)
    assert np.isnan(np.asarray(nll_N)).tolist() == [False, True, False, False]


def test_the_heads_gradient_is_not_kept_for_every_microbatch():
    def temporaries(num_microbatches: int) -> int:
        config = run_config(2, num_microbatches=num_microbatches, remat="stage")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=16384))
        programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()))
        step = jax.ShapeDtypeStruct((), jnp.int32)
        lowered = programs.inner_step.lower(programs.state.params, programs.state.inner, programs.batch, step)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    gradient = 4 * 16384 * run_config(2).model.hidden_size
    assert temporaries(4) < temporaries(1) + gradient


def parts_of(x):
    """Return the parts of an array on the first replica's devices, from the first stage to the last."""
    return [np.asarray(shard.data)[0] for shard in x.addressable_shards if shard.index[0].start in (0, None)]


def test_every_stage_holds_an_equal_shard_of_the_vocabulary():
    config, vocab_size, padded = run_config(4, replica=2), V, 128
    model = init_params(config.model, jax.random.key(0))
    state = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices())).from_params(model)
    for name, axis in (("embed", 0), ("head", 1)):
        parts = parts_of(state.params[name])
        assert [part.shape[axis] for part in parts] == [padded // 4] * 4
        assert all(part.any() for part in parts)
        whole = np.concatenate(parts, axis)
        np.testing.assert_array_equal(whole.take(range(vocab_size), axis), model[name])
        assert not whole.take(range(vocab_size, padded), axis).any()
    assert jax.tree.map(lambda x: x.size, state.params) == jax.tree.map(
        lambda x: N * x.size // vocab_size * padded if vocab_size in x.shape else N * x.size, model
    )


def test_windows_fit_the_stages_parts_of_a_small_vocabulary():
    """Rows of a table are joined into blocks from 32 on, and each stage has as many of them."""
    config = run_config(2, vocab_size=24, replica=2)
    config = dataclasses.replace(config, outer=dataclasses.replace(config.outer, wire="modulo4"))
    programs = programs_of(config, 4)
    assert programs.outer_step is not None and programs.state.outer is not None
    after = jax.eval_shape(programs.outer_step, programs.state.params, programs.state.outer)
    assert jax.tree.map(jnp.shape, after[1].windows) == jax.tree.map(jnp.shape, programs.state.outer.windows)


def test_padding_of_the_vocabulary_stays_zero():
    config, num_devices, _ = RANDOM_LAYOUTS[FOUR_STAGES]
    _, _, state, _ = train(config, num_devices)
    tables = [x for path, x in jax.tree.leaves_with_path(state) if getattr(path[-1], "key", "") in ("embed", "head")]
    assert len(tables) == 2 * 5  # weights, two moments, slow weights, outer momentum
    for x in tables:
        padding = x[..., V:] if x.shape[-1] == 128 else x[:, V:]
        assert padding.shape[-1] == 3 or padding.shape[1] == 3
        assert not np.asarray(padding).any()


def test_the_replica_spread_ignores_padding_of_the_vocabulary():
    config, num_devices, _ = RANDOM_LAYOUTS[FOUR_STAGES]
    params = trajectory(config, num_devices)[2]
    padded = train(config, num_devices)[2].params
    spread = programs_of(config, num_devices).spread(padded)
    squares, numel = np.sum([[np.square(x - x.mean(0)).sum(), x.size] for x in jax.tree.leaves(params)], axis=0)
    np.testing.assert_allclose(spread, np.sqrt(squares / numel), rtol=1e-5)


def test_the_stages_copies_of_the_last_norm_stay_bitwise_equal():
    config, num_devices, _ = RANDOM_LAYOUTS[FOUR_STAGES]
    _, _, state, _ = train(config, num_devices)
    norms = [x for path, x in jax.tree.leaves_with_path(state) if getattr(path[-1], "key", "") == "norm"]
    assert len(norms) == 5  # weights, two moments, slow weights, outer momentum
    for x in norms:
        first, *others = parts_of(x)
        assert len(others) == 3 and (first != first[0]).any()
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_stages": 3}, ["model.num_layers=4", "mesh.stage=3"]),
        ({"num_microbatches": 3}, ["data.batch_size=4", "num_microbatches=3"]),
        ({"num_stages": 1, "remat": "stage"}, ["model.remat", "mesh.stage=1"]),
        ({"fsdp": 4, "num_microbatches": 2}, ["micro-batches of 2", "mesh.fsdp=4"]),
    ],
)
def test_incompatible_stages_are_refused_with_both_numbers(changes, words):
    with pytest.raises(UserError) as error:
        programs_of(run_config(**changes), len(jax.devices()))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("group", "changes", "words"),
    [
        ("model", {"tie_embeddings": True}, "tie_embeddings"),
        ("", {"num_replicas": 1, "method": "local"}, "routing"),
    ],
)
def test_stages_refuse_tied_embeddings_and_random_routing_of_one_replica(group, changes, words):
    values = dataclasses.asdict(run_config(2))
    (values[group] if group else values).update(changes)
    with pytest.raises(UserError, match=words):
        from_dict(values)
