"""Trains the same model on the same tokens with several methods, and compares them in a table and a picture.

    python -m noloco_jax.compare --config=configs/c4_tiny.py --methods=ddp,diloco,noloco,local --seeds=3 --workdir=DIR

The configuration is noloco's. ddp and local take it as it is; diloco has the paper's settings beside it: outer.lr 0.7,
outer.momentum 0.3 and twice noloco's outer.sync_every. `--set=diloco:outer.sync_every=50` sets a field of one method,
over all else, and `--vary=outer.sync_every=25,50,100` trains every method that the field matters to with each value.

Runs go one after another, each in DIR/METHOD[-FIELD=VALUE]-seedK, a workdir of `python -m noloco_jax.train`. The same
command again goes on where it was stopped; with more methods, seeds or values it adds them. What is finished stands in
DIR/comparison.md, .csv and .png after every run. Once a run is finished, its checkpoints are no longer needed.

Replicas drift apart between outer steps, and diloco's are equal right after them. With eval_every an odd multiple of
outer.sync_every, noloco is always evaluated right after an outer step and diloco every other time half-way.
"""

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from noloco_jax.cluster.stop import INTERRUPTED, RESTART
from noloco_jax.compare import report
from noloco_jax.compare.figures import is_complete, make_rows, read_evaluations
from noloco_jax.compare.picture import draw
from noloco_jax.compare.plan import Run, check_folder, make_plan, parse_methods, parse_settings, parse_vary
from noloco_jax.config.flags import make_parser, split_overrides
from noloco_jax.data import check_data
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.run.console import make_console
from noloco_jax.run.metrics import METRICS_FILE, read_metrics

LOG_FILE = "log.txt"
_FAILED = 1
_CLEAR = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is not finished yet; returns the exit status, 1 where a run broke off."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides, own = split_overrides(arguments)
    flags = _parser().parse_args(own)
    methods = parse_methods(flags.methods)
    vary = parse_vary(flags.vary) if flags.vary else None
    runs = make_plan(flags.config, overrides, methods, flags.seeds, vary, parse_settings(flags.set, methods))
    check_folder(flags.workdir, runs)
    for data, replicas, vocabulary in {(r.config.data, r.config.num_replicas, r.config.model.vocab_size) for r in runs}:
        check_data(data, num_replicas=replicas, vocab_size=vocabulary)

    jax.config.update("jax_platforms", "cpu")  # accelerators are the runs'
    console = make_console()
    comparison = Comparison(
        flags.config,
        flags.workdir,
        runs,
        vary.field if vary else None,
        shlex.join(["python", "-m", "noloco_jax.compare", *arguments]),
        console,
    )
    if flags.dry_run:
        comparison.list_runs()
        return 0
    return comparison.run()


