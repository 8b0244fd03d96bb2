"""A Llama whose feed-forward networks are mixtures of experts, in the form of Qwen 3's.

The parameters are those of `llama`, but that every layer has E feed-forward networks and a router:

    "blocks": {..., "router": (L, D, E), "gate": (L, E, D, F), "up": (L, E, D, F), "down": (L, E, F, D)}

No token is dropped. `jax.lax.ragged_dot` computes every expert for every token on the CPU (jax 0.10.2: ten times
slower at 8 experts), so that tokens are sorted into blocks of one expert each, and blocks multiplied as a batch.

Axes: as of `llama`; E experts, A experts of a token, N tokens, C blocks, S slots of a block.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import Axes, Path
from noloco_jax.model.block import Block, swiglu
from noloco_jax.model.llama import Llama
from noloco_jax.model.loss import token_nll
from noloco_jax.model.placement import map_shards, num_shards

# Slots of a block. Each block has its own copy of its expert's kernels, of which a GPU waits for every byte.
_SMALLEST_BLOCK, _LARGEST_CPU_BLOCK, _LARGEST_BLOCK = 8, 128, 1024


class MoeBlock(Block):
    """A decoder layer whose router sends every token to `config.experts_per_token` of its experts."""

    def make_mlp(self, kernel: Callable[..., nnx.Param]) -> None:
        self.router = kernel("hidden", "expert")
        self.router.set_metadata(axes=("hidden", None))  # its columns are no stack
        self.gate = kernel("expert", "hidden", "ffn")
        self.up = kernel("expert", "hidden", "ffn")
        self.down = kernel("expert", "ffn", "hidden")

    def mlp(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mix the outputs of each token's experts; return them and the load-balancing loss.

        The loss (Switch Transformer, arXiv 2101.03961, in transformers' scale) is E times the sum over experts of the
        mean number of a token's experts that are this one, and its mean probability: A if the load is even.
        """
        scores_BTA, experts_BTA, probabilities_BTE = self.route(x_BTD)
        num_experts = self.config.num_experts
        load_E = jax.nn.one_hot(experts_BTA, num_experts).sum(axis=2).mean(axis=(0, 1))
        auxiliary = num_experts * jnp.sum(load_E * probabilities_BTE.mean(axis=(0, 1)))
        kernels = (kernel[...].astype(x_BTD.dtype) for kernel in (self.gate, self.up, self.down))
        return _experts(x_BTD, scores_BTA, experts_BTA, *kernels), auxiliary

    def route(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Choose each token's experts, in float32.

        Returns:
          (scores_BTA, experts_BTA, probabilities_BTE): the weights and int32 indices of a token's experts, and the
          router's probabilities of all.
        """
        logits_BTE = x_BTD.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        probabilities_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        scores_BTA, experts_BTA = jax.lax.top_k(probabilities_BTE, self.config.experts_per_token)
        if self.config.norm_topk_prob:
            scores_BTA /= scores_BTA.sum(axis=-1, keepdims=True)
        return scores_BTA, experts_BTA, probabilities_BTE


class Moe(Llama):
    """A decoder-only transformer with mixtures of experts, trained with a load-balancing loss of its routers."""

    block: ClassVar[type[Block]] = MoeBlock

    def training_loss_sum(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        h_BTD = self.embed_tokens(batch["input_ids"])
        h_BTD, auxiliary = self.run_blocks_in_training(h_BTD, segments_BT=batch.get("segment_ids"))
        total, num_labels = token_nll(self.final_norm(h_BTD), self.head_kernel(), batch["labels"])
        return total, num_labels, auxiliary * num_labels

    def run_blocks_in_training(
        self, h_BTD: jax.Array, *, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Do as `run_blocks` does; return also these layers' share in the mean of all layers' load-balancing losses."""
        h_BTD, auxiliary_L = self._run(h_BTD, None, segments_BT)
        assert auxiliary_L is not None
        return h_BTD, self.config.router_aux_loss_coef / self.config.num_layers * auxiliary_L.sum()

    @classmethod
    def is_muons(cls, path: Path, axes: Axes) -> bool:
        """Return True for attention's and experts' matrices: routers are AdamW's."""
        return path[-1] != "router" and super().is_muons(path, axes)

    @classmethod
    def mlp_weights(cls, config: ModelConfig) -> int:
        used = config.experts_per_token * super().mlp_weights(config)
        return used + config.hidden_size * config.num_experts

    @classmethod
    def mlp_width(cls, config: ModelConfig) -> int:
        return config.experts_per_token * super().mlp_width(config)


def _experts(
    x_BTD: jax.Array,
    scores_BTA: jax.Array,
    experts_BTA: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    """Return the sum over each token's experts of score times output (B, T, D).

    A device sorts its own tokens, and multiplies them by its own columns of all experts.
    """
    is_summed = num_shards("tensor", gate_EDF.shape[-1]) > 1

    def on_device(x_BTD: jax.Array, scores_BTA: jax.Array, experts_BTA: jax.Array, *kernels: jax.Array) -> jax.Array:
        x_ND, scores_NA, experts_NA = (x.reshape(-1, x.shape[-1]) for x in (x_BTD, scores_BTA, experts_BTA))
        y_ND = _mixed(x_ND, scores_NA, experts_NA, *kernels)
        if is_summed:
            y_ND = jax.lax.psum(y_ND, "tensor")
        return y_ND.reshape(x_BTD.shape).astype(x_BTD.dtype)

    tokens = ("fsdp", None, None)
    return map_shards(
        on_device,
        (x_BTD, tokens),
        (scores_BTA, tokens),
        (experts_BTA, tokens),
        (gate_EDF, (None, None, "tensor")),
        (up_EDF, (None, None, "tensor")),
        (down_EFD, (None, "tensor", None)),
    )


def _mixed(
    x_ND: jax.Array,
    scores_NA: jax.Array,
    experts_NA: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    """Compute `_experts` of tokens (N, D), float32: blocks of tokens, each with the kernels of its expert."""
    num_experts, width = gate_EDF.shape[:2]
    per_token = experts_NA.shape[1]
    size = _block_size(experts_NA.size, num_experts)
    num_blocks = experts_NA.size // size + min(num_experts, experts_NA.size)  # each expert's last is not full
    is_sent_PE = jax.nn.one_hot(experts_NA.reshape(-1), num_experts, dtype=jnp.int32)
    ends_E = jnp.cumsum(-(-is_sent_PE.sum(axis=0) // size))  # of each expert's blocks
    rank_PE = jnp.cumsum(is_sent_PE, axis=0) - is_sent_PE
    starts_E = jnp.pad(ends_E, (1, 0))[:-1] * size
    slots_P = jnp.sum(is_sent_PE * (rank_PE + starts_E[None]), axis=1)
    experts_C = jnp.minimum(jnp.searchsorted(ends_E, jnp.arange(num_blocks), side="right"), num_experts - 1)

    into = jnp.zeros((num_blocks * size, width), x_ND.dtype)
    x_CSD = into.at[slots_P].set(jnp.repeat(x_ND, per_token, axis=0), unique_indices=True).reshape(-1, size, width)
    hidden_CSF = swiglu(_multiply(x_CSD, gate_EDF, experts_C), _multiply(x_CSD, up_EDF, experts_C))
    y_CSD = _multiply(hidden_CSF, down_EFD, experts_C).astype(jnp.float32)
    y_PD = y_CSD.reshape(-1, width).at[slots_P].get(unique_indices=True)
    return jnp.sum(y_PD.reshape(-1, per_token, width) * scores_NA[..., None], axis=1)


@jax.custom_vjp
def _multiply(x_CSI: jax.Array, kernels_EIO: jax.Array, experts_C: jax.Array) -> jax.Array:
    """Multiply blocks by the kernels of their experts.

    Its gradients sum the blocks of an expert in float32, and keep no copies of kernels for the backward pass.
    """
    return jnp.einsum("csi,cio->cso", x_CSI, kernels_EIO[experts_C])


def _multiply_forward(x_CSI: jax.Array, kernels_EIO: jax.Array, experts_C: jax.Array) -> tuple[jax.Array, Any]:
    return _multiply(x_CSI, kernels_EIO, experts_C), (x_CSI, kernels_EIO, experts_C)


def _multiply_backward(saved: Any, gradient_CSO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_CSI, kernels_EIO, experts_C = jax.lax.optimization_barrier(saved)  # else XLA keeps the forward pass's copies
    parts_CIO = jnp.einsum("csi,cso->cio", x_CSI, gradient_CSO, preferred_element_type=jnp.float32)
    sums_EIO = jax.ops.segment_sum(parts_CIO, experts_C, kernels_EIO.shape[0], indices_are_sorted=True)
    back_CSI = jnp.einsum("cso,cio->csi", gradient_CSO, kernels_EIO[experts_C])
    return back_CSI, sums_EIO.astype(kernels_EIO.dtype), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _block_size(num_sent: int, num_experts: int) -> int:
    """Return a power of two, about a quarter of the tokens that an expert gets in the mean: padding adds 12 to 25 %."""
    quarter = max(num_sent // (4 * num_experts), 1)
    largest = _LARGEST_CPU_BLOCK if jax.default_backend() == "cpu" else _LARGEST_BLOCK
    return min(max(1 << (quarter.bit_length() - 1), _SMALLEST_BLOCK), largest)
