"""The compiled programs of a run: initialise, inner step, outer step, evaluate, merge, spread, share.

Arrays carry all N replicas on a leading axis, which lies on the mesh axis `replica`: L = N / (devices along it)
replicas are the slots of one device. Programs are `shard_map`ped over the devices, and `vmap`ped or mapped over a
device's slots; `fsdp` and `tensor` inside a replica are left to the partitioner.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import ModelConfig, TrainConfig
from noloco_jax.model.architecture import check_architecture, init_params, num_params
from noloco_jax.optim.exchange.all_reduce import all_mean
from noloco_jax.optim.methods import METHODS
from noloco_jax.optim.outer_step import OuterOptimizer
from noloco_jax.optim.rule import OuterState, computed
from noloco_jax.spmd import sharding
from noloco_jax.spmd.batches import parts_of, share_program, spans_processes
from noloco_jax.spmd.gradients import Batch
from noloco_jax.spmd.inner import inner_optimizer
from noloco_jax.spmd.losses import Losses, build_losses
from noloco_jax.spmd.mesh import check_layout
from noloco_jax.spmd.outer_programs import OuterPrograms, build_outer, outer_axes, over_mesh
from noloco_jax.spmd.sharding import REPLICAS, SLOT
from noloco_jax.spmd.stages import padded_vocab_size, replica_square_norm, resize_vocabulary

PyTree = Any
# Options for programs that run once: optimizing them takes longer than running them.
RUN_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class TrainState(NamedTuple):
    """Everything a run trains, each array with the N replicas in front.

    Attributes:
      params: θ, the fast weights.
      inner: the inner optimizer's state.
      outer: the outer optimizer's `OuterState`, or None.
    """

    params: PyTree
    inner: PyTree
    outer: OuterState | None


class StepMetrics(NamedTuple):
    """Metrics of one inner step, float32 (N,), one value a replica."""

    loss: jax.Array
    grad_norm: jax.Array


@dataclass(frozen=True)
class Programs:
    """Programs of a run. Parts of the state that a program takes are donated.

    Attributes:
      mesh: the devices.
      state: shapes, dtypes and shardings of the `TrainState` that programs take.
      between_steps: the same of the state between steps, with an offloaded outer state in host memory.
      batch: shapes and shardings of a batch: `input_ids`, `labels` and with a document mask `segment_ids`, int32
        (N, B, T).
      parts: shape and sharding of the argument of `share_batch`.
      init: key -> TrainState at rest, the same weights in every replica.
      from_params: parameters of one replica (no replica axis) -> TrainState at rest.
      inner_step: (params, inner, batch, step) -> (params, inner, StepMetrics); step 1, 2, ... is the one to take.
      outer: those of the outer optimizer, one by one; None for methods without.
      outer_step: (params, outer at rest) -> (params, outer at rest); None for methods without.
      correct_step: (params, outer at rest) -> (params, outer at rest) with the oldest pending correction applied; None
        without a delay.
      evaluate: (params, batch) -> summed loss (N,) and number of tokens (N,), each replica's on its devices.
      merge: params -> params, every replica the mean, by an all-reduce.
      spread: params -> sqrt(Σ |mean − θ_i|² / (numel · N)), the replica spread.
      share_batch: parts -> batch, from the device of each replica that was given it (`batches`); None if every
        replica's devices belong to one process, which gives each its rows.
      compiled: compiled executables by program name.
      compile_seconds: seconds of lowering and compilation.
    """

    mesh: Mesh
    state: TrainState
    between_steps: TrainState
    batch: PyTree
    parts: jax.ShapeDtypeStruct
    init: Callable[..., TrainState]
    from_params: Callable[..., TrainState]
    inner_step: Callable[..., Any]
    outer: OuterPrograms | None
    outer_step: Callable[..., Any] | None
    correct_step: Callable[..., Any] | None
    evaluate: Callable[..., Any]
    merge: Callable[..., PyTree]
    spread: Callable[..., jax.Array]
    share_batch: Callable[[jax.Array], Batch] | None
    compiled: Mapping[str, jax.stages.Compiled] = field(default_factory=dict)
    compile_seconds: Mapping[str, float] = field(default_factory=dict)

    def moved_to_rest(self, state: TrainState) -> TrainState:
        """Move the outer part of a state to where it lies between steps."""
        return state._replace(outer=jax.device_put(state.outer, shardings_of(self.between_steps.outer)))


def build_programs(config: TrainConfig, mesh: Mesh, *, shares_batches: bool | None = None) -> Programs:
    """Build the programs of a run on a mesh; they are compiled at their first call.

    Args:
      config: the run.
      mesh: its devices.
      shares_batches: make `share_batch`; None: if some replica's devices belong to several processes.
    """
    model, data, method = config.model, config.data, METHODS[config.method]
    check_architecture(model, config.mesh.stage, data.document_mask)
    fragments = config.outer.fragments if method.has_outer_steps else 1
    check_layout(model, data.batch_size, config.num_microbatches, fragments, mesh.shape)
    inner = inner_optimizer(model, config.inner, config.num_steps)
    outer = build_outer(method, config.outer, model, config.num_replicas, config.seed)
    losses = build_losses(
        model,
        mesh,
        num_replicas=config.num_replicas,
        num_microbatches=config.num_microbatches,
        tokens=config.microbatch_tokens,
        averages_gradients=method.averages_gradients,
        stages=config.mesh.stage,
        routing=config.mesh.routing,
        seed=config.seed,
    )
    vocab_size = padded_vocab_size(model.vocab_size, mesh.shape)
    from_params = partial(_from_params, model, config.num_replicas, vocab_size, inner, outer)
    shapes = jax.eval_shape(lambda: from_params(init_params(model, jax.random.key(0))))

    param_specs = sharding.param_specs(model, shapes.params, mesh)
    specs = TrainState(
        params=param_specs,
        inner=sharding.inner_specs(inner, shapes.params, param_specs),
        outer=None if outer is None else sharding.outer_specs(outer, shapes.outer, param_specs),
    )
    on_mesh = sharding.shardings(mesh, specs)
    batch_sharding = NamedSharding(mesh, sharding.BATCH_SPEC)
    replica_sharding = NamedSharding(mesh, sharding.REPLICA_SPEC)
    one_value = NamedSharding(mesh, P())

    compiled = partial(over_mesh, mesh)
    per_replica = sharding.REPLICA_SPEC
    inner_step = compiled(
        partial(_inner_step, model, losses, inner, config.inner.clip_norm, method.averages_gradients),
        in_specs=(specs.params, specs.inner, sharding.BATCH_SPEC, P()),
        out_specs=(specs.params, specs.inner, per_replica),
        out_shardings=(on_mesh.params, on_mesh.inner, replica_sharding),
        donate=(0, 1),
    )

    evaluate = compiled(
        losses.evaluate,
        in_specs=(specs.params, sharding.BATCH_SPEC),
        out_specs=(per_replica, per_replica),
        out_shardings=(replica_sharding, replica_sharding),
    )

    batch_shape = (config.num_replicas, data.batch_size, data.sequence_length)
    sequences = jax.ShapeDtypeStruct(batch_shape, jnp.int32, sharding=batch_sharding)
    names = ["input_ids", "labels", *(["segment_ids"] if data.document_mask else [])]
    batch = dict.fromkeys(names, sequences)
    if shares_batches is None:
        shares_batches = spans_processes(mesh)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, on_mesh)
    outer_programs = None if outer is None else OuterPrograms(outer, state.params, state.outer, mesh)
    return Programs(
        mesh=mesh,
        state=state,
        between_steps=state,
        batch=batch,
        parts=parts_of(batch, mesh),
        init=jax.jit(
            lambda key: from_params(init_params(model, key)), out_shardings=on_mesh, compiler_options=RUN_ONCE
        ),
        from_params=jax.jit(from_params, out_shardings=on_mesh, compiler_options=RUN_ONCE),
        inner_step=inner_step,
        outer=outer_programs,
        outer_step=outer_programs and outer_programs.step,
        correct_step=outer_programs.apply if outer_programs and config.delay else None,
        evaluate=evaluate,
        merge=compiled(_merge, in_specs=(specs.params,), out_specs=specs.params, out_shardings=on_mesh.params),
        spread=compiled(partial(_spread, model), in_specs=(specs.params,), out_specs=P(), out_shardings=one_value),
        share_batch=share_program(mesh, names) if shares_batches else None,
    )


def shardings_of(shapes: PyTree) -> PyTree:
    """Return the shardings of shapes."""
    return jax.tree.map(lambda x: x.sharding, shapes)


def _from_params(
    model: ModelConfig,
    num_replicas: int,
    vocab_size: int,
    inner: optax.GradientTransformation,
    outer: OuterOptimizer | None,
    replica_params: PyTree,
) -> TrainState:
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_replicas, *x.shape)), replica_params)
    params = resize_vocabulary(model, params, vocab_size)
    outer_state: Any = None if outer is None else jax.vmap(outer.init, out_axes=outer_axes(outer))(params)
    return TrainState(params, jax.vmap(inner.init)(computed(params)), outer_state)


def _inner_step(
    model: ModelConfig,
    losses: Losses,
    inner: optax.GradientTransformation,
    clip_norm: float,
    averages_gradients: bool,
    params: PyTree,
    inner_state: PyTree,
    batch: Batch,
    step: jax.Array,
):
    gradients, loss = losses.gradient(params, batch, step)

    def update(params: PyTree, inner_state: PyTree, gradient: PyTree):
        gradient = computed(gradient)  # moments and norm are float32 whatever the parameters are
        if averages_gradients:
            gradient = all_mean(gradient, REPLICAS)
        with jax.named_scope("optimizer"):
            norm = jnp.sqrt(replica_square_norm(model, gradient))
            if clip_norm:
                factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
                gradient = optax.tree.scale(factor, gradient)
            updates, inner_state = inner.update(gradient, inner_state, computed(params))
            return optax.apply_updates(params, updates), inner_state, norm

    params, inner_state, norm = jax.vmap(update, axis_name=SLOT)(params, inner_state, gradients)
    return params, inner_state, StepMetrics(loss, norm)


def _merge(params: PyTree) -> PyTree:
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), _mean_of_replicas(params), params)


def _mean_of_replicas(tree: PyTree) -> PyTree:
    """Return the mean over all replicas of a device's slots, in float32, for each slot."""
    return jax.vmap(partial(all_mean, axis_name=REPLICAS), axis_name=SLOT)(computed(tree))


def _spread(model: ModelConfig, params: PyTree) -> jax.Array:
    apart = jax.tree.map(jnp.subtract, computed(params), _mean_of_replicas(params))
    squares_L = jax.vmap(partial(replica_square_norm, model))(apart)  # padding of the vocabulary is zero
    return jnp.sqrt(_mean_of_replicas(squares_L)[0] / float(num_params(model)[0]))
