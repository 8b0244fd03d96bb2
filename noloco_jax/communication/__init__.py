"""The report of what a run's compiled programs communicate."""
