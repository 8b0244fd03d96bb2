"""Simulation of a run whose members come and go all the time: the protocol itself, in virtual time.

python -m support.churn --members=1000 --hours=2      from tests/, with PYTHONPATH=.:..

Leavers vanish and are removed at once by an entry that one member is told; as many newcomers start as soon as their
entry was told to one member. Entries hold from `lead` rounds on. A member's weights are a number that every round moves
by a random step, so that the spread is that of pair averaging; printed beside that of the same members without churn.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from typing import Any

from noloco_jax.config import from_dict
from noloco_jax.island.members import lead
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.events import Apply, Drop, Heal, Learned
from noloco_jax.islands.protocol.members import Entry
from support.changing_world import ChangingWorld
from support.island_nodes import ROUND, Node

SETTLED = 30  # rounds after which news counts as known or lost
FIRST = 10  # rounds before the first change


class Churn(ChangingWorld):
    """Members with numbers as weights, and what became of the news.

    Args:
      count: members.
      rate: leavers, and newcomers, of a round.
      last: the last round with a change.
      ahead: rounds from which on an entry holds, from its making on.
      seed: of everything.
    """

    def __init__(self, count: int, rate: float, last: int, ahead: int, seed: int):
        config = from_dict({"num_replicas": count, "outer": {"order": "passes"}})
        settings = Settings(answer_seconds=3.0, state_seconds=30.0, start_seconds=2 * ROUND)
        equal = {"durations": [ROUND] * count, "starts": [0.001 * number for number in range(count)]}
        super().__init__(count, config, seed=seed, settings=settings, downtime=None, **equal)
        self.chance, self.rate, self.ahead = random.Random(seed + 1), rate, ahead
        self.values: dict[str, float] = dict.fromkeys(self.names, 0.0)
        self.told: dict[Entry, float] = {}
        self.heard: dict[Entry, dict[str, float]] = {}
        self.gone: dict[str, float] = {}
        self.spreads: list[float] = []
        self.apart: list[float] = []
        self.reasons: Counter[str] = Counter()
        for number in range(last):
            self.at((number + 0.5) * ROUND, self._change, number)
            self.at((number + 0.95) * ROUND, self._look, number)

    # Weights.

    def message(self, node: Node) -> tuple[Any, int]:
        self.values[node.name] += self.random.gauss(0.0, 1.0)
        return self.values[node.name], 1

    def distances(self, own: Any, other: Any) -> tuple[float, ...]:
        return (abs(other - own),)

    def correction(self, node: Node, own: Any, other: Any, action: Apply) -> Any:
        correction = super().correction(node, own, other, action)
        self.values[node.name] += correction
        return correction

    def _carry_out(self, node: Node, action: Any) -> None:
        super()._carry_out(node, action)
        if isinstance(action, Heal):
            self.values[node.name] = self.values[action.peer]
        elif isinstance(action, Drop):
            self.reasons["other members" if "members there" in action.reason else action.reason] += 1
        elif isinstance(action, Learned):
            for entry in action.entries:
                self.heard.setdefault(entry, {})[node.name] = self.now

    # Changes.

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.machine is not None]

    def _change(self, round: int) -> None:
        if round < FIRST:
            return
        for kind in ("leave", "join"):
            for _ in range(int(self.rate) + (self.chance.random() < self.rate % 1)):
                self._leave(round) if kind == "leave" else self._join(round)

    def _leave(self, round: int) -> None:
        node = self.chance.choice([node for node in self.alive if node.ends])
        self.crash(node, "kill")
        self.gone[node.name] = self.now
        born = next((entry.from_round for entry in node.entries if entry.name == node.name), 0)
        self._tell(self.entry(node.name, born, round + self.ahead))

    def _join(self, round: int) -> None:
        name = f"n{len(self.names)}"
        knows = self.chance.choice(self.alive).entries
        self.values[name] = 0.0
        self._tell(self.join(name, round + self.ahead, knows=knows))

    def _tell(self, entry: Entry) -> None:
        self.told[entry] = self.now
        self.tell(self.chance.choice([node.name for node in self.alive if node.ends]), entry)

    def _look(self, round: int) -> None:
        alive = [node for node in self.alive if node.ends]
        values = [self.values[node.name] for node in alive]
        if not alive:
            return
        self.spreads.append(statistics.pstdev(values))
        views = Counter(node.machine.members.active(round) for node in alive if node.machine is not None)
        self.apart.append(1 - max(views.values()) / views.total())

    # Figures.

    def ages(self, entry: Entry) -> list[float]:
        """Return the rounds after which members heard of an entry: those that were there, and stayed until all had."""
        told, heard = self.told[entry], self.heard[entry]
        last = told + SETTLED * ROUND
        there = [node for node in self.nodes.values() if node.ends and min(node.ends.values()) < told]
        stayed = [node.name for node in there if self.gone.get(node.name, float("inf")) > last]
        return sorted((heard.get(name, float("inf")) - told) / ROUND for name in stayed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--rounds_per_hour", type=int, default=60)
    parser.add_argument(
        "--churn", type=float, default=0.1, help="share of the members that leave, and join, in an hour"
    )
    parser.add_argument("--ahead", type=int, help="rounds from which on an entry holds (default: as `island invite`)")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    ahead = flags.ahead or lead(flags.members)
    rounds = FIRST + round(flags.hours * flags.rounds_per_hour)
    spreads = {}
    for churn in (0.0, flags.churn):
        began = time.monotonic()
        world = Churn(flags.members, churn * flags.members / flags.rounds_per_hour, rounds, ahead, flags.seed)
        world.run((rounds + 3) * ROUND).finish()
        first, last = FIRST + ahead, rounds - 3
        spreads[churn] = statistics.mean(world.spreads[first:last])
        print(f"{flags.members} members, {flags.churn if churn else 0:.0%} an hour, rounds {first} to {last}")
        print(f"  participation {world.participation(first, last):.4f}; spread {spreads[churn]:.3f}", flush=True)
        if churn:
            print(f"  spread with churn / without {spreads[churn] / spreads[0.0]:.3f}")
            dues = sum(first <= round < last for node in world.nodes.values() for round in node.had_partner)
            print(f"  rounds alone for other members' sake: {world.reasons['other members'] / dues:.4%} of {dues}")
            print(f"  members whose view of a round was not the most common one: {statistics.mean(world.apart):.4%}")
            ages = [world.ages(entry) for entry, told in world.told.items() if told < (rounds - SETTLED) * ROUND]
            for share in (0.5, 0.99, 1.0):
                rounds_old = [age[min(int(share * len(age)), len(age) - 1)] for age in ages]
                print(
                    f"  news known to {share:.0%} after {statistics.median(rounds_old):.1f} rounds (median), ", end=""
                )
                print(f"{max(rounds_old):.1f} (largest) of {ahead}")
            print(f"  {len(world.told)} changes; {sum(len(node.heals) for node in world.nodes.values())} states taken")
            print(f"  other rounds alone: {world.reasons.most_common(6)}")
        print(f"  {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
