"""Next-token loss that never holds the whole batch's logits.

Axes: B batch, P parts of it on other devices, T positions, C positions of a chunk, D hidden width, V vocabulary (the
kernel's columns: of one shard, where the vocabulary is sharded).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.model.placement import constrain, num_devices, num_shards

# Float32 logits held at once when the caller does not say: 256 MiB on the CPU, and 2 GiB elsewhere. There each chunk
# reads and writes the kernel's float32 gradient, which takes as long as the products of some 400 tokens.
_CPU_LOGITS_AT_ONCE = 2**26
_LOGITS_AT_ONCE = 2**29
# XLA wants rows of such a multiple for 16-bit products on a GPU, or copies kernel and logits into them for every chunk.
_GPU_VOCAB_MULTIPLE = 64
_NO_TOKEN = -1  # token of a padding column
# A logit of probability zero that, unlike -inf, can be subtracted from itself.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def logits_at_once(backend: str) -> int:
    """Float32 logits that a device of this kind holds at once, if the caller does not say how many."""
    return _CPU_LOGITS_AT_ONCE if backend == "cpu" else _LOGITS_AT_ONCE


class _Columns(NamedTuple):
    """Tokens of the columns of a kernel.

    Attributes:
      number: columns of the kernel.
      vocab_size: tokens of the whole vocabulary; columns behind them are padding.
      multiple: the kernel is multiplied with columns of zeros behind it up to a multiple of this.
      axis_name: the mesh axis over which the vocabulary is sharded, or None.
    """

    number: int
    vocab_size: int
    multiple: int
    axis_name: str | None

    @property
    def is_padded(self) -> bool:
        num_shards = 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)
        return self.number % self.multiple > 0 or self.number * num_shards > self.vocab_size

    def cast(self, kernel_DV: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The kernel as it is multiplied: in the compute dtype, with columns of zeros up to a multiple."""
        padding = -self.number % self.multiple
        return constrain(jnp.pad(kernel_DV.astype(dtype), ((0, 0), (0, padding))), None, "tensor")

    def tokens(self, num_cast: int) -> jax.Array:
        """The token of each of the `num_cast` columns that are multiplied."""
        column_V = jnp.arange(num_cast)
        first = 0 if self.axis_name is None else jax.lax.axis_index(self.axis_name) * self.number
        token_V = first + column_V
        return jnp.where((column_V < self.number) & (token_V < self.vocab_size), token_V, _NO_TOKEN)


