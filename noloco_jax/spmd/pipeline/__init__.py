"""Pipeline stages with random routing between replicas: over devices, and its twin on one device."""
