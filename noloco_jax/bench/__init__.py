"""How fast a configuration trains."""
