"""Whether an island that dials is let in, and what it is told where it is not."""

from noloco_jax.islands.protocol.context import Context
from noloco_jax.islands.protocol.meeting import Meeting, Stage
from noloco_jax.islands.protocol.messages import Answer, AtRound, Busy, Done, ExchangeId, NotPartner, Outcome
from noloco_jax.islands.protocol.peers import Peer


def refusal(
    context: Context, peer: Peer, xid: ExchangeId, partner: str | None, meeting: Meeting | None, is_unresolved: bool
) -> Answer | None:
    """The answer to an exchange that is not accepted now; None: it is.

    Args:
      context: of the island that is called.
      peer: who dials; its identity is right.
      xid: the exchange.
      partner: whom the island meets in the exchange's round.
      meeting: what is left of that round's; None: its message is not here yet, or no more.
      is_unresolved: whether the round's message may have been committed.
    """
    if peer.quarantined_until > xid.round:
        return NotPartner("in quarantine")
    if partner != peer.name:
        return NotPartner("not in this round")
    if context.ledger.has_committed(xid.round):
        return Done(Outcome.COMMITTED)
    if xid in context.ledger.outcomes:
        return Done(Outcome.ABORTED)
    if meeting is None:
        is_recent = context.round - context.settings.patience < xid.round <= context.round
        if is_recent:
            return NotPartner("no message of that round is left")
        return AtRound(context.round, context.pace.timing(context.round, context.now))
    if is_unresolved or _prefers_its_own(context, meeting, xid):
        return Busy(context.settings.retry_seconds)
    return None


def _prefers_its_own(context: Context, meeting: Meeting, xid: ExchangeId) -> bool:
    """Whether what is running goes on when the partner dials.

    Two dials that cross: the lower name's counts in even rounds, the higher one's in odd ones, on both sides.
    """
    running = meeting.running
    if running is None:
        return False
    if running.dials:
        lower_name_leads = meeting.round % 2 == 0
        leads = (context.name < meeting.peer.name) is lower_name_leads
        return leads or running.stage is not Stage.OFFERED
    return (xid.incarnation, xid.attempt) <= (running.xid.incarnation, running.xid.attempt)
