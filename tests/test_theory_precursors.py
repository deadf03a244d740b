"""Susceptibility and relaxation on the way to each transition: exponents, amplitudes, and what they are made of."""

from functools import cache

import numpy as np
import pytest

import copyhead
from conftest import Explicit
from copyhead.problem import Problem, ProblemError
from copyhead.report import theory_figures
from copyhead.theory.fluctuations import fluctuations
from copyhead.theory.precursors import precursors
from copyhead.theory.transition import phases

PAPER, LINEAR = Problem.preset("paper"), Problem.preset("paper", attention="linear")


@cache
def approaches(problem: Problem, **distances):
    return precursors(problem, found=phases(problem), **distances)


def test_first_order_transition_gives_no_warning_but_its_folds_do():
    place, upper, lower = approaches(PAPER)
    (transition,) = phases(PAPER).transitions
    assert [one.place for one in (place, upper, lower)] == ["P*", "upper fold", "lower fold"]
    assert [transition.P, *transition.window] == [place.P, lower.P, upper.P]
    assert [one.before for one in (place, upper, lower)] == [True, True, False]
    for one in (place, upper, lower):
        assert one.order_parameter == "cG"
        np.testing.assert_allclose(one.distance, np.geomspace(0.3, 1e-3, 26), rtol=1e-12)
        np.testing.assert_allclose(one.sequences, one.P * (1 - (1 if one.before else -1) * one.distance), rtol=1e-12)
    # to P*, susceptibility and rate hardly move over a decade
    assert abs(place.susceptibility_exponent.value) < 0.02
    assert abs(place.relaxation_exponent.value) < 0.02
    assert place.susceptibility[-1] == pytest.approx(0.072, abs=5e-4)
    for fold, tolerance in ((upper, 0.01), (lower, 0.05)):
        assert fold.susceptibility_exponent.value == pytest.approx(-0.5, abs=tolerance)
        assert fold.relaxation_exponent.value == pytest.approx(0.5, abs=tolerance)
        assert fold.susceptibility_exponent.error < tolerance / 10
    # the difference from 1/2 falls like the square root of the distance
    pairs = [approaches(PAPER, farthest=10 * nearest, nearest=nearest, points=6)[1:] for nearest in (1e-4, 1e-6)]
    for far, near in zip(*pairs, strict=True):
        ratio = (far.susceptibility_exponent.value + 0.5) / (near.susceptibility_exponent.value + 0.5)
        assert ratio == pytest.approx(10, rel=0.15)
        assert near.relaxation_exponent.value == pytest.approx(0.5, abs=2e-3)


def test_second_order_transition_announces_itself():
    below, above = approaches(LINEAR)
    for one, before in ((below, True), (above, False)):
        assert (one.place, one.order_parameter, one.before) == ("P_c", "c1", before)
        assert one.P == phases(LINEAR).transitions[0].P
        assert one.susceptibility_exponent.value == pytest.approx(-1, abs=0.01)
        assert one.relaxation_exponent.value == pytest.approx(1, abs=0.01)
    # Landau: half the susceptibility, and twice the rate, on the ordered side
    assert below.susceptibility[-1] / above.susceptibility[-1] == pytest.approx(2, rel=0.01)
    assert above.relaxation[-1] / below.relaxation[-1] == pytest.approx(2, rel=0.01)


def test_finite_chi_departs_from_the_limit_like_one_over_chi_and_ends_before_the_fold():
    departures = []
    for chi in (1000.0, 2000.0):
        place, further, _ = approaches(PAPER.replace(chi=chi))
        assert place.chi == chi
        assert set(place.status) == {"good"}
        departures.append(
            [np.array([place.finite_susceptibility, place.finite_relaxation]) - [place.susceptibility, place.relaxation]]
        )
    np.testing.assert_allclose(np.divide(*departures), 2, rtol=0.05)
    # the branch is lost the earlier, the smaller chi is; what is left is nan
    _, upper, _ = approaches(PAPER)
    lost = np.array([status == "no minimum" for status in upper.status])
    assert 0 < lost.sum() < len(lost)
    assert lost[-lost.sum() :].all()
    for values in (upper.mean, upper.finite_susceptibility, upper.finite_relaxation):
        np.testing.assert_array_equal(np.isnan(values), lost)
    assert np.isfinite([upper.susceptibility, upper.relaxation]).all()
    assert lost.sum() > further.status.count("no minimum")
    # on the way out it softens, more than for chi -> infinity
    assert (upper.finite_susceptibility[~lost] / upper.susceptibility[~lost])[-1] > 1.5
    assert (upper.finite_relaxation[~lost] / upper.relaxation[~lost])[-1] < 0.7


def test_susceptibility_is_the_curvature_of_the_explicit_action():
    _, upper, _ = approaches(PAPER)
    explicit = Explicit.of(PAPER)
    for index in (0, -1):
        P = upper.sequences[index]
        state = min(phases(PAPER).minima(P), key=lambda m: float(m.order_parameters.cG)).order_parameters
        slopes = [explicit.softmax_slope(float(state.cG) + step, P) for step in (1e-4, -1e-4)]
        assert upper.susceptibility[index] == pytest.approx(2e-4 / (slopes[0] - slopes[1]), rel=1e-4)


@pytest.mark.parametrize("chi", [50.0, 400.0])
def test_with_fast_output_the_rate_is_the_inverse_susceptibility(chi):
    """Then cG relaxes in its own free energy, with Gamma'' or S'' as its stiffness; a unit of cG is 992/32 of a unit matrix."""
    found = phases(PAPER)
    for one in fluctuations(PAPER.replace(chi=chi), 305.0, found, mobility=(1.0, 1e9)):
        unit = (PAPER.length - 1) * PAPER.scored / PAPER.length
        assert one.saddle_relaxation * one.susceptibility[1, 1] == pytest.approx(1 / unit, rel=1e-6)
        assert one.relaxation * chi * one.covariance[1, 1] == pytest.approx(1 / unit, rel=1e-6)


def test_figure_of_precursors():
    found = copyhead.predict(PAPER, finite_chi=True).finite_chi
    figure = found.plot()
    assert len(figure.axes) == 2
    both = theory_figures.precursors([*approaches(PAPER), *approaches(LINEAR)])
    labels = [text.get_text() for text in both.axes[0].get_legend().get_texts()]
    assert labels[1] == "$c_G$ to upper fold: -0.494"
    assert len(labels) == 5


def test_a_crossover_has_no_precursors_and_other_networks_are_refused():
    assert precursors(PAPER.replace(length=12)) == ()
    with pytest.raises(ProblemError, match="content"):
        precursors(PAPER.replace(content=True, token_scale=1.0))
    with pytest.raises(ProblemError, match=r"nearest = 0\.5, farthest = 0\.3"):
        precursors(PAPER, nearest=0.5)
