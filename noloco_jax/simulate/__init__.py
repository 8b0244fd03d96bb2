"""What the paper's analysis claims, in numbers: latency, blocking, cost on given links, and the theorem. numpy only."""
