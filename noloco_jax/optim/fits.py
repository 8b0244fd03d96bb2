"""Table of what goes with what in an outer step, for the transforms, the configuration and the tools. Free of jax."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from noloco_jax.optim.wire_sizes import MODULO_BITS


class Fit(NamedTuple):
    """Values of an option that do not go with every exchange.

    Exchanges are "pairs" (and groups that average by swaps of pairs), "groups" (others), "all" (an all-reduce), "graph"
    (a directed one), "sparse" (sparse messages to all) and "none" (a method without outer steps).

    Attributes:
      option: name of the argument of a transform, and of the field of `outer`.
      values: the values; None: all but the one to give instead.
      what: what they are for.
      instead: the value to give instead, for each exchange that they do not go with.
    """

    option: str
    values: Collection[Any] | None
    what: str
    instead: Mapping[str, Any]


TABLE = (
    Fit("wire", MODULO_BITS, "equal groups of 2, 4, 8, ...", {"groups": "int8", "all": "int4", "graph": "int8"}),
    Fit("wire", None, "dense messages", {"sparse": "float32", "none": "float32"}),
    Fit("order", ("hypercube",), "pairs", {"graph": "passes"}),  # of groups: `fits_hypercube`
    Fit("delay", None, "dense messages", {"sparse": 0}),
    Fit("offload", None, "an outer state", {"graph": False, "none": False}),
)


def _as_argument(option: str, value: Any) -> str:
    return f"{option}={value!r}"


def misfits(
    exchange: str, options: Mapping[str, Any], given: str, shown: Callable[[str, Any], str] = _as_argument
) -> Iterator[str]:
    """Yield a message for each option that does not go with an exchange.

    Args:
      exchange: one of those of `Fit`.
      options: option -> value; those that are missing or None are not given.
      given: what chose the exchange, for the message.
      shown: (option, value) -> both as the user types them.
    """
    for option, values, what, instead in TABLE:
        value = options.get(option)
        if value is None or exchange not in instead:
            continue
        if value != instead[exchange] if values is None else value in values:
            yield f"{shown(option, value)} is for {what}, not for {given}: give {shown(option, instead[exchange])}"


def is_without_effect(exchange: str, option: str) -> bool:
    """Return True for an option of which an exchange allows one value alone."""
    return any(fit.option == option and fit.values is None and exchange in fit.instead for fit in TABLE)


def fits_hypercube(num_replicas: int, group_size: int) -> bool:
    """Return True if pairings in the order of a hypercube exist: both numbers are powers of two."""
    return num_replicas & (num_replicas - 1) == 0 and group_size & (group_size - 1) == 0


def exchange_of_groups(num_replicas: int, group_size: int) -> str:
    """Return the exchange of random groups: "pairs" also for groups of 4, 8, ..., which average by swaps of pairs."""
    swaps = group_size == 2 or (group_size & (group_size - 1) == 0 and num_replicas % group_size == 0)
    return "pairs" if swaps else "groups"


def messages_of_groups(num_replicas: int, group_size: int) -> float:
    """Return the messages that a member of a full group sends: 2 (g − 1) / g by swaps of pairs, else one to each."""
    by_swaps = exchange_of_groups(num_replicas, group_size) == "pairs"
    return (group_size - 1) * (2 / group_size if by_swaps else 1)