@jax.named_scope("head")
def token_nll(
    h_BTD: jax.Array,
    kernel_DV: jax.Array,
    labels_BT: jax.Array,
    weight_B: jax.Array | None = None,
    *,
    chunk_tokens: int | None = None,
    vocab_multiple: int | None = None,
    vocab_size: int | None = None,
    axis_name: str | None = None,
    one_pass: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the summed negative log-likelihood of the labels, and how many there are, both float32 scalars.

    Logits are a product in the dtype of `h_BTD` accumulated in float32; the softmax is float32. Where a gradient is
    asked for, it is computed beside the loss, chunk by chunk, so that no logits are kept or computed twice.

    With `axis_name`, inside `shard_map(check_vma=False)`, every shard returns the loss over the whole vocabulary. A
    gradient is then, as always there, that of the sum of all shards' results: a shard gets the gradient of its own
    columns, and of its own copy of `h_BTD` what passes through these columns.

    Args:
      h_BTD: hidden states after the last norm.
      kernel_DV: the output matrix.
      labels_BT: the token that each position should predict; -100 is out of the loss. A label that is neither makes
        the sum and its gradients NaN.
      weight_B: float32, what a sequence's likelihoods count in the sum; it takes no gradient. None: one.
      chunk_tokens: tokens whose logits are held at once (at least one position of the whole batch). None: as many as
        make 2**26 logits on the CPU, 2**29 elsewhere.
      vocab_multiple: the kernel is cast with columns of zeros behind it until V is a multiple of this; their logits are
        left out of the softmax. None: 64 a `tensor` device for 16-bit products on a GPU, else 1.
      vocab_size: tokens of the whole vocabulary; columns behind them are left out too. None: every column is a token.
      axis_name: the mesh axis whose shard i has the i-th part of the output matrix's columns, all else being the same.
      one_pass: reads the logits once, not twice, for the softmax's normaliser. None: on a GPU, which
        waits for its memory; XLA's code of it for the CPU is slow.
    """
    batch, length = labels_BT.shape
    backend = jax.default_backend()
    if chunk_tokens is None:
        chunk_tokens = logits_at_once(backend) // kernel_DV.shape[1]
    if vocab_multiple is None:
        on_tensor_cores = backend == "gpu" and h_BTD.dtype.itemsize == 2
        vocab_multiple = _GPU_VOCAB_MULTIPLE * num_devices("tensor") if on_tensor_cores else 1
    if one_pass is None:
        one_pass = backend == "gpu"
    # Chunks are cut along T, so that a batch that is sharded over devices stays so.
    num_chunks = min(length, math.ceil(batch * length / max(chunk_tokens, batch)))
    chunk = math.ceil(length / num_chunks)
    padding = math.ceil(length / chunk) * chunk - length
    if padding:
        h_BTD = jnp.pad(h_BTD, ((0, 0), (0, padding), (0, 0)))
        labels_BT = jnp.pad(labels_BT, ((0, 0), (0, padding)), constant_values=IGNORED_LABEL)
    num_tokens = jnp.sum(labels_BT != IGNORED_LABEL, dtype=jnp.float32)
    h_BTD = constrain(h_BTD, "fsdp", None, None)
    if vocab_size is None:
        vocab_size = kernel_DV.shape[1] * (1 if axis_name is None else jax.lax.axis_size(axis_name))
    columns = _Columns(kernel_DV.shape[1], vocab_size, vocab_multiple, axis_name)
    return _nll_sum(chunk, columns, one_pass, h_BTD, kernel_DV, labels_BT, weight_B), num_tokens


def _chunk_nll(
    columns: _Columns,
    one_pass: bool,
    h_BCD: jax.Array,
    kernel_DV: jax.Array,
    labels_BC: jax.Array,
    weight_B: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return a chunk's weighted loss, and the gradient of that with respect to its logits in the compute dtype."""
    logits_BCV = jnp.matmul(h_BCD, kernel_DV, preferred_element_type=jnp.float32)
    token_V = columns.tokens(kernel_DV.shape[1])
    if columns.is_padded:
        logits_BCV = jnp.where((token_V != _NO_TOKEN)[None, None], logits_BCV, _LOWEST)
    # Compared rather than gathered: a gather along a vocabulary that is sharded over devices would collect it first.
    is_label_BCV = labels_BC[..., None] == token_V[None, None]
    valid_BC = labels_BC != IGNORED_LABEL
    weight_BC = valid_BC if weight_B is None else valid_BC * weight_B[:, None]
    is_token_BC = (labels_BC >= 0) & (labels_BC < columns.vocab_size)
    weight_BC = jnp.where(is_token_BC | ~valid_BC, weight_BC, jnp.nan)  # it would be a loss of log Z, without an error
    log_normaliser_BC, label_logit_BC = _normaliser_and_label(logits_BCV, is_label_BCV, one_pass)
    if columns.axis_name is not None:
        of_shards = jax.lax.all_gather(jnp.stack([log_normaliser_BC, label_logit_BC]), columns.axis_name)
        log_normaliser_BC, label_logit_BC = jax.nn.logsumexp(of_shards[:, 0], axis=0), jnp.sum(of_shards[:, 1], axis=0)
    nll_sum = jnp.sum(jnp.where(valid_BC, weight_BC * (log_normaliser_BC - label_logit_BC), 0.0))
    d_logits_BCV = jnp.exp(logits_BCV - log_normaliser_BC[..., None]) - is_label_BCV
    return nll_sum, (d_logits_BCV * weight_BC[..., None]).astype(h_BCD.dtype)


def _normaliser_and_label(
    logits_BCV: jax.Array, is_label_BCV: jax.Array, one_pass: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the log of the softmax's normaliser, and the label's logit, of every position."""
    of_label_BCV = jnp.where(is_label_BCV, logits_BCV, 0.0)
    if not one_pass:
        return jax.nn.logsumexp(logits_BCV, axis=-1), jnp.sum(of_label_BCV, axis=-1)
    parts = (logits_BCV, jnp.ones_like(logits_BCV), of_label_BCV)
    highest_BC, sum_BC, label_logit_BC = jax.lax.reduce(parts, (_LOWEST, 0.0, 0.0), _join, dimensions=(2,))
    return highest_BC + jnp.log(sum_BC), label_logit_BC


_LossPart = tuple[jax.Array, jax.Array, jax.Array]


def _join(a: _LossPart, b: _LossPart) -> _LossPart:
    """Join two parts of a row: the highest logit h, the sum of exp(logit - h), and the sum of the labels' logits."""
    (highest_a, sum_a, label_a), (highest_b, sum_b, label_b) = a, b
    highest = jnp.maximum(highest_a, highest_b)
    ratio = jnp.exp(jnp.minimum(highest_a, highest_b) - highest)
    joined = jnp.where(highest_a >= highest_b, sum_a + ratio * sum_b, ratio * sum_a + sum_b)
    return highest, joined, label_a + label_b


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _nll_sum(
    chunk: int,
    columns: _Columns,
    one_pass: bool,
    h_BTD: jax.Array,
    kernel_DV: jax.Array,
    labels_BT: jax.Array,
    weight_B: jax.Array | None,
) -> jax.Array:
    """The weighted loss, `chunk` positions at a time; `chunk` divides T."""
    kernel_DV = columns.cast(kernel_DV, h_BTD.dtype)

    def body(nll_sum: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        h_BCD, labels_BC = _chunk(h_BTD, start, chunk), _chunk(labels_BT, start, chunk)
        return nll_sum + _chunk_nll(columns, one_pass, h_BCD, kernel_DV, labels_BC, weight_B)[0], None

    return jax.lax.scan(body, _zero(h_BTD), jnp.arange(0, h_BTD.shape[1], chunk))[0]


def _nll_sum_forward(chunk, columns, one_pass, h_BTD, kernel_DV, labels_BT, weight_B):
    """Compute the loss and, while a chunk's logits are there, its gradients for a unit cotangent."""
    kernel_cast_DV = columns.cast(kernel_DV, h_BTD.dtype)
    parts = num_shards("fsdp", h_BTD.shape[0])

    def body(carry, start):
        nll_sum, d_h_BTD, d_kernel_PDV = carry
        h_BCD, labels_BC = _chunk(h_BTD, start, chunk), _chunk(labels_BT, start, chunk)
        chunk_sum, d_logits_BCV = _chunk_nll(columns, one_pass, h_BCD, kernel_cast_DV, labels_BC, weight_B)
        d_h_BCD = jnp.einsum("bcv,dv->bcd", d_logits_BCV, kernel_cast_DV)
        d_h_BTD = jax.lax.dynamic_update_slice_in_dim(d_h_BTD, d_h_BCD, start, axis=1)
        # Summed over chunks in float32, whatever the compute dtype.
        h_PBCD, d_logits_PBCV = (x.reshape(parts, -1, *x.shape[1:]) for x in (h_BCD, d_logits_BCV))
        d_kernel_PDV += jnp.einsum("pbcd,pbcv->pdv", h_PBCD, d_logits_PBCV, preferred_element_type=jnp.float32)
        return (nll_sum + chunk_sum, d_h_BTD, constrain(d_kernel_PDV, "fsdp", None, "tensor")), None

    # A sum for every part of the batch that lies on other devices: summed over them once, not for every chunk.
    nothing_PDV = jnp.broadcast_to(jnp.zeros_like(kernel_cast_DV, jnp.float32), (parts, *kernel_cast_DV.shape))
    start = (_zero(h_BTD), jnp.zeros_like(h_BTD), constrain(nothing_PDV, "fsdp", None, "tensor"))
    (nll_sum, d_h_BTD, d_kernel_PDV), _ = jax.lax.scan(body, start, jnp.arange(0, h_BTD.shape[1], chunk))
    return nll_sum, (d_h_BTD, d_kernel_PDV.sum(axis=0)[:, : columns.number].astype(kernel_DV.dtype))


def _nll_sum_backward(chunk, columns, one_pass, gradients, cotangent):
    d_h_BTD, d_kernel_DV = gradients
    if columns.axis_name is not None:
        cotangent = jax.lax.psum(cotangent, columns.axis_name)  # every shard's loss depends on this shard's columns
    return (cotangent * d_h_BTD).astype(d_h_BTD.dtype), (cotangent * d_kernel_DV).astype(d_kernel_DV.dtype), None, None


_nll_sum.defvjp(_nll_sum_forward, _nll_sum_backward)


def _chunk(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _zero(like: jax.Array) -> jax.Array:
    """A float32 zero that varies over the same mesh axes as `like`, as a loop inside `shard_map` asks of its carry."""
    return jnp.zeros_like(like[0, 0, 0], jnp.float32)
