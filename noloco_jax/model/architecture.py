"""Interface between a model and all that trains it, and the model that a configuration names.

A model is an NNX module of `nnx.Param` weights. `weight` names the logical axes of each; sharding, pipeline stages,
fragments, Muon and the padding of the vocabulary follow from those names, so that no other package knows a weight.

The parameters travel as a plain nested dict of arrays, a field of the module a key.

Axes: B batch, T positions, D hidden width, V vocabulary.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.errors import UserError, described
from noloco_jax.model.loss import token_nll

Params = dict[str, Any]
Axes = tuple[str | None, ...]
Path = tuple[str, ...]

# The logical axes that a weight's dimensions may have. "layer": stacked layers. "vocab": tokens. "hidden": the residual
# stream. "heads", "ffn": the wide sides of attention and feed-forward layers. "expert": stacked experts, of
# which a token uses `config.experts_per_token`.
LOGICAL_AXES = ("layer", "expert", "vocab", "hidden", "heads", "ffn")
BUILT_IN = {"llama": "noloco_jax.model.llama:Llama", "moe": "noloco_jax.model.moe:Moe"}
_STACKED = ("layer", "expert")
_STAGES_REMEDY = "give --config.mesh.stage=1, or follow noloco_jax.model.architecture.Stages"


def weight(value: jax.Array, *axes: str | None) -> nnx.Param:
    """Return a parameter whose dimensions have the given logical axes, one of `LOGICAL_AXES` or None each.

    A parameter made otherwise, as by `nnx.Linear`, has no logical axis: every device of a replica holds all of it.
    """
    return nnx.Param(value, axes=axes)


def stacked(block: Callable[..., nnx.Module], num_layers: int, rngs: nnx.Rngs) -> Any:
    """Return `num_layers` blocks as one, each weight stacked along a leading axis "layer".

    Args:
      block: makes one block, called with `rngs=`.
      num_layers: number of layers.
      rngs: random streams, split for the layers.
    """

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def made(rngs: nnx.Rngs) -> nnx.Module:
        return block(rngs=rngs)

    blocks = made(rngs)
    for _, variable in nnx.iter_graph(blocks):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(axes=("layer", *_variable_axes(variable, variable.ndim - 1)))
    return blocks


def _variable_axes(variable: Any, ndim: int) -> Axes:
    return variable.get_metadata().get("axes", (None,) * ndim)


class Stages(NamedTuple):
    """Fields of a model that can be cut into pipeline stages, which are all that it has.

    D, the width of the stream between layers, is `config.hidden_size`.

    Attributes:
      embedding: (V, D) with axes "vocab" and "hidden", for `embed_tokens`; each stage has a part of the tokens.
      layers: weights that begin with the axis "layer", for `run_blocks`; each stage has a part of the layers.
      norm: for `final_norm`, without these axes; each stage has a copy.
      head: (D, V) with axes "hidden" and "vocab", for `head_kernel`; each stage has a part of the tokens.
    """

    embedding: str
    layers: str
    norm: str
    head: str


class Model(nnx.Module):
    """A causal language model. A subclass makes its weights and defines `hidden` and `head_kernel`, or `loss_sum`.

    Args:
      config: sizes and dtypes; a model uses the fields that it needs.
      rngs: its `params` stream draws the weights.

    Attributes:
      stages: the fields that pipeline stages share out. None: the model is not cut.
    """

    stages: ClassVar[Stages | None] = None
    config: ModelConfig

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        raise NotImplementedError

    def hidden(self, ids_BT: jax.Array, *, segments_BT: jax.Array | None = None) -> jax.Array:
        """Return the hidden states for the output layer (B, T, D), each a function of its own and earlier tokens.

        Args:
          ids_BT: token ids.
          segments_BT: the document of every position, for models that keep documents apart. None: all is one.
        """
        raise NotImplementedError

    def head_kernel(self) -> jax.Array:
        """Return the output matrix (D, V)."""
        raise NotImplementedError

    def loss_sum(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return the summed loss of a batch's labels and their number, float32 scalars.

        Args:
          batch: `input_ids` and `labels` (B, T), the labels shifted by one, -100 where there is none; maybe
            `segment_ids`.
        """
        h_BTD = self.hidden(batch["input_ids"], segments_BT=batch.get("segment_ids"))
        return token_nll(h_BTD, self.head_kernel(), batch["labels"])

    def training_loss_sum(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return what `loss_sum` does, and the auxiliary loss that training adds to the sum: here none.

        A model's auxiliary loss is a term of a label's mean loss, multiplied by the number of labels here.
        """
        return *self.loss_sum(batch), jnp.zeros(())

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Next-token logits (B, T, V), float32, of what `hidden` returns."""
        return jnp.matmul(h_BTD, self.head_kernel().astype(h_BTD.dtype), preferred_element_type=jnp.float32)

    # What pipeline stages call, each with its own part of the fields in `stages`.

    def embed_tokens(self, ids_BT: jax.Array) -> jax.Array:
        """Return the residual stream (B, T, D) that enters the first layer."""
        raise NotImplementedError

    def run_blocks(self, h_BTD: jax.Array, *, segments_BT: jax.Array | None = None) -> jax.Array:
        """Apply this part's layers in turn to the residual stream (B, T, D)."""
        raise NotImplementedError

    def run_blocks_in_training(
        self, h_BTD: jax.Array, *, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Do as `run_blocks` does; return also the share that these layers have in the auxiliary loss: here 0."""
        return self.run_blocks(h_BTD, segments_BT=segments_BT), jnp.zeros(())

    def final_norm(self, h_BTD: jax.Array) -> jax.Array:
        """Return the hidden states for the output layer, from the residual stream after the last layer."""
        raise NotImplementedError

    # What a model may know better.

    @classmethod
    def is_muons(cls, path: Path, axes: Axes) -> bool:
        """Return True for a weight that Muon takes: a matrix, or a stack of them, that is no table of tokens.

        Args:
          path: its fields' names.
          axes: its logical axes.
        """
        return _num_sides(axes) == 2 and "vocab" not in axes

    @classmethod
    def forward_flops(cls, config: ModelConfig, length: int) -> float:
        """Count the floating-point operations of one token's forward pass in a sequence of `length` tokens.

        Here: 2 for each weight of a matrix, but for tables whose first axis is "vocab", which are looked up, and
        experts that a token does not use.
        """
        axes, sizes = param_axes(config), _active_sizes(config)
        matrices = (path for path in sizes if _num_sides(axes[path]) > 1 and axes[path][0] != "vocab")
        return 2 * sum(sizes[path] for path in matrices)

    @classmethod
    def kept_numbers(cls, config: ModelConfig) -> int:
        """Estimate the activations of one token that are kept for the backward pass, in numbers of `config.dtype`."""
        everything = 10 * config.hidden_size + 4 * config.intermediate_size
        kept = {"none": everything, "dots": 6 * config.hidden_size, "full": 0, "stage": 0}
        return config.num_layers * (kept[config.remat] + config.hidden_size)

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch_size: int, max_length: int) -> Any:
        """Return a cache for generation, which `hidden` takes as `cache=`. None: each token repeats the whole pass."""
        return None

    @classmethod
    def cast_for_generation(cls, config: ModelConfig, params: Params) -> Params:
        """Return the parameters in the dtypes that generation multiplies."""
        return params

    @classmethod
    def from_params(cls, config: ModelConfig, params: Params) -> Any:
        """Make the module from a parameter dict, or from a part of one, as a pipeline stage holds it.

        A field that is missing stays a shape without values, and methods that need it fail; stacks may hold fewer
        layers than `config.num_layers`.
        """
        graphdef, shapes, _ = _abstract(cls, config)
        return nnx.merge(graphdef, shapes | params)

    def to_params(self) -> Params:
        """Return the parameter dict of the module."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))


def _refusal(config: ModelConfig, problem: str, remedy: str) -> UserError:
    return UserError(f"model.kind={config.kind!r}: {problem}: {remedy}")


@functools.cache
def architecture_of(config: ModelConfig) -> type[Model]:
    """Return the class that `config.kind` names.

    Raises:
      UserError: if there is no such module or class, or it is no `Model`.
    """
    module_name, _, name = BUILT_IN.get(config.kind, config.kind).partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # one's own module may raise anything
        remedy = "mend it, start where Python finds it, or add its folder to PYTHONPATH"
        raise _refusal(config, f"{module_name} cannot be imported ({described(error)})", remedy) from error
    architecture = getattr(module, name, None)
    if not (inspect.isclass(architecture) and issubclass(architecture, Model)):
        raise _refusal(
            config, f"{module_name} has no such model", "name a subclass of noloco_jax.model.architecture.Model"
        )
    return architecture


def stages_of(config: ModelConfig) -> Stages:
    """Return the fields that pipeline stages share out.

    Raises:
      UserError: if the model is not cut into stages.
    """
    stages = architecture_of(config).stages
    if stages is None:
        raise _refusal(config, "the class names no stages", _STAGES_REMEDY)
    return stages


@functools.cache
def check_architecture(config: ModelConfig, num_stages: int, document_mask: bool = False) -> None:
    """Check that the configuration's model can be made, cut into stages and differentiated, without computing anything.

    Args:
      config: the model.
      num_stages: pipeline stages of a replica.
      document_mask: True if batches have `segment_ids`.

    Raises:
      UserError: if it cannot, or does not look at `segment_ids`.
    """
    shapes = param_shapes(config)
    if num_stages > 1:
        _check_stages(config, stages_of(config))
    if config.kind in BUILT_IN:
        return
    ids_BT = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    batch = {"input_ids": ids_BT, "labels": ids_BT} | ({"segment_ids": ids_BT} if document_mask else {})
    try:
        traced = jax.make_jaxpr(jax.grad(lambda params, batch: loss(config, params, batch)[0]))(shapes, batch)
    except Exception as error:  # one's own model may raise anything
        problem = f"the loss of tokens (2, 8) cannot be traced ({described(error)})"
        raise _refusal(config, problem, "mend hidden and head_kernel, or loss_sum") from error
    segments_BT = traced.jaxpr.invars[-1]  # the last of the batch by name, and so of all
    if document_mask and not any(x is segments_BT for equation in traced.jaxpr.eqns for x in equation.invars):
        problem = "the loss does not use segment_ids, so that documents of a sequence would see each other"
        raise _refusal(config, problem, "give --config.data.document_mask=False, or use segments_BT in hidden")


def check_generates(config: ModelConfig) -> None:
    """Raise `UserError` for a model that text cannot be generated with, as it defines a loss alone."""
    architecture = architecture_of(config)
    if architecture.hidden is Model.hidden or architecture.head_kernel is Model.head_kernel:
        remedy = "define hidden and head_kernel, or train with --config.sample_tokens=0"
        raise _refusal(config, "a model with a loss alone cannot generate", remedy)


def _check_stages(config: ModelConfig, stages: Stages) -> None:
    """Raise `UserError` where the fields of the stages are not as `Stages` describes them, or the loss is another."""
    architecture = architecture_of(config)
    if architecture.loss_sum is not Model.loss_sum:
        raise _refusal(config, "pipeline stages have the loss of the next token, not its loss_sum", _STAGES_REMEDY)
    has_own_loss = architecture.training_loss_sum is not Model.training_loss_sum
    if has_own_loss and architecture.run_blocks_in_training is Model.run_blocks_in_training:
        problem = "pipeline stages call run_blocks_in_training, not its training_loss_sum"
        raise _refusal(config, problem, _STAGES_REMEDY)
    axes, shapes = param_axes(config), _leaves(param_shapes(config))
    fits: dict[str, Callable[[Path], bool]] = {
        stages.embedding: lambda path: axes[path][:1] == ("vocab",) and len(path) == 1,
        stages.layers: lambda path: axes[path][:1] == ("layer",) and shapes[path].shape[0] == config.num_layers,
        stages.norm: lambda path: not {"layer", "vocab"} & {*axes[path]},
        stages.head: lambda path: axes[path][-1:] == ("vocab",) and len(path) == 1,
    }
    wrong = [
        *sorted(fits.keys() ^ {path[0] for path in axes}),
        *(".".join(path) for path in axes if path[0] in fits and not fits[path[0]](path)),
    ]
    if wrong:
        raise _refusal(config, f"{wrong[0]} does not fit {stages} with {config.num_layers} layers", _STAGES_REMEDY)


def from_params(config: ModelConfig, params: Params) -> Any:
    """Make the configuration's model from a parameter dict, see `Model.from_params`."""
    return architecture_of(config).from_params(config, params)


@functools.cache
def _abstract(architecture: type[Model], config: ModelConfig) -> tuple[Any, Params, Mapping[Path, Axes]]:
    """Return the module without its parameters, their shapes, and their logical axes by path."""
    try:
        graphdef, state = nnx.split(nnx.eval_shape(lambda: architecture(config, rngs=nnx.Rngs(params=0))))
    except Exception as error:  # one's own constructor may raise anything
        if config.kind in BUILT_IN:
            raise
        problem = f"it cannot be made from model.* ({described(error)})"
        raise _refusal(config, problem, "mend its __init__(self, config, *, rngs)") from error
    axes = {}
    for path, variable in nnx.to_flat_state(state):
        is_weight = isinstance(variable, nnx.Param) and all(isinstance(key, str) for key in path)
        axes[path] = _variable_axes(variable, variable.ndim) if is_weight else ()
        if not is_weight or len(axes[path]) != variable.ndim or not {*axes[path]} <= {*LOGICAL_AXES, None}:
            name = f"{'.'.join(map(str, path))}, a {type(variable).__name__} with the axes {axes[path]}"
            raise _refusal(
                config,
                f"{name}, is not a weight that can be trained and saved",
                "a model holds nothing but nnx.Param in named fields, with one logical axis for each dimension, of "
                f"{', '.join(LOGICAL_AXES)} or None (noloco_jax.model.architecture.weight, and stacked for layers)",
            )
    return graphdef, nnx.to_pure_dict(state), MappingProxyType(axes)


def param_axes(config: ModelConfig) -> Mapping[Path, Axes]:
    """Return the logical axes of every parameter by its path."""
    return _abstract(architecture_of(config), config)[2]


def axes_at(config: ModelConfig, path: tuple[Any, ...]) -> Axes | None:
    """Return the logical axes of the parameter whose path a path in some state ends with; None if there is none.

    Args:
      config: the model.
      path: JAX's path of an array: of a parameter, or of what an optimizer keeps beside it, with any prefix.
    """
    axes = param_axes(config)
    names: tuple[Any, ...] = tuple(getattr(key, "key", None) for key in path)
    return next((axes[names[start:]] for start in range(len(names)) if names[start:] in axes), None)


def muons(config: ModelConfig) -> frozenset[Path]:
    """Return the paths of the weights that Muon takes."""
    architecture = architecture_of(config)
    return frozenset(path for path, axes in param_axes(config).items() if architecture.is_muons(path, axes))


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Draw the parameter dict of a new model from a typed PRNG key."""
    return architecture_of(config)(config, rngs=nnx.Rngs(params=key)).to_params()


def param_shapes(config: ModelConfig) -> Params:
    """Return the parameter dict as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda shape: shape, _abstract(architecture_of(config), config)[1]
    )  # a copy: the original is cached


def num_params(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters, in all and without the tables of tokens: input embedding and head."""
    sizes = {path: math.prod(shape.shape) for path, shape in _leaves(param_shapes(config)).items()}
    axes = param_axes(config)
    return sum(sizes.values()), sum(size for path, size in sizes.items() if "vocab" not in axes[path])


def num_active_params(config: ModelConfig) -> int:
    """Return the number of parameters that one token uses: all but the experts that it is not sent to."""
    return sum(_active_sizes(config).values())


def _active_sizes(config: ModelConfig) -> dict[Path, int]:
    """Return the number of weights of every parameter that one token uses."""

    def size(shape: tuple[int, ...], axes: Axes) -> int:
        used = (config.experts_per_token if axis == "expert" else dim for dim, axis in zip(shape, axes, strict=True))
        return math.prod(used)

    axes = param_axes(config)
    return {path: size(x.shape, axes[path]) for path, x in _leaves(param_shapes(config)).items()}


def loss(config: ModelConfig, params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the mean training loss over a batch's labels, and how many there are (no label: 0, 0).

    `batch` is as of `Model.loss_sum`. An id outside the vocabulary makes the loss and its gradients NaN, and so does a
    label there other than -100.
    """
    total, num_labels, auxiliary = from_params(config, params).training_loss_sum(batch)
    return (total + auxiliary) / jnp.maximum(num_labels, 1.0), num_labels


def _leaves(params: Params) -> dict[Path, Any]:
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def _num_sides(axes: Axes) -> int:
    return sum(axis not in _STACKED for axis in axes)
