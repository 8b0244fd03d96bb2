"""Packs the folder configs/ as noloco_jax.configs; pyproject.toml holds everything else."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["noloco_jax", "noloco_jax.*"]), "noloco_jax.configs"],
    package_dir={"noloco_jax.configs": "configs"},
)
