"""Softmax: equal action, window, end point and crossover, against the one-dimensional action of section 4 written out.

Every cG > 0 is stationary at one P (Explicit.softmax_sequences), so the curve P(cG) tells everything: its extrema are the
folds, two minima coexist where it falls, and its flattest place in ln P is the steepest growth of cG.
"""

import itertools
import json
import math
from functools import cache

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar

from conftest import Explicit, derivative
from copyhead import predict
from copyhead.problem import Problem
from copyhead.theory.end_point import end_point
from copyhead.theory.transition import phases

pytestmark = pytest.mark.usefixtures("x64")

# docs/theory.md, section 6: (L, V, sigma^2): P*, window, cG at P* on both branches; as printed
TABLE = {
    (32, 4, 0.9): ("296.8200", "278.386", "337.177", "0.30649", "1.86337"),
    (32, 5, 0.9): ("291.7173", "272.161", "335.702", "0.29021", "1.92640"),
    (64, 10, 1.0): ("834.8519", "705.020", "1308.151", "0.13484", "2.62031"),
}
SIZES = pytest.mark.parametrize("size", TABLE, ids=str)


def problem_of(size, **fields) -> Problem:
    length, vocab, noise = size
    return Problem(length=length, vocab=vocab, noise=noise, **fields)


@cache
def prediction(problem: Problem):
    return predict(problem)


def printed(value: float, reference: str) -> str:
    return f"{value:.{len(reference.split('.')[1])}f}"


@SIZES
def test_reference_table_to_the_printed_digits(size):
    (found,) = prediction(problem_of(size)).transitions
    assert found.kind == "first-order"
    values = (found.P, *found.window, found.before.cG, found.after.cG)
    assert tuple(map(printed, values, TABLE[size])) == TABLE[size]


def folds(explicit: Explicit) -> tuple[float, float] | None:
    """cG at the upper and at the lower fold, the extrema of P(cG); None where the curve rises throughout."""
    grid = np.linspace(0.01, 2 * math.log(explicit.length), 800)
    rising = np.diff(explicit.softmax_sequences(grid)) > 0
    turns = np.flatnonzero(rising[1:] != rising[:-1])
    if not turns.size:
        return None
    first, second = turns
    upper = minimize_scalar(
        lambda c: -explicit.softmax_sequences(c), bounds=grid[[first, first + 2]], method="bounded", options={"xatol": 1e-9}
    )
    lower = minimize_scalar(
        explicit.softmax_sequences, bounds=grid[[second, second + 2]], method="bounded", options={"xatol": 1e-9}
    )
    return float(upper.x), float(lower.x)


def both_minima(explicit: Explicit, sequences: float) -> tuple[float, float]:
    upper, lower = folds(explicit)

    def slope(cG):
        return explicit.softmax_slope(cG, sequences)

    return brentq(slope, 1e-9, upper, xtol=1e-14), brentq(slope, lower, 3 * math.log(explicit.length), xtol=1e-14)


def equal_action(explicit: Explicit) -> float:
    window = [float(explicit.softmax_sequences(c)) for c in reversed(folds(explicit))]

    def difference(sequences):
        low, high = both_minima(explicit, sequences)
        return explicit.softmax_action(low, sequences) - explicit.softmax_action(high, sequences)

    return brentq(difference, window[0] * (1 + 1e-6), window[1] * (1 - 1e-6), xtol=1e-11)


FIRST_ORDER = [
    *(problem_of(size) for size in TABLE),
    Problem(length=17, vocab=4, noise=0.9),
    Problem(length=40, vocab=7, noise=0.3, logit_variance=1.6, output_variance=0.5, position_scale=1.2, cyclic=False),
    Problem(length=40, vocab=3, noise=2.0, logit_variance=0.7, output_variance=2.0, token_scale=1.0),
]


def name(problem: Problem) -> str:
    return f"L{problem.length}-V{problem.vocab}-{'cyclic' if problem.cyclic else 'open'}-tau{problem.token_scale:g}"


