"""The command line: parse, call, print."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from copyhead import __version__, study_commands
from copyhead.induction import Induction
from copyhead.options import (
    AsJson,
    Memory,
    Progress,
    Scheduler,
    Slurm,
    Workers,
    bytes_of,
    engine_of,
    given,
    new_file,
    new_folder,
    numbers,
    with_problem,
)
from copyhead.problem import Problem, ProblemError

app = typer.Typer(
    name="copyhead",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="How much data does an attention head need before it snaps into a copy head, how sharp is that snap, and does "
    "real training agree?",
)


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
@partial(with_problem, tasks=("recall",))
def predict(
    problem: Problem | Induction,
    finite_chi: Annotated[
        bool, typer.Option("--finite-chi", help="also P*, fluctuations, barrier and lifetimes at this chi (some seconds)")
    ] = False,
    all_logits: Annotated[
        bool,
        typer.Option(
            "--all-logits",
            help="also the minima over all H L^2 logits at --at, beside the symmetric ones, or where no symmetry is known "
            "(seconds to minutes)",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Order and place of every transition, from the exact minima of the action.

    What is not given is taken from the preset `paper` (L = 32, V = 4, sigma^2 = 0.9). Examples:

    - `copyhead predict`

    - `copyhead predict --length 64 --vocab 10 --noise 1 --attention linear`

    - `copyhead predict --preset paper --at 300 --json`

    - `copyhead predict --finite-chi --chi 15 --at 310`

    - `copyhead predict --length 16 --causal --tokens markov:chain.csv --at 200 --all-logits`

    - `copyhead predict --task recall --length 16 --vocab 16 --noise 0.3 --at 2000` (two layers, preset `induction`)
    """
    if isinstance(problem, Induction):
        from copyhead.induction_prediction import predict_induction

        for name, asked in (("finite_chi", finite_chi), ("all_logits", all_logits)):
            if asked:
                raise ProblemError(
                    f"{name} = True: must not be given with task = {problem.task!r}; it is known for the copy task"
                )
        predicted = predict_induction(problem)
        typer.echo(json.dumps(predicted.to_dict()) if as_json else repr(predicted))
        return
    from copyhead.prediction import predict as solve

    found = solve(problem, finite_chi, all_logits)
    typer.echo(json.dumps(found.to_dict()) if as_json else repr(found))


@app.command()
@partial(with_problem, without=("target",))
def sample(
    problem: Problem,
    sampler: Annotated[str | None, typer.Option(help="hmc (default), mala, sgld, nuts or blackjax-hmc")] = None,
    target: Annotated[str | None, typer.Option(help="joint or collapsed (default), for nuts and blackjax-hmc")] = None,
    chains: Annotated[int | None, typer.Option(help="chains from each of the two starts (default 4)")] = None,
    warmup: Annotated[int | None, typer.Option(help="before the first draw (default 500)")] = None,
    draws: Annotated[int | None, typer.Option(help="draws of a chain (default 1000)")] = None,
    thin: Annotated[int | None, typer.Option(help="steps from one draw to the next (default 1; sgld and mala 50)")] = None,
    seed: Annotated[int | None, typer.Option(help="of the data set and of all random draws (default 0)")] = None,
    repeats: Annotated[int | None, typer.Option(help="independent ladders for --free-energy, even (default 4)")] = None,
    population: Annotated[bool, typer.Option("--population", help="expected moments in place of a data set")] = False,
    free_energy: Annotated[
        bool, typer.Option("--free-energy", help="also F(aG) from one branch to the other, branch weights, and P*")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="file for the draws, ArviZ data as netCDF: .nc")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it exists")] = False,
    as_json: AsJson = False,
) -> None:
    """Samples the posterior at one P from both starts, and says whether the chains mixed, are metastable, or did not converge.

    Examples:

    - `copyhead sample --at 250`

    - `copyhead sample --at 300 --free-energy --population`

    - `copyhead sample --at 250 --sampler nuts --target joint --draws 500 --out draws.nc`
    """
    from copyhead.study.sampling import SamplingSettings, check, save
    from copyhead.study.sampling import sample as solve

    if out is not None:
        new_file(out, force, (".nc",))
    chosen = given(
        sampler=sampler, target=target, chains=chains, warmup=warmup, draws=draws, thin=thin, seed=seed, repeats=repeats
    )
    settings = SamplingSettings(**chosen, population=population, free_energy=free_energy)
    check(problem, settings)
    with Progress("sampling", 3.0 if free_energy else 2.0) as advance:
        found = solve(problem, settings, lambda stage: advance(0.0 if stage == "sampling" else 1.0))
    if out is not None:
        save(found, out)
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))


