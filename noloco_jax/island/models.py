"""Commands on islands' models and runs: merge, report, gather, scatter."""

import argparse

import jax

from noloco_jax.checkpoint.trained_model import tokenizer_of, write_model_folder
from noloco_jax.config import load_saved, overridden
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_perplexity
from noloco_jax.island import folders
from noloco_jax.island.merge import evaluation_of, mean_of, of_folders, of_live_islands
from noloco_jax.island.report import draw_islands, report_table, row_of
from noloco_jax.islands.discovery import read_run
from noloco_jax.islands.roster import read_roster
from noloco_jax.metrics.console import by_source, make_console
from noloco_jax.model.huggingface import check_has_format, check_new_folder


def merge(flags: argparse.Namespace) -> int:
    """Write the mean of the islands' weights, and print whose are in it."""
    if (flags.roster is None) == (flags.workdirs is None):
        raise UserError("give --roster=FILE of islands that train, or --workdirs DIR DIR ... of those that ended")
    if not all(override.startswith("--config.data.") for override in flags.overrides):
        raise UserError("merge takes no fields but --config.data.NAME=VALUE: the islands say what they train")
    if not 0 < flags.seconds <= 86400:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 86400")
    check_new_folder(flags.out)
    if not flags.evaluate:
        jax.config.update("jax_platforms", "cpu")  # accelerators may be a training's
    if flags.roster is None:
        source = of_folders(flags.workdirs)
    else:
        source = of_live_islands(read_run(flags.roster), flags.keys, min(flags.seconds, 10.0), flags.seconds)
    config = overridden(source.config, flags.overrides)
    check_has_format(config.model)
    is_named = any(override.startswith("--config.data.tokenizer") for override in flags.overrides)
    tokenizer = tokenizer_of(config.data, None if is_named or flags.workdirs is None else flags.workdirs[0])
    if tokenizer is not None:
        source.check_tokenizer(tokenizer)
    merged = mean_of(source, print, flags.at_least)
    print(*write_model_folder(flags.out, merged.params, config, tokenizer, str(merged)), sep="\n")
    if flags.evaluate:
        values = evaluation_of(config, merged.params, tokenizer)
        print(f"merged model: validation perplexity {format_perplexity(values['perplexity'])}{by_source(values)}")
    return 0


def report(flags: argparse.Namespace) -> int:
    """Print a table of the islands and draw their history."""
    rows = [row_of(workdir) for workdir in flags.workdirs]
    make_console().print(report_table(rows))
    print(f"picture: {draw_islands([row.history for row in rows], flags.out)}")
    return 0


def gather(flags: argparse.Namespace) -> int:
    """Join islands that have ended into a run of one program."""
    jax.config.update("jax_platforms", "cpu")
    folders.gather(flags.workdirs, flags.out, print)
    return 0


def scatter(flags: argparse.Namespace) -> int:
    """Split a run of one program into islands."""
    jax.config.update("jax_platforms", "cpu")
    config = overridden(load_saved(flags.workdir), flags.overrides)
    folders.scatter(flags.workdir, config, read_roster(flags.roster), flags.out, print)
    return 0
