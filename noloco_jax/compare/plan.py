"""Runs of a comparison: all of them, those due next, and the check that a folder holds this comparison."""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_jax.checkpoint.record import data_at_start
from noloco_jax.compare.variants import Choices, Variant
from noloco_jax.config import CONFIG_FILE, DataConfig, TrainConfig, changes, from_dict, load_config, load_saved
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
      references: variant -> the one that its gap is above; none where no ddp has its inner optimizer.
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
        return len(self.expected({}))

    def expected(self, perplexities: Mapping[Run, float], failed: Collection[Run] = ()) -> list[Run]:
        """Return as many runs as are trained in all: where the best value is not known yet, any stands for it."""
        due = self.due(perplexities, failed)
        known = {(run.variant, run.seed) for run in due}
        others = (
            self.runs_of(variant, seed)[0]
            for seed in self.seeds
            for variant in self.variants
            if (variant, seed) not in known
        )
        return [*due, *others]

    def best_value(self, variant: Variant, perplexities: Mapping[Run, float]) -> str | None:
        """Return the tuned value with the least perplexity of the first seed, of the runs that have one."""
        finished = [run for run in self.runs_of(variant, self.seeds[0]) if run in perplexities]
        return min(finished, key=lambda run: _order(perplexities[run])).tuned if finished else None

    def chosen(self, variant: Variant, perplexities: Mapping[Run, float]) -> list[Run]:
        """Return the finished runs of a variant, a seed each, at its best value."""
        best = self.best_value(variant, perplexities)
        return [run for run in self.runs if run.variant == variant and run.tuned == best and run in perplexities]

    def due(self, perplexities: Mapping[Run, float], failed: Collection[Run] = ()) -> list[Run]:
        """Return the runs that are known to be needed, finished ones included, in the order in which to train them.

        Args:
          perplexities: of the finished runs; NaN where it is not finite.
          failed: runs that broke off, as those of too high a learning rate do: the best is among the others.
        """
        due = []
        for seed in self.seeds:
            for variant in self.variants:
                runs, first = self.runs_of(variant, seed), self.runs_of(variant, self.seeds[0])
                if seed == self.seeds[0] or len(first) == 1:
                    due += runs
                elif all(run in perplexities or run in failed for run in first):
                    best = self.best_value(variant, perplexities)
                    due += [run for run in runs if best is not None and run.tuned == best]
        return due


def _order(perplexity: float) -> float:
    return perplexity if math.isfinite(perplexity) else math.inf


