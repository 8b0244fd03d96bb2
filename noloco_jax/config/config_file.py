"""Config files: the defaults that they begin with, their reading, and a run's record of its configuration."""

import dataclasses
import difflib
import importlib.util
import inspect
import json
import os
import re
import traceback
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict, config_dict

from noloco_jax.config.build import from_dict
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import FieldInfo, fields_of
from noloco_jax.errors import UserError, described, tell
from noloco_jax.files import write_whole

CONFIG_FILE = "config.json"


def read_config_file(file: str) -> ConfigDict:
    """Read the settings of a file, with its references between fields.

    `file` is the path of a .py file, or `path:argument` for a `get_config(argument)`, or the path of a .json file such
    as a run's config.json. Where configs/NAME.py does not exist, the package's own file of that name is read. Raises
    `UserError`, with the line, where it cannot be read.
    """
    path, _, argument = (file, "", "") if Path(file).is_file() else file.partition(":")
    if not Path(path).is_file() and (bundled := _bundled(path)) is not None:
        tell(f"{path} is not in this folder: using {bundled}")
        path = str(bundled)
    if not Path(path).is_file():
        others = [str(file) for file in Path(path).parent.glob("*.py")]
        others += [f"configs/{name}.py" for name in bundled_names()]
        named = f"configs/{Path(path).stem}.py"
        near = [named] if named in others else difflib.get_close_matches(path, others, n=1)
        raise UserError(
            f"config file {path} does not exist: {f'did you mean {near[0]}?' if near else 'check --config'}"
        )
    try:
        values = _read_json(path, argument) if Path(path).suffix == ".json" else _run_python(path, argument)
        if isinstance(values, FrozenConfigDict):
            values = values.as_configdict()
        elif isinstance(values, dict):
            values = ConfigDict(values)
    except UserError:
        raise
    except (AttributeError, KeyError) as error:
        raise UserError(f"config file {path}{_where(path, error)}: {_unknown_name(error)}") from error
    except Exception as error:
        raise UserError(f"config file {path}{_where(path, error)}: {described(error)}") from error
    if not isinstance(values, ConfigDict):
        raise UserError(f"config file {path}: it gives a {type(values).__name__}, not a ConfigDict of fields")
    return values


def bundled_names() -> list[str]:
    """Return the names of the package's own configs, which `--config=configs/NAME.py` finds from any folder."""
    return sorted(file.stem for file in _bundled_folder().glob("*.py") if file.stem != "paper")


def _bundled(path: str) -> Path | None:
    """Return the package's own file for a path configs/NAME.py, or None."""
    file = _bundled_folder() / Path(path).name
    return file if Path(path).parent == Path("configs") and file.is_file() else None


def _bundled_folder() -> Path:
    """Return the folder of the package's own configs: inside an installed package, beside that of a clone."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _read_json(path: str, argument: str) -> Any:
    _check_argument(path, argument, takes_one=False)
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _run_python(path: str, argument: str) -> Any:
    spec = importlib.util.spec_from_file_location("noloco_config_file", path)
    if spec is None or spec.loader is None:
        raise UserError(f"config file {path} is neither .py nor .json: --config takes one of them")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_config = module.get_config
    _check_argument(path, argument, takes_one=bool(inspect.signature(get_config).parameters))
    return get_config(argument) if argument else get_config()


def _check_argument(path: str, argument: str, takes_one: bool) -> None:
    if argument and not takes_one:
        raise UserError(f"config file {path} takes no argument, got {argument!r}: leave ':{argument}' out")


def _unknown_name(error: Exception) -> str:
    """Return what is wrong in a line; ml_collections lists all fields where one is unknown to the defaults."""
    unknown = re.search(r'Key "(\w+)" does not exist and cannot be added', str(error))
    if unknown is None:
        return described(error)
    meant = re.search(r'Did you mean "(\w+)"', str(error))
    return f"unknown field {unknown[1]!r}: " + (f"did you mean {meant[1]!r}?" if meant else "see configs/FIELDS.md")


def _where(path: str, error: BaseException) -> str:
    """The last line of the file itself that led to the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(path)]
    return f" line {lines[-1]}" if lines else ""


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


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested plain values that JSON can hold and `from_dict` reads back."""
    return dataclasses.asdict(config)


def save_config(config: TrainConfig, workdir: str | os.PathLike[str]) -> Path:
    """Write the resolved configuration to WORKDIR/config.json, whole or not at all, and return its path."""
    return write_whole(Path(workdir) / CONFIG_FILE, json.dumps(to_dict(config), indent=2) + "\n")


def load_saved(workdir: str | os.PathLike[str]) -> TrainConfig:
    """Load the configuration that a run in `workdir` was started with.

    Raises `UserError` where the folder holds none, or a broken one.
    """
    path = Path(workdir) / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path} is not there: give the --workdir of a run that was started")
    try:
        return from_dict(read_config_file(str(path)))
    except UserError as error:
        raise UserError(f"{path} cannot be used, restore it or start afresh in another --workdir: {error}") from None
