"""The numbers of the protocol that a user may have reasons to change."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Rounds and seconds of the protocol.

    Attributes:
      patience: rounds that a message waits for its partner's; each costs the memory of a message, and corrections that
        come later than 2 rounds do harm. An island that is further behind the median of the others meets nobody any
        more: it takes another one's state. With 1, what is almost a round behind, as islands are that have just healed,
        has hardly any time left to exchange.
      reach_seconds: in which an island may be late all the same, by however many rounds, and takes nobody's state: what
        holds a machine up for a moment is made up for by those who give way, see `pace.py`.
      quarantine_rounds: rounds without a partner that has sent `broken_in_a_row` broken messages.
      broken_in_a_row: see there.
      answer_seconds: for the answer to an opener.
      start_seconds: for islands that start at the same time, to begin together.
      state_seconds: for a whole state on its way.
      retry_seconds: until the first retry; the time doubles with each.
      keeps_pace: whether an island fits its inner steps to common rounds, see `pace.py`.
    """

    patience: int = 2
    reach_seconds: float = 5.0
    quarantine_rounds: int = 16
    broken_in_a_row: int = 3
    answer_seconds: float = 10.0
    start_seconds: float = 120.0
    state_seconds: float = 600.0
    retry_seconds: float = 1.0
    keeps_pace: bool = False

    def __post_init__(self):
        if self.patience < 1:
            raise ValueError(f"patience is {self.patience}: it must be at least 1")
