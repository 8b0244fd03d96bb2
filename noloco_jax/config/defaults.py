"""Every field of the configuration as a `ConfigDict`, which config files begin with."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict, config_dict

from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import FieldInfo, fields_of


def default_config() -> Any:
    """Return the `ConfigDict` that a config file begins with: every field at its default, locked against others.

    Fields that are None here take the method's own default, or none. `config.get_ref` and `get_oneway_ref` make fields
    that follow others, whatever flags set these to. A source of `data.mixture` is given as
    `config.data.mixture.NAME = dict(kind=..., path=..., weight=...)`.
    """
    config: Any = _defaults(TrainConfig).lock()
    config.data.mixture.unlock()
    return config


def _defaults(cls: type) -> ConfigDict:
    return ConfigDict({name: _default(field) for name, field in fields_of(cls).items()})


def _default(field: FieldInfo) -> Any:
    if field.by_name:
        return ConfigDict()
    if field.is_group:
        return _defaults(field.type)
    if field.default is None or field.default is dataclasses.MISSING:
        return config_dict.placeholder(field.type)
    return field.default
