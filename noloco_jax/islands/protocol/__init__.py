"""Protocol of islands: a state machine without sockets, threads, files or clocks (design §12).

`island.py` takes events and gives actions (`events.py`); `messages.py` holds the headers that they send. An exchange,
with what each side sends:

    dialler                                   who answers
    OFFERED    -- Hello ------------------->              its round's message is here? else AtRound, and it dials itself
               <------------------ Accept --  STREAMING
    STREAMING  -- Message --> <-- Message --              both at once; each judges what it gets
    HELD       -- Received(good) ---------->  HELD        from here on the dialler may not decide alone
               <------------------ Commit --  COMMITTED   once it holds a good message and has heard Received(good)
    COMMITTED

    OFFERED, STREAMING: anything else, a broken channel, the deadline -> ABORTED on this side, tried again later
    HELD, who answers:  the same                                      -> ABORTED, for good: it decides
    HELD, dialler:      the same -> unresolved: StatusRequest(xid), until a round after the message itself is dropped
                        Status(committed) -> COMMITTED; Status(aborted) -> ABORTED; never heard -> logged as one-sided

A question about an exchange settles it: HELD becomes COMMITTED, as who asks holds a good message too; anything else
ABORTED. Nothing is waited for: a message is dropped, on both sides, when `patience` more rounds have ended.

`exchanges.py` does that for the rounds whose messages are kept (`meeting.py`) and refuses what does not fit,
`link_limit.py` limits concurrent exchanges on slow links, `recovery.py` asks about unresolved exchanges, `ledger.py`
remembers the outcomes that the weights have seen, `peers.py` says whom and what to believe and how long to wait,
`pace.py` has islands end their rounds together, by the `speeds.py` that they believe, `catch_up.py` decides when an
island begins and from which weights, and `context.py` is what they share.
"""
