"""The command line: the contract for machines, and one clear line for every wrong input."""

import json
import os
import subprocess
import sys

import pytest

from copyhead.cli import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command in this process."""
    before = sys.argv
    sys.argv = ["copyhead", *arguments]
    try:
        with pytest.raises(SystemExit) as exit_:
            main()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_predict_json_contract(capsys):
    code, out, _ = run(
        capsys, "predict", "--length", "32", "--vocab", "4", "--noise", "0.9", "--attention", "softmax", "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert set(found) == {"problem", "verdict", "transitions", "leading_order", "status"}
    assert (found["verdict"], found["status"], found["problem"]["length"]) == ("first-order", "ok", 32)
    (transition,) = found["transitions"]
    assert set(transition) == {"kind", "P", "window", "before", "after"}
    # theory.md section 6
    assert transition["P"] == pytest.approx(296.8200, abs=5e-5)
    assert transition["window"] == pytest.approx([278.386, 337.177], abs=5e-4)
    for state in (transition["before"], transition["after"]):
        assert set(state) == {"c1", "cG", "a1", "aG", "loss"}


def test_predict_linear_and_states(capsys):
    _, out, _ = run(capsys, "predict", "--attention", "linear", "--json")
    assert [t["kind"] for t in json.loads(out)["transitions"]] == ["second-order", "crossover"]
    _, out, _ = run(capsys, "predict", "--preset", "paper", "--at", "300", "--json")
    states = json.loads(out)["state"]
    assert [state["metastable"] for state in states] == [False, True]
    assert states[0]["action"] < states[1]["action"]
    assert {"c1", "cG", "a1", "aG", "loss", "action", "metastable"} <= set(states[0])
    _, out, _ = run(capsys, "predict", "--length", "12", "--json")
    assert json.loads(out)["verdict"] == "crossover"


def test_predict_at_finite_chi(capsys):
    code, out, _ = run(capsys, "predict", "--finite-chi", "--at", "310", "--json")
    found = json.loads(out)["finite_chi"]
    assert code == 0
    assert set(found) == {"chi", "coexistence", "state"}
    place = found["coexistence"]
    assert set(place) == {"P", "limit", "shift", "slope", "before", "after", "barrier"}
    # theory.md section 11
    assert (place["P"], place["limit"]) == pytest.approx((301.171, 296.820), abs=1e-3)
    assert (place["slope"], place["shift"]) == pytest.approx((213.68, 4.351), abs=5e-3)
    assert [place[side]["mean"]["cG"] for side in ("before", "after")] == pytest.approx([0.3139, 1.8620], abs=5e-5)
    deviations = [place[side]["standard_deviation"]["cG"] for side in ("before", "after")]
    assert deviations == pytest.approx([0.0387, 0.0286], abs=5e-5)
    assert min(place["barrier"]["heights"]) == pytest.approx(74.6, abs=0.05)
    assert len(place["barrier"]["lifetimes"]) == 2
    copying, uniform = found["state"]
    assert copying["weight"] + uniform["weight"] == pytest.approx(1)
    assert (copying["saddle"]["cG"], uniform["saddle"]["cG"]) == pytest.approx((1.9479, 0.35054), abs=5e-5)
    for state in (copying, uniform, place["before"]):
        assert state["status"] == "good"
        assert set(state["mean"]) == set(state["standard_deviation"]) == {"c1", "cG", "a1", "aG"}
        variance = state["standard_deviation"]["cG"] ** 2
        assert state["susceptibility"]["cG"] == pytest.approx(found["chi"] * variance, rel=1e-12)
        assert state["relaxation"] == pytest.approx(state["saddle_relaxation"], rel=0.3)


def test_what_finite_chi_does_not_have_is_null(capsys):
    _, out, _ = run(capsys, "predict", "--finite-chi", "--chi", "5", "--at", "320", "--json")
    assert "NaN" not in out
    found = json.loads(out)["finite_chi"]
    assert found["coexistence"]["P"] is found["coexistence"]["barrier"] is None
    lost = found["state"][-1]
    assert (lost["status"], lost["mean"]["cG"], lost["weight"]) == ("no minimum", None, 0)
    assert lost["saddle"]["cG"] == pytest.approx(1.9977, abs=1e-4)
    _, out, _ = run(capsys, "predict", "--finite-chi", "--attention", "linear", "--json")
    assert json.loads(out)["finite_chi"] == {"chi": 50, "coexistence": None}
    _, out, _ = run(capsys, "predict", "--json")
    assert "finite_chi" not in json.loads(out)


def test_predict_at_finite_chi_for_people(capsys):
    _, out, _ = run(capsys, "predict", "--finite-chi", "--at", "310")
    for part in ("P*(chi) = 301.171, +4.351", "213.7 / chi", "cG 0.31393 +- 0.039", "barrier chi dF 74.56", "relaxation rate"):
        assert part in out
    _, out, _ = run(capsys, "predict", "--finite-chi", "--chi", "5", "--at", "320")
    for part in ("P*(chi): none", "saddle c1 -0.06243  cG 1.9977; no minimum"):
        assert part in out
    assert "nan" not in out


def test_predict_from_a_file(capsys, tmp_path):
    path = tmp_path / "problem.toml"
    path.write_text('length = 20\nvocab = 5\nnoise = 0.5\nattention = "linear"\n')
    _, out, _ = run(capsys, "predict", "--config", str(path), "--vocab", "6", "--json")
    problem = json.loads(out)["problem"]
    assert (problem["length"], problem["vocab"], problem["attention"]) == (20, 6, "linear")


def test_predict_with_a_causal_mask(capsys):
    code, out, _ = run(capsys, "predict", "--causal", "--length", "6", "--at", "40", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["leading_order"] is None
    (state,) = found["state"]
    assert len(state["rows"]) == 6
    assert state["rows"][0] is None
    assert all(isinstance(row, float) for row in state["rows"][1:])
    assert [set(one) >= {"n", "P"} for one in found["front"]] == [True] * 5
    assert [one["n"] for one in found["front"]] == [2, 3, 4, 5, 6]
    assert found["verdict"] == "crossover"
    assert isinstance(found["transitions"][0]["before"]["loss"], float)


def test_predict_with_heads_and_lags(capsys):
    arguments = ["--length", "6", "--target", "lags:1=1,2=0.5", "--heads", "2", "--at", "200", "--json"]
    _, out, _ = run(capsys, "predict", *arguments)
    found = json.loads(out)
    for state in found["state"]:
        assert len(state["heads"]) == 2
        assert set(state["lags"]) == {"1", "2"}
    best = found["state"][0]
    assert best["heads"] == sorted(best["heads"], reverse=True)
    assert best["lags"]["1"] > best["lags"]["2"]
    assert "rows" not in best
    assert "front" not in found


WRONG = [
    (["predict", "--heads", "9"], "heads = '9': must be an integer >= 1 and <= 8"),
    (["predict", "--target", "lag:32"], "target = 'lag:32': lags must be >= 0 and < length = 32"),
    (["predict", "--target", "matrix:missing"], "target file = 'missing': cannot be read"),
    (["predict", "--causal", "--cyclic"], "causal = True: needs cyclic = False"),
    (["predict", "--causal", "--token-scale", "1"], "token_scale = 1: must be 0 where rows or columns of the target differ"),
    (["predict", "--causal", "--head-dimension", "8"], "head_dimension = 8: "),
    (["predict", "--vocab", "1"], "vocab = '1': must be an integer >= 2"),
    (["predict", "--length", "1"], "length = '1': must be an integer >= 2"),
    (["predict", "--length", "abc"], "length = 'abc': must be an integer >= 2"),
    (["predict", "--noise", "-1"], "noise = '-1': must be a finite number > 0"),
    (["predict", "--noise", "nan"], "noise = 'nan': must be a finite number > 0"),
    (["predict", "--at", "0"], "sequences = '0': must be a finite number > 0"),
    (["predict", "--attention", "hard"], "attention = 'hard': must be one of softmax, linear"),
    (["predict", "--preset", "mine"], "preset = 'mine': must be one of paper"),
    (["predict", "--config", "missing.toml"], "config = 'missing.toml': cannot be read"),
    (["predict", "--bogus"], "No such option: --bogus"),
    (["predict", "--token-scale", "1", "--no-cyclic"], "token_scale > 0: "),
    (["predict", "--finite-chi", "--token-scale", "1", "--content"], "content = True: fluctuations are known for positional"),
    (["predict", "--finite-chi", "--head-dimension", "64"], "head_dimension = 64: fluctuations are known for positional"),
    (["diagram", "--x", "size=1:2:3"], "x = 'size=1:2:3': FIELD must be one of length"),
    (["diagram", "--x", "length=9:8:3"], "x = 'length=9:8:3': must be FIELD=LOW:HIGH:COUNT"),
    (["diagram", "--x", "length=1:8:3", "--y", "vocab=2,3"], "length = 1: must be an integer >= 2"),
    (["diagram", "--x", "vocab=2:8:3", "--y", "vocab=2:8:3"], "y = 'vocab': must be another field than x"),
    (["diagram", "--out", "figure.gif"], "out = 'figure.gif': must end in .png, .svg, .pdf"),
    (["reproduce", "--grid", "300,200,100,400"], "must be at least 4 ascending integers >= 1"),
    (["reproduce", "--grid", "a,b,c,d"], "grid = "),
    (["reproduce", "--seeds", "1"], "seeds = '1': must be an integer >= 2"),
    (["sample"], "sequences = None: must be given"),
    (["sample", "--at", "30.5"], "sequences = 30.5: must be an integer >= 1"),
    (["sample", "--at", "300", "--chains", "1"], "chains = 1: must be an integer >= 2"),
    (["sample", "--at", "300", "--sampler", "gibbs"], "sampler = 'gibbs': must be one of hmc, mala, sgld, nuts, blackjax-hmc"),
    (["sample", "--at", "300", "--out", "draws.zarr"], "out = 'draws.zarr': must end in .nc"),
    (["sample", "--at", "300", "--out", "no/draws.nc"], "out = 'no/draws.nc': its folder must exist"),
    (["sample", "--at", "300", "--head-dimension", "8"], "head_dimension = 8: "),
    (["fluctuations", "--chi", "5,-1"], "chi = '5,-1': must be positive numbers separated by commas"),
    (["train-curve", "--at", "300.5"], "sequences = 300.5: must be an integer >= 1"),
    (["train-curve", "--seeds", "1"], "seeds = '1': must be an integer >= 2"),
    (["train-curve", "--grid", "a,b"], "grid = 'a,b': must be positive numbers separated by commas"),
    (["train-curve", "--token-scale", "1"], "token_scale = 1: training time is known for token_scale = 0"),
    (["classify", "missing.csv"], "table = 'missing.csv': cannot be read"),
    (["classify", "/dev/null"], "table = '/dev/null': must have a header and at least one row"),
    (["classify"], "Missing argument 'TABLE.csv'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_wrong_input_is_answered_by_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("copyhead: ")
    assert message in err
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_help_shows_examples(capsys):
    for command in ("predict", "diagram", "reproduce", "sample", "fluctuations", "train-curve", "classify"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert f"copyhead {command}" in out


def test_diagram_writes_a_figure_and_never_replaces_one_unasked(capsys, tmp_path):
    out = tmp_path / "figure.svg"
    arguments = ["diagram", "--x", "sequences=50:500:5", "--y", "length=16,24,32", "--out", str(out)]
    assert run(capsys, *arguments)[0] == 0
    assert out.read_text().startswith("<?xml")
    out.write_text("precious")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "exists" in err
    assert out.read_text() == "precious"
    assert run(capsys, *arguments, "--force")[0] == 0
    assert "precious" not in out.read_text()


def test_diagram_numbers(capsys):
    _, out, _ = run(capsys, "diagram", "--x", "length=12,32", "--y", "vocab=4,5", "--json")
    found = json.loads(out)
    assert found["verdict"] == [["crossover", "first-order"]] * 2
    # theory.md section 6
    assert [row[1] for row in found["P"]] == pytest.approx([296.8200, 291.7173], abs=5e-5)


def test_sample(capsys, tmp_path):
    small = ["--length", "6", "--vocab", "3", "--at", "40", "--chi", "20", "--chains", "2", "--warmup", "100", "--draws", "100"]
    out_file = tmp_path / "draws.nc"
    code, out, _ = run(capsys, "sample", *small, "--out", str(out_file), "--json")
    found = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert found["verdict"] in ("mixed", "metastable", "not converged")
    assert {"verdict", "reason", "rhat_between_starts", "branches", "acceptance", "theory", "free_energy"} <= set(found)
    before = out_file.read_bytes()
    code, _, err = run(capsys, "sample", *small, "--out", str(out_file))
    assert code == 2
    assert "exists; give --force" in err
    assert out_file.read_bytes() == before


def test_classify(capsys, tmp_path):
    path = tmp_path / "runs.csv"
    places = [100 * 1.1**i for i in range(20)]
    rows = [
        f"{p},{float(p > fold) + 0.001 * i},{start}" for i, p in enumerate(places) for start, fold in (("a", 300), ("b", 200))
    ]
    path.write_text("P,m,start\n" + "\n".join(rows))
    code, out, _ = run(capsys, "classify", str(path), "--json")
    found = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert found["verdict"] == "first-order"
    assert found["interval"] == pytest.approx([200, 300], rel=0.1)
    code, out, _ = run(capsys, "classify", str(path))
    assert (code, out.split()[0]) == (0, "first-order")
    code, out, err = run(capsys, "classify", str(path), "--order", "aG")
    assert (code, out) == (2, "")
    assert err == "copyhead: order = 'aG': must be a column of the table, one of P, m, start\n"


def test_reproduce_refuses_a_folder_that_is_not_its_own(capsys, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    code, _, err = run(capsys, "reproduce", "--quick", "--out", str(tmp_path))
    assert code == 2
    assert "exists and is no study" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(os.name != "posix", reason="uses /dev/full and /proc")
def test_unwritable_folder_is_one_line(capsys):
    code, _, err = run(capsys, "reproduce", "--quick", "--out", "/proc/reproduction")
    assert code == 2
    assert "out = '/proc/reproduction': cannot be written to" in err
    assert err.count("\n") == 1


def test_installed_command_runs():
    done = subprocess.run(
        [sys.executable, "-c", "from copyhead.cli import main; main()", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
