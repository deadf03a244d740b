"""Linear attention: the second-order transition to pooling and the crossover to copying, on the formula of section 4."""

import math
from functools import cache

import numpy as np
import pytest
from scipy.linalg import eigh
from scipy.optimize import minimize, minimize_scalar, root

from conftest import Explicit, derivative
from copyhead import predict
from copyhead.problem import Problem

pytestmark = pytest.mark.usefixtures("x64")

# docs/theory.md, section 6: (L, V, sigma^2): P_c and steepest growth of cG at tau_x = 0 and 1, as printed. The steepest
# places were read from a coarse grid and are up to 1% off.
TABLE = {
    (32, 4, 0.9): (("115.0149", 386), ("12.7813", 443)),
    (32, 5, 0.9): (("143.6813", 413), ("19.4215", 475)),
    (64, 10, 1.0): (("639.186", 1739), ("86.3914", 1896)),
}
REFERENCES = [
    pytest.param(Problem(length=size[0], vocab=size[1], noise=size[2], attention="linear", token_scale=tau), *entry)
    for size, entries in TABLE.items()
    for tau, entry in zip((0.0, 1.0), entries, strict=True)
]
PROBLEMS = [
    Problem(length=32, vocab=4, noise=0.9, attention="linear"),
    Problem(length=32, vocab=4, noise=0.9, attention="linear", token_scale=1.0),
    Problem(length=7, vocab=30, noise=0.5, attention="linear", logit_variance=1.7, output_variance=0.6, position_scale=1.4),
    Problem(length=12, vocab=5, noise=2.0, attention="linear", token_scale=0.3, output_variance=3.0, position_scale=0.6),
    Problem(length=10, vocab=6, noise=0.7, attention="linear", cyclic=False, logit_variance=0.4),
]


def name(problem: Problem) -> str:
    return f"L{problem.length}-V{problem.vocab}-{'cyclic' if problem.cyclic else 'open'}-tau{problem.token_scale:g}"


EACH = pytest.mark.parametrize("problem", PROBLEMS, ids=name)


@cache
def prediction(problem: Problem):
    return predict(problem)


def pitchfork(problem: Problem) -> tuple[float, np.ndarray]:
    """P_c = kappa V / sqrt(g_O lambda) and the soft direction in (c1, cG).

    lambda is the largest eigenvalue of the gain form (V - 1) m^2 + q^2 against twice the prior energy, A = G / L.
    """
    length, vocab = problem.length, problem.vocab
    rows = length if problem.cyclic else length - 1
    copied, row_sum = np.array([1.0, 1.0]) / length, np.array([length, 1.0]) / length
    gain = (vocab - 1) * rows**2 * np.outer(copied, copied) + rows**2 * np.outer(row_sum, row_sum)
    uniform = (problem.position_scale + problem.token_scale * length / vocab) ** 2
    form = length**2 * np.outer(row_sum, row_sum) / uniform + (length - 1) * np.diag([0, 1]) / problem.position_scale**2
    values, vectors = eigh(gain, rows / length * form / problem.logit_variance)
    return rows * problem.noise * vocab / math.sqrt(problem.output_variance * values[-1]), vectors[:, -1]


def second_order(problem: Problem):
    found = prediction(problem)
    assert found.verdict == "second-order"
    assert found.status == "ok"
    return found.transitions[0]


@pytest.mark.parametrize(("problem", "place", "steepest"), REFERENCES)
def test_reference_table(problem, place, steepest):
    second, crossover = prediction(problem).transitions
    assert f"{second.P:.{len(place.split('.')[1])}f}" == place
    assert pytest.approx(steepest, rel=0.01) == crossover.P


@EACH
def test_place_is_the_generalised_eigenvalue(problem):
    found = second_order(problem)
    assert found.kind == "second-order"
    assert pytest.approx(pitchfork(problem)[0], rel=1e-8) == found.P  # located next to a singular matrix, 1e-9 of a step off
    assert (found.before.c1, found.before.cG, found.before.loss) == pytest.approx((0, 0, 1), abs=1e-10)


# Of a grid of 570 sizes these hit the pitchfork to the last bit, where the matrix of Newton's method is singular.
@pytest.mark.parametrize("size", [(2, 5, 1.0), (2, 8, 0.5), (3, 4, 0.5), (3, 4, 1.0), (9, 4, 0.9)])
def test_place_is_found_where_the_search_hits_it_exactly(size):
    length, vocab, noise = size
    problem = Problem(length=length, vocab=vocab, noise=noise, attention="linear")
    assert pytest.approx(pitchfork(problem)[0], rel=1e-8) == second_order(problem).P


