"""Variants of a comparison, from its flags: a title, a method, settings, and values of the fields that vary."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from noloco_jax.errors import UserError
from noloco_jax.optim.methods import METHODS
from noloco_jax.tools.sweep import Sweep, check_single, combinations

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
