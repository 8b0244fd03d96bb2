"""Public outer optimizers for `optax.chain`: each combines a rule with the exchange that averages its messages."""

import math
import operator
import warnings
from typing import Any

import jax
import jax.core
import numpy as np

from noloco_jax.optim.defaults import DEFAULTS
from noloco_jax.optim.exchange.all_reduce import AllExchange
from noloco_jax.optim.exchange.axes import AxisName, names_of
from noloco_jax.optim.exchange.mean import MeanExchange
from noloco_jax.optim.exchange.modulo import Modulo
from noloco_jax.optim.exchange.sparseloco import SparseExchange, SparseLoCo
from noloco_jax.optim.exchange.wire import wire_of
from noloco_jax.optim.fits import misfits
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.neighbours import RandomNeighbours
from noloco_jax.optim.outer_step import Exchange, OuterOptimizer, OuterStep
from noloco_jax.optim.pairing import Pairing, components, consensus_limit, halvings_of, largest_group
from noloco_jax.optim.rule import MOMENTUM_OF, Number, Rule
from noloco_jax.optim.schedule import SyncSchedule
from noloco_jax.optim.wire_sizes import CHUNK, MODULO_BITS

_NOLOCO, _DILOCO, _EPIDEMIC, _SPARSELOCO = (DEFAULTS[name] for name in ("noloco", "diloco", "epidemic", "sparseloco"))

_RANGES = {
    "finite and at least 0": lambda number: 0 <= number < math.inf,
    "in [0, 1)": lambda number: 0 <= number < 1,
    "in [0, 1]": lambda number: 0 <= number <= 1,
}
# Rounds in which a schedule is checked: its extremes lie at its ends, or where its parts meet.
_SOME_ROUNDS = sorted({*range(0, 129, 8), *(2**i for i in range(21)), *(10**i for i in range(7))})
# Largest momentum of corrections with a wire format whose step follows the replicas' distance: 0.8 diverges, 0.6 not.
_SAFE_BESIDE_MODULO = 0.6


