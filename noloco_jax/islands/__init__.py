"""Islands: one independent process a replica, on machines that come and go; nobody waits for anybody."""

import os

# gRPC prints lines about every failed handshake, by which strangers could fill the log; `probe.py` says what matters.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
