"""Options of the command line: one for each field of a problem, and what several commands ask for alike."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from copyhead.induction import Induction
from copyhead.problem import PRESETS, Problem, ProblemError

if TYPE_CHECKING:
    from copyhead.study.engine import Engine

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
# Where and how cells of studies run.
Memory = Annotated[
    str | None, typer.Option(help="for all workers together: 4GB, 800MB (default: half of the machine's)", metavar="SIZE")
]
Workers = Annotated[int | None, typer.Option(help="worker processes or jobs (default: one for each core)", min=1)]
Scheduler = Annotated[str | None, typer.Option(help="address of a running Dask scheduler, tcp://HOST:PORT")]
Slurm = Annotated[Path | None, typer.Option(help="TOML file with the fields of dask_jobqueue.SLURMCluster")]
# The task of Problem.
COPY = "copy"
# Bytes of a unit.
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def with_problem(
    command: Callable[..., None], without: tuple[str, ...] = (), tasks: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Gives a command one option for each field of Problem not in `without`; calls it with the Problem as first argument.

    Values are passed on as text, so that a wrong one is answered by Problem: field, value, allowed range.

    Args:
        tasks: tasks of `Induction` that the command also takes, with an option for each field that only these have.
    """
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = []
    offered = {name: field for name, field in Problem.model_fields.items() if name not in without}
    if tasks:
        offered |= {name: field for name, field in Induction.model_fields.items() if name not in Problem.model_fields}
    for name, field in offered.items():
        kind = next(t for t in (*get_args(field.annotation), field.annotation) if t is not type(None))
        flag = "--at" if name == "sequences" else "--" + name.replace("_", "-")
        if name == "task":
            help_text = f"copy (default), or of two layers: {', '.join(tasks)}"
            annotation = Annotated[str | None, typer.Option(flag, help=help_text, metavar="TASK", rich_help_panel="Problem")]
            options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
            continue
        default = "" if field.is_required() else f" (default {field.default})" if field.default is not None else ""
        switch = field.annotation is bool
        option = typer.Option(
            f"{flag}/--no-{name}" if switch else flag,
            help=f"{field.description}{default}",
            metavar=None
            if switch
            else getattr(kind, "__name__", "softmax|linear").upper()
            if not isinstance(kind, str)
            else "KIND",
            rich_help_panel="Problem",
        )
        annotation = Annotated[bool | None if switch else str | None, option]
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    preset = Annotated[str | None, typer.Option(help=f"start from {', '.join(PRESETS)}", rich_help_panel="Problem")]
    config = Annotated[
        Path | None, typer.Option(help="start from the fields in a .json or .toml file", rich_help_panel="Problem")
    ]
    options.append(inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=preset))
    options.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config))

    def wrapped(**given: Any) -> None:
        fields = {name: given.pop(name) for name in offered}
        fields = {name: value for name, value in fields.items() if value is not None}
        preset, config, task = given.pop("preset"), given.pop("config"), fields.pop("task", COPY)
        if task in tasks:
            command(_induction(preset, config, {**fields, "task": task}), **given)
            return
        if task != COPY:
            raise ProblemError(f"task = {task!r}: must be one of {', '.join((COPY, *tasks))}")
        for name in fields:
            if name not in Problem.model_fields:
                raise ProblemError(f"{name} = {fields[name]}: needs --task {' or '.join(tasks)}")
        command(_problem(preset, config, fields), **given)

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    wrapped.__signature__ = inspect.Signature([*options, *own])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in (*options, *own)}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def _induction(preset: str | None, config: Path | None, fields: dict[str, Any]) -> Induction:
    if config is not None:
        raise ProblemError(f"config = {str(config)!r}: must not be given with task = {fields['task']!r}")
    return Induction.preset(preset or "induction", **fields)


def _problem(preset: str | None, config: Path | None, fields: dict[str, Any]) -> Problem:
    if config is not None:
        if preset is not None:
            raise ProblemError(f"preset = {preset!r}: must not be given together with --config")
        try:
            return Problem.from_file(config).replace(**fields)
        except OSError as error:
            raise ProblemError(f"config = {str(config)!r}: cannot be read ({error.strerror})") from None
    named = fields.get("tokens", "")
    if "vocab" not in fields and named.partition(":")[0] in ("counts", "markov", "corpus"):
        from copyhead.model.tokens import vocab_of

        found = vocab_of(named)
        if found is None:
            raise ProblemError(f"vocab: must be given with tokens = {named!r}; the rarest units beyond it become one token")
        fields["vocab"] = found
    return Problem.preset(preset or "paper", **fields)


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Positive numbers, separated by commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < value < float("inf") for value in found):
        raise ProblemError(f"{name} = {text!r}: must be positive numbers separated by commas")
    return found


def bytes_of(memory: str | None) -> float | None:
    """Bytes of a size such as 800MB; None if none is given.

    Raises:
        ProblemError: if it is no size.
    """
    if memory is None:
        return None
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]?)i?B?\s*", memory, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise ProblemError(f"memory = {memory!r}: must be a size such as 800MB or 4GB")
    return float(match[1]) * UNITS[match[2].upper()]


def engine_of(workers: int | None, scheduler: str | None, slurm: Path | None) -> Engine:
    """Where cells run.

    Raises:
        ProblemError: if both a scheduler and SLURM are given.
    """
    from copyhead.study.engine import Engine

    if scheduler is not None and slurm is not None:
        raise ProblemError(f"slurm = {str(slurm)!r}: must not be given together with --scheduler")
    return Engine(scheduler=scheduler, slurm=slurm, **given(workers=workers))


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; for the others the defaults of the library hold."""
    return {name: value for name, value in options.items() if value is not None}


def new_folder(out: Path | None) -> None:
    """Makes the folder for results before they are computed.

    Raises:
        ProblemError: if there is something in it. OSError: if it cannot be made.
    """
    if out is None:
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ProblemError(f"out = {str(out)!r}: must be a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)


def new_file(out: Path, force: bool, suffixes: tuple[str, ...]) -> None:
    """Checks the file for a result before it is computed.

    Raises:
        ProblemError: for another suffix, a folder that is not there, or a file that is and is not to be replaced.
    """
    if out.suffix not in suffixes:
        raise ProblemError(f"out = {str(out)!r}: must end in {', '.join(suffixes)}")
    if not out.parent.is_dir():
        raise ProblemError(f"out = {str(out)!r}: its folder must exist")
    if out.exists() and not force:
        raise ProblemError(f"out = {str(out)!r}: exists; give --force to replace it, or another name")


class Progress:
    """A progress bar on stderr; a plain line at the start and at the end where stderr is no terminal."""

    def __init__(self, title: str, total: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.title = title
        self.task = self.bar.add_task(title, total=total)

    def __enter__(self) -> Callable[[float], None]:
        self.bar.start()
        if self.bar.disable:
            self.console.print(f"{self.title} ...", highlight=False)
        return lambda done: self.bar.advance(self.task, done)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