@EACH
def test_the_hessian_at_zero_changes_sign_there(problem):
    explicit, place = Explicit.of(problem), second_order(problem).P
    below, above = (np.linalg.eigvalsh(explicit.hessian(0.0, 0.0, factor * place)) for factor in (0.999, 1.001))
    assert below[0] > 0 > above[0]
    assert above[1] > 0


@EACH
def test_zero_is_the_only_state_below_and_no_state_above(problem):
    """The symmetric start sits on a saddle above P_c; it must not be listed as a minimum."""
    place, found = second_order(problem).P, prediction(problem).phases
    (below,) = found.minima(0.99 * place)
    assert abs(below.order_parameters.c1) + abs(below.order_parameters.cG) < 1e-9
    above = found.minima(1.01 * place)
    assert len(above) == 1
    values = above[0].order_parameters
    assert abs(values.c1) > 1e-3
    assert problem.length * values.c1 + values.cG > 0  # of the two mirror images, the one with positive row sums
    assert above[0].action < Explicit.of(problem).action(0.0, 0.0, 1.01 * place)


@EACH
def test_order_parameter_grows_as_the_square_root(problem):
    """Landau: S = S_0 + a x^2 / 2 + b x^4 / 24 along the soft direction, so x^2 = -6 a / b; cubic couplings are odd."""
    explicit, (place, soft), found = Explicit.of(problem), pitchfork(problem), prediction(problem).phases
    soft = soft / soft[np.argmax(np.abs(soft))]
    squares = {}
    for distance in (1e-3, 1e-4):
        sequences = place * (1 + distance)

        def along(x, sequences=sequences):
            return explicit.action(x * soft[0], x * soft[1], sequences)

        landau = -6 * derivative(along, 0.0, 2, radius=0.02) / derivative(along, 0.0, 4, radius=0.02)
        values = found.minima(sequences)[0].order_parameters
        squares[distance] = max(abs(values.c1), abs(values.cG)) ** 2
        # the next order of Landau's series is a relative distance times a number of order one to ten
        assert squares[distance] == pytest.approx(landau, rel=20 * distance)
    assert squares[1e-3] / squares[1e-4] == pytest.approx(10, rel=20e-3)


def growth(explicit: Explicit, log_p: float, start: np.ndarray) -> tuple[np.ndarray, float]:
    """The minimum at P = exp(log_p) next to `start`, and d cG / d ln P there by the implicit function theorem."""
    sequences, step = math.exp(log_p), 1e-5
    found = root(lambda x: explicit.gradient(*x, sequences), start, jac=lambda x: explicit.hessian(*x, sequences), tol=1e-13)
    high, low = (explicit.gradient(*found.x, math.exp(log_p + sign * step)) for sign in (1, -1))
    return found.x, -np.linalg.solve(explicit.hessian(*found.x, sequences), (high - low) / (2 * step))[1]


def steepest(problem: Problem) -> float | None:
    """The highest interior maximum of d cG / d ln P down to 5% above the pitchfork; None if the slope only falls with P."""
    explicit = Explicit.of(problem)
    scale = math.sqrt(problem.length * problem.vocab)
    log_ps = np.log(pitchfork(problem)[0] * np.geomspace(1e4, 1.05, 250))
    # far above every transition the head copies: W = (L / cG) 1 and |G| = |W| up to the ratio of prior widths
    widths = problem.logit_variance * problem.position_scale**2 / problem.output_variance
    states, slopes = [np.array([0.0, math.sqrt(scale) * widths**0.25])], []
    for log_p in log_ps:
        state, slope = growth(explicit, log_p, states[-1])
        states.append(state)
        slopes.append(slope)
    interior = [i for i in range(1, len(slopes) - 1) if slopes[i] > slopes[i - 1] and slopes[i] >= slopes[i + 1]]
    if not interior:
        return None
    index = max(interior, key=lambda i: slopes[i])
    bounds = sorted((log_ps[index - 1], log_ps[index + 1]))
    place = minimize_scalar(lambda log_p: -growth(explicit, log_p, states[index + 1])[1], bounds=bounds, method="bounded")
    return math.exp(place.x)


@pytest.mark.parametrize("problem", [*(reference.values[0] for reference in REFERENCES), PROBLEMS[4]], ids=name)
def test_crossover_is_the_steepest_growth_of_cG(problem):
    second, crossover = prediction(problem).transitions
    assert (second.kind, crossover.kind) == ("second-order", "crossover")
    # minimize_scalar stops at 1e-5 in ln P; the slope is flat there, so its place is known to about that
    assert pytest.approx(steepest(problem), rel=1e-4) == crossover.P
    values, explicit = crossover.before, Explicit.of(problem)
    assert values.loss == pytest.approx(explicit.loss(values.c1, values.cG, crossover.P), rel=1e-9)