def noloco(
    pairing: Pairing | None = None,
    outer_lr: Number = _NOLOCO["lr"],
    outer_momentum: Number = _NOLOCO["momentum"],
    consensus: Number | None = _NOLOCO["consensus"],
    sync_every: int = _NOLOCO["sync_every"],
    axis_name: AxisName = "replica",
    wire: str = _NOLOCO["wire"],
    fragments: int | Fragments | None = None,
    delay: int | None = None,
    momentum_of: str = _NOLOCO["momentum_of"],
) -> OuterOptimizer:
    """NoLoCo (arXiv 2506.10911): every `sync_every` inner steps, a momentum step with a random group of replicas.

    With θ the fast weights, φ the slow ones, δ the outer momentum, and the mean over the replica's group:

        Δ = θ − φ                                            (Eq. 1)
        δ ← α δ + β mean(Δ) + γ (mean(φ) − φ)                (Eq. 2, with the sign of Eq. 32 and the authors' code)
        φ ← φ + δ;  θ ← φ                                    (Eq. 3)

    Since β mean(Δ) + γ mean(φ) = mean(βΔ + γφ), a replica sends one tensor of the parameters' size.

    There are two ways to use it. Both must run where `axis_name` is bound: inside `jax.shard_map` over a mesh axis,
    inside `jax.vmap(axis_name=...)`, or inside the latter within the former with both axes as a tuple (JAX then needs
    `check_vma=False`, as for any collective over such a `vmap`).

    `step(params, state) -> (params, state)` is one outer step, to be compiled as a program of its own and called after
    every `sync_every` inner steps, which do not depend on it. Use this form on accelerators: on GPUs all devices of a
    process synchronize before a program with a collective, so inner steps should contain none.

    `update(updates, state, params, *, sync=None)` is the transform. It must come last in an `optax.chain`, so that it
    sees the final update of the inner optimizer. It returns updates that end on φ after an outer step, and its input
    otherwise; updates that are narrower than the parameters are returned in the parameters' dtype. `sync=None` decides
    by the state's counter with `lax.cond`, so that steps in between cost nothing, also under `vmap`; `True` and `False`
    are static, for callers that compile one program with the outer step and one without.

    Both count their outer steps in the state, and this count selects the pairing. All replicas must take the same
    steps: a transform that skips or repeats steps (`optax.MultiSteps`, `optax.apply_if_finite`, a lookahead) may wrap
    only the inner optimizer.

    Args:
      pairing: the groups of every draw: `RandomPairing`, `ExplicitPairing`. None: for an `Island`, which draws random
        pairs of its roster's islands.
      outer_lr: β, outer learning rate, at least 0; a number or a schedule of the fragment's round.
      outer_momentum: α, in [0, 1); likewise.
      consensus: γ, the pull towards the group's mean; likewise. None: equal to `outer_lr`, as in the authors' code, and
        to its schedule: with one, or with an `outer_lr` above 1, give a number. A value outside the interval in which
        pure consensus is mean-square stable (`consensus_limit`) gives a warning.
      sync_every: inner steps between outer steps, for `sync=None`.
      axis_name: name of the axis of replicas; or a tuple of mesh axes, a `vmap` axis, or both in this order.
      wire: wire format of messages: "float32"; or "bfloat16", "int8" or "int4", which quantize to 16, 8 or 4
        bits a weight (the last two in blocks of up to 64 weights, with a scale of 2 bytes each). Partners then move
        by the difference of their quantized messages, so that equal replicas stay equal, the replicas' mean does not
        change, and each replica keeps what is below the format's resolution. For groups of 2, 4, 8,
        ... also "modulo4": 4 bits in windows that follow the replicas' distance, plus two bytes a block (see
        `exchange.modulo`); its quantization error is far smaller than that of "int4".
      fragments: F. Every outer step exchanges one of F equal parts of the parameters, in turn, each with a pairing of
        its own; there are F outer steps in `sync_every` inner steps. A number, or a `Fragments`; None: no fragments.
      delay: inner steps after an outer step at which the group's correction is applied, at most `sync_every`; until
        then a replica continues from its own message, so that the exchange can overlap with training. None: at once.
        `apply(params, state) -> (params, state)` applies the oldest pending correction.
      momentum_of: "steps": δ is as above. "corrections": it accumulates only corrections from the group,

            δ ← α δ + c,  c = mean(m) − m,  m = βΔ + γφ;    φ ← φ + α δ + mean(m) − γφ

        as in gossip with heavy-ball momentum (arXiv 1810.13084). Inner momentum drives replicas apart in the same
        directions for many steps; this momentum keeps pulling them together, and does not change their mean, since
        corrections sum to zero.

    Returns:
      A transform whose state is an `OuterState`.

    Raises:
      ValueError: if a number is out of its range, or a name unknown.
    """
    if momentum_of not in MOMENTUM_OF:
        raise ValueError(f"momentum_of is {momentum_of!r}: choose from {', '.join(map(repr, MOMENTUM_OF))}")
    gamma = outer_lr if consensus is None else consensus
    _check_number("outer_lr", outer_lr)
    _check_number("consensus", gamma)
    _check_number("outer_momentum", outer_momentum, "in [0, 1)")
    if pairing is not None:
        _check_pairing(pairing)
        _warn_if_apart(pairing, outer_momentum, gamma)
        if (largest := largest_group(pairing)) > 2 and not halvings_of(pairing):
            _check_fits("groups", f"those of the pairing, of up to {largest}", wire)

    of_corrections = momentum_of == "corrections"
    alpha = _known(outer_momentum)
    if of_corrections and wire in MODULO_BITS and alpha is not None and alpha > _SAFE_BESIDE_MODULO:
        warnings.warn(
            f"with outer_momentum {alpha:g} of corrections replicas hardly converge, and the quantization error of "
            f"wire={wire!r}, a share of their distance, may drive them apart: use at most {_SAFE_BESIDE_MODULO}",
            stacklevel=2,
        )
    rule = Rule(outer_momentum, outer_lr, gamma, of_corrections=of_corrections)
    exchange = MeanExchange(pairing, wire_of(wire), axis_name)
    return _made(rule, exchange, sync_every, axis_name, fragments, delay)


