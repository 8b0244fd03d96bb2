"""Training of virtual islands: rounds that end, and numbers in place of messages."""

import math
from collections.abc import Callable
from typing import Any

from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.events import Apply, RoundEnded
from support.island_network import Network
from support.island_nodes import FAR, NORM, Node


class Training(Network):
    """Nodes that train by the clock.

    Attributes:
      settings: of the islands.
      steps: inner steps of a round, for islands that keep pace; None: they end rounds after their durations.
      save_every: rounds between checkpoints.
      finishing: True once nobody ends a round any more.
    """

    settings: Settings
    steps: int | None
    save_every: int
    finishing = False

    def partner(self, name: str) -> Callable[[int], str | None]:
        raise NotImplementedError

    def _end_round(self, node: Node, process: int, round: int) -> None:
        if node.process != process or node.machine is None or node.round != round - 1 or self.finishing:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._end_round, node, process, round)
            return
        if round % self.save_every == 0:
            node.disk = node.machine.journal(), dict(node.weights)
        node.round = round
        number, tokens = self.message(node)
        if self.steps is not None:
            tokens, node.steps = node.steps, 0
        node.messages[round] = number, tokens
        if self.partner(node.name)(round) is not None:
            node.open.add(round)
            node.had_partner.add(round)
        if self.steps is None:
            self.train(node)
        node.ends[round] = self.now
        self.handle(node, RoundEnded(round, tokens, self.norm(number)))
        late = [key for key in node.open if key < round - self.settings.patience]
        assert not late, f"{node.name} still waits for {late} in round {round}"
        for key in [key for key in node.messages if key < round - self.settings.patience]:
            del node.messages[key]

    # What islands exchange; numbers, unless a subclass has something else.

    def message(self, node: Node) -> tuple[Any, int]:
        """Train for a round, and return its message and tokens."""
        tokens = self.random.randrange(0, 5)
        return 1000.0 + self.random.random(), tokens

    def norm(self, message: Any) -> float:
        del message
        return NORM

    def distances(self, own: Any, other: Any) -> tuple[float, ...]:
        """Return what both sides are told of their distance: some are farther apart, so that bounds clip them."""
        if not math.isfinite(other):
            return (math.nan,)
        return (FAR if int(1e6 * abs(other - own)) % 5 == 0 else 1.0,)

    def correction(self, node: Node, own: Any, other: Any, action: Apply) -> Any:
        return action.weight * min(action.factors, default=1.0) * (other - own)

    def train(self, node: Node) -> None:
        """Goes on after the last round."""
        if self.steps is None:  # a round is one inner step
            assert node.machine is not None
            pause = node.machine.pause()
            node.paused += pause
            node.machine.stride(self.now + pause, 1)
            self.at(self.now + pause + node.duration, self._end_round, node, node.process, node.round + 1)
            return
        node.training += 1
        node.position, node.steps = (node.round + 1) * self.steps, 0
        self._step(node, node.process, node.training, self.steps)

    def _step(self, node: Node, process: int, training: int, steps: int) -> None:
        """Ends the rounds that the last inner step has come to, and takes another."""
        if self.finishing:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._step, node, process, training, steps)
            return
        while node.machine is not None and (node.process, node.training) == (process, training):
            if node.position < (node.round + 2) * steps:
                pause = node.machine.pause()
                node.paused += pause
                node.position += node.machine.stride(self.now + pause, 4 * steps)
                node.steps += 1
                node.all_steps += 1
                seconds = node.duration / steps * (1 - node.jitter + 2 * node.jitter * self.random.random())
                self.at(self.now + pause + seconds, self._step, node, process, training, steps)
                return
            self._end_round(node, process, node.round + 1)

    def participation(self, first: int, last: int) -> float:
        """Applied of all messages that were due in these rounds."""
        due = [
            (node, round)
            for node in self.nodes.values()
            for round in range(first, last)
            if self.partner(node.name)(round) is not None
        ]
        return sum(key in {action.xid.round for action in node.applied} for node, key in due) / len(due)
