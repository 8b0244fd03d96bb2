"""Cost model of communication, to find a setting for a link."""
