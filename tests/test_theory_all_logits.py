"""Minima over all H L^2 logits: the symmetric ones are among them, and what lies lower is found."""

import json

import jax
import numpy as np
import pytest
from scipy.optimize import minimize

from copyhead.model import layout, targets, tokens
from copyhead.model.moments import Correlated, empirical
from copyhead.prediction import predict
from copyhead.problem import Problem, ProblemError
from copyhead.theory import all_logits
from copyhead.theory.all_logits import Landscape, check, classes_of, spread
from copyhead.theory.order_parameters import lift as lift_copy
from copyhead.theory.solution import solve
from copyhead.theory.symmetric import (
    NoSubspace,
    action_of,
    at_sequences,
    dimension,
    lift,
    symmetric_action,
    symmetric_task,
)
from copyhead.theory.unreduced import both_ways, expanded, unreduced_task
from test_cli import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick", "x64")]

SMALL = Problem.preset("paper", length=6)
CHAIN = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.05, 0.15, 0.1, 0.7]]


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokens") / "chain.csv"
    np.savetxt(path, CHAIN, delimiter=",")
    return f"markov:{path}"


def slope(problem: Problem, logits: np.ndarray, sequences: float) -> np.ndarray:
    task = at_sequences(unreduced_task(problem), sequences)
    return np.asarray(jax.grad(action_of)(logits, task, problem.attention))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": "linear", "token_scale": 0.1},
        {"causal": True},
        {"causal": True, "attention": "linear", "tokens": "zipf:1"},
        {"heads": 2, "target": "lags:1=1,3=-0.5"},
        {"tokens": "chain"},
    ],
    ids=str,
)
def test_symmetric_minima_are_stationary_over_all_logits(fields, chain):
    problem = SMALL.replace(**{**fields, **({"tokens": chain} if fields.get("tokens") == "chain" else {})})
    kind, task = problem.attention, at_sequences(symmetric_task(problem), 100.0)
    gradient = jax.jit(jax.value_and_grad(lambda place: symmetric_action(place, task, kind)))
    start = np.linspace(1.5, 0.5, dimension(task, kind))
    found = minimize(gradient, start, jac=True, method="BFGS", options={"gtol": 1e-9})
    logits = np.array(expanded(np.asarray(lift(found.x, task, kind)), problem))
    assert np.abs(logits).max() > 0.1
    whole = at_sequences(unreduced_task(problem), 100.0)
    assert float(action_of(logits, whole, kind)) == pytest.approx(found.fun, rel=1e-12)
    assert np.abs(slope(problem, logits, 100.0)).max() < 1e-6
    assert spread(logits, classes_of(problem)) < 1e-12
    # a logit that moves alone is felt
    logits[0, 3, 1] += 0.1
    assert np.abs(slope(problem, logits, 100.0)).max() > 1e-3
    assert spread(logits, classes_of(problem)) > 0.01


def test_open_pairs_are_the_moments_of_many_drawn_sequences():
    """Of a chain that goes round, so that the direction of a pair matters."""
    law = tokens.Markov(np.roll(0.6 * np.eye(4) + 0.1, 1, axis=1))
    moments = Correlated(np.float64(1), both_ways(law.pairs(6, False)))
    data = empirical(law.draw(tokens.stream(0, "train"), 40000, 6, False), 4)
    left, right = np.random.default_rng(0).normal(size=(2, 6, 6))
    expected = np.asarray(data.contract(left, right, layout.full(6)))[0] / 40000
    # the square root of 40000 sequences is 200
    assert np.abs(np.asarray(moments.contract(left, right)) - expected).max() < 0.1
    assert np.abs(np.asarray(moments.contract(right, left)) - expected).max() > 0.3


def test_the_hessian_is_that_of_finite_differences():
    landscape = Landscape(at_sequences(unreduced_task(SMALL.replace(length=4, causal=True)), 50.0), "softmax")
    flat = np.random.default_rng(1).normal(size=int(landscape.inside.sum()))
    assert len(flat) == 10

    def gradient(place: np.ndarray) -> np.ndarray:
        logits = landscape.expand(place)
        return np.asarray(jax.grad(action_of)(logits, landscape.task, "softmax"))[landscape.inside]

    dense = np.array([(gradient(flat + 1e-5 * e) - gradient(flat - 1e-5 * e)) / 2e-5 for e in np.eye(10)])
    value, direction = landscape.lowest(flat, np.random.default_rng(0))
    values, vectors = np.linalg.eigh((dense + dense.T) / 2)
    assert value == pytest.approx(values[0], abs=1e-6)
    assert abs(direction @ vectors[:, 0]) == pytest.approx(1, abs=1e-4)


