"""A measurement of what late processes cost each method."""
