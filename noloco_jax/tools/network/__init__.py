"""Runs on a slow network, made of this machine's network namespaces."""
