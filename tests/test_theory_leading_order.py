"""Leading-order scales: the formulas with numbers put in by hand, and the exact places that they are the limit of."""

import math

import pytest
from scipy.optimize import minimize_scalar

from copyhead import predict
from copyhead.problem import Problem
from copyhead.theory.leading_order import leading_order

pytestmark = pytest.mark.usefixtures("x64")


def test_formulas_at_numbers_that_are_all_different():
    """L = 9, V = 4, sigma^2 = 0.7, g_W = 2.25, g_O = 4, tau_p = 2, tau_x = 0.8, so sqrt(g_O g_W) = 3."""
    found = leading_order(
        Problem(length=9, vocab=4, noise=0.7, logit_variance=2.25, output_variance=4.0, position_scale=2.0, token_scale=0.8)
    )
    # Eq. 16: 0.7 x 9 x 4 / ((2 + 0.8 x 9/4) x 3)
    assert found.pooling == pytest.approx(25.2 / 11.4, rel=1e-12)
    # Eq. 17: 0.7 x 27 x 2 / (2 x 3)
    assert found.copying_linear == pytest.approx(6.3, rel=1e-12)
    # Eq. 21: 9 / (4 x 2.25 x 4) x 4/3 x 0.7 x ln^2 9
    assert found.copying_softmax == pytest.approx(0.25 * 4 / 3 * 0.7 * math.log(9) ** 2, rel=1e-12)


@pytest.mark.parametrize("token_scale", [0.0, 1.0])
def test_pooling_is_exact_for_many_positions(token_scale):
    """The correction to P_c is of order V / L^2."""
    for length in (50, 500):
        problem = Problem(length=length, vocab=4, noise=0.9, attention="linear", token_scale=token_scale)
        exact = predict(problem).transitions[0].P
        assert exact == pytest.approx(leading_order(problem).pooling, rel=4 / length**2)


def test_upper_fold_is_exact_for_many_positions():
    """S' = 0 with e^cG << sqrt(L) and P >> V L sigma^2: P = (L^2 sigma^2 / g_W) V/(V-1) cG e^(-2 cG), at most at cG = 1/2."""
    errors = []
    for length in (300, 3000, 30_000):
        problem = Problem(length=length, vocab=4, noise=0.9)
        (found,) = predict(problem).transitions
        errors.append(found.window[1] / leading_order(problem).upper_fold - 1)
    assert errors[0] > errors[1] > errors[2] > 0
    # corrections of order V / L and 1 / L: a tenth each time
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.05)
    assert errors[2] < 2e-3


def test_softmax_place_is_a_minimum_over_one_number_without_ridge():
    """g_O -> infinity: what A leaves unexplained is L e^(-2 cG) of the loss, so equal action with cG = 0 is at

        P = (L sigma^2 / (g_W tau_p^2)) V/(V-1) min over c of c^2 (1 + L e^(-2c)),

    up to 1/L. For ln L >> ln ln L the minimum is ln^2 L / 4, Eq. 21.
    """
    for length in (1000, 100_000):
        problem = Problem(length=length, vocab=7, noise=0.6, logit_variance=1.4, position_scale=1.2, output_variance=1e8)
        place = predict(problem).transitions[0].P
        centre = math.log(length) / 2
        least = minimize_scalar(
            lambda c, length=length: c**2 * (1 + length * math.exp(-2 * c)), bounds=(centre, 2 * centre), method="bounded"
        )
        expected = length * 0.6 / (1.4 * 1.2**2) * 7 / 6 * least.fun
        assert place == pytest.approx(expected, rel=1 / length)
        assert leading_order(problem).copying_softmax == pytest.approx(expected * centre**2 / least.fun, rel=1e-12)


@pytest.mark.parametrize("vocab", [4, 100])
def test_softmax_place_approaches_the_leading_order_slowly_from_above(vocab):
    """Corrections are of order ln ln L / ln L, and V / ln^2 L from the ridge."""
    ratios = []
    for length in (32, 1024, 100_000):
        problem = Problem(length=length, vocab=vocab, noise=0.9)
        (found,) = predict(problem).transitions
        ratios.append(found.P / leading_order(problem).copying_softmax)
    assert ratios[0] > ratios[1] > ratios[2] > 1