def test_a_saddle_is_left():
    """Linear attention at zero logits, above the pitchfork."""
    problem = SMALL.replace(attention="linear")
    landscape = Landscape(at_sequences(unreduced_task(problem), 400.0), "linear")
    rng = np.random.default_rng(0)
    zero = landscape.descend(np.zeros((1, 6, 6)))
    assert np.all(zero.place == 0)
    assert landscape.lowest(zero.place, rng)[0] < -0.1
    found, lowest = landscape.settle(np.zeros((1, 6, 6)), rng)
    assert found.value < zero.value - 1
    assert lowest > 0


def test_a_saddle_is_left_to_the_lower_side():
    """Between two minima: below P* it is the side of the uniform one, above it that of the copying one."""
    problem = SMALL.replace(length=24)
    found = solve(problem)
    (jump,) = found.transitions
    sides = []
    for end in jump.window:
        sequences = (jump.P + end) / 2
        lowest, other = found.minima(sequences)
        assert other.action > lowest.action + 0.01
        places = [point.z for _, point in found.points(np.log(sequences))]
        (saddle,) = found.system.at_fixed_p(np.mean(places, axis=0)[None], np.log(sequences))
        assert saddle.converged
        assert saddle.lowest < -0.01
        logits = expanded(np.asarray(lift_copy(found.system.coordinates(saddle.z), found.system.task.target))[None], problem)
        landscape = Landscape(at_sequences(unreduced_task(problem), sequences), "softmax")
        reached, _ = landscape.settle(logits, np.random.default_rng(0))
        assert reached.value == pytest.approx(lowest.action, abs=1e-6)
        sides.append(float(lowest.order_parameters.cG) > float(saddle.z[-1]))
    assert sides == [False, True]


@pytest.mark.parametrize("fields", [{}, {"attention": "linear", "cyclic": False}, {"causal": True}], ids=str)
def test_the_check_agrees_with_the_symmetric_subspace(fields):
    found = check(SMALL.replace(**fields), 100.0, starts=1)
    assert found.verdict == "symmetric"
    assert found.lost == 0
    assert sum(one.starts for one in found.states) == found.starts
    assert found.action == pytest.approx(found.symmetric_action, rel=1e-9)
    assert found.states[0].minimum.lowest > 0


def test_heads_that_specialise_lie_below_the_symmetric_subspace():
    """Two lags of equal weight are one class, but where W is dear two heads do better with a lag each (theory.md, all logits).

    Row by row, with W at its best, both actions were found by an independent search over the 2 x 6 logits of one row.
    """
    problem = SMALL.replace(heads=2, output_variance=0.05, target="lags:1=1,3=1", sequences=1000)
    found = check(problem, 1000.0, starts=0)
    assert found.verdict == "asymmetric"
    assert found.symmetric_action == pytest.approx(152.528683, abs=1e-5)
    assert found.action == pytest.approx(148.559766, abs=1e-5)
    assert (found.states[0].spread or 0) > 0.5
    attention = np.asarray(all_logits.turned(found.states[0].logits, unreduced_task(problem), "softmax")[1])
    leading = {np.argmax([(one * targets.shift(6, lag)).sum() for lag in (1, 3)]) for one in attention}
    assert leading == {0, 1}


def test_causal_correlated_tokens_have_no_subspace_and_an_answer(chain, capsys):
    problem = SMALL.replace(tokens=chain, causal=True)
    with pytest.raises(NoSubspace):
        classes_of(problem)
    with pytest.raises(ProblemError, match=r"correlated tokens need cyclic = True.*--all-logits"):
        predict(problem)
    arguments = ["--length", "6", "--causal", "--tokens", chain]
    code, _, error = run(capsys, "predict", *arguments)
    assert (code, error.count("\n")) == (2, 1)
    code, out, _ = run(capsys, "predict", *arguments, "--at", "100", "--all-logits", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["verdict"], found["transitions"]) == ("undetermined", [])
    assert found["all_logits"]["verdict"] == "no symmetric subspace"
    assert found["state"][0]["action"] == found["all_logits"]["action"]
    # the first row is not scored, and rows later in the sequence are harder to tell from what the others say
    assert found["state"][0]["rows"][0] is None
    assert 0.2 < found["state"][0]["aG"] < 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "sequences = None: must be given"),
        ({"sequences": 50, "content": True, "token_scale": 0.1}, "content = True: the minima over all logits"),
        ({"sequences": 50, "head_dimension": 4}, "head_dimension = 4: the minima over all logits"),
        ({"sequences": 50, "length": 300}, r"length = 300: heads \* length\^2 must be <= "),
        ({"sequences": 50, "causal": True, "token_scale": 0.1}, "token_scale = 0.1: must be 0 with causal"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(ProblemError, match=message):
        predict(SMALL.replace(**fields), all_logits=True)
