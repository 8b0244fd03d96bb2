"""One damaged or malicious island of eight: how far it moves the others, with and without bounds on corrections.

    PYTHONPATH=.:tests python -m support.poisons [--rounds=80] [--partition=4]

Real models of 0.1M parameters train on Python's standard library in one process, an inner step after the other; the
protocol, its headers and its lateness are those of islands, in virtual time.
"""

import argparse
import dataclasses
import re
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from noloco_jax import draws
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.exchange.wire import Float32
from noloco_jax.islands.payload import Arrays, PlainCodec, norm_of
from noloco_jax.islands.protocol.bounds import Bounds
from noloco_jax.islands.protocol.events import Apply
from noloco_jax.islands.protocol.island import Island
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import TrainState, build_programs
from noloco_jax.spmd.solo import build_solo
from support.island_world import ROUND, Node, World

COUNT, BAD = 8, "i7"
INNER = 10  # inner steps of a round
BATCH, LENGTH = 2, 64
Poison = Callable[[Arrays, int, np.random.Generator], Arrays]  # own message, round -> what is sent


def config_of(rounds: int) -> TrainConfig:
    model = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
    return from_dict(
        {
            "num_replicas": COUNT,
            "num_steps": rounds * INNER,
            "model": {**model, "vocab_size": 259},
            "inner": {"lr": 3e-3, "warmup_steps": 50, "b2": 0.98},
            "outer": {"sync_every": INNER},
            "data": {"sequence_length": LENGTH, "batch_size": BATCH},
        }
    )


class Lab:
    """Programs, compiled once, and bytes to train on."""

    def __init__(self, rounds: int):
        config = config_of(rounds)
        self.config = dataclasses.replace(config, num_replicas=1, mesh=dataclasses.replace(config.mesh, replica=1))
        self.programs = build_programs(self.config, make_mesh(self.config, jax.devices()[:1]))
        self.solo = build_solo(self.config, self.programs)
        self.codec = PlainCodec(Float32(), self.solo.message, self.solo.code)
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.bytes = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
        generator = np.random.default_rng(17)
        self.held_out = [self.batch(generator, 0.95, 1.0) for _ in range(32)]

    def batch(self, generator: np.random.Generator, first: float, last: float) -> dict[str, np.ndarray]:
        """Return sequences from a share of the bytes."""
        places = generator.integers(int(first * len(self.bytes)), int(last * len(self.bytes)) - LENGTH - 1, BATCH)
        rows = np.stack([self.bytes[place : place + LENGTH + 1] for place in places])
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}

    def init(self) -> TrainState:
        return self.programs.init(draws.key(self.config.seed))

    def train(self, state: TrainState, step: int, generator: np.random.Generator) -> tuple[TrainState, Arrays]:
        """Return the state after a round from inner step `step` on, and its message."""
        params, inner, outer = state
        for number in range(step + 1, step + INNER + 1):
            batch = place_batch({0: self.batch(generator, 0.0, 0.95)}, self.programs.batch)
            params, inner, _ = self.programs.inner_step(params, inner, batch, np.int32(number))
        assert outer is not None
        params, outer, kept, _ = self.solo.step(params, outer)
        return TrainState(params, inner, outer), [np.array(x) for x in jax.device_get(jax.tree.leaves(kept))]

    def enter(self, state: TrainState, correction: Arrays, round: int) -> TrainState:
        params, inner, outer = state
        tree = jax.tree.unflatten(jax.tree.structure(self.solo.correction), correction)
        assert outer is not None
        params, outer = self.solo.enter(params, outer, tree, np.int32(round))
        return TrainState(params, inner, outer)

    def loss(self, params: Any) -> float:
        """Return the mean loss on held-out bytes."""
        sums = np.zeros(2)
        for batch in self.held_out:
            result = self.programs.evaluate(params, place_batch({0: batch}, self.programs.batch))
            sums += np.asarray(jax.device_get(result)).ravel()
        return float(sums[0] / sums[1])