@app.command()
@partial(with_problem, without=("attention", "sequences", "chi", "content", "head_dimension"))
def fluctuations(
    problem: Problem,
    chi: Annotated[str, typer.Option(help="values at which means and deviations are compared")] = "5,15,50,150",
    approach: Annotated[str, typer.Option(help="values at which precursors are sampled")] = "50,200,1000",
    out: Annotated[Path | None, typer.Option(help="folder for figures and numbers, new or empty")] = None,
    as_json: AsJson = False,
) -> None:
    """Theory at finite chi against sampling, both attentions: means, variances, and precursors on the way to each transition.

    On expected moments, so that only the expansion in 1/chi is tested. Takes some minutes. Examples:

    - `copyhead fluctuations --out fluctuations`

    - `copyhead fluctuations --chi 50 --approach 50 --json`
    """
    from copyhead.study import finite_chi

    chis, ways = (numbers(name, text) for name, text in (("chi", chi), ("approach", approach)))
    new_folder(out)
    with Progress("sampling", finite_chi.stages(chis, ways)) as advance:
        found = finite_chi.study(problem, chis, ways, report=lambda stage: advance(1))
    if out is not None:
        from copyhead.report.sampling_figures import approaches, comparison
        from copyhead.report.style import save

        (out / "fluctuations.json").write_text(json.dumps(finite_chi.records(found)), encoding="utf-8")
        save(comparison(found.compared), out / "comparison.png")
        save(approaches(found.approached), out / "precursors.png")
    typer.echo(json.dumps(finite_chi.records(found)) if as_json else finite_chi.text(found))


@app.command()
@with_problem
def train_curve(
    problem: Problem,
    rate: Annotated[
        str | None, typer.Option(help="eta of gradient descent (default: from the curvature of E)", metavar="FLOAT")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="standard deviation of the entries of G and W at the start (default 0.01)", metavar="FLOAT"),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="number of data sets and starts (default 8)", metavar="INT")] = None,
    steps: Annotated[
        str | None, typer.Option(help="steps of gradient descent (default: 2.5 times those to the jump)", metavar="INT")
    ] = None,
    grid: Annotated[str | None, typer.Option(help="P of the jump times: P1,P2,... (default: around the folds)")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for figure and numbers, new or empty")] = None,
    as_json: AsJson = False,
) -> None:
    """Training time: plateau and jump of the gradient flow against P, beside gradient descent and Adam.

    --at is the P of the curves. From small weights above the upper fold, from a copy head below the lower one. Examples:

    - `copyhead train-curve --out curve`

    - `copyhead train-curve --at 360 --seeds 16 --scale 0.1`

    - `copyhead train-curve --attention linear --grid 200,400,800 --json`
    """
    from copyhead.study.training import check, stages, study
    from copyhead.study.training_record import TrainingSettings

    chosen: dict[str, Any] = given(rate=rate, scale=scale, seeds=seeds, steps=steps)
    if grid is not None:
        chosen["grid"] = numbers("grid", grid)
    settings = TrainingSettings(**chosen)
    check(problem, settings)
    new_folder(out)
    with Progress("training", stages(problem, settings)) as advance:
        found = study(problem, settings, lambda stage: advance(1))
    if out is not None:
        from copyhead.report.style import save
        from copyhead.report.training_figures import training_times

        (out / "training.json").write_text(json.dumps(found.to_dict()), encoding="utf-8")
        save(training_times(found), out / "training.png", out / "training.svg")
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))


