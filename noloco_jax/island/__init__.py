"""The commands of islands: one trains (`training`), keys and others (`peers`), what runs have left (`models`)."""