PROBLEMS = pytest.mark.parametrize("problem", FIRST_ORDER, ids=name)


@PROBLEMS
def test_place_and_window_are_those_of_the_formula(problem):
    (found,), explicit = prediction(problem).transitions, Explicit.of(problem)
    # an extremum of P(cG) is exact to rounding although its place is not; equal action is a well-conditioned root
    expected = [float(explicit.softmax_sequences(c)) for c in reversed(folds(explicit))]
    np.testing.assert_allclose(found.window, expected, rtol=1e-9)
    assert pytest.approx(equal_action(explicit), rel=1e-9) == found.P


@PROBLEMS
def test_the_actions_of_both_branches_are_equal_at_the_place(problem):
    (found,), explicit = prediction(problem).transitions, Explicit.of(problem)
    low, high = both_minima(explicit, found.P)
    assert found.before.cG == pytest.approx(low, rel=1e-8)
    assert found.after.cG == pytest.approx(high, rel=1e-8)
    assert explicit.softmax_action(low, found.P) == pytest.approx(explicit.softmax_action(high, found.P), rel=1e-11)
    # trap: equal action, not the middle of the window and not a fold; the order of the two changes here
    for fold, sign in zip(found.window, (1, -1), strict=True):
        sequences = found.P + 0.01 * (fold - found.P)
        low, high = both_minima(explicit, sequences)
        assert sign * (explicit.softmax_action(high, sequences) - explicit.softmax_action(low, sequences)) > 0


@PROBLEMS
def test_first_and_second_derivative_vanish_at_the_folds(problem):
    """The folds as the package finds them, on the formula; S'' at a neighbouring minimum sets the scale."""
    found, explicit = prediction(problem).phases, Explicit.of(problem)
    events = {id(e): e for s in found.segments for e in (s.start, s.end) if e is not None and e.kind == "fold"}
    assert len(events) == 2
    for event in events.values():
        sequences = math.exp(event.point.log_p)
        c1, cG = found.system.coordinates(event.point.z)
        assert c1 == pytest.approx(-cG / problem.length, rel=1e-8)

        def along(c, sequences=sequences):
            return explicit.softmax_action(c, sequences)

        stiffness = (problem.length - 1) / (problem.logit_variance * problem.position_scale**2)  # of the prior alone
        assert derivative(along, cG, 1) == pytest.approx(0, abs=1e-9 * stiffness)
        assert derivative(along, cG, 2) == pytest.approx(0, abs=1e-7 * stiffness)
        assert abs(derivative(along, cG, 3)) > 1e-3 * stiffness  # a fold, not the end point


def minima_by_scan(explicit: Explicit, sequences: float) -> list[float]:
    """Every minimum of the one-dimensional action, from sign changes of its slope."""
    grid = np.linspace(-4, 8, 4001)
    slope = explicit.softmax_slope(grid, sequences)
    return [
        brentq(explicit.softmax_slope, grid[i], grid[i + 1], args=(sequences,), xtol=1e-14)
        for i in np.flatnonzero((slope[:-1] < 0) & (slope[1:] >= 0))
    ]


def test_window_at_seventeen_positions_and_none_at_sixteen():
    """Two minima exist at L = 17 between P = 119.6197 and 119.8359, scanned; at L = 16 the curve P(cG) has no fold."""
    explicit = Explicit(length=17, vocab=4, noise=0.9)
    counts = {sequences: len(minima_by_scan(explicit, sequences)) for sequences in (119.615, 119.625, 119.72, 119.83, 119.84)}
    assert counts == {119.615: 1, 119.625: 2, 119.72: 2, 119.83: 2, 119.84: 1}
    assert prediction(Problem(length=17, vocab=4, noise=0.9)).verdict == "first-order"

    explicit = Explicit(length=16, vocab=4, noise=0.9)
    assert folds(explicit) is None
    assert all(len(minima_by_scan(explicit, sequences)) == 1 for sequences in np.linspace(100, 125, 26))
    assert prediction(Problem(length=16, vocab=4, noise=0.9)).verdict == "crossover"


