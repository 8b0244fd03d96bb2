"""Rosters of islands on loopback, and their files."""

from pathlib import Path

from noloco_jax.islands.roster import Address, Island, Roster
from support.ports import free_ports


def on_loopback(*names: str, run: str = "test") -> Roster:
    """Return a roster of islands at free ports."""
    ports = free_ports(len(names))
    return Roster(run, tuple(Island(name, Address("127.0.0.1", port)) for name, port in zip(names, ports, strict=True)))


def written(roster: Roster, path: Path) -> Path:
    """Write a roster to a file; return its path."""
    islands = (f'\n[[island]]\nname = "{name}"\naddress = "{address}"\n' for name, address in roster.islands)
    path.write_text(f'run = "{roster.run}"\n' + "".join(islands))
    return path
