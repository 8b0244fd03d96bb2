"""Simulation of communication costs, to find a setting for a link, and the paper's analysis in numbers; numpy only."""
