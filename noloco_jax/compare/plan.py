"""Runs of a comparison: all of them, those due next, and the check that a folder holds this comparison."""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_jax.compare.variants import Choices, Variant
from noloco_jax.config import CONFIG_FILE, TrainConfig, changes, from_dict, load_config, load_saved
from noloco_jax.errors import UserError
from noloco_jax.methods import METHODS


@dataclass(frozen=True)
class Run:
    """One training run of a comparison.

    Attributes:
      name: name of its folder.
      variant: its variant.
      seed: its `config.seed`.
      tuned: its value of the field that is tuned, as written; None where none is.
      config: its configuration.
    """

    name: str
    variant: Variant
    seed: int
    tuned: str | None
    config: TrainConfig


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Of a variant that is tuned, the first seed is trained with every value, the others with the best of them alone.

    Attributes:
      variants: the variants.
      vary: the fields that vary.
      tune: the field that is tuned, or None.
      seeds: seeds, counted up from the configuration's.
      runs: all runs that there may be, of the first seed first.
      references: variant -> the ddp that its gap is above; none where no ddp has its inner optimizer.
    """

    variants: tuple[Variant, ...]
    vary: tuple[Choices, ...]
    tune: Choices | None
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    references: Mapping[Variant, Variant]

    @property
    def total(self) -> int:
        """The number of runs that are trained in all."""
        of_first = [run for run in self.runs if run.seed == self.seeds[0]]
        return len(of_first) + len(self.variants) * (len(self.seeds) - 1)

    def chosen(self, variant: Variant, perplexities: Mapping[Run, float]) -> list[Run]:
        """Return the runs of a variant at the value with the least perplexity of the first seed, one for each seed.

        None of the first seed's runs is finished: none. The runs of other seeds need not be finished.
        """
        runs = [run for run in self.runs if run.variant == variant]
        finished = [run for run in runs if run.seed == self.seeds[0] and run in perplexities]
        best = min(finished, key=lambda run: perplexities[run]).tuned if finished else None
        return [run for run in runs if finished and run.tuned == best]

    def due(self, perplexities: Mapping[Run, float], failed: Collection[Run] = ()) -> list[Run]:
        """Return the runs that are known to be needed, finished ones included, in the order in which to train them.

        Args:
          perplexities: perplexities of the finished runs; infinite where one is not finite.
          failed: runs that broke off, as those of too high a learning rate do: the best is among the others.
        """
        needed = {run for run in self.runs if run.seed == self.seeds[0]}
        for variant in self.variants:
            runs = [run for run in self.runs if run.variant == variant]
            first = [run for run in runs if run.seed == self.seeds[0]]
            if len(first) == 1:
                needed.update(runs)
            elif all(run in perplexities or run in failed for run in first):
                needed.update(self.chosen(variant, perplexities))
        return [run for run in self.runs if run in needed]

    def is_at_end(self, value: str | None) -> bool:
        """Return True if a tuned value is the least or the greatest of the list: a better one may lie beyond."""
        if self.tune is None or value is None:
            return False
        try:
            numbers = {choice[0]: float(choice[0]) for choice in self.tune.values}
        except ValueError:
            return False  # words have no ends
        return numbers[value] in (min(numbers.values()), max(numbers.values()))


def make_plan(
    file: str,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    num_seeds: int,
    vary: Sequence[Choices] = (),
    tune: Choices | None = None,
) -> Plan:
    """Return the runs that the variants make of a config file.

    Args:
      file: the config file, which has to be noloco's: the other methods' settings follow from it.
      overrides: `--config.FIELD=VALUE`, of all runs.
      variants: the variants, see `make_variants`.
      num_seeds: number of seeds.
      vary: fields that take several values in turn, every combination of them.
      tune: a field of which every variant gets its own best value.

    Raises:
      UserError: if a run's configuration is unknown, inconsistent or the same as another's.
    """
    base = from_dict(load_config(file, overrides))
    if base.method != "noloco":
        raise UserError(
            f"the configuration has method={base.method!r}: give noloco's, from which the others follow, and --methods"
        )
    if num_seeds < 1:
        raise UserError(f"--seeds={num_seeds} is below 1: it is how many seeds each variant is trained with")
    if tune is not None and len(tune.values) < 2:
        raise UserError(f"--tune={tune.title} has one value: give two or more to choose from")
    fields = [field for choices in (*vary, *([tune] if tune else [])) for field in choices.fields]
    for field in fields:
        if fields.count(field) > 1:
            raise UserError(f"--vary and --tune have {field} twice: give it to one of them")
    seeds = tuple(range(base.seed, base.seed + num_seeds))
    runs = [
        _run(file, overrides, variant, seed, tune, value)
        for seed in seeds
        for variant in variants
        for value in (tune.values if tune is not None and variant.heeds(tune) else (None,))
    ]
    of_first_seed = [run for run in runs if run.seed == base.seed]  # those of another differ as these do
    for one, other in itertools.combinations(of_first_seed, 2):
        if one.name == other.name:
            raise UserError(f"two runs would be called {one.name}: change the values, or a variant's name")
        if not changes(one.config, other.config):
            raise UserError(
                f"{one.name} and {other.name} would be the same run: what tells them apart has no effect on them, so "
                "leave one out"
            )
    return Plan(tuple(variants), tuple(vary), tune, seeds, tuple(runs), _references(of_first_seed))


def _run(
    file: str,
    overrides: Sequence[str],
    variant: Variant,
    seed: int,
    tune: Choices | None,
    value: tuple[str, ...] | None,
) -> Run:
    common: dict[str, object] = {"seed": seed}
    for choices, values in [*variant.varied, *([(tune, value)] if tune is not None and value is not None else [])]:
        common |= zip(choices.fields, values, strict=True)
    flags, row = [*overrides, *_flags(common)], METHODS[variant.method]
    if row.has_outer_steps:  # the file's is noloco's, and would be left out with another method
        sync_every = from_dict(load_config(file, flags)).outer.sync_every
        flags += _flags({"outer.sync_every": sync_every * row.sync_factor})
    baseline = {f"outer.{name}": value for name, value in row.baseline.items()}
    flags += _flags({field: common.get(field, value) for field, value in baseline.items()})
    flags += _flags({"method": variant.method, **dict(variant.settings)})
    tuned = None if value is None else value[0]
    label = f"-{tune.title}={tuned}" if tune is not None and tuned is not None else ""
    name = re.sub(r"[^\w.=+-]", "_", f"{variant.name}{label}-seed{seed}")
    return Run(name, variant, seed, tuned, from_dict(load_config(file, flags)))


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--config.{field}={value}" for field, value in values.items()]


def _references(runs: Sequence[Run]) -> dict[Variant, Variant]:
    """Map each variant to the ddp with its inner optimizer that differs from it in the fewest fields."""
    configs = {run.variant: run.config for run in reversed(runs)}  # of a tuned variant, the first value's

    def unlike(variant: Variant, other: Variant) -> tuple[int, bool]:
        fields = [row.field for row in changes(configs[variant], configs[other])]
        return sum(not field.startswith(("outer.", "method")) for field in fields), other != variant

    references = {}
    for variant, config in configs.items():
        ddps = [other for other in reversed(configs) if other.method == "ddp"]
        if others := [other for other in ddps if configs[other].inner.optimizer == config.inner.optimizer]:
            references[variant] = min(others, key=lambda other: unlike(variant, other))
    return references


def check_folder(workdir: Path, runs: Sequence[Run]) -> None:
    """Raise `UserError` if what a folder holds is not a part of these runs."""
    if (workdir / CONFIG_FILE).exists():
        raise UserError(f"{workdir} is the workdir of a run: give another --workdir for the comparison")
    planned = {run.name: run for run in runs}
    for name in sorted(path.parent.name for path in workdir.glob(f"*/{CONFIG_FILE}")):
        if name not in planned:
            raise UserError(
                f"{workdir} holds another comparison, with {name}: give that one's flags (more variants, seeds and "
                "values may be added), or another --workdir"
            )
        for field, there, here, on_resume in changes(load_saved(workdir / name), planned[name].config):
            if on_resume != "free":  # a change that one run may make still makes a different comparison
                raise UserError(
                    f"{workdir} holds another comparison: {name} has {field}={there!r} and this one {here!r}: "
                    "give the same value, or another --workdir"
                )