def diloco(
    outer_lr: Number = _DILOCO["lr"],
    outer_momentum: Number = _DILOCO["momentum"],
    nesterov: bool = _DILOCO["nesterov"],
    sync_every: int = _DILOCO["sync_every"],
    axis_name: AxisName = "replica",
    wire: str = _DILOCO["wire"],
    fragments: int | Fragments | None = None,
    delay: int | None = None,
) -> OuterOptimizer:
    """DiLoCo (arXiv 2311.08105): every `sync_every` inner steps, a momentum step along the mean outer gradient.

        Δ = θ − φ
        δ ← α δ + β mean(Δ)
        φ ← φ + δ            heavy ball: the baseline of the NoLoCo paper (α 0.3, β 0.7, 100 inner steps)
        φ ← φ + α δ + β mean(Δ)    Nesterov: the DiLoCo paper (arXiv 2311.08105; α 0.9, β 0.7)
        θ ← φ

    Used as `noloco` is, with the same `step` and `update`. The replicas must begin with equal weights, as Δ alone is
    exchanged: differences at the start stay.

    Args:
      outer_lr: β, outer learning rate, at least 0; a number or a schedule of the fragment's round.
      outer_momentum: α, in [0, 1); likewise.
      nesterov: true Nesterov momentum, instead of heavy ball.
      sync_every, axis_name, fragments, delay: as for `noloco`; with fragments it is Streaming DiLoCo
        (arXiv 2501.18512).
      wire: as for `noloco`, without the modulo wire formats. Each message is quantized, and so is their mean; what they
        lose is not sent later.

    Returns:
      A transform whose state is an `OuterState`.

    Raises:
      ValueError: if a number is out of its range, or a name unknown.
    """
    _check_fits("all", "diloco", wire)
    wire_format = wire_of(wire)
    assert not isinstance(wire_format, Modulo)
    _check_number("outer_lr", outer_lr)
    _check_number("outer_momentum", outer_momentum, "in [0, 1)")
    rule = Rule(outer_momentum, outer_lr, 0.0, nesterov)
    return _made(rule, AllExchange(wire_format, axis_name), sync_every, axis_name, fragments, delay)


def epidemic(
    neighbours: RandomNeighbours,
    sync_every: int = _EPIDEMIC["sync_every"],
    axis_name: AxisName = "replica",
    wire: str = _EPIDEMIC["wire"],
    fragments: int | Fragments | None = None,
    delay: int | None = None,
) -> OuterOptimizer:
    """Epidemic Learning (arXiv 2310.01972): the mean of a replica's weights and those of random senders.

    Every `sync_every` inner steps (1 in the paper) a replica sends its weights θ to s others, receives those of s
    others, and continues from the mean of its own and the received weights:

        θ_i ← (θ_i + Σ_{j sends to i} θ_j) / (s + 1)         (Algorithm 1)

    This is the paper's EL-Oracle: a random graph in which each replica sends to s and receives from s others, so that
    the mean over all replicas does not change. EL-Local, in which every replica draws its s receivers by itself and
    receives from none or many, cannot be expressed by compiled collectives.

    There are no slow weights, and no outer state but counters. Used as `noloco` is, with the same `step` and `update`.

    Args:
      neighbours: the communication graphs.
      sync_every, axis_name, fragments, delay: as for `noloco`.
      wire: as for `noloco`, without the modulo wire formats, whose windows belong to pairs.

    Returns:
      A transform whose state is an `OuterState`.

    Raises:
      TypeError: if `neighbours` are none.
      ValueError: if a number is out of its range, or a name unknown.
    """
    if not isinstance(neighbours, RandomNeighbours):
        raise TypeError(f"neighbours is {type(neighbours).__name__}: give graphs, such as nj.RandomNeighbours(N)")
    _check_fits("graph", "epidemic", wire)
    exchange = MeanExchange(neighbours, wire_of(wire), axis_name)
    return _made(Rule(0.0, 1.0, 1.0, keeps_state=False), exchange, sync_every, axis_name, fragments, delay)


def sparseloco(
    outer_lr: Number = _SPARSELOCO["lr"],
    error_decay: Number = 0.95,
    top_k: int = _SPARSELOCO["top_k"],
    sync_every: int = _SPARSELOCO["sync_every"],
    axis_name: AxisName = "replica",
    fragments: int | Fragments | None = None,
) -> OuterOptimizer:
    """SparseLoCo (arXiv 2508.15706): all replicas average top-k, 2-bit messages, with error feedback.

    With θ the fast weights, φ those after the last outer step, and the error e of each replica:

        Δ = θ − φ                    (the paper's with the opposite sign)
        e ← β e + Δ
        Δ̂ = Q(TOP-k(e))              k of the entries of every chunk of 4096, 2 bits each
        e ← e − Δ̂
        φ ← φ + α mean(Δ̂);  θ ← φ

    Q gives an entry its sign and one of two magnitudes, the means of the smaller and the larger entries of its chunk.
    An entry is sent as these two bits and 12 bits of its position: with k = 64 a message is 1/141 of the weights in
    float32.

    Every replica needs the message of every other: it is an all-gather, in which each replica sends N − 1 messages and
    all wait. Used as `noloco` is, with the same `step` and `update`. The replicas must begin with equal weights, as for
    `diloco`.

    Args:
      outer_lr: α, outer learning rate, at least 0; a number or a schedule of the fragment's round.
      error_decay: β, in [0, 1]; likewise. With 1 nothing is lost: sent messages and e add up to the sum of all Δ.
      top_k: k, of 1 to 4096; chunks of smaller arrays keep the same share. It is rounded up to a multiple of 4.
      sync_every, axis_name, fragments: as for `noloco`.

    Returns:
      A transform whose state is an `OuterState`.

    Raises:
      ValueError: if a number is out of its range.
    """
    _check_number("outer_lr", outer_lr)
    _check_number("error_decay", error_decay, "in [0, 1]")
    _check_known(top_k=top_k)
    if not 1 <= top_k <= CHUNK:
        raise ValueError(f"top_k is {top_k}: it must be between 1 and {CHUNK}")
    rule, exchange = SparseLoCo(outer_lr, error_decay), SparseExchange(top_k, axis_name)
    return _made(rule, exchange, sync_every, axis_name, fragments, None)


