"""Rosters of islands on loopback, and their files."""

from pathlib import Path

from noloco_jax.islands.command import main as island
from noloco_jax.islands.roster import Address, Member, Roster
from support.ports import free_ports


def on_loopback(*names: str, run: str = "test") -> Roster:
    """Return a roster of islands at free ports."""
    ports = free_ports(len(names))
    rows = [
        Member(i, name, Address("127.0.0.1", port)) for i, (name, port) in enumerate(zip(names, ports, strict=True))
    ]
    return Roster(run, tuple(rows), len(rows))


def written(roster: Roster, path: Path) -> Path:
    """Write a roster to a file; return its path."""
    islands = (f'\n[[island]]\nname = "{one.name}"\naddress = "{one.address}"\n' for one in roster.members)
    path.write_text(f'run = "{roster.run}"\n' + "".join(islands))
    return path


def with_keys(roster: Roster, folder: Path) -> tuple[Path, Path]:
    """Write a roster to a folder and make its islands' keys; return the paths of the file and of the keys."""
    path, keys = written(roster, folder / "roster.toml"), folder / "keys"
    assert island(["keys", f"--roster={path}", f"--out={keys}"]) == 0
    return path, keys
