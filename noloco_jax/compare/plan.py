"""Runs of a comparison: all of them, those due next, and the check that a folder holds this comparison."""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_jax.checkpoint.record import data_at_start
from noloco_jax.compare.variants import Choices, Variant
from noloco_jax.config import CONFIG_FILE, TrainConfig, changes, from_dict, load_config, load_saved
from noloco_jax.errors import UserError
from noloco_jax.methods import METHODS


@dataclass(frozen=True)
class Run:
    """One training run of a comparison.

    Attributes:
      name: of its folder.
      variant: how it trains.
      seed: its `config.seed`.
      tuned: its value of the field that is tuned, as written; None where none is.
      overrides: `--config.FIELD=VALUE` flags that make it of the config file.
      config: what they make.
    """

    name: str
    variant: Variant
    seed: int
    tuned: str | None
    overrides: tuple[str, ...]
    config: TrainConfig


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Of a variant that is tuned, the first seed is trained with every value, the others with the best of them alone.

    Attributes:
      variants: that are compared.
      vary: the fields that vary.
      tune: the field that is tuned, or None.
      seeds: counted up from the configuration's.
      runs: all that there may be, of the first seed first.
      references: variant -> the ddp that its gap is above; none where no ddp has its inner optimizer.
    """

    variants: tuple[Variant, ...]
    vary: tuple[Choices, ...]
    tune: Choices | None
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    references: Mapping[Variant, Variant]

    def runs_of(self, variant: Variant, seed: int) -> list[Run]:
        """Return the runs of a variant and a seed, one for every value that is tuned."""
        return [run for run in self.runs if run.variant == variant and run.seed == seed]

    @property
    def total(self) -> int:
        """The number of runs that are trained in all."""
        of_first = [run for run in self.runs if run.seed == self.seeds[0]]
        return len(of_first) + len(self.variants) * (len(self.seeds) - 1)

    def best_value(self, variant: Variant, perplexities: Mapping[Run, float]) -> str | None:
        """Return the tuned value with the least perplexity of the first seed, of the runs that have one."""
        finished = [run for run in self.runs_of(variant, self.seeds[0]) if run in perplexities]
        return min(finished, key=lambda run: perplexities[run]).tuned if finished else None

    def chosen(self, variant: Variant, perplexities: Mapping[Run, float]) -> list[Run]:
        """Return the finished runs of a variant, a seed each, at its best value."""
        best = self.best_value(variant, perplexities)
        return [run for run in self.runs if run.variant == variant and run.tuned == best and run in perplexities]

    def due(self, perplexities: Mapping[Run, float], failed: Collection[Run] = ()) -> list[Run]:
        """Return the runs that are known to be needed, finished ones included, in the order in which to train them.

        Args:
          perplexities: of the finished runs; infinite where it is not finite.
          failed: runs that broke off, as those of too high a learning rate do: the best is among the others.
        """
        due = []
        for seed, variant in itertools.product(self.seeds, self.variants):
            runs, first = self.runs_of(variant, seed), self.runs_of(variant, self.seeds[0])
            if seed == self.seeds[0] or len(first) == 1:
                due += runs
            elif all(run in perplexities or run in failed for run in first):
                best = self.best_value(variant, perplexities)
                due += [run for run in runs if best is not None and run.tuned == best]
        return due

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
      variants: how to train, see `make_variants`.
      num_seeds: seeds, counted up from the configuration's.
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
    lists = [*vary, *([tune] if tune is not None else [])]
    fields = [field for choices in lists for field in choices.fields]
    for field in fields:
        if fields.count(field) > 1:
            raise UserError(f"--vary and --tune have {field} twice: give it to one of them")
    for variant, choices in itertools.product(variants, lists):
        own = [field for field in choices.fields if field in dict(variant.settings)]
        if own and variant.heeds(choices):  # its rows would name values that it was not trained with
            raise UserError(
                f"{' and '.join(choices.fields)} change together, and {variant.title} sets {own[0]} itself: "
                "let it set all of them, or none"
            )
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
    return Plan(tuple(variants), tuple(vary), tune, seeds, tuple(runs), _references(variants, runs))


def _run(
    file: str,
    overrides: Sequence[str],
    variant: Variant,
    seed: int,
    tune: Choices | None,
    value: tuple[str, ...] | None,
) -> Run:
    common: dict[str, object] = {"seed": seed}
    chosen = [*variant.varied, *([(tune, value)] if tune is not None and value is not None else [])]
    for choices, values in chosen:
        common |= zip(choices.fields, values, strict=True)
    flags, row = [*overrides, *_flags(common)], METHODS[variant.method]
    if row.has_outer_steps:  # the file's is noloco's, and would be left out with another method
        sync_every = from_dict(load_config(file, flags)).outer.sync_every
        flags += _flags({"outer.sync_every": sync_every * row.sync_factor})
    baseline = {f"outer.{name}": value for name, value in row.baseline.items()}
    flags += _flags({field: common.get(field, value) for field, value in baseline.items()})
    flags += _flags({"method": variant.method, **dict(variant.settings)})
    tuned = value[0] if value is not None else None
    label = f"-{tune.title}={tuned}" if tune is not None and tuned is not None else ""
    name = re.sub(r"[^\w.=+-]", "_", f"{variant.name}{label}-seed{seed}")
    return Run(name, variant, seed, tuned, tuple(flags), from_dict(load_config(file, flags)))


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--config.{field}={value}" for field, value in values.items()]


def _references(variants: Sequence[Variant], runs: Sequence[Run]) -> dict[Variant, Variant]:
    """Map each variant to the ddp with its inner optimizer that differs from it in the fewest fields."""
    configs = {variant: next(run.config for run in runs if run.variant == variant) for variant in variants}

    def unlike(variant: Variant, other: Variant) -> tuple[int, bool]:
        fields = [row.field for row in changes(configs[variant], configs[other])]
        return sum(not field.startswith(("outer.", "method")) for field in fields), other != variant

    references = {}
    for variant in variants:
        optimizer = configs[variant].inner.optimizer
        ddps = (other for other in variants if other.method == "ddp")
        if others := [other for other in ddps if configs[other].inner.optimizer == optimizer]:
            references[variant] = min(others, key=lambda other: unlike(variant, other))
    return references


def check_folder(workdir: Path, runs: Sequence[Run]) -> None:
    """Raise `UserError` if what a folder holds is not a part of these runs, or they read different data there."""
    if (workdir / CONFIG_FILE).exists():
        raise UserError(f"{workdir} is the workdir of a run: give another --workdir for the comparison")
    planned = {run.name: run for run in runs}
    first: dict[object, tuple[str, object]] = {}
    for name in sorted(path.parent.name for path in workdir.glob(f"*/{CONFIG_FILE}")):
        if name not in planned:
            raise UserError(
                f"{workdir} holds another comparison, with {name}: give that one's flags (more variants, seeds and "
                "values may be added), or another --workdir"
            )
        run = planned[name]
        for field, there, here, on_resume in changes(load_saved(workdir / name), run.config):
            if on_resume != "free":  # a change that one run may make still makes a different comparison
                raise UserError(
                    f"{workdir} holds another comparison: {name} has {field}={there!r} and this one {here!r}: "
                    "give the same value, or another --workdir"
                )
        facts = {fact: value for fact, value in (data_at_start(workdir / name) or {}).items() if fact != "seed"}
        other, others = first.setdefault((run.config.data, run.config.num_replicas), (name, facts))
        if facts != others:
            raise UserError(
                f"{name} and {other} in {workdir} read other data from the same path: restore the data and delete the "
                "folder of one of them, or give another --workdir"
            )
