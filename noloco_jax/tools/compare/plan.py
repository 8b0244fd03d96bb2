"""Variants of a comparison and the runs that they make: all of them, and those needed so far."""

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from noloco_jax.config import CONFIG_FILE, TrainConfig, changes, load_config, load_saved
from noloco_jax.errors import UserError
from noloco_jax.optim.methods import METHODS
from noloco_jax.tools.sweep import Sweep, check_given_once, check_single, combinations

_METHODS = "ddp,diloco,noloco,local"
_OWN_FLAGS = {"method": "--methods or --variant", "seed": "--seeds"}  # flags that set a field of every run


@dataclass(frozen=True)
class Variant:
    """A way of training that is compared with others.

    Attributes:
      title: its name, as given.
      method: its method.
      settings: (field, value) of its own settings, over all else.
      varied: (choices, value) of the fields that the comparison varies, where they make another run.
    """

    title: str
    method: str
    settings: tuple[tuple[str, str], ...] = ()
    varied: tuple[tuple[Sweep, tuple[str, ...]], ...] = ()

    @property
    def name(self) -> str:
        """The title, and the varied fields with their values: its name in folders and pictures."""
        return "-".join([self.title, *(f"{choices.title}={value[0]}" for choices, value in self.varied)])

    def heeds(self, choices: Sweep) -> bool:
        """Return True if another value, given to all variants, makes another run of this one.

        Raises:
          UserError: if it sets some of the fields itself: its rows would name values that it was not trained with.
        """
        own = [field for field in choices.fields if field in dict(self.settings)]
        unused = [field for field in choices.fields if field in own or METHODS[self.method].is_unused(field)]
        if own and len(unused) < len(choices.fields):
            raise UserError(
                f"{' and '.join(choices.fields)} change together, and {self.title} sets {own[0]} itself: "
                "let it set all of them, or none"
            )
        return len(unused) < len(choices.fields)


def check_free(fields: Sequence[str], flag: str) -> None:
    """Raise `UserError` for a field that a flag of its own sets."""
    for field in fields:
        if field in _OWN_FLAGS:
            raise UserError(f"{flag}: {field} is not set like other fields: give {_OWN_FLAGS[field]}")


def make_variants(methods: str | None, variants: Sequence[str], vary: Sequence[Sweep] = ()) -> list[Variant]:
    """Make the variants that the flags name, each once for all values of the varied fields that change its run.

    Args:
      methods: "ddp,noloco"; None: all of `_METHODS`, or none beside `variants`.
      variants: "often:outer.fragments=8,outer.sync_every=2" each, see `_parse_variant`.
      vary: fields that take several values, in all combinations.
    """
    if methods is None and not variants:
        methods = _METHODS
    names = [] if methods is None else [name.strip() for name in methods.split(",")]
    named = [Variant(name, _known_method(name, f"--methods={methods}")) for name in names]
    named += map(_parse_variant, variants)
    titles = [variant.title for variant in named]
    for title in titles:
        if titles.count(title) > 1:
            raise UserError(f"two variants are called {title!r}: give each of --methods and --variant its own name")
    return [
        replace(variant, varied=varied)
        for variant in named
        for varied in combinations([choices for choices in vary if variant.heeds(choices)])
    ]


def _parse_variant(text: str) -> Variant:
    """Parse "often:outer.fragments=8,outer.sync_every=2"; its method is that of `method=`, of its name, or noloco."""
    flag = f"--variant={text}"
    title, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"[\w.+-]+", title):
        raise UserError(
            f"{flag} is not of the form NAME:FIELD=VALUE,FIELD=VALUE, with a NAME of letters, digits, '.+-_'"
        )
    settings: dict[str, str] = {}
    for part in re.split(r",(?=[\w.\s]+=)", rest) if rest.strip() else []:  # a value may hold commas itself
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UserError(f"{flag}: {part!r} is not of the form FIELD=VALUE")
        if field in settings:
            raise UserError(f"{flag} has {field} twice: give it once")
        settings[field] = value
    method = _known_method(settings.pop("method", title if title in METHODS else "noloco"), flag)
    check_free(list(settings), flag)
    for field in settings:
        check_single(field)
    return Variant(title, method, tuple(settings.items()))


def _known_method(name: str, flag: str) -> str:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(METHODS)}"
        raise UserError(f"{flag}: there is no method {name!r}: {hint}")
    return name


