"""The command line: files, their arguments, and a flag for every field."""

import json

import pytest

from noloco_jax.config import (
    TrainConfig,
    flatten,
    from_dict,
    known_fields,
    load_config,
    make_parser,
    parse_args,
    save_config,
    split_overrides,
    to_dict,
)
from noloco_jax.config.build import changed
from noloco_jax.config.config_file import default_config, read_config_file
from noloco_jax.errors import Mistakes, UserError
from noloco_jax.optim.methods import METHODS

FILE = """
from ml_collections import ConfigDict

def get_config(method="noloco"):
    config = ConfigDict({"method": method, "num_replicas": 8, "inner": {"lr": 1e-3, "clip_norm": 2}})
    config.inner.min_lr = config.inner.get_oneway_ref("lr") / 10
    config.data = ConfigDict({"batch_size": 64 // config.get_oneway_ref("num_replicas")})
    return config
"""
ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
HIGHER_ROPE = [f"--config.model.rope_scaling.{name}={number}" for number, name in enumerate(ROPE[1:], start=1)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(FILE)
    return str(path)


def loaded(file: str, *overrides: str) -> TrainConfig:
    return load_config(file, overrides)


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as raised:
        parse_args(arguments, "A tool.", lambda parser: parser.add_argument("--workdir"))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_file_is_completed_by_the_defaults(file):
    config = loaded(file)
    assert (config.num_replicas, config.inner.clip_norm) == (8, 2.0)
    assert config.outer == TrainConfig().outer


def test_a_file_takes_an_argument_after_a_colon(file):
    assert loaded(file + ":diloco").method == "diloco"


def test_flags_win_over_the_file_and_references_between_fields_follow_them(file):
    config = loaded(file, "--config.inner.lr=0.5", "--config.num_replicas=16")
    assert (config.num_replicas, config.inner.min_lr, config.data.batch_size) == (16, 0.05, 4)


def test_every_field_can_be_set_whether_the_file_lists_it_or_not(file):
    texts = {int: "7", float: "0.25", bool: "true", str: "text"}
    values = {int: 7, float: 0.25, bool: True, str: "text"}
    for path, field in known_fields().items():
        word = field.allowed.choices[-1:]
        text, value = (word * 2) or (texts[field.type], values[field.type])
        changes = {path: field.parsed(text)}
        for given in (read_config_file(file), default_config()):
            assert flatten(changed(given, changes, Mistakes()).to_dict())[path] == value, path


def test_every_field_that_may_be_none_can_be_made_none(tmp_path):
    rope = dict.fromkeys(ROPE[:2], 1.0) | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    saved = save_config(from_dict({"outer": {"consensus": 0.5}, "model": {"rope_scaling": rope}}), tmp_path)
    optional = [path for path, field in known_fields().items() if field.optional]
    assert "outer.consensus" in optional
    for path in optional:
        without = flatten(to_dict(loaded(str(saved), f"--config.{path}=None")))[path]
        own = METHODS["noloco"].defaults.get(path.removeprefix("outer.")) if path.startswith("outer.") else None
        assert without == own, path
    assert loaded(str(saved), "--config.model.rope_scaling=None").model.rope_scaling is None
    assert loaded(str(saved), "--config.sample_prompt=None").sample_prompt == "None"


def test_boolean_flags_may_have_no_value_and_the_last_of_two_flags_counts(file):
    assert loaded(file, "--config.model.tie_embeddings").model.tie_embeddings
    assert not loaded(file, "--config.data.add_bos=True", "--config.data.add_bos=false").data.add_bos


def test_a_value_may_follow_its_flag_and_look_like_a_flag():
    overrides, rest = split_overrides(["--workdir", "a", "--config.sample_prompt", "--x y", "-config.mesh.replica=-1"])
    assert overrides == ["--config.sample_prompt=--x y", "-config.mesh.replica=-1"]
    assert rest == ["--workdir", "a"]


def test_a_run_can_be_repeated_from_its_saved_configuration(file, tmp_path):
    config, _ = parse_args(["--config", file, "--config.inner.lr=0.5", "--config.num_replicas=2"], "A tool.")
    record = save_config(config, tmp_path / "run")
    assert parse_args([f"--config={record}"], "A tool.")[0] == config
    changed = loaded(str(record), "--config.outer.sync_every=3", "--config.model.rope_scaling.factor=2", *HIGHER_ROPE)
    assert (changed.inner, changed.outer.sync_every) == (config.inner, 3)
    assert changed.model.rope_scaling is not None and changed.model.rope_scaling.factor == 2.0


def test_a_wrong_argument_is_refused_by_name(file):
    for argument, named in {
        "--config.outer.sync_evry=3": "did you mean 'outer.sync_every'",
        "--config.num_steps.x=3": "unknown config field 'num_steps.x'",
        "--config.workdir=x": "unknown config field 'workdir': the folder of a run is a flag, --workdir=DIR",
        "--config.num_steps=1.5": "--config.num_steps=1.5 is not allowed: give a whole number",
        "--config.inner.lr=fast": "--config.inner.lr=fast is not allowed: give a number above 0",
        "--config.outer.consensus=none": "--config.outer.consensus=none is not allowed: give a number of",
        "--config.num_steps=None": "--config.num_steps=None is not allowed: give a whole number",
        "--config.outer.nesterov=maybe": "--config.outer.nesterov=maybe is not allowed: give True or False",
        "--config.num_replicas=0": "num_replicas=0 is not allowed: give a whole number of",  # the file divides by it
        "--config.method=nolocco": "method='nolocco' is not allowed: give one of noloco,",
        "--config.num_steps": "--config.num_steps has no value",
        "--config.outer={}": "--config.outer is a group",
        "--config.outer=None": "--config.outer is a group",
        "--config.model.rope_scaling.factor=8": "model.rope_scaling.low_freq_factor is missing",
        "--config.model.num_heads=3": "model.num_heads=3",
        "--workdr=x": "unknown argument '--workdr=x': did you mean '--workdir'",
        "--work=x": "unknown argument '--work=x'",
        "--num_steps=100": "unknown argument '--num_steps=100': did you mean '--config.num_steps=100'?",
        "--outer.sync_every=3": "did you mean '--config.outer.sync_every=3'?",
        "--steps=20": "unknown argument '--steps=20': did you mean '--config.num_steps=20'?",
        "--seq_len=64": "did you mean '--config.data.sequence_length=64'?",
        "--lr=0.1": "did you mean '--config.inner.lr=0.1' or '--config.outer.lr=0.1'?",
        "--config.outer.wire=int3": "give one of float32, bfloat16, int8",
        "stray": "unknown argument 'stray'",
        "--workdir": "--workdir",
    }.items():
        assert named in refusal("--config", file, argument), argument


def test_all_mistakes_of_a_command_line_are_told_at_once(file):
    """A field that is refused keeps the file's value, and the other checks go on."""
    unknown = ["--config.num_stepz", "20", "--config.outer.sync_evry=3"]
    refused = ["--config.inner.lr=fast", "--config.inner.min_lr=1", "--config.num_microbatches=3", "--steps=3"]
    with pytest.raises(UserError) as raised:
        parse_args(["--config", file, *unknown, *refused[:-1]], "A tool.")
    found = [*raised.value.args]
    parts = ["num_stepz", "sync_evry", "inner.lr=fast", "inner.min_lr=1.0 is above inner.lr=0.001", "batch_size=8"]
    assert [part in message for part, message in zip(parts, found, strict=True)] == [True] * 5, found
    with pytest.raises(UserError) as raised:
        parse_args(["--config", file, *unknown, *refused], "A tool.")
    assert ["num_stepz" in raised.value.args[0], "--steps=3" in raised.value.args[-1]] == [True, True]


def test_a_config_file_that_fails_is_named(tmp_path):
    path = tmp_path / "broken.py"
    assert "--config" in refusal()
    assert "broken.py does not exist" in refusal(f"--config={path}")
    for text, named in {
        "def get_config():\n    return {}['lr']\n": "line 2: KeyError",
        "def get_config():\n    raise ValueError('one\\n\\n  two')\n": "line 2: ValueError: one two",
        f"{UNPRINTABLE}def get_config():\n    raise Unprintable\n": "line 4: Unprintable",
        "def get_config(:\n": "SyntaxError",
        "": "get_config",
        "def get_config():\n    return 3\n": "a int",
        "def get_config():\n    return {'num_stepz': 3}\n": "'num_stepz': did you mean 'num_steps'",
        "def get_config():\n    return {'num_steps': 'a'}\n": "num_steps='a' is not allowed",
        "def get_config():\n    return {'outer': 3}\n": "outer: expected a group",
    }.items():
        path.write_text(text)
        message = refusal(f"--config={path}")
        assert named in message, text
    assert "outer: expected a group of fields, got 3" in refusal(f"--config={path}", "--config.outer.lr=1")
    assert "takes no argument, got 'diloco'" in refusal(f"--config={path}:diloco")


def test_a_reference_that_cannot_be_evaluated_is_refused(tmp_path):
    path = tmp_path / "a.py"
    divided = "    config.seed = 1\n    config.eval_every = 64 // config.get_oneway_ref('seed')\n    return"
    path.write_text(FILE.replace("    return", divided))
    for more in ([], ["--config.sample_prompt=a"]):  # a field that the file does not list is added beside it
        message = refusal(f"--config={path}", "--config.seed=0", *more)
        assert "config field eval_every: what follows other fields has no value: ZeroDivisionError" in message


def test_a_json_file_that_fails_is_named(tmp_path):
    path = tmp_path / "broken.json"
    for text, named in {
        "{": "broken.json: JSONDecodeError",
        "[]": "broken.json: it gives a list",
        '{"num_stepz": 3}': "'num_stepz': did you mean 'num_steps'",
        '{"outer.lr": 3}': "broken.json",
    }.items():
        path.write_text(text)
        assert named in refusal(f"--config={path}"), text
    assert "takes no argument, got 'diloco'" in refusal(f"--config={path}:diloco")
    (tmp_path / "config.toml").write_text(json.dumps({}))
    assert "neither .py nor .json" in refusal(f"--config={tmp_path / 'config.toml'}")


UNPRINTABLE = "class Unprintable(Exception):\n    def __str__(self): raise ValueError\n"
DEFAULTS = "import noloco_jax\n\ndef get_config():\n    config = noloco_jax.default_config()\n"


def test_a_file_that_begins_with_the_defaults_sets_what_differs(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(f"{DEFAULTS}    return config\n")
    assert loaded(str(path)) == TrainConfig()
    path.write_text(
        f"{DEFAULTS}    config.outer.lr = 1\n    config.inner.min_lr = config.inner.get_oneway_ref('lr') / 10\n"
        "    config.data.kind = 'mixture'\n    config.data.mixture.web = dict(kind='text', path='a', weight=2)\n"
        "    return config\n"
    )
    config = loaded(str(path), "--config.inner.lr=0.5", "--config.data.mixture.web.path=b")
    assert (config.outer.lr, config.inner.min_lr) == (1.0, 0.05)
    assert (config.data.mixture["web"].path, config.data.mixture["web"].weight) == ("b", 2.0)


def test_an_unknown_field_in_a_file_of_defaults_is_answered_with_its_line_and_the_right_name(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(f"{DEFAULTS}    config.outer.sync_evry = 3\n    return config\n")
    expected = f"config file {path} line 5: unknown field 'sync_evry': did you mean 'sync_every'?"
    assert refusal(f"--config={path}") == expected


def test_a_required_flag_under_another_name_is_answered_with_its_name(file):
    parser = make_parser("A tool.")
    parser.add_argument("--workdir", required=True)
    with pytest.raises(UserError, match=r"unknown argument '--work_dir=x': did you mean '--workdir'\?"):
        parser.parse_args(["--work_dir=x"])


def test_a_missing_file_is_answered_with_the_nearest_name(file):
    assert "did you mean configs/quickstart.py?" in refusal("--config=quickstart")
    assert f"did you mean {file}?" in refusal("--config=" + file.replace("some", "soem"))


def test_the_sources_of_a_mixture_are_set_added_and_left_out_by_name(tmp_path):
    file = tmp_path / "mixture.py"
    file.write_text(
        "from ml_collections import ConfigDict\n\ndef get_config():\n"
        "    config = ConfigDict({'data': {'kind': 'mixture'}})\n"
        "    config.data.mixture = {'web': {'kind': 'jsonl', 'path': 'c4/en', 'weight': 7}}\n    return config\n"
    )
    added = ["--config.data.mixture.own.kind=jsonl", "--config.data.mixture.own.weight=3"]
    config = loaded(str(file), *added, "--config.data.mixture.web.weight=6")
    assert {name: (source.kind, source.weight) for name, source in config.data.mixture.items()} == {
        "own": ("jsonl", 3.0),
        "web": ("jsonl", 6.0),
    }
    saved = str(save_config(config, tmp_path))
    assert loaded(saved) == config
    assert list(loaded(saved, "--config.data.mixture.own=None").data.mixture) == ["web"]
    assert "--config.data.mixture.NAME.FIELD=VALUE" in refusal(f"--config={file}", "--config.data.mixture=web")
    assert "data.mixture.web.weight=-1.0" in refusal(f"--config={file}", "--config.data.mixture.web.weight=-1")
