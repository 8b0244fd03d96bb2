"""The variants of a configuration that are measured: every combination of the values of the fields that are varied."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from noloco_jax.config import TrainConfig, find_field, load_config, unchecked, unknown_field, validate
from noloco_jax.errors import UserError


@dataclass(frozen=True)
class Variant:
    """One configuration to measure.

    Attributes:
      varied: field -> value, as written on the command line.
      overrides: what makes it of the config file, `--config.FIELD=VALUE` each.
      config: the result.
      note: what was changed so that it can be measured; "" if nothing.
    """

    varied: dict[str, str]
    overrides: tuple[str, ...]
    config: TrainConfig
    note: str

    @property
    def label(self) -> str:
        """`num_replicas=4 method=noloco`, or the method and replicas where nothing is varied."""
        shown = self.varied or {"method": self.config.method, "num_replicas": str(self.config.num_replicas)}
        return " ".join(f"{field}={value}" for field, value in shown.items())


def make_variants(file: str, overrides: Sequence[str], vary: Sequence[str]) -> list[Variant]:
    """The variants, the last field varying fastest; one, the configuration itself, where nothing is varied.

    Args:
      file: the config file, with its argument if it takes one.
      overrides: `--config.FIELD=VALUE`, of all variants.
      vary: `FIELD=VALUE,VALUE,...` each.

    Raises:
      UserError: if a field or value is wrong, or a variant's fields contradict each other.
    """
    choices: dict[str, list[str]] = {}
    for text in vary:
        field, values = _parse(text)
        if field in choices:
            raise UserError(f"--vary names {field} twice: list all its values in one")
        choices[field] = values
    combinations = itertools.product(*choices.values())
    return [_variant(file, overrides, dict(zip(choices, values, strict=True))) for values in combinations]


def _parse(text: str) -> tuple[str, list[str]]:
    field, equals, values = text.partition("=")
    field = field.removeprefix("config.")
    if not equals or not all(values.split(",")):
        raise UserError(f"--vary {text} is not FIELD=VALUE,VALUE,...: write, for example, --vary num_replicas=2,4,8")
    if find_field(field).is_group:
        raise unknown_field(field)
    return field, values.split(",")


def _variant(file: str, overrides: Sequence[str], varied: dict[str, str]) -> Variant:
    chosen = (*overrides, *(f"--config.{field}={value}" for field, value in varied.items()))
    config = unchecked(load_config(file, chosen))
    note = ""
    if config.method == "noloco" and config.num_replicas == 1:
        config = replace(config, method="local")
        chosen = (*chosen, "--config.method=local")
        note = "one replica has none to average with: measured as method=local"
    validate(config)
    return Variant(varied, chosen, config, note)