def _made(
    rule: Any,
    exchange: Exchange,
    sync_every: int,
    axis_name: AxisName,
    fragments: int | Fragments | None,
    delay: int | None,
) -> OuterOptimizer:
    """Return the outer optimizer of a rule and an exchange."""
    _check_known(fragments=fragments, delay=delay)
    if not isinstance(fragments, Fragments):
        fragments = Fragments(1 if fragments is None else operator.index(fragments))
    schedule = SyncSchedule(sync_every, fragments.count, 0 if delay is None else operator.index(delay))
    steps = OuterStep(rule, exchange, fragments, schedule, names_of(axis_name))
    return OuterOptimizer(steps.init, steps.update, steps)


def _check_known(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{name} is traced and must be known: name it in the static_args of inject_hyperparams")


def _check_pairing(pairing: Any) -> None:
    """Raise `TypeError` for what is no `Pairing`, among them the neighbours of `epidemic`."""
    pool = getattr(pairing, "pool", ())
    if not pool or any(
        sorted(i for group in round_ for i in group) != list(range(pairing.num_replicas)) for round_ in pool
    ):
        raise TypeError(f"pairing is {type(pairing).__name__}: give groups of replicas, such as nj.RandomPairing(N)")


def _check_fits(exchange: str, given: str, wire: str) -> None:
    """Raise `ValueError` for a wire format that does not go with an exchange, see `fits.TABLE`."""
    for message in misfits(exchange, {"wire": wire}, given):
        raise ValueError(message)


def _known(value: Any, k: int | None = None) -> float | None:
    """Return the value of a concrete number, or of a schedule in round `k`; None for another schedule or a tracer."""
    if isinstance(value, str):
        raise TypeError(f"{value!r} is a text: give a number")
    if callable(value) and k is not None:
        with jax.ensure_compile_time_eval():
            value = value(np.int32(k))
    return None if callable(value) or isinstance(value, jax.core.Tracer) else float(value)


def _check_number(name: str, value: Number, range: str = "finite and at least 0") -> None:
    known = _known(value)
    if known is not None and not _RANGES[range](known):
        raise ValueError(f"{name} is {value}: it must be {range}")


def _warn_if_apart(pairing: Pairing, outer_momentum: Number, gamma: Number) -> None:
    """Warn about settings, in any round of a schedule, with which the replicas' weights do not stay together."""
    if pairing.num_replicas == 1:
        return
    group_size = largest_group(pairing)
    for k in _SOME_ROUNDS if callable(outer_momentum) or callable(gamma) else (0,):
        alpha, known = _known(outer_momentum, k), _known(gamma, k)
        if alpha is None or known is None or not 0 <= alpha < 1:
            break
        limit = consensus_limit(alpha, pairing.num_replicas, group_size)
        if not 0 < known < limit:
            when = f" in round {k}" if callable(outer_momentum) or callable(gamma) else ""
            warnings.warn(
                f"consensus {known:g}{when} is outside (0, {limit:.3g}): with outer_momentum {alpha:g} and "
                f"{pairing.num_replicas} replicas, their weights do not stay together; give consensus a number inside",
                stacklevel=3,
            )
            break
    apart = components(pairing)
    if len(apart) > 1:
        warnings.warn(
            f"the pairing never mixes all replicas: {' and '.join(map(str, apart[:4]))} meet in none of its rounds, "
            "and their weights do not stay together: add rounds that connect them",
            stacklevel=3,
        )
