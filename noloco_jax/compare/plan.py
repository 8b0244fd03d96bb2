"""Which runs make up a comparison, and whether a folder holds that comparison or another."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_jax.config import (
    CONFIG_FILE,
    TrainConfig,
    changes,
    find_field,
    from_dict,
    load_config,
    load_saved,
    unknown_field,
)
from noloco_jax.errors import UserError
from noloco_jax.methods import METHODS


@dataclass(frozen=True)
class Run:
    """One training run of a comparison.

    Attributes:
      name: of its folder.
      method: how it trains.
      value: of the field that the comparison varies, as written; None where that makes no other run.
      seed: its `config.seed`.
      overrides: `--config.FIELD=VALUE` flags that make it of the config file.
      config: what they make.
    """

    name: str
    method: str
    value: str | None
    seed: int
    overrides: tuple[str, ...]
    config: TrainConfig


@dataclass(frozen=True)
class Vary:
    """A field and the values that it takes in turn, as written."""

    field: str
    values: tuple[str, ...]


def parse_methods(text: str) -> list[str]:
    """ "ddp,noloco" as a list of methods, each of them once."""
    methods = [name.strip() for name in text.split(",")]
    for name in methods:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(METHODS)}"
            raise UserError(f"--methods={text}: there is no method {name!r}: {hint}")
        if methods.count(name) > 1:
            raise UserError(f"--methods={text} has {name} {methods.count(name)} times: name it once")
    return methods


def parse_vary(text: str) -> Vary:
    """ "outer.sync_every=25,50" as a field and its values; what they mean is the configuration's to check."""
    field, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(","))
    if not equals or not all(values):
        raise UserError(f"--vary={text} is not of the form FIELD=VALUE,VALUE, such as outer.sync_every=25,50")
    _check_field(field)
    if field in ("method", "seed"):
        raise UserError(f"--vary={text}: give --{field}s, which every comparison has")
    if len(set(values)) < len(values):
        raise UserError(f"--vary={text} has a value twice: give each once")
    return Vary(field, values)


def parse_settings(texts: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, str]]:
    """ "diloco:outer.momentum=0.5" and its like as method -> field -> value."""
    settings: dict[str, dict[str, str]] = {method: {} for method in methods}
    for text in texts:
        method, colon, rest = text.partition(":")
        field, equals, value = rest.partition("=")
        if not colon or not equals:
            raise UserError(f"--set={text} is not of the form METHOD:FIELD=VALUE, such as diloco:outer.momentum=0.5")
        if method not in methods:
            raise UserError(f"--set={text}: {method!r} is not among --methods={','.join(methods)}: add or correct it")
        _check_field(field)
        if field in ("method", "seed"):
            raise UserError(f"--set={text}: {field} belongs to the whole comparison: give --{field}s")
        settings[method][field] = value
    return settings


def _check_field(path: str) -> None:
    if find_field(path).is_group:
        raise unknown_field(path)


def make_plan(
    file: str,
    overrides: Sequence[str],
    methods: Sequence[str],
    num_seeds: int,
    vary: Vary | None = None,
    settings: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Run]:
    """The runs, of the first seed first, in the order in which they are trained.

    Args:
      file: the config file, which has to be noloco's: the other methods' settings follow from it.
      overrides: `--config.FIELD=VALUE`, of all runs.
      methods: how to train.
      num_seeds: seeds, counted up from the configuration's.
      vary: a field that takes several values in turn.
      settings: method -> field -> value, for single methods, over all else.

    Raises:
      UserError: if a run's configuration is unknown, inconsistent or the same as another's.
    """
    base = from_dict(load_config(file, overrides))
    if base.method != "noloco":
        raise UserError(
            f"the configuration has method={base.method!r}: give noloco's, from which the others follow, and --methods"
        )
    if num_seeds < 1:
        raise UserError(f"--seeds={num_seeds} is below 1: it is how many seeds each method is trained with")
    runs = []
    for seed in range(base.seed, base.seed + num_seeds):
        for method in methods:
            own = dict((settings or {}).get(method, {}))
            varies = vary is not None and vary.field not in own and not METHODS[method].is_unused(vary.field)
            for value in vary.values if vary is not None and varies else (None,):
                varied = {} if vary is None or value is None else {vary.field: value}
                runs.append(_run(file, overrides, method, seed, varied, own))
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two runs would be called {name}: change the values of --vary")
    return runs


def _run(
    file: str, overrides: Sequence[str], method: str, seed: int, varied: Mapping[str, str], own: Mapping[str, str]
) -> Run:
    flags = [*overrides, *_flags({"seed": seed, **varied})]
    row = METHODS[method]
    if row.sync_factor != 1:
        sync_every = from_dict(load_config(file, flags)).outer.sync_every
        flags += _flags({"outer.sync_every": sync_every * row.sync_factor})
    flags += _flags({field: varied.get(field, value) for field, value in row.baseline.items()})
    flags += _flags({"method": method, **own})
    label = "".join(f"-{field}={value}" for field, value in varied.items())
    name = re.sub(r"[^\w.=+-]", "_", f"{method}{label}-seed{seed}")
    value = next(iter(varied.values()), None)
    return Run(name, method, value, seed, tuple(flags), from_dict(load_config(file, flags)))


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--config.{field}={value}" for field, value in values.items()]


def check_folder(workdir: Path, runs: Sequence[Run]) -> None:
    """Raises `UserError` if what a folder holds is not a part of these runs."""
    if (workdir / CONFIG_FILE).exists():
        raise UserError(f"{workdir} is the workdir of a run: give another --workdir for the comparison")
    planned = {run.name: run.config for run in runs}
    for path in sorted(workdir.glob(f"*/{CONFIG_FILE}")):
        name = path.parent.name
        if name not in planned:
            raise UserError(
                f"{workdir} holds another comparison, with {name}: give that one's flags (more methods, seeds and "
                "values may be added), or another --workdir"
            )
        for field, there, here, on_resume in changes(load_saved(path.parent), planned[name]):
            if on_resume != "free":  # what may change in one run would make another of a comparison
                raise UserError(
                    f"{workdir} holds another comparison: {name} has {field}={there!r} and this one {here!r}: "
                    "give the same value, or another --workdir"
                )