def _parser():
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.compare")
    parser.add_argument("--config", required=True, metavar="FILE[:ARGUMENT]", help="noloco's; --config.FIELD=VALUE too")
    parser.add_argument("--methods", default="ddp,diloco,noloco,local", help="comma-separated (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, metavar="K", help="seeds a method: config.seed and K-1 more")
    parser.add_argument("--workdir", required=True, type=Path, metavar="DIR", help="where runs and results go")
    parser.add_argument("--vary", metavar="FIELD=A,B,C", help="a field to train with each of several values")
    parser.add_argument("--set", action="append", default=[], metavar="METHOD:FIELD=VALUE", help="may be repeated")
    parser.add_argument("--dry_run", action="store_true", help="check everything, list the runs and stop")
    return parser


class Comparison:
    """The runs of a comparison, trained one after another in processes of their own."""

    def __init__(
        self, config_file: str, workdir: Path, runs: Sequence[Run], vary: str | None, command: str, console: Console
    ):
        self._config_file, self._workdir, self._runs = config_file, workdir, runs
        self._vary, self._command, self._console = vary, command, console
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped: int | None = None

    def list_runs(self) -> None:
        """Prints the command of each run, and whether it is finished."""
        for run in self._runs:
            state = "finished" if is_complete(run, self._workdir) else "to do"
            self._console.print(f"{run.name} ({state})", style="bold")
            self._console.print("    " + shlex.join(["python", *self._arguments(run)]))

    def run(self) -> int:
        """Trains all that is not finished. SIGTERM and Ctrl-C stop the present run with everything saved."""
        former = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        failed = []
        try:
            for number, run in enumerate(self._runs, start=1):
                where = f"[{number}/{len(self._runs)}] {run.name}"
                done = is_complete(run, self._workdir)
                if not done:
                    status = self._train(run, where)
                    if self._stopped is not None:
                        self._write()
                        self._console.print("stopped: the same command goes on")
                        return INTERRUPTED if self._stopped == signal.SIGINT else RESTART
                    done = is_complete(run, self._workdir)
                    if not done:
                        failed.append(run.name)
                        self._console.print(f"{where}: broke off with {self._failure(run, status)}", style="bold red")
                        continue
                    self._write()
                last = read_evaluations(self._workdir / run.name)[-1]
                self._console.print(
                    f"{where}: perplexity {_number(last['perplexity'])}, merged "
                    f"{_number(last['perplexity_merged'])}, spread {_number(last['replica_spread'], '.2e')}"
                )
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        self._write(show=True)
        return _FAILED if failed else 0

    def _arguments(self, run: Run) -> list[str]:
        workdir = self._workdir / run.name
        return ["-m", "noloco_jax.train", f"--config={self._config_file}", f"--workdir={workdir}", *run.overrides]

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _train(self, run: Run, where: str) -> int:
        """Runs the trainer to its end, saying how far it is, and returns its exit status."""
        folder = self._workdir / run.name
        folder.mkdir(parents=True, exist_ok=True)
        told, started = 0, time.monotonic()
        with (folder / LOG_FILE).open("a") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the trainer inherits it, and may outlive us
            except BlockingIOError:
                raise UserError(f"{folder} is being trained by another process: wait for it, or end it") from None
            # In a session of its own, so that Ctrl-C comes to it once, through this process.
            self._child = subprocess.Popen(
                [sys.executable, *self._arguments(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if self._stopped is not None:
                    self._child.send_signal(self._stopped)
                while True:
                    try:
                        return self._child.wait(timeout=1)
                    except subprocess.TimeoutExpired:
                        told = self._tell(run, where, told, time.monotonic() - started)
            finally:
                if self._child.poll() is None:
                    self._child.kill()
                    self._child.wait()
                self._child = None
                if self._console.is_terminal:
                    self._console.control(_CLEAR)

    def _tell(self, run: Run, where: str, told: int, seconds: float) -> int:
        """Prints how far a run is: on a terminal a line that is overwritten, elsewhere one an evaluation."""
        try:
            lines = read_metrics(self._workdir / run.name)
        except UserError:  # none yet
            return told
        training = [line for line in lines if line["kind"] == "train"]
        evaluations = [line for line in lines if line["kind"] == "eval"]
        text = ""
        if evaluations:
            text = f"  perplexity {_number(evaluations[-1]['perplexity'])} at step {evaluations[-1]['step']}"
        if self._console.is_terminal and training:
            now = training[-1]
            rate = f"{now['tokens_per_second'] or 0:.0f} tokens/s"
            self._console.control(_CLEAR)
            where += f"  step {now['step']}/{run.config.num_steps}  loss {_number(now['loss'])}{text}  {rate}"
            self._console.print(where[: self._console.width - 1], end="")
        elif len(evaluations) > told:
            self._console.print(f"{where}:{text[1:]} of {run.config.num_steps}, {seconds:.0f} s")
        return len(evaluations)

    def _failure(self, run: Run, status: int) -> str:
        """What a run that ended early said; an error if it never began, for then the others will not either."""
        log = self._workdir / run.name / LOG_FILE
        last = (log.read_text(errors="replace").strip().splitlines() or ["no word"])[-1].removeprefix("error: ")
        if not (self._workdir / run.name / METRICS_FILE).exists():
            raise UserError(f"{run.name} did not start (status {status}): {last} ({log})")
        return f"status {status}: {last} ({log})"

    def _write(self, show: bool = False) -> None:
        """Writes table and picture of what is finished, and shows them."""
        rows = make_rows(self._runs, self._workdir)
        missing = [run for run in self._runs if not is_complete(run, self._workdir)]
        picture = self._workdir / "comparison.png"
        if rows:
            draw(rows, self._vary, picture)
        page = report.markdown(rows, self._vary, self._command, picture.name if rows else None, missing)
        _replace(self._workdir / "comparison.md", page)
        _replace(self._workdir / "comparison.csv", report.table_csv(rows, self._vary))
        if show:
            self._console.print("\n" + "\n".join(line for line in page.splitlines() if line.startswith("|")))
            self._console.print(f"\ncorrelation of replica spread and learning rate ({report.PAPER}):")
            for line in report.correlations(rows, self._vary):
                self._console.print(f"  {line}")
            self._console.print(f"\nwritten: {self._workdir / 'comparison.md'}, .csv and .png")


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _number(value: float | None, form: str = ".2f") -> str:
    """None is what was not finite."""
    return "inf" if value is None else format(value, form)


if __name__ == "__main__":
    main_with_errors(main)
