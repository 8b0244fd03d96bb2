"""Pairings: pools of partitions of the replicas into groups, and the pool entry that each round uses.

A compiled collective needs its permutation at compile time, so a round cannot draw a fresh one. Instead a pool of
partitions is fixed, all of them are compiled, and round r draws an entry of the pool.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np

from noloco_jax.optim.fits import fits_hypercube
from noloco_jax.optim.prng import PAIRING, POOL, below, permutation

Group = tuple[int, ...]
Round = tuple[Group, ...]

# Larger pools are sampled down to this size: a fixed graph in which every replica has this many partners mixes like
# the complete graph, and the outer program's size grows with the pool.
MAX_POOL = 64
DRAWS = ("passes", "independent")
ORDERS = (*DRAWS, "hypercube")


class Pairing(Protocol):
    """Interface of a pairing, as an outer optimizer uses it.

    Attributes:
      num_replicas: N.
      pool: partitions of `range(N)` into groups.
    """

    num_replicas: int
    pool: tuple[Round, ...]

    def pool_index(self, draw: Any, fragment: Any = 0) -> Any:
        """Return the index in `pool` of a draw (0, 1, ...) of a fragment: an int32 scalar, a pure function.

        A Python number is computed on the host and a traced one in the program, with the same result.
        """
        ...


class RandomPairing:
    """A random partition of the replicas into groups of `group_size`, drawn afresh every round.

    For pairs the pool is a 1-factorization of the complete graph: N - 1 rounds (N of them when N is odd, each leaving
    another replica alone) in which every pair meets exactly once. A uniform draw then pairs any two replicas with the
    probability of a uniform random matching, and because pair averaging is a projection, the mean-square mixing is the
    same too. If there are more than `max_pool` rounds, the pool is a sample of that size. For 2^k replicas it consists
    of rounds that match one half of the replicas with the other, by a parity that the seed draws; these mix like all
    rounds (see `_xor_sample`). For other numbers it consists of random matchings. For larger groups the pool holds
    every partition once if there are at most `max_pool` of them, else random ones.

    When `group_size` does not divide `num_replicas`, the last group of each round is the remainder; a group of one
    still takes its outer step, with itself as the mean.

    Args:
      num_replicas: number of replicas N, at least 1.
      group_size: replicas that average together, from 2 to N (1 replica: any).
      seed: seed of the draws, and of the pool if that is random; any non-negative integer.
      order: "passes" goes through all entries of the pool in a random order, then through all in another order: after
        a pass over pairs every replica has met every other. The replicas stay closer than with "independent" draws,
        which are the paper's (a spread 20, 12 and 8 % smaller for 4, 8 and 16 replicas). "hypercube", for
        groups of 2^j among N = 2^k replicas, is one fixed order from a random start: any k / j consecutive rounds,
        rounded up, bring all replicas to their exact mean, like the one-peer graphs of arXiv 2110.13363.
      max_pool: the largest pool to compile.

    Raises:
      ValueError: if the sizes do not fit, or the order is unknown.
    """

    def __init__(
        self,
        num_replicas: SupportsIndex,
        group_size: SupportsIndex = 2,
        seed: SupportsIndex = 0,
        order: str = "passes",
        *,
        max_pool: SupportsIndex = MAX_POOL,
    ):
        numbers = num_replicas, group_size, seed, max_pool
        num_replicas, group_size, seed, max_pool = map(operator.index, numbers)  # NumPy's too
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}: it must be at least 1")
        if num_replicas > 1 and not 2 <= group_size <= num_replicas:
            raise ValueError(
                f"group_size is {group_size} with num_replicas {num_replicas}: choose from 2 to {num_replicas}"
            )
        check_draws(seed, order, ORDERS, max_pool)
        if order == "hypercube" and not fits_hypercube(num_replicas, group_size):
            raise ValueError(
                f"order is 'hypercube' with {num_replicas} replicas in groups of {group_size}: both must be powers of "
                "two, choose 'passes'"
            )
        self.num_replicas = num_replicas
        self.group_size = group_size
        self.seed = seed
        self.order = order
        if order == "hypercube" and num_replicas > 1:
            self.pool = _hypercube(num_replicas, group_size, max_pool)
        else:
            self.pool = _make_pool(num_replicas, group_size, seed, max_pool)

    def pool_index(self, draw: Any, fragment: Any = 0) -> Any:
        """Return the pool index of a draw: uniform, each entry once a pass or independent between draws."""
        stride = self.group_size.bit_length() - 1 if self.order == "hypercube" else 1
        return drawn(len(self.pool), self.seed, self.order, draw, fragment, stride)


class ExplicitPairing:
    """Partitions listed by the caller, used in turn: draw k of fragment f uses `rounds[(k + f) % len(rounds)]`.

    Args:
      rounds: a list of partitions, each a list of groups, each a list of replica indices. Every partition must hold
        every replica from 0 to N - 1 exactly once.

    Raises:
      ValueError: if a round is not a partition of the same replicas.
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

    def pool_index(self, draw: Any, fragment: Any = 0) -> Any:
        """See `Pairing`."""
        index = (draw + fragment) % len(self.pool)
        return index.astype(np.int32) if hasattr(index, "astype") else index


