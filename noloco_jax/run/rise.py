"""Whether the loss of all replicas together rises: their comparison with one another cannot tell."""

_MEMORY = 0.95  # of the running mean, per step: some twenty steps
_STEPS_FIRST = 50  # before anything is told
_FACTOR = 1.2  # of the lowest mean


class Rise:
    """Watches a running mean of the loss."""

    def __init__(self) -> None:
        self._steps = 0
        self._mean = 0.0
        self._lowest = float("inf")
        self._lowest_step = 0

    def told(self, step: int, loss: float) -> str | None:
        """A line when the mean has come to lie a fifth above its lowest, and again for every further fifth."""
        self._steps += 1
        self._mean = loss if self._steps == 1 else _MEMORY * self._mean + (1 - _MEMORY) * loss
        if self._steps < _STEPS_FIRST:
            return None
        if self._mean < self._lowest:
            self._lowest, self._lowest_step = self._mean, step
        if self._mean <= _FACTOR * self._lowest:
            return None
        line = (
            f"the loss rises: {self._mean:.2f} on average, {self._lowest:.2f} at step {self._lowest_step}; the "
            "replicas may be diverging: lower inner.lr, outer.momentum, outer.lr or outer.consensus"
        )
        self._lowest, self._lowest_step = self._mean, step
        return line