class Poisoned(World):
    """Islands with real weights, of which `BAD` sends what `poison` makes of its messages, and takes no correction."""

    def __init__(self, lab: Lab, poison: Poison | None, **arguments: Any):
        super().__init__(COUNT, **arguments)
        self.lab, self.poison = lab, poison
        self.states = {name: lab.init() for name in self.names}
        self.generators = {name: np.random.default_rng([5, number]) for number, name in enumerate(self.names)}
        self.ended: dict[int, dict[str, Any]] = {}  # round -> states after its training
        self.look_at: frozenset[int] = frozenset()

    def message(self, node: Node) -> tuple[Any, int]:
        generator = self.generators[node.name]
        self.states[node.name], arrays = self.lab.train(self.states[node.name], node.round * INNER, generator)
        if node.round in self.look_at:  # islands end a round at different times
            self.ended.setdefault(node.round, {})[node.name] = jax.device_get(self.states[node.name].params)
        if node.name == BAD and self.poison is not None:
            arrays = self.poison(arrays, node.round, generator)
        return arrays, INNER * BATCH * LENGTH

    def norm(self, message: Any) -> float:
        return norm_of(message)

    def distances(self, own: Any, other: Any) -> tuple[float, ...]:
        return self.lab.codec.read(own, (), other).differences

    def correction(self, node: Node, own: Any, other: Any, action: Apply) -> Any:
        arrays = self.lab.codec.correction(own, other, action.weight, action.factors)
        if node.name != BAD or self.poison is None:
            self.states[node.name] = self.lab.enter(self.states[node.name], arrays, action.xid.round)
        return 0.0

    def check(self) -> None:
        """Weights are no numbers here."""

    def honest(self, round: int) -> list[Any]:
        """Return the weights of the honest islands after a round of `look_at`."""
        return [params for name, params in self.ended[round].items() if name != BAD]

    def loss(self, round: int) -> float:
        return float(np.mean([self.lab.loss(params) for params in self.honest(round)]))

    def spread(self, round: int) -> float:
        """Return the root mean square distance of the honest islands' weights from their mean."""
        leaves = [jax.tree.leaves(params) for params in self.honest(round)]
        means = [np.mean(one, axis=0) for one in zip(*leaves, strict=True)]
        squares = [sum(float(((x - m) ** 2).sum()) for x, m in zip(one, means, strict=True)) for one in leaves]
        return float(np.sqrt(np.mean(squares) / sum(m.size for m in means)))

    def named(self) -> dict[str, int]:
        """Return the islands that others name, and how many others."""
        found: dict[str, set[str]] = {}
        for node in self.nodes.values():
            for line in node.lines:
                if match := re.match(r"(\w+) (is far from|sent)", line):
                    found.setdefault(match[1], set()).add(node.name)
        return {name: len(by - {BAD}) for name, by in sorted(found.items()) if by - {BAD}}


class Boundless(Bounds):
    def factors(self, sizes: Sequence[float], norm: float) -> tuple[float, ...]:
        del sizes, norm
        return ()


def boundless(*arguments: Any, **more: Any) -> Island:
    island = Island(*arguments, **more)
    island._context.bounds = Boundless()  # pyright: ignore[reportPrivateUsage]
    return island


def flipped(message: Arrays, round: int, generator: np.random.Generator) -> Arrays:
    return [-x for x in message]


def random_weights(message: Arrays, round: int, generator: np.random.Generator) -> Arrays:
    noise = [generator.standard_normal(x.shape).astype(np.float32) for x in message]
    return [x * np.float32(norm_of([m]) / max(norm_of([x]), 1e-30)) for x, m in zip(noise, message, strict=True)]


def five_times(message: Arrays, round: int, generator: np.random.Generator) -> Arrays:
    return [5 * x for x in message]


def one_array(message: Arrays, round: int, generator: np.random.Generator) -> Arrays:
    largest = max(range(len(message)), key=lambda i: message[i].size)
    return [-x if i == largest else x for i, x in enumerate(message)]


def slow(message: Arrays, round: int, generator: np.random.Generator) -> Arrays:
    return [np.float32(1.01**round) * x for x in message]


def once(message: Arrays, round: int, generator: np.random.Generator) -> Arrays:
    return [4 * x if round == 40 else x for x in message]


POISONS: dict[str, Poison | None] = {
    "none": None,
    "sign flip": flipped,
    "random weights of the same norm": random_weights,
    "x 5": five_times,
    "one array's sign": one_array,
    "slow, 1 % a round": slow,
    "x 4 in one round": once,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--only", nargs="+", choices=POISONS, default=[*POISONS])
    parser.add_argument("--partition", type=int, metavar="N", help="N are apart from round 20 to 70, and no poison")
    flags = parser.parse_args()
    lab = Lab(flags.rounds)
    if flags.partition:
        _partition(lab, flags.rounds, flags.partition)
        return
    print("| poison | bounds | others' perplexity | spread | participation | named by how many of 7 |")
    print("|---|---|---:|---:|---:|---|")
    last = flags.rounds - 1
    for kind in flags.only:
        for island in (boundless, Island):
            world = Poisoned(lab, POISONS[kind], island=island, durations=[ROUND] * COUNT)
            world.look_at = frozenset({last})
            world.run((flags.rounds + 4) * ROUND)
            share = 100 * world.participation(3, last - 3)
            named = ", ".join(f"{name}: {by}" for name, by in world.named().items()) or "nobody"
            bounds, perplexity = "with" if island is Island else "without", np.exp(world.loss(last))
            row = f"| {kind} | {bounds} | {perplexity:.3g} | {world.spread(last):.1e} | {share:.0f} % | {named} |"
            print(row, flush=True)


def _partition(lab: Lab, rounds: int, count: int) -> None:
    for island in (boundless, Island):
        world = Poisoned(lab, None, island=island, durations=[ROUND] * COUNT)
        world.cuts.append((20 * ROUND, 70 * ROUND, frozenset(world.names[:count])))
        world.look_at = frozenset({*range(19, rounds, 10), *range(69, 84, 2)})
        world.run((rounds + 4) * ROUND)
        bounds = "with" if island is Island else "without"
        for round in sorted(world.look_at):
            print(f"{bounds} bounds, round {round}: spread {world.spread(round):.2e}, loss {world.loss(round):.4f}")
        named, share = world.named(), world.participation(72, rounds - 4)
        print(f"{bounds} bounds: named {named or 'nobody'}, participation after it {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
