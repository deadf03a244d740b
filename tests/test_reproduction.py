"""One small reproduction from end to end: killed, continued, and looked at."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import xarray as xr

from conftest import quickly
from copyhead import reproduction
from copyhead.model.network import Network
from copyhead.problem import Problem
from copyhead.reproduction import reproduce
from copyhead.study.engine import Engine
from copyhead.study.scaling import scaling
from copyhead.study.spec import Reproduction, study
from copyhead.study.study_file import read
from copyhead.study.sweep import results, status
from copyhead.study_report import report
from test_cli import run
from test_study_sweep import command, wait_until, workers

pytestmark = pytest.mark.slow

SMALL = {
    "seeds": 2, "adam_steps": 400, "warmup": 200, "draws": 40, "thin": 5, "points": 6, "sampled": 3,
    "ladders": 1, "ladder_draws": 60, "plane_sizes": 2, "plane_points": 3, "plane_steps": 200, "plane_seeds": 1,
}  # fmt: skip
PROBLEM = Problem.preset("paper", length=20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    with quickly():
        return folder, reproduce(PROBLEM, folder, engine=Engine(2), **SMALL)


@pytest.mark.slow
def test_summary_and_tables(whole):
    folder, summary = whole
    places = {(row["attention"], row["place"].split(" ")[0]) for row in summary.transitions}
    assert {("softmax", "P*"), ("softmax", "upper"), ("softmax", "lower"), ("linear", "P_c")} <= places
    assert {a.method for a in summary.agreements} == {"Adam", "SGLD"}
    assert json.loads((folder / "transitions.json").read_text())[0]["exact"] == summary.transitions[0]["exact"]
    header = (folder / "grid.csv").read_text().splitlines()[0].split(",")
    assert {"population", "exact", "adam", "adam_error", "sgld", "sgld_error", "sgld_limit"} <= set(header)
    json.dumps(summary.to_dict())
    assert "report.html" in str(summary)


@pytest.mark.slow
def test_report_is_self_contained(whole):
    folder, _ = whole
    page = (folder / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert page.count("data:image/png;base64,") == len(list((folder / "figures").glob("*.png"))) == 8
    assert len(list((folder / "figures").glob("*.svg"))) == 8
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page).lower().replace("dominan", "")


@pytest.mark.slow
def test_report_of_its_cells_is_beside_its_own(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    before = (folder / "report.html").read_bytes()
    page = report(folder)
    assert page.name == "cells.html"
    assert (folder / "report.html").read_bytes() == before
    with (folder / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    planned = status(folder).planned
    counted = {method: sum(int(row["n"]) for row in rows if row["method"] == method) for method in planned}
    assert counted == planned


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("kind", "attention"), [("kernel", "softmax"), ("embedded", "linear")])
def test_networks_that_read_tokens_have_the_same_tables_and_figures(tmp_path, monkeypatch, kind, attention):
    """A check that everything runs; the numbers are held by the tests of each part."""
    # the scaling of `whole` has all lengths
    monkeypatch.setattr(reproduction, "scaling", partial(scaling, lengths=(18, 32, 128, 1024)))
    network = Network(kind=kind, width=16)
    small = {**SMALL, "grid": (16, 24, 32, 45), "sampled": 3, "adam_steps": 200, "widths": (16, 32), "attentions": (attention,)}
    problem = Problem(length=6, vocab=2, noise=0.5)
    summary = reproduce(problem, tmp_path / "run", engine=Engine(2), network=network, **small)
    names = {path.stem for path in (tmp_path / "run" / "figures").glob("*.png")}
    expected = {f"order-parameters-{attention}", "loss-maps", "scaling", "chi-shift"}
    assert names == expected | ({"departure"} if kind == "embedded" else set())
    with (tmp_path / "run" / "grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["quantity"] for row in rows} == {"c1", "cG", "cI", "cS", "a1", "aG", "loss"}
    if kind == "embedded":
        with (tmp_path / "run" / "departure.csv").open() as file:
            departed = list(csv.DictReader(file))
        assert {row["width"] for row in departed} == {"16", "32"}
        assert {row["quantity"] for row in departed} == {"c1", "cG", "cI", "cS", "a1", "aG", "loss"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"Network: {kind}" in page
    assert "Attention reads the tokens" in page
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page).lower().replace("dominan", "")
    assert summary.lost == []


def test_it_is_a_study(whole, capsys):
    folder, _ = whole
    assert read(folder / "study.toml") == study(Reproduction(problem=PROBLEM, **SMALL))[0]
    found = status(folder)
    assert found.missing == found.beside == 0
    cells = results(folder)
    assert set(cells.method.values) == {"exact", "adam", "sgld", "jump", "ladder"}
    assert (cells.length.values[cells.method.values == "jump"] == PROBLEM.length).all()
    # nothing is left to do for whoever runs its file
    assert run(capsys, "run", str(folder / "study.toml"), "--out", str(folder))[0] == 0
    assert status(folder) == found


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_killed_run_is_continued_with_the_same_numbers(whole, tmp_path):
    """kill -9 of the whole process group at the start, half way and at the end; the table is that of a run left alone."""
    reference, _ = whole
    folder = tmp_path / "run"
    script = tmp_path / "run.py"
    script.write_text(
        "from copyhead.problem import Problem\n"
        "from copyhead.reproduction import reproduce\n"
        "from copyhead.study.engine import Engine\n"
        "if __name__ == '__main__':\n"
        f"    problem, out, small = Problem.preset('paper', length=20), {str(folder)!r}, {SMALL!r}\n"
        "    reproduce(problem, out, engine=Engine(2), attentions=('linear',), **small)\n"
    )
    count = len(list((reference / "cells").glob("*.zarr"))) // 2
    for stored in (0, count // 2, count - 1):
        process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
        deadline = time.monotonic() + 300
        # of the first, as soon as it has workers; of the others, as soon as this many batches are there
        while len(list((folder / "cells").glob("*.zarr"))) < stored or not workers(process.pid):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for path in (folder / "cells").glob("*.zarr"):
        xr.load_dataset(path, engine="zarr", consolidated=False)  # every batch that is there is whole
    reproduce(PROBLEM, folder, engine=Engine(2), attentions=("linear",), **SMALL)
    rows = [list(csv.DictReader((path / "grid.csv").open())) for path in (reference, folder)]
    assert [row for row in rows[0] if row["attention"] == "linear"] == rows[1]


def test_interrupt_stops_the_workers(tmp_path):
    process = subprocess.Popen(
        command("reproduce", "--quick", "--out", tmp_path / "run"), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: workers(process.pid), process)
    time.sleep(1)
    running = workers(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "copyhead: interrupted; finished batches are kept, the same command goes on from there"
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)
