"""A round of questions: where is everybody? Before an island begins also: who is about to begin?"""

from dataclasses import dataclass, field

from noloco_jax.islands.protocol.events import Channel
from noloco_jax.islands.protocol.messages import Status


@dataclass
class Sweep:
    """What has been asked and answered.

    Attributes:
      deadline: for answers.
      asked: the calls that are open, and to whom.
      waits: whether a second answer is awaited where the first was "not ready yet".
      found: the last answer of each.
      lags: rounds behind each that trains, when it answered.
    """

    deadline: float
    asked: dict[Channel, str]
    waits: bool = False
    found: dict[str, Status] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)

    def heard(self, channel: Channel, status: Status, round: int) -> None:
        """An answer, to who has ended `round`."""
        name = self.asked[channel]
        self.found[name] = status
        if not (self.waits and status.starting):
            del self.asked[channel]
        if status.training and status.round >= 0:
            self.lags.append(status.round - round)

    def is_over(self, now: float) -> bool:
        """Whether all have answered that are going to; where somebody trains, nobody waits for who is not ready."""
        unheard = any(name not in self.found for name in self.asked.values())
        return now >= self.deadline or not (unheard or self.not_ready())

    def not_ready(self) -> list[str]:
        """Those of whom the second answer has not come, where nobody trains."""
        if any(status.training for status in self.found.values()):
            return []
        return sorted(name for name in self.asked.values() if name in self.found)
