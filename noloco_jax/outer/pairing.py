"""Who averages with whom: pools of partitions of the replicas, and the pool entry that each round uses.

A compiled collective needs its permutation at compile time, so a round cannot draw a fresh one. Instead a pool of
partitions is fixed, every one of them is compiled, and round r draws an entry of the pool.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

Group = tuple[int, ...]
Round = tuple[Group, ...]

# More rounds than this are sampled: a fixed graph in which every replica has this many partners mixes like the
# complete one, and the outer program's size grows with the pool.
MAX_POOL = 64


class Pairing(Protocol):
    """What an outer optimizer asks of a pairing."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas N."""
        ...

    @property
    def pool(self) -> tuple[Round, ...]:
        """Partitions of `range(N)` into groups."""
        ...

    def pool_index(self, round: jax.typing.ArrayLike) -> jax.Array:
        """The entry of `pool` that outer round `round` (0, 1, ...) uses: an int32 scalar, a pure function of it."""
        ...


class RandomPairing:
    """A random partition of the replicas into groups of `group_size`, drawn afresh every round.

    For pairs the pool is a 1-factorization of the complete graph: N - 1 rounds (N of them when N is odd, each leaving
    another replica alone) in which every pair meets exactly once. A uniform draw then pairs any two replicas with the
    probability of a uniform random matching, and because pair averaging is a projection, the mean-square mixing is the
    same too. For larger groups, and for pairs when that takes more than `max_pool` rounds, the pool is `max_pool`
    random partitions.

    When `group_size` does not divide `num_replicas`, the last group of each round is the remainder; a group of one
    still takes its outer step, with itself as the mean.

    Args:
      num_replicas: number of replicas N, at least 1.
      group_size: replicas that average together, from 2 to N (1 replica: any).
      seed: of the draws, and of the pool where that is random.
      max_pool: the largest pool to compile.

    Raises:
      ValueError: if the sizes do not fit.
    """

    def __init__(self, num_replicas: int, group_size: int = 2, seed: int = 0, *, max_pool: int = MAX_POOL):
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}: it must be at least 1")
        if num_replicas > 1 and not 2 <= group_size <= num_replicas:
            raise ValueError(
                f"group_size is {group_size} with num_replicas {num_replicas}: choose from 2 to {num_replicas}"
            )
        if max_pool < 1:
            raise ValueError(f"max_pool is {max_pool}: it must be at least 1")
        self.num_replicas = num_replicas
        self.group_size = group_size
        self.seed = seed
        num_rounds = num_replicas - 1 + num_replicas % 2
        if num_replicas == 1:
            self.pool: tuple[Round, ...] = (((0,),),)
        elif group_size == num_replicas:
            self.pool = ((tuple(range(num_replicas)),),)
        elif group_size == 2 and num_rounds <= max_pool:
            self.pool = _round_robin(num_replicas)
        else:
            self.pool = _random_partitions(num_replicas, group_size, seed, max_pool)

    def pool_index(self, round: jax.typing.ArrayLike) -> jax.Array:
        """See `Pairing`. Uniform over the pool, independent between rounds."""
        key = jax.random.fold_in(jax.random.key(self.seed), round)
        return jax.random.randint(key, (), 0, len(self.pool), jnp.int32)  # the same draw under jax_enable_x64


class ExplicitPairing:
    """The partitions the caller lists, in turn: round r uses `rounds[r % len(rounds)]`.

    Args:
      rounds: a list of partitions, each a list of groups, each a list of replica indices. Every partition must hold
        every replica from 0 to N - 1 exactly once.

    Raises:
      ValueError: if a round is no partition of the same replicas.
    """

    def __init__(self, rounds: Sequence[Sequence[Sequence[int]]]):
        self.pool: tuple[Round, ...] = tuple(tuple(tuple(map(int, group)) for group in round_) for round_ in rounds)
        if not self.pool:
            raise ValueError("rounds is empty: list at least one partition of the replicas")
        self.num_replicas = sum(map(len, self.pool[0]))
        for r, round_ in enumerate(self.pool):
            members = sorted(i for group in round_ for i in group)
            if members != list(range(self.num_replicas)) or not all(round_):
                raise ValueError(
                    f"round {r} holds replicas {members}: each of 0..{self.num_replicas - 1} must be there exactly once"
                )

    def pool_index(self, round: jax.typing.ArrayLike) -> jax.Array:
        """See `Pairing`."""
        return jnp.asarray(round, jnp.int32) % len(self.pool)


def groups_of_rounds(pairing: Pairing, num_rounds: int) -> list[Round]:
    """The partitions of rounds 0 to `num_rounds` - 1, on the host: what a run will do, for logs and tests."""
    indices = np.asarray(jax.vmap(pairing.pool_index)(jnp.arange(num_rounds)))
    return [pairing.pool[i] for i in indices]


def consensus_limit(momentum: float, num_replicas: int, group_size: int = 2) -> float:
    """The largest consensus strength γ for which pure consensus is mean-square stable: 0 < γ < limit, exactly.

    Without gradients a replica's deviation from the mean obeys δ ← αδ − γPφ, φ ← φ + δ, with P = I − W a random
    projection and E[P] = p I on the deviations, p = (N − G)/(N − 1) for G groups. The second moments |φ|², ⟨φ, δ⟩ and
    |δ|² close; their 3×3 map reaches eigenvalue one at

        γ = 2 (1 − α²) / (1 + α − 2αp),

    which for pairs is 2(1 − α²)/(1 − α/(N − 1)) if N is even, 2(1 − α²) if odd. The paper's Eq. 74 is not that bound. A
    pool that is a sample of the partitions has E[P] only near p I, and a limit up to a few per cent lower.

    Args:
      momentum: outer momentum α in [0, 1).
      num_replicas: N.
      group_size: n; the remainder forms one smaller group.
    """
    if num_replicas == 1:
        return float("inf")
    num_groups = -(-num_replicas // group_size)
    p = (num_replicas - num_groups) / (num_replicas - 1)
    return 2 * (1 - momentum**2) / (1 + momentum - 2 * momentum * p)


def _round_robin(n: int) -> tuple[Round, ...]:
    """A 1-factorization of the complete graph on n replicas; for odd n, one replica a round is alone."""
    if n & (n - 1) == 0:
        # i meets i XOR r: replicas that lie together in an aligned block of 2^k move together, so that blocks of
        # replicas on one device exchange with exactly one other device a round.
        return tuple(tuple((i, i ^ r) for i in range(n) if i < i ^ r) for r in range(1, n))
    odd = n - 1 + n % 2  # the circle method: a fixed replica, the others on a circle of odd size
    rounds = []
    for r in range(odd):
        pairs = [tuple(sorted(((r + k) % odd, (r - k) % odd))) for k in range(1, (odd + 1) // 2)]
        rounds.append(((r, n - 1) if n % 2 == 0 else (r,), *pairs))
    return tuple(rounds)


def _random_partitions(n: int, group_size: int, seed: int, count: int) -> tuple[Round, ...]:
    rng = np.random.default_rng([seed, n, group_size])
    return tuple(
        tuple(tuple(map(int, order[i : i + group_size])) for i in range(0, n, group_size))
        for order in (rng.permutation(n) for _ in range(count))
    )