def steepest(explicit: Explicit) -> float:
    """P where d cG / d ln P is largest on a curve without folds."""
    grid = np.linspace(0.01, 3 * math.log(explicit.length), 1500)
    slope = np.gradient(np.log(explicit.softmax_sequences(grid)), grid)
    index = int(np.argmin(slope))

    def local(c):
        high, low = explicit.softmax_sequences(np.array([c + 1e-4, c - 1e-4]))
        return math.log(high / low)

    place = minimize_scalar(local, bounds=(grid[index - 2], grid[index + 2]), method="bounded", options={"xatol": 1e-6})
    return float(explicit.softmax_sequences(place.x))


@pytest.mark.parametrize(
    "problem",
    [
        Problem(length=16, vocab=4, noise=0.9),
        Problem(length=8, vocab=3, noise=0.5, logit_variance=1.4, output_variance=0.6, cyclic=False),
        Problem(length=6, vocab=20, noise=1.5, logit_variance=0.5, token_scale=1.0),
    ],
    ids=name,
)
def test_softmax_crossover_is_at_the_steepest_growth(problem):
    (found,), explicit = prediction(problem).transitions, Explicit.of(problem)
    assert found.kind == "crossover"
    assert found.window is None
    assert pytest.approx(steepest(explicit), rel=1e-5) == found.P  # a maximum found through differences of 1e-4 in cG


@pytest.mark.parametrize(
    ("problem", "parameter", "place"),
    [
        (Problem.preset("paper"), "length", 16.517304),
        (Problem(length=14, vocab=9, noise=0.5), "vocab", None),
        (Problem(length=14, vocab=9, noise=0.5, cyclic=False), "logit_variance", None),
    ],
    ids=["length", "vocab", "logit_variance"],
)
def test_three_derivatives_vanish_at_the_end_point(problem, parameter, place):
    found = end_point(problem, parameter)
    fields = {**problem.model_dump(include=set(Explicit.__dataclass_fields__)), parameter: found.value}
    explicit = Explicit(**fields)
    if place is not None:
        assert found.value == pytest.approx(place, abs=1e-6)  # from brentq on the flattest slope of P(cG), outside this package

    def along(c):
        return explicit.softmax_action(c, found.P)

    stiffness = (explicit.length - 1) / explicit.logit_variance
    # the place of a minimum of the slope is known to about the root of rounding, 1e-7 in cG, times S''''
    assert derivative(along, found.cG, 1) == pytest.approx(0, abs=1e-9 * stiffness)
    assert derivative(along, found.cG, 2) == pytest.approx(0, abs=1e-7 * stiffness)
    assert derivative(along, found.cG, 3) == pytest.approx(0, abs=1e-5 * stiffness)
    assert derivative(along, found.cG, 4) > 1e-2 * stiffness
    # and it is where the window closes: folds on one side of the value only
    sides = [folds(Explicit(**{**fields, parameter: found.value * factor})) is None for factor in (0.98, 1.02)]
    assert sorted(sides) == [False, True]


@pytest.mark.parametrize("distance", [1e-2, 1e-4])
def test_the_verdict_changes_at_the_end_point_however_narrow_the_window(distance):
    """The window opens like the 3/2 power of the distance: at 1e-4 it is 4e-8 of P wide, far below a step of the search."""
    problem = Problem(length=14, vocab=9, noise=0.5)
    value = end_point(problem, "logit_variance").value
    below, above = (predict(problem.replace(logit_variance=value * (1 + sign * distance))) for sign in (-1, 1))
    assert (below.verdict, above.verdict) == ("crossover", "first-order")
    low, high = above.transitions[0].window
    assert 0 < high / low - 1 < 0.1 * distance**1.5
    explicit = Explicit.of(above.problem)
    np.testing.assert_allclose(
        (low, high), [float(explicit.softmax_sequences(c)) for c in reversed(folds(explicit))], rtol=1e-9
    )


