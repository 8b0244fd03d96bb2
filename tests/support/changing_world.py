"""A world whose members come and go: entries with signatures of words, which every node keeps on its disk."""

from collections.abc import Callable, Sequence
from typing import Any

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.islands.partners import partner_in
from noloco_jax.islands.protocol.events import Open, Told
from noloco_jax.islands.protocol.members import OPEN, Certificate, Entry, Members, News
from noloco_jax.islands.protocol.messages import StatusRequest
from support.island_nodes import IDENTITY, ROUND, Node
from support.island_world import World

AUTHORITY = "signed by the authority"


def is_signed(entry: Entry) -> bool:
    """Stand in for the check of a signature: the authority's, or the member's own."""
    return entry.signature == (f"signed by {entry.name}" if entry.certificate else AUTHORITY)


def entry(id: int, name: str, from_round: int, until_round: int = OPEN, version: int = 1, **values: Any) -> Entry:
    return Entry(id, name, f"{name}:1", from_round, until_round, 0, version, **{"signature": AUTHORITY, **values})


def moved(name: str, address: str, version: int, **values: Any) -> Entry:
    """Make a member's own statement of its address."""
    signature = {"signature": f"signed by {name}", **values}
    return Entry(-1, name, address, 0, OPEN, 0, version, certificate=Certificate("a certificate"), **signature)


class ChangingWorld(World):
    """Islands of which some are there from the beginning, the founders, and others come later.

    Args:
      count: founders.
      config: whose pairing it is.
      arguments: of `World`.
    """

    def __init__(self, count: int, config: TrainConfig | None = None, **arguments: Any):
        self.config = config or from_dict({"num_replicas": max(count, 2)})
        self.founders = [f"i{number}" for number in range(count)]
        self.versions = 0
        super().__init__(count, **arguments)

    def members_of(self, node: Node) -> Members:
        return Members(self.founders, is_signed, node.entries)

    def partner(self, name: str) -> Callable[[int], str | None]:
        def of(round: int) -> str | None:
            machine = self.nodes[name].machine
            return partner_in(machine.members, name, self.config)(round) if machine is not None else None

        return of

    def admits(self, node: Node, caller: str, header: Any) -> bool:
        machine = node.machine
        assert machine is not None
        if caller not in machine.members.present(machine.round) and isinstance(header, StatusRequest) and header.news:
            self.handle(node, Told(header.news))
        return caller in machine.members.present(machine.round)

    def open(self, node: Node, action: Open) -> None:
        self.nodes.setdefault(action.peer, Node(action.peer, ROUND))  # one that never started
        super().open(node, action)

    def join(self, name: str, from_round: int, *, knows: Sequence[Entry] = (), duration: float = ROUND) -> Entry:
        """Start a new island now, which brings its own entry and `knows`; return its entry."""
        made = self.entry(name, from_round)
        self.add(name, [*knows, made], duration)
        return made

    def add(self, name: str, entries: Sequence[Entry], duration: float = ROUND) -> None:
        """Start a new island now, with these entries, whatever they are worth."""
        self.names.append(name)
        self.identities[name] = IDENTITY
        node = self.nodes[name] = Node(name, duration, entries=list(entries))
        self.start(node, node.process)

    def entry(self, name: str, from_round: int, until_round: int = OPEN) -> Entry:
        """Have the authority make the next entry about a name."""
        self.versions += 1
        known = [*self.founders, *(other for other in self.names if other not in self.founders)]
        id = known.index(name) if name in known else len(known)
        return entry(id, name, from_round, until_round, self.versions)

    def remove(self, name: str, from_round: int, *, told: str) -> Entry:
        """Have the authority remove a member, and tell one island."""
        former = next((one.from_round for one in reversed(self.nodes[name].entries) if one.name == name), 0)
        made = self.entry(name, former, from_round)
        self.tell(told, made)
        return made

    def tell(self, name: str, *entries: Entry) -> None:
        self.handle(self.nodes[name], Told(News(entries)))

    def views(self) -> dict[str, str]:
        """Return what each island that runs knows of the members."""
        return {node.name: node.machine.members.view for node in self.nodes.values() if node.machine is not None}

    def participation(self, first: int, last: int) -> float:
        """Applied of all messages that had a partner, in the sender's view when it sent them."""
        due = [
            (node, round)
            for node in self.nodes.values()
            for round in range(first, last)
            if round in node.ends and round in node.had_partner
        ]
        return sum(round in {action.xid.round for action in node.applied} for node, round in due) / len(due)
