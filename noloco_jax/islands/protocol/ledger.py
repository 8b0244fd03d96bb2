"""Ledger of exchange outcomes, which makes duplicates and late questions harmless.

An outcome says whether the island's *weights* contain the correction. The ledger is therefore saved with them, and a
question after a restart gets the true answer: an exchange that is not in the ledger is not in the weights.
"""

from collections.abc import Mapping

from noloco_jax.islands.protocol.bounds import Factors
from noloco_jax.islands.protocol.messages import ExchangeId, Outcome

ROUNDS_KEPT = 64  # partners stop asking long before


class Ledger:
    """Outcomes of recent exchanges.

    Attributes:
      floor: the round before which they are forgotten.
      factors: the factors of committed corrections that were scaled, see `Bounds`.
    """

    def __init__(
        self,
        outcomes: Mapping[ExchangeId, Outcome] | None = None,
        floor: int = 0,
        factors: Mapping[ExchangeId, Factors] | None = None,
    ):
        self.outcomes: dict[ExchangeId, Outcome] = {}
        self.floor = floor
        self.factors = dict(factors or {})
        self._applied: set[int] = set()
        for xid, outcome in (outcomes or {}).items():
            self.close(xid, outcome)

    def close(self, xid: ExchangeId, outcome: Outcome, factors: Factors = ()) -> None:
        """Record the final outcome of an exchange.

        Raises:
          ValueError: if it had ended otherwise, or another exchange of its round was committed.
        """
        known = self.outcomes.setdefault(xid, outcome)
        if known is not outcome:
            raise ValueError(f"{xid} had ended as {known}, not {outcome}")
        if outcome is Outcome.COMMITTED:
            if self.has_committed(xid.round):
                raise ValueError(f"{xid} would be the second correction of its round")
            self._applied.add(xid.round)
            if factors:
                self.factors[xid] = factors

    def has_committed(self, round: int) -> bool:
        """Return whether the weights have applied a correction of this round."""
        return round in self._applied

    def settle(self, xid: ExchangeId) -> Outcome:
        """Return the outcome of an exchange, and settle it: if it is not committed by now, it never will be."""
        if xid not in self.outcomes and xid.round < self.floor:
            return Outcome.FORGOTTEN
        return self.outcomes.setdefault(xid, Outcome.ABORTED)

    def forget(self, round: int) -> None:
        """Forget outcomes that are too old to be asked for, at the end of `round`."""
        if round - ROUNDS_KEPT > self.floor:
            self.floor = round - ROUNDS_KEPT
            self.outcomes = {xid: outcome for xid, outcome in self.outcomes.items() if xid.round >= self.floor}
            self.factors = {xid: factors for xid, factors in self.factors.items() if xid.round >= self.floor}
            self._applied = {round for round in self._applied if round >= self.floor}