@dataclass(frozen=True)
class PlannedRun:
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
class ComparisonPlan:
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
    vary: tuple[Sweep, ...]
    tune: Sweep | None
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    references: Mapping[Variant, Variant]

    @property
    def total(self) -> int:
        """The number of runs that are trained in all."""
        return len(self._first) + len(self.variants) * (len(self.seeds) - 1)

    @property
    def _first(self) -> list[PlannedRun]:
        return [run for run in self.runs if run.seed == self.seeds[0]]

    def chosen(self, variant: Variant, perplexities: Mapping[PlannedRun, float]) -> list[PlannedRun]:
        """Return the runs of a variant at the value with the least perplexity of the first seed, one for each seed.

        A tuned variant has none before one of its first seed's runs is finished.

        Args:
          variant: the variant.
          perplexities: perplexities of the finished runs; infinite where one is not finite.
        """
        runs = [run for run in self.runs if run.variant == variant]
        if len(runs) == len(self.seeds):
            return runs
        finished = [run for run in self._first if run.variant == variant and run in perplexities]
        best = min(finished, key=lambda run: perplexities[run]).tuned if finished else None
        return [run for run in runs if finished and run.tuned == best]

    def needed(self, perplexities: Mapping[PlannedRun, float]) -> list[PlannedRun]:
        """Return the runs of the first seed, and the chosen ones of the others, in the order in which to train them.

        Give perplexities only after the runs of the first seed have ended; before, no value is the best.
        """
        chosen = {run for variant in self.variants for run in self.chosen(variant, perplexities)}
        return [run for run in self.runs if run.seed == self.seeds[0] or run in chosen]

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
    vary: Sequence[Sweep] = (),
    tune: Sweep | None = None,
) -> ComparisonPlan:
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
    base = load_config(file, overrides)
    if base.method != "noloco":
        raise UserError(
            f"the configuration has method={base.method!r}: give noloco's, from which the others follow, and --methods"
        )
    if num_seeds < 1:
        raise UserError(f"--seeds={num_seeds} is below 1: it is how many seeds each variant is trained with")
    if tune is not None and len(tune.values) < 2:
        raise UserError(f"--tune={tune.title} has one value: give two or more to choose from")
    check_given_once([*vary, *([tune] if tune else [])], "--vary and --tune")
    seeds = tuple(range(base.seed, base.seed + num_seeds))
    runs = [
        _planned_run(file, overrides, variant, seed, tuned)
        for seed in seeds
        for variant in variants
        for tuned in ([(tune, value) for value in tune.values] if tune is not None and variant.heeds(tune) else [None])
    ]
    of_first_seed = runs[: len(runs) // num_seeds]  # those of another differ as these do
    for one, other in itertools.combinations(of_first_seed, 2):
        if one.name == other.name:
            raise UserError(f"two runs would be called {one.name}: change the values, or a variant's name")
        if not changes(one.config, other.config):
            raise UserError(
                f"{one.name} and {other.name} would be the same run: what tells them apart has no effect on them, so "
                "leave one out"
            )
    return ComparisonPlan(tuple(variants), tuple(vary), tune, seeds, tuple(runs), _references(of_first_seed))


def _planned_run(
    file: str, overrides: Sequence[str], variant: Variant, seed: int, tuned: tuple[Sweep, tuple[str, ...]] | None
) -> PlannedRun:
    common: dict[str, object] = {"seed": seed}
    for choices, values in [*variant.varied, *([tuned] if tuned else [])]:
        common |= zip(choices.fields, values, strict=True)
    flags, row = [*overrides, *_flags(common)], METHODS[variant.method]
    if row.has_outer_steps:  # the file's is noloco's, and would be left out with another method
        sync_every = load_config(file, flags).outer.sync_every
        flags += _flags({"outer.sync_every": sync_every * row.sync_factor})
    baseline = {f"outer.{name}": value for name, value in row.baseline.items()}
    flags += _flags({field: common.get(field, value) for field, value in baseline.items()})
    flags += _flags({"method": variant.method, **dict(variant.settings)})
    label = f"-{tuned[0].title}={tuned[1][0]}" if tuned else ""
    name = re.sub(r"[^\w.=+-]", "_", f"{variant.name}{label}-seed{seed}")
    return PlannedRun(name, variant, seed, tuned[1][0] if tuned else None, load_config(file, flags))


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--config.{field}={value}" for field, value in values.items()]


def _references(runs: Sequence[PlannedRun]) -> dict[Variant, Variant]:
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


def check_folder(workdir: Path, runs: Sequence[PlannedRun]) -> None:
    """Raise `UserError` if a folder holds runs of another comparison."""
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
