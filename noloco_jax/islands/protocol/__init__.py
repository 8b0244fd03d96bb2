"""The protocol of islands: a state machine without sockets, threads, files or clocks."""
