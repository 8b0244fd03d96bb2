"""The configuration of a run: fields with their ranges and meanings, checks, and the command line."""

from noloco_jax.config.build import find_field, from_dict, from_record, known_fields, unknown_field
from noloco_jax.config.changes import Change, changes, unused_settings
from noloco_jax.config.config_file import CONFIG_FILE, load_saved, save_config, to_dict
from noloco_jax.config.fields import (
    DataConfig,
    InnerConfig,
    MeshConfig,
    ModelConfig,
    OuterConfig,
    RopeScaling,
    SourceConfig,
    TrainConfig,
)
from noloco_jax.config.flags import load_config, make_parser, overridden, parse_args, split_overrides
from noloco_jax.config.schema import flatten

__all__ = [
    "CONFIG_FILE",
    "Change",
    "DataConfig",
    "InnerConfig",
    "MeshConfig",
    "ModelConfig",
    "OuterConfig",
    "RopeScaling",
    "SourceConfig",
    "TrainConfig",
    "changes",
    "find_field",
    "flatten",
    "from_dict",
    "from_record",
    "known_fields",
    "load_config",
    "load_saved",
    "make_parser",
    "overridden",
    "parse_args",
    "save_config",
    "split_overrides",
    "to_dict",
    "unknown_field",
    "unused_settings",
]
