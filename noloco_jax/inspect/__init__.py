"""What a run's compiled programs communicate."""