def check_draws(seed: int, order: str, orders: Sequence[str], max_pool: int) -> None:
    """Raise `ValueError` for a seed, an order of draws or a size limit of a pool that is out of its range."""
    if max_pool < 1:
        raise ValueError(f"max_pool is {max_pool}: it must be at least 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}: it must not be negative")
    if order not in orders:
        raise ValueError(f"order is {order!r}: choose from {', '.join(map(repr, orders))}")


# Random draws of a fragment are those of an index that is a multiple of this, which no run reaches.
_FRAGMENT = 2**20


def drawn(size: int, seed: int, order: str, draw: Any, fragment: Any, stride: int = 1) -> Any:
    """Return the index in a pool of `size` entries that a draw uses; `order` is one of `ORDERS`.

    Fragments draw independently: the fragment enters the hash. In the fixed order of a hypercube fragment f is f
    entries ahead, so that up to `size` fragments have different partners.
    """
    if order == "independent":
        return below(size, seed, PAIRING, fragment * _FRAGMENT + draw)
    if order == "hypercube":
        return (below(size, seed, PAIRING) + draw * stride + fragment) % size
    return permutation(size, seed, PAIRING, fragment * _FRAGMENT + draw // size)[draw % size]


def senders_of(pairing: Pairing) -> tuple[np.ndarray, np.ndarray]:
    """Return the senders of every replica in each entry of the pool, and how many average with it.

    Member k of a group hears the members k + 1, k + 2, ... places after it, in turn; in a directed graph, whose entries
    are tuples of a replica and its senders, only the replica hears.

    Returns:
      senders: int32 (pool, largest group − 1 or 1, N); a replica is its own sender where it has fewer.
      sizes: int32 (pool, N), the replica itself and its senders.
    """
    pool, n = pairing.pool, pairing.num_replicas
    is_directed = getattr(pairing, "is_directed", False)
    sizes = np.ones((len(pool), n), np.int32)
    senders = np.tile(np.arange(n, dtype=np.int32), (len(pool), max(largest_group(pairing) - 1, 1), 1))
    for entry, groups in enumerate(pool):
        for group in groups:
            for position, replica in enumerate(group[:1] if is_directed else group):
                sizes[entry, replica] = len(group)
                for k in range(1, len(group)):
                    senders[entry, k - 1, replica] = group[(position + k) % len(group)]
    return senders, sizes


def halvings_of(pairing: Pairing) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return how groups of 4, 8, 16, ... average by halves; empty if there are others.

    In halving l the member at position p of a group swaps with that at p XOR 2^l, and keeps half number bit l of p.

    Returns:
      For each halving int32 (pool, N) arrays: the partner of every replica, and its half, 0 or 1.
    """
    sizes = {len(group) for round_ in pairing.pool for group in round_}
    size = max(sizes)
    if getattr(pairing, "is_directed", False) or len(sizes) > 1 or size < 4 or size & (size - 1):
        return []
    halvings = []
    for leg in range(size.bit_length() - 1):
        partners, sides = np.zeros((2, len(pairing.pool), pairing.num_replicas), np.int32)
        for entry, groups in enumerate(pairing.pool):
            for group in groups:
                for position, replica in enumerate(group):
                    partners[entry, replica] = group[position ^ 1 << leg]
                    sides[entry, replica] = position >> leg & 1
        halvings.append((partners, sides))
    return halvings


def largest_group(pairing: Pairing) -> int:
    """Return the size of the largest group in any entry of the pool."""
    return max(len(group) for round_ in pairing.pool for group in round_)


def components(pairing: Pairing) -> list[list[int]]:
    """Return the connected components of the replicas over all rounds: one list if all of them mix."""
    parent = list(range(pairing.num_replicas))  # union-find: one tree a component, whose root is its own parent

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for first, *others in itertools.chain.from_iterable(pairing.pool):
        for other in others:
            parent[root(other)] = root(first)
    members: dict[int, list[int]] = {}
    for i in range(pairing.num_replicas):
        members.setdefault(root(i), []).append(i)
    return list(members.values())


def consensus_limit(momentum: float, num_replicas: int, group_size: int = 2) -> float:
    """Return the limit of the consensus strength γ: pure consensus is mean-square stable exactly for 0 < γ < limit.

    Without gradients a replica's deviation from the mean obeys δ ← αδ − γPφ, φ ← φ + δ, with P = I − W a random
    projection and E[P] = p I on the deviations, p = (N − G)/(N − 1) for G groups. The second moments |φ|², ⟨φ, δ⟩ and
    |δ|² close; their 3×3 map reaches eigenvalue one at

        γ = 2 (1 − α²) / (1 + α − 2αp),

    which for pairs is 2(1 − α²)/(1 − α/(N − 1)) if N is even, 2(1 − α²) if odd. The paper's Eq. 74 is not that bound.
    A sampled pool has E[P] only near p I, and a lower limit. For groups it is lower by up to a few per cent. For a
    sample of the rounds i XOR r it is the formula with the smallest eigenvalue of E[P] as p: with α = 0.5 and the
    default pool no lower for N = 128, 14 to 16 % lower for 256 to 1024. The limit assumes independent rounds.

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


def _make_pool(n: int, group_size: int, seed: int, max_pool: int) -> tuple[Round, ...]:
    if n == 1:
        return (((0,),),)
    if group_size == n:
        return ((tuple(range(n)),),)
    if group_size == 2 and n - 1 + n % 2 <= max_pool:
        return _round_robin(n)
    if group_size == 2 and n & (n - 1) == 0 and max_pool >= n.bit_length() - 1:  # fewer shifts do not connect all
        return _xor_sample(n, seed, max_pool)
    if _num_partitions(n, group_size) <= max_pool:
        return tuple(_all_partitions(tuple(range(n)), group_size))
    pool: dict[Round, None] = {}
    for number in itertools.takewhile(lambda _: len(pool) < max_pool, itertools.count()):
        pool.setdefault(_random_partition(n, group_size, seed, number))
    return tuple(pool)


def _round_robin(n: int) -> tuple[Round, ...]:
    """Return a 1-factorization of the complete graph on n replicas; for odd n, one replica a round is alone."""
    if n & (n - 1) == 0:
        # Replica i is paired with i XOR r. An aligned block of 2^k replicas is paired with one other such block, so
        # that the replicas of a device exchange with exactly one other device a round.
        return tuple(_xor_round(n, r) for r in range(1, n))
    odd = n - 1 + n % 2  # the circle method: a fixed replica, the others on a circle of odd size
    rounds = []
    for r in range(odd):
        pairs = [tuple(sorted(((r + k) % odd, (r - k) % odd))) for k in range(1, (odd + 1) // 2)]
        rounds.append(((r, n - 1) if n % 2 == 0 else (r,), *pairs))
    return tuple(rounds)


def _xor_sample(n: int, seed: int, count: int) -> tuple[Round, ...]:
    """Sample `count` of the rounds i XOR r of n = 2^k replicas so that together they connect all replicas.

    The n / 2 shifts r with an odd number of bits under a random mask come first, in random order: they match the
    replicas of one parity with those of the other. A deviation from the mean is a sum of n − 1 Walsh functions s. A
    round either keeps or cancels each of them; under independent draws s keeps the share (1 + mean over r of s(r)) / 2
    of its variance. For all n − 1 shifts that is (1 − 1 / (n − 1)) / 2. For those n / 2 it is 1/2, and 0 for the mask's
    own s. For 64 of 128 to 512 of them it is the same on average and 0.66 to 0.69 for the slowest s (64 random
    matchings: 0.62). Replicas that move at random end no farther apart than with random matchings.
    """
    for attempt in itertools.count():
        mask = 1 + int(below(n - 1, seed, POOL, attempt))
        order = (1 + permutation(n - 1, seed, POOL, attempt)).tolist()
        shifts = sorted(order, key=lambda r: (r & mask).bit_count() % 2 == 0)[:count]
        reached = {0}
        for r in shifts:
            reached |= {i ^ r for i in reached}
        if len(reached) == n:
            return tuple(_xor_round(n, r) for r in shifts)
    raise AssertionError("attempts do not end")


def _xor_round(n: int, r: int) -> Round:
    return tuple((i, i ^ r) for i in range(n) if i < i ^ r)


def _hypercube(n: int, group_size: int, max_pool: int) -> tuple[Round, ...]:
    """Return rounds of n = 2^k replicas in groups of 2^j: the sums of j consecutive shifts, of which any k are a basis.

    The shifts r of i XOR r go through the powers of a generator of the field of n elements, so that every pair meets,
    or through the k unit vectors if those are more than `max_pool`. They are linearly independent as vectors of k bits.
    """
    k, j = n.bit_length() - 1, group_size.bit_length() - 1
    shifts = [1 << bit for bit in range(k)] if n - 1 > max_pool else _powers_of_generator(k)
    starts = range(len(shifts) if j < k else 1)
    return tuple(_span_round(n, [shifts[(start + i) % len(shifts)] for i in range(j)]) for start in starts)


def _span_round(n: int, shifts: list[int]) -> Round:
    """Return the groups {i XOR a sum of some shifts}; the member at position p differs by the shifts of its bits."""
    sums = [0]
    for shift in shifts:
        sums += [shift ^ other for other in sums]
    return tuple(tuple(i ^ other for other in sums) for i in range(n) if all(i <= i ^ other for other in sums))


def _powers_of_generator(k: int) -> list[int]:
    """Return 1, x, x², ... modulo the first primitive polynomial of degree k over two elements: 2^k − 1 values."""
    for polynomial in range(2**k + 1, 2 ** (k + 1), 2):
        powers = [1]
        while len(powers) < 2**k - 1:
            power = powers[-1] << 1
            powers.append(power ^ polynomial if power >> k else power)
        if len(set(powers)) == len(powers):
            return powers
    raise AssertionError(f"no generator of degree {k}")


def _num_partitions(n: int, group_size: int) -> int:
    """Count the partitions of n replicas into groups of `group_size` and one group of the remainder."""
    whole, rest = divmod(n, group_size)
    return math.factorial(n) // (math.factorial(group_size) ** whole * math.factorial(whole) * math.factorial(rest))


def _all_partitions(members: Group, group_size: int) -> Iterator[Round]:
    """Yield every partition once; the first member is in a whole group or in the group of the remainder."""
    first, others = members[0], members[1:]
    rest = len(members) % group_size
    if len(members) < group_size:
        yield (members,)
        return
    for size in {group_size, rest} - {0}:
        for mates in itertools.combinations(others, size - 1):
            group, left = (first, *mates), tuple(i for i in others if i not in mates)
            for round_ in _all_partitions(left, group_size) if left else ((),):
                yield (*round_, group) if size == rest else (group, *round_)


def _random_partition(n: int, group_size: int, seed: int, number: int) -> Round:
    """Draw a partition, groups ascending and the remainder last, so that equal partitions are equal values."""
    order = permutation(n, seed, POOL, group_size, number).tolist()
    groups = [tuple(sorted(order[i : i + group_size])) for i in range(0, n, group_size)]
    return tuple(sorted(groups, key=lambda group: (-len(group), group)))