@app.command()
@with_problem
def diagram(
    problem: Problem,
    x: Annotated[
        str, typer.Option("--x", help="FIELD=LOW:HIGH:COUNT (log-spaced) or FIELD=V1,V2,...")
    ] = "sequences=50:2000:60",
    y: Annotated[str, typer.Option("--y", help="likewise")] = "length=8:128:17",
    out: Annotated[Path, typer.Option(help="figure to write: .png, .svg or .pdf")] = Path("diagram.png"),
    force: Annotated[bool, typer.Option("--force", help="replace the figure if it exists")] = False,
    as_json: AsJson = False,
) -> None:
    """A phase diagram of the theory in any two parameters.

    With `sequences` (P) on an axis it shows the loss of the global minimum with the boundaries; without, the place of the
    transition with the verdicts. With --json the numbers are printed and no figure is written. Examples:

    - `copyhead diagram --out planes.png`

    - `copyhead diagram --x length=8:128:30 --y vocab=2:64:20 --out boundary.svg`

    - `copyhead diagram --attention linear --x sequences=20:3000:80 --y token-scale=0.01,0.1,1 --json`
    """
    from copyhead.report.style import FIGURE_SUFFIXES, save
    from copyhead.report.theory_figures import phase_diagram
    from copyhead.study.diagram import check, cost, parse_axis
    from copyhead.study.diagram import diagram as solve

    if not as_json:
        new_file(out, force, FIGURE_SUFFIXES)
    axes = parse_axis("x", x), parse_axis("y", y)
    check(problem, *axes)
    with Progress("phase diagram", cost(*axes)) as advance:
        found = solve(problem, *axes, step=lambda: advance(1))
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    save(phase_diagram(found), out)
    typer.echo(f"wrote {out}")


@app.command()
@partial(with_problem, without=("attention", "sequences"))
def reproduce(
    problem: Problem,
    out: Annotated[Path, typer.Option(help="folder for results; a stopped run in it is continued")] = Path("reproduction"),
    quick: Annotated[bool, typer.Option("--quick", help="fewer data sets, points and steps: a check, not a result")] = False,
    grid: Annotated[str | None, typer.Option(help="P of the training runs: ascending integers, P1,P2,...")] = None,
    seeds: Annotated[str | None, typer.Option(help="number of data sets (default 8)", metavar="INT")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="which network is trained: positional (attention reads no tokens), kernel (it does; d_model infinite), "
            "embedded (finite d_model, every weight trained)",
            metavar="positional|kernel|embedded",
        ),
    ] = None,
    width: Annotated[str | None, typer.Option(help="d_model of the embedded network (default 128)", metavar="INT")] = None,
    embedding: Annotated[
        str | None, typer.Option(help="its embeddings at the start (default orthogonal)", metavar="orthogonal|gaussian")
    ] = None,
    positions: Annotated[
        str | None, typer.Option(help="its positional encoding (default learned)", metavar="learned|fixed")
    ] = None,
    embedding_variance: Annotated[
        str | None, typer.Option(help="g_E, how far its embeddings may move (default 0.01)", metavar="FLOAT")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="sequences in the gradient of one step (default: all)", metavar="INT")
    ] = None,
    memory: Memory = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    slurm: Slurm = None,
    as_json: AsJson = False,
) -> None:
    """Theory, Adam and SGLD side by side, for both kinds of attention: tables, figures and report.html.

    Ends with the transitions and the share of grid points that agree. A run that was stopped goes on where it was if the
    same command is given again; an existing folder is never destroyed. Examples:

    - `copyhead reproduce`

    - `copyhead reproduce --quick --out check`

    - `copyhead reproduce --length 64 --vocab 10 --noise 1 --seeds 16 --out larger`

    - `copyhead reproduce --network embedded --width 256 --out embedded`
    """
    from copyhead.model.network import Network
    from copyhead.reproduction import reproduce as run

    chosen = given(seeds=seeds, batch=batch)
    architecture = given(width=width, embedding=embedding, positions=positions, embedding_variance=embedding_variance)
    chosen["network"] = Network(**given(kind=network), **architecture)
    if network != "embedded" and architecture:
        raise ProblemError(f"network = {network or 'positional'!r}: must be embedded with {', '.join(architecture)}")
    if grid is not None:
        chosen["grid"] = tuple(part.strip() for part in grid.split(","))
    engine = engine_of(workers, scheduler, slurm)
    summary = run(problem, out, quick=quick, engine=engine, memory=bytes_of(memory), progress=Progress, **chosen)
    typer.echo(json.dumps(summary.to_dict()) if as_json else str(summary))