def at_end(tune: Choices, value: str) -> bool:
    """Return True if a value is the least or the greatest of the list: a better one may lie beyond."""
    try:
        numbers = {text: float(tune.title(text)) for text in tune.values}
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
    """The runs that the variants make of a config file.

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
        raise UserError(f"--tune={tune.field}={','.join(tune.values)} is one value: give two or more to choose from")
    flags = [("--vary", choices) for choices in vary] + ([("--tune", tune)] if tune is not None else [])
    for (flag, choices), (other, others) in itertools.combinations(flags, 2):
        for field in set(choices.fields) & set(others.fields):
            raise UserError(f"{other} and {flag} both have {field}: give it to one of them")
    for variant, (flag, choices) in itertools.product(variants, flags):
        own = [field for field in choices.fields if variant.sets(field)]
        if own and variant.heeds(choices):  # its rows would name values that it was not trained with
            raise UserError(
                f"{flag} changes {' and '.join(choices.fields)} together, and {variant.title} sets {own[0]} itself: "
                "let it set all of them, or none"
            )
    seeds = tuple(range(base.seed, base.seed + num_seeds))
    runs = [
        _run(file, overrides, variant, seed, vary, tune, value)
        for seed in seeds
        for variant in variants
        for value in (tune.values if tune is not None and variant.heeds(tune) else (None,))
    ]
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two runs would be called {name}: change the values of --vary or --tune, or a variant's name"
            )
    of_first_seed = [run for run in runs if run.seed == base.seed]  # those of another differ as these do
    for one, other in itertools.combinations(of_first_seed, 2):
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
    vary: Sequence[Choices],
    tune: Choices | None,
    value: str | None,
) -> Run:
    common: dict[str, object] = {"seed": seed}
    chosen = [(choices, variant.value_of(choices)) for choices in vary] + ([(tune, value)] if tune is not None else [])
    for choices, text in chosen:
        common |= choices.settings(text) if text is not None else {}
    flags = [*overrides, *_flags(common)]
    row = METHODS[variant.method]
    if row.has_outer_steps:  # the file's is noloco's, and would be left out with another method
        sync_every = from_dict(load_config(file, flags)).outer.sync_every
        flags += _flags({"outer.sync_every": sync_every * row.sync_factor})
    baseline = {f"outer.{name}": value for name, value in row.baseline.items()}
    flags += _flags({field: common.get(field, value) for field, value in baseline.items()})
    flags += _flags({"method": variant.method, **dict(variant.settings)})
    label = f"-{tune.field}={value}" if tune is not None and value is not None else ""
    name = re.sub(r"[^\w.=+-]", "_", f"{variant.name}{label}-seed{seed}")
    return Run(name, variant, seed, value, tuple(flags), from_dict(load_config(file, flags)))


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--config.{field}={value}" for field, value in values.items()]


def _references(variants: Sequence[Variant], runs: Sequence[Run]) -> dict[Variant, Variant]:
    """Map each variant to its reference: the one that it names, or the ddp of its inner optimizer most like it."""
    configs = {variant: next(run.config for run in runs if run.variant == variant) for variant in variants}

    def unlike(variant: Variant, other: Variant) -> tuple[int, int, bool]:
        fields = [row.field for row in changes(configs[variant], configs[other]) if row.field != "method"]
        of_outer = sum(field.startswith("outer.") for field in fields)  # differ where a reference is varied
        return len(fields) - of_outer, of_outer, other != variant

    references = {}
    for variant in variants:
        if variant.reference is not None:
            others = [other for other in variants if other.title == variant.reference]
        else:
            optimizer = configs[variant].inner.optimizer
            ddps = (other for other in variants if other.method == "ddp")
            others = [other for other in ddps if configs[other].inner.optimizer == optimizer]
        if others:
            references[variant] = min(others, key=lambda other: unlike(variant, other))
    return references


def check_folder(workdir: Path, runs: Sequence[Run]) -> None:
    """Raise `UserError` if what a folder holds is not a part of these runs."""
    if (workdir / CONFIG_FILE).exists():
        raise UserError(f"{workdir} is the workdir of a run: give another --workdir for the comparison")
    planned = {run.name: run for run in runs}
    for path in sorted(workdir.glob(f"*/{CONFIG_FILE}")):
        name = path.parent.name
        if name not in planned:
            raise UserError(
                f"{workdir} holds another comparison, with {name}: give that one's flags (more variants, seeds and "
                "values may be added), or another --workdir"
            )
        check_run(planned[name], workdir)
    check_same_data(runs, workdir)


def check_run(run: Run, workdir: Path) -> None:
    """Raise `UserError` if the run in `workdir`/NAME has another configuration than is planned."""
    for field, there, here, on_resume in changes(load_saved(workdir / run.name), run.config):
        if on_resume != "free":  # a change that one run may make still makes a different comparison
            raise UserError(
                f"{workdir} holds another comparison: {run.name} has {field}={there!r} and this one {here!r}: "
                "give the same value, or another --workdir"
            )


def check_same_data(runs: Sequence[Run], workdir: Path) -> None:
    """Raise `UserError` if runs on the same path read other data, as files that change under a comparison make them."""
    first: dict[tuple[DataConfig, int], tuple[str, dict[str, object]]] = {}
    for run in runs:
        there = data_at_start(workdir / run.name)
        if there is None:
            continue
        facts = {name: fact for name, fact in there.items() if name != "seed"}
        other, others = first.setdefault((run.config.data, run.config.num_replicas), (run.name, facts))
        changed = [name for name in facts | others if facts.get(name) != others.get(name)]
        if changed:
            raise UserError(
                f"{run.name} and {other} in {workdir} read other data, though all their fields are the same "
                f"({changed[0]}: {facts.get(changed[0])!r} and {others.get(changed[0])!r}): restore the data and "
                "delete the folder of one of them, or give another --workdir"
            )
