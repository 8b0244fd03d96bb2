"""Warning when the mean loss of all replicas rises, which a comparison between replicas cannot detect."""

# Decay of the running mean per step: about a hundred steps. A mean of twenty rises by a fifth without cause where a
# step has few tokens: with 256 bytes, whose losses vary by a quarter, twice in 2,400 steps.
_MEMORY = 0.99
_STEPS_FIRST = 100  # steps before the first warning
_FACTOR = 1.2  # multiple of the lowest mean that triggers a warning


class Rise:
    """Monitor of a running mean of the loss."""

    def __init__(self) -> None:
        self._steps = 0
        self._mean = 0.0
        self._lowest = float("inf")
        self._lowest_step = 0

    def told(self, step: int, loss: float) -> str | None:
        """Return a warning when the mean rises 20 % above its minimum, and again for every further 20 %."""
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
