"""How exchanges ended: the memory that makes duplicates and late questions harmless.

An outcome is what the island's *weights* have seen. The ledger is therefore saved with them, and a question after a
restart is answered truly: what is not in the ledger is not in the weights either.
"""

from collections.abc import Mapping

from noloco_jax.islands.protocol.messages import ExchangeId, Outcome

ROUNDS_KEPT = 64  # a partner stops asking long before


class Ledger:
    """Outcomes of the exchanges of the last rounds; older ones are forgotten, and known to be."""

    def __init__(self, outcomes: Mapping[ExchangeId, Outcome] | None = None, floor: int = 0):
        self.outcomes: dict[ExchangeId, Outcome] = {}
        self.floor = floor
        self._applied: set[int] = set()
        for xid, outcome in (outcomes or {}).items():
            self.close(xid, outcome)

    def close(self, xid: ExchangeId, outcome: Outcome) -> None:
        """An exchange has ended, for good.

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

    def has_committed(self, round: int) -> bool:
        """Whether the weights have seen a correction of this round."""
        return round in self._applied

    def settle(self, xid: ExchangeId) -> Outcome:
        """The answer to a question after an exchange, which settles it: what is not committed by now never will be."""
        if xid not in self.outcomes and xid.round < self.floor:
            return Outcome.FORGOTTEN
        return self.outcomes.setdefault(xid, Outcome.ABORTED)

    def forget(self, round: int) -> None:
        """At the end of this round: forgets those that are too old to be asked for."""
        if round - ROUNDS_KEPT > self.floor:
            self.floor = round - ROUNDS_KEPT
            self.outcomes = {xid: outcome for xid, outcome in self.outcomes.items() if xid.round >= self.floor}
            self._applied = {round for round in self._applied if round >= self.floor}
