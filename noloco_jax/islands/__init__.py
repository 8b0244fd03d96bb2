"""Islands: one independent process a replica, on machines that come and go; nobody waits for anybody."""
