"""Variants of a comparison, from its flags: name, method and settings."""

import difflib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from noloco_jax.config import find_field, unknown_field
from noloco_jax.errors import UserError
from noloco_jax.methods import METHODS

_METHODS = "ddp,diloco,noloco,local"
_OWN_FLAGS = {"method": "--methods or --variant", "seed": "--seeds"}  # flags that set a field of every run


@dataclass(frozen=True)
class Choices:
    """Values that a field takes in turn, or several fields together, which go by the name and value of the first.

    Attributes:
      field: as written: `num_steps`, or `num_steps/eval_every` for two that change together.
      values: as written: `600`, or `600/150`.
    """

    field: str
    values: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.field.split("/"))

    def title(self, value: str | None = None) -> str:
        """Return the first field, or its value in one of the values."""
        return self.fields[0] if value is None else self.settings(value)[self.fields[0]]

    def settings(self, value: str) -> dict[str, str]:
        """Return field -> value of one of the values."""
        if len(self.fields) == 1:
            return {self.field: value}
        return dict(zip(self.fields, value.split("/"), strict=True))


@dataclass(frozen=True)
class Variant:
    """A way of training that is compared with others.

    Attributes:
      title: as the table calls it.
      method: how it trains.
      settings: (field, value) of its own settings, over all else.
      reference: the title of the variant that its gap is above; None for the ddp that is most like it.
      values: (choices, value) of the fields that the comparison varies, where they make another run.
      name: as its folders are called: the title, and the varied fields with their values.
    """

    title: str
    method: str
    settings: tuple[tuple[str, str], ...] = ()
    reference: str | None = None
    values: tuple[tuple[Choices, str], ...] = ()
    name: str = ""

    @property
    def written(self) -> str:
        """Method and settings as a flag has them."""
        return ",".join(f"{field}={value}" for field, value in (("method", self.method), *self.settings))

    def sets(self, field: str) -> bool:
        return field in dict(self.settings)

    def value_of(self, choices: Choices) -> str | None:
        """Return its value of a varied field, as written, or None."""
        return dict(self.values).get(choices)

    def heeds(self, choices: Choices) -> bool:
        """Return True if another value, given to all variants, makes another run of this one."""
        return any(not self.sets(field) and not METHODS[self.method].is_unused(field) for field in choices.fields)


def parse_methods(text: str) -> list[Variant]:
    """Parse "ddp,noloco" as variants, each method once and by its own name."""
    methods = [name.strip() for name in text.split(",")]
    for name in methods:
        _check_method(name, f"--methods={text}")
        if methods.count(name) > 1:
            raise UserError(f"--methods={text} has {name} {methods.count(name)} times: name it once")
    return [Variant(name, name) for name in methods]


def _check_method(name: str, flag: str) -> None:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(METHODS)}"
        raise UserError(f"{flag}: there is no method {name!r}: {hint}")


def parse_variant(text: str) -> Variant:
    """Parse "often:outer.fragments=8,outer.sync_every=2" as a variant.

    Its method is that of `method=`, else the one it is named like, else noloco; `reference=` names its reference.
    """
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
    method = settings.pop("method", title if title in METHODS else "noloco")
    reference = settings.pop("reference", None)
    _check_method(method, flag)
    for field in settings:
        _check_field(field, flag)
    return Variant(title, method, tuple(settings.items()), reference)


def parse_choices(text: str, flag: str) -> Choices:
    """Parse "outer.sync_every=25,50" or "num_steps/eval_every=600/150,2400/600"; the configuration checks values."""
    field, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(","))
    if not equals or not all(values):
        raise UserError(f"{flag}={text} is not of the form FIELD=VALUE,VALUE, such as outer.sync_every=25,50")
    choices = Choices(field, values)
    for name in choices.fields:
        _check_field(name, f"{flag}={text}")
    for value in values:
        if len(choices.fields) > 1 and value.count("/") != field.count("/"):
            raise UserError(f"{flag}={text}: {value!r} has not a value for each of {' and '.join(choices.fields)}")
    if len(set(values)) < len(values):
        raise UserError(f"{flag}={text} has a value twice: give each once")
    return choices


def with_settings(variants: Sequence[Variant], texts: Sequence[str]) -> list[Variant]:
    """Return the variants with settings such as "diloco:outer.momentum=0.5" added to the one that is named."""
    titled = {variant.title: variant for variant in variants}
    for text in texts:
        title, colon, rest = text.partition(":")
        field, equals, value = rest.partition("=")
        if not colon or not equals:
            raise UserError(f"--set={text} is not of the form NAME:FIELD=VALUE, such as diloco:outer.momentum=0.5")
        if title not in titled:
            raise UserError(f"--set={text}: {title!r} is not among --methods and --variant: {', '.join(titled)}")
        _check_field(field, f"--set={text}")
        settings = dict(titled[title].settings) | {field: value}
        titled[title] = replace(titled[title], settings=tuple(settings.items()))
    return list(titled.values())


def make_variants(
    methods: str | None, variants: Sequence[str], settings: Sequence[str], vary: Sequence[Choices] = ()
) -> list[Variant]:
    """Make the variants that the flags name, each once for all values of the varied fields that change its run."""
    if methods is None and not variants:
        methods = _METHODS
    named = [*(parse_methods(methods) if methods is not None else []), *map(parse_variant, variants)]
    titles = [variant.title for variant in named]
    for variant in named:
        if titles.count(variant.title) > 1:
            raise UserError(f"two variants are called {variant.title!r}: give each of --variant and --methods its name")
        if variant.reference is not None and variant.reference not in titles:
            near = difflib.get_close_matches(variant.reference, titles, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(titles)}"
            raise UserError(f"--variant={variant.title}: no variant is called reference={variant.reference!r}: {hint}")
    expanded = []
    for variant in with_settings(named, settings):
        heeded = [choices for choices in vary if variant.heeds(choices)]
        for values in itertools.product(*(choices.values for choices in heeded)):
            pairs = list(zip(heeded, values, strict=True))
            name = "-".join([variant.title, *(f"{choices.title()}={choices.title(value)}" for choices, value in pairs)])
            expanded.append(replace(variant, name=re.sub(r"[^\w.=+-]", "_", name), values=tuple(pairs)))
    return expanded


def _check_field(path: str, flag: str) -> None:
    if find_field(path).is_group:
        raise unknown_field(path)
    if path in _OWN_FLAGS:
        raise UserError(f"{flag}: {path} is not set like other fields: give {_OWN_FLAGS[path]}")