def test_no_end_point_where_the_window_stays_open():
    """At L = 32 and V = 4 the curve P(cG) has folds for every g_O within 2^10 either way."""
    assert all(folds(Explicit(32, 4, 0.9, output_variance=2.0**power)) for power in range(-10, 11, 2))
    assert end_point(Problem.preset("paper"), "output_variance") is None


def test_softmax_depends_on_the_length_and_one_ratio():
    """S gives P (V - 1) g_W tau_p^2 / (V sigma^2) and cG as functions of L and (V - 1) g_W tau_p^2 / g_O alone."""
    problems = (
        Problem(length=40, vocab=4, noise=0.9),
        Problem(length=40, vocab=7, noise=0.3, logit_variance=0.4, output_variance=1.8, position_scale=1.5),
    )
    scaled = []
    for problem in problems:
        (found,) = prediction(problem).transitions
        width = problem.logit_variance * problem.position_scale**2
        unit = problem.vocab * problem.noise / ((problem.vocab - 1) * width)
        assert (problem.vocab - 1) * width / problem.output_variance == pytest.approx(3.0)
        scaled.append([found.P / unit, found.window[0] / unit, found.window[1] / unit, found.before.cG, found.after.cG])
    np.testing.assert_allclose(*scaled, rtol=1e-8)


def test_end_point_of_a_parameter_that_only_rescales_is_refused():
    with pytest.raises(ValueError, match="parameter = 'noise': must be one of length, vocab, logit_variance, output_variance"):
        end_point(Problem.preset("paper"), "noise")


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_every_place_is_proportional_to_the_noise(attention):
    first, second = (prediction(Problem.preset("paper", noise=noise, attention=attention)) for noise in (0.9, 2.25))
    assert len(first.transitions) == len(second.transitions) > 0
    for one, other in zip(first.transitions, second.transitions, strict=True):
        rel = 1e-5 if one.kind == "crossover" else 1e-9  # a maximum is known to the root of rounding only
        assert pytest.approx(2.5 * one.P, rel=rel) == other.P
        assert other.kind == one.kind
        np.testing.assert_allclose(other.window or 0, 2.5 * np.array(one.window or 0), rtol=1e-9)


def test_chi_moves_nothing():
    places = [prediction(Problem.preset("paper", chi=chi)).transitions[0].P for chi in (1.0, 50.0)]
    assert places[0] == pytest.approx(places[1], rel=1e-12)


def test_states_of_the_window_and_outside_it():
    (found,) = prediction(Problem.preset("paper")).transitions
    low, high = found.window
    for sequences, count in ((0.99 * low, 1), (1.01 * low, 2), (0.99 * high, 2), (1.01 * high, 1)):
        assert len(predict(Problem.preset("paper", sequences=sequences)).state) == count
    below, above = (predict(Problem.preset("paper", sequences=found.P * factor)).state for factor in (0.999, 1.001))
    assert below[0].order_parameters.cG < 1 < above[0].order_parameters.cG
    assert [minimum.metastable for minimum in below] == [False, True]


def test_minima_outside_the_searched_range_are_refused():
    with pytest.raises(ValueError, match=r"sequences = 1e\+12: must be within the searched range"):
        phases(Problem.preset("paper")).minima(1e12)


def test_a_prediction_prints_as_json():
    found = predict(Problem.preset("paper", sequences=300.0))
    record = json.loads(json.dumps(found.to_dict()))
    assert record["verdict"] == "first-order"
    assert record["transitions"][0]["P"] == found.transitions[0].P
    assert Problem(**record["problem"]) == found.problem
    actions = [state["action"] for state in record["state"]]
    assert all(first <= second for first, second in itertools.pairwise(actions))
    assert "296.82" in repr(found)
