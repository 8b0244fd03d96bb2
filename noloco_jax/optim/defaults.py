"""Default values of the outer optimizers. Free of jax, since the configuration reads this table.

They are the only defaults of the `outer` fields on which methods differ: the transforms' arguments and the rows of
`methods` take them from here.
"""

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "noloco": {  # the paper's, except for the order of pairings
        **{"lr": 0.7, "momentum": 0.5, "consensus": None, "momentum_of": "steps"},
        **{"sync_every": 50, "group_size": 2, "order": "passes", "wire": "float32"},
    },
    "diloco": {  # its own paper's optimizer
        **{"lr": 0.7, "momentum": 0.9, "nesterov": True, "sync_every": 100, "wire": "float32"},
    },
    "epidemic": {"sync_every": 1, "neighbours": None, "order": "passes", "wire": "float32"},
    "sparseloco": {"lr": 1.0, "top_k": 64, "sync_every": 30},
}