@app.command()
def classify(
    table: Annotated[Path, typer.Argument(help="CSV file with a header, one row for each run", metavar="TABLE.csv")],
    control: Annotated[str | None, typer.Option(help="column of P, or of another control parameter > 0 (default P)")] = None,
    order: Annotated[str | None, typer.Option(help="column of the order parameter (default cG, aG, order or m)")] = None,
    loss: Annotated[str | None, typer.Option(help="column of the loss (default loss, if there is one)")] = None,
    error: Annotated[
        str | None, typer.Option(help="column of the standard error of the order parameter (default error)")
    ] = None,
    start: Annotated[str | None, typer.Option(help="column that tells two starts apart (default start)")] = None,
    chi: Annotated[str | None, typer.Option(help="column of chi, for its trend (default chi or beta)")] = None,
    size: Annotated[str | None, typer.Option(help="column of the size, for its trend (default L or size)")] = None,
    signed: Annotated[bool, typer.Option("--signed", help="never take the absolute value of the order parameter")] = False,
    as_json: AsJson = False,
) -> None:
    """Order of a transition from a table of anybody's runs, without any theory.

    Answers first-order, second-order, crossover or undetermined, with the place and the evidence. Rows come in any order; those
    of equal P are repeats. Two starts at each P, or several repeats, are what shows a first-order transition. Examples:

    - `copyhead classify runs.csv`

    - `copyhead classify runs.csv --control tokens --order accuracy --json`
    """
    from copyhead.experiment.classify import classify as judge
    from copyhead.experiment.table import read

    columns = given(control=control, order=order, loss=loss, error=error, start=start, chi=chi, size=size)
    found = judge(read(table, **columns), signed=signed)
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))


for command in (study_commands.run, study_commands.status, study_commands.report, study_commands.export):
    app.command()(command)

# Exit status after Ctrl-C; the parser catches the interrupt and returns this.
INTERRUPTED = 130


def _repeat_interrupt(lost: Any) -> None:
    """An interrupt that falls into a callback of the garbage collector (JAX has one) would be printed and forgotten."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


def main() -> None:
    """Entry point: every expected error is one line on stderr; 2 for bad input, 130 for an interrupt."""
    sys.unraisablehook = _repeat_interrupt
    usage_error: Any = typer.BadParameter.__base__  # UsageError of the parser, which typer does not export
    try:
        code = app(standalone_mode=False)
    except usage_error as error:
        if message := error.format_message():  # empty where the help was printed for want of arguments
            print(f"copyhead: {message}", file=sys.stderr)
        sys.exit(2)
    except (ProblemError, OSError) as error:
        print(f"copyhead: {error}", file=sys.stderr)
        sys.exit(2)
    if code == INTERRUPTED:
        studies = sys.argv[1] in ("reproduce", "run")
        kept = "; finished batches are kept, the same command goes on from there" if studies else ""
        print(f"copyhead: interrupted{kept}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # threads of JAX that still compile can crash an orderly exit; nothing is left to be closed
        os._exit(code)
    sys.exit(code)