def test_no_crossover_where_cG_grows_steepest_at_the_pitchfork():
    """Few positions, many tokens: the soft direction of the pitchfork already copies."""
    problem = Problem(length=4, vocab=30, noise=0.9, attention="linear")
    assert [transition.kind for transition in prediction(problem).transitions] == ["second-order"]
    assert steepest(problem) is None


def polished(explicit: Explicit, start: np.ndarray, sequences: float) -> np.ndarray:
    """The minimum of the formula next to a start, or at the end of a run of BFGS from it."""
    run = minimize(lambda x: explicit.action(*x, sequences), start, jac=lambda x: explicit.gradient(*x, sequences))
    found = root(lambda x: explicit.gradient(*x, sequences), run.x, jac=lambda x: explicit.hessian(*x, sequences), tol=1e-13)
    assert np.linalg.eigvalsh(explicit.hessian(*found.x, sequences))[0] > 0
    return found.x if found.x[0] > 0 else -found.x


def distinct_minima(explicit: Explicit, sequences: float) -> np.ndarray:
    """All minima that runs from a grid of starts over pooling and copying end in, up to the mirror image; by growing cG."""
    starts = [np.array([c1, cG]) for c1 in (0.05, 0.3, 0.6, 0.9) for cG in (0.0, 0.3, 0.6, 1.0, 2.0, 4.0)]
    found = sorted((polished(explicit, start, sequences) for start in starts), key=lambda x: x[1])
    return np.array([x for i, x in enumerate(found) if i == 0 or abs(x[1] - found[i - 1][1]) > 1e-4])


def test_copying_is_first_order_for_linear_attention_that_sees_tokens():
    """L = 84, V = 2, tau_x = 1: the prior favours pooling so much that two minima coexist, which no tau_x = 0 case shows."""
    problem = Problem(length=84, vocab=2, noise=0.9, attention="linear", token_scale=1.0)
    explicit, (second, first) = Explicit.of(problem), prediction(problem).transitions
    assert (second.kind, first.kind) == ("second-order", "first-order")
    low, high = first.window
    counts = [len(distinct_minima(explicit, p)) for p in (0.999 * low, 1.001 * low, 0.999 * high, 1.001 * high)]
    assert counts == [1, 2, 2, 1]
    minima = distinct_minima(explicit, first.P)
    expected = [[state.c1, state.cG] for state in (first.before, first.after)]
    np.testing.assert_allclose(minima, expected, rtol=1e-6)  # roots polished to 1e-13 of a gradient of order L
    actions = [explicit.action(*minimum, first.P) for minimum in minima]
    assert actions[0] == pytest.approx(actions[1], rel=1e-10)


@pytest.mark.parametrize("token_scale", [0.0, 1.0])
def test_the_state_lists_the_branch_whose_pooling_has_the_other_sign(token_scale):
    """Only m = tr A^T T ties the sign of the row sums to that of cG, so beyond copying c1 < 0 < cG is metastable."""
    problem = Problem.preset("paper", attention="linear", token_scale=token_scale, sequences=1000.0)
    explicit = Explicit.of(problem)
    actions = []
    for start in (np.array([0.1, 2.5]), np.array([-0.2, 2.5])):
        found = root(lambda x: explicit.gradient(*x, 1000.0), start, jac=lambda x: explicit.hessian(*x, 1000.0), tol=1e-13)
        assert np.linalg.eigvalsh(explicit.hessian(*found.x, 1000.0))[0] > 1
        assert np.sign(found.x[0]) == np.sign(start[0])
        actions.append(explicit.action(*found.x, 1000.0))
    assert [minimum.action for minimum in predict(problem).state] == pytest.approx(actions, rel=1e-10)


def test_linear_attention_depends_on_the_sizes_alone():
    """S gives P sqrt(g_O g_W) tau_p / sigma^2 and cG (g_O / (g_W tau_p^2))^(1/4) as functions of L, V and tau_x / tau_p."""
    first = Problem(length=20, vocab=6, noise=0.9, attention="linear", token_scale=0.5)
    second = first.replace(noise=0.2, logit_variance=1.9, output_variance=0.3, position_scale=1.6, token_scale=0.8)
    scaled = []
    for problem in (first, second):
        width = math.sqrt(problem.logit_variance) * problem.position_scale
        pooling, copying = prediction(problem).transitions
        unit = problem.noise / (width * math.sqrt(problem.output_variance))
        size = math.sqrt(width / math.sqrt(problem.output_variance))
        scaled.append([pooling.P / unit, copying.P / unit, copying.before.c1 / size, copying.before.cG / size])
    np.testing.assert_allclose(*scaled, rtol=1e-5)  # the crossover is a maximum, known to the root of rounding
