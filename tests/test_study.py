"""Grids and blocks of the reproduction, branches, comparison."""

import numpy as np
import pytest
import xarray as xr

from copyhead.experiment.adam import NEVER
from copyhead.experiment.diagnostics import NOTHING, Estimate
from copyhead.problem import Problem, ProblemError
from copyhead.study.branch import branch_state
from copyhead.study.cell import groups
from copyhead.study.compare import _paired, agreement, extrapolated, to_csv
from copyhead.study.curves import Curves, kept
from copyhead.study.jump import jumps
from copyhead.study.places import _branch_change
from copyhead.study.scaling import scaling
from copyhead.study.spec import QUICK, Reproduction, p_grid, study
from copyhead.study.study_file import Jump, parse
from copyhead.theory.transition import phases


def test_grid_covers_the_transitions():
    for attention in ("softmax", "linear"):
        found = phases(Problem.preset("paper", attention=attention))
        grid = p_grid(found, 18)
        assert grid == sorted(set(grid))
        places = [place for t in found.transitions for place in (t.window or (t.P,))]
        for place in places:
            near = [p for p in grid if 0.9 * place <= p <= 1.35 * place]
            assert any(p < place for p in near)
            assert any(p > place for p in near)


def test_blocks_cover_all_seeds_and_differ():
    spec = Reproduction(**QUICK, attentions=("softmax",))
    asked, blocks = study(spec)
    assert asked.blocks == tuple(blocks.values())
    assert blocks["adam-softmax"].seeds == tuple(range(spec.seeds))
    assert len(set(map(repr, asked.blocks))) == len(blocks)
    names = [cell.identity for _, cells in groups(asked.blocks) for cell in cells]
    assert len(names) == asked.planned
    # the loss maps have the preset's own sizes among theirs, and other numbers of steps
    assert len(set(names)) == len(names)


def test_the_reproduction_is_a_study_file():
    """The study that is shown and kept is the one that is run: the same blocks, and the same cells, are read from its text."""
    asked, _ = study(Reproduction(**QUICK))
    again = parse(asked.to_toml())
    assert again == asked
    assert [cells for _, cells in groups(again.blocks)] == [cells for _, cells in groups(asked.blocks)]


def test_settings_are_validated():
    with pytest.raises(ProblemError, match="seeds = 1: must be an integer >= 2 and <= 1000"):
        Reproduction(seeds=1)
    with pytest.raises(ProblemError, match="ascending"):
        Reproduction(grid=(100, 200, 200, 300))
    with pytest.raises(ProblemError, match="attentions"):
        Reproduction(attentions=("hard",))


def test_branch_of_a_start():
    found = phases(Problem.preset("paper"))
    inside = [float(branch_state(found, 300, start).order_parameters.cG) for start in ("small", "copy")]
    assert inside[0] < 0.5 < 1.5 < inside[1]
    outside = [branch_state(found, 400, start).order_parameters for start in ("small", "copy")]
    assert outside[0] == outside[1]
    # the metastable branch of opposite c1 in linear attention is nobody's branch
    linear = phases(Problem.preset("paper", attention="linear"))
    assert len(linear.minima(1000)) == 2
    assert float(branch_state(linear, 1000, "small").order_parameters.c1) > 0


def test_extrapolation_removes_a_shift_of_order_one_over_chi():
    low, high = (Estimate(2.0 - 3.0 / chi, 0.0, 0.01, 50.0, 1.0, 8) for chi in (50.0, 150.0))
    limit = extrapolated(low, high, 3.0)
    assert limit.mean == pytest.approx(2.0)
    assert limit.error == pytest.approx(0.01 * np.hypot(1.5, 0.5))


def test_agreement_counts_points_not_quantities():
    row = {"attention": "softmax", "start": "small", "in_window": False, "separate": False, "adam_z_paired": 0.0}
    row |= {"adam_converged": 1.0, "adam_worst": 0.1}
    rows = [
        row | {"P": 100, "adam_z": 1.0},
        row | {"P": 100, "adam_z": 4.0},
        row | {"P": 200, "adam_z": -2.0},
        row | {"P": 300, "adam_z": 9.0, "in_window": True},
        row | {"P": 400, "adam_z": float("nan")},
        row | {"P": 500, "adam_z": 0.0, "adam_converged": 0.5},
    ]
    adam = agreement(rows)[0]
    # a point without a number does not agree; one that had not converged neither agrees nor disagrees
    assert (adam.agree, adam.points, adam.gated) == (1, 3, 1)


def test_a_run_on_another_branch_does_not_hide_in_the_error_that_it_enlarges():
    """Three data sets agree, the fourth is far off: the mean is within three of its standard errors, and yet no agreement."""
    differences = np.array([1e-5, -1e-5, 2e-5, 1.0])
    z = _paired(differences, np.zeros(4), 1e-4)
    assert abs(z) < 3
    row = {"attention": "linear", "start": "small", "in_window": False, "separate": False, "P": 100, "adam_converged": 1.0}
    row |= {"adam_z": z, "adam_z_paired": z}
    for worst, agree in ((100.0, 0), (0.01, 1)):
        found = [a for a in agreement([row | {"adam_worst": worst}]) if a.method == "Adam"]
        assert [(a.agree, a.points) for a in found] == [(agree, 1)] * 2


def test_a_run_that_diverged_is_left_out_of_every_estimate():
    """The second data set is lost: its value, finite but far off, must not enter, and the count of data sets says so."""
    values = np.array([[[1.0], [1e5], [3.0]]])
    lost = np.array([[[NEVER], [40], [NEVER]]])
    dims = ("P", "seed", "start")
    data = xr.Dataset({"cG": (dims, values), "diverged": (dims, lost)}, {"P": [100], "seed": [0, 1, 2], "start": ["small"]})
    curves = Curves(kept(data))
    estimate = curves.estimate("cG", 100, "small")
    assert (estimate.mean, estimate.n) == (2.0, 2)
    np.testing.assert_array_equal(curves.values("cG", 100, "small"), [1.0, np.nan, 3.0])
    # paired differences 0.1 and 0.3: mean 0.2, standard error 0.1
    assert _paired(curves.values("cG", 100, "small"), np.array([0.9, 2.0, 2.7]), 1e-6) == pytest.approx(2.0)


def test_adam_is_not_judged_on_separate_query_and_key_matrices():
    row = {"attention": "softmax", "start": "small", "in_window": False, "P": 100, "adam_z": 9.0, "adam_z_paired": 9.0}
    found = agreement([row | {"adam_converged": 1.0, "separate": True}])
    assert all(a.points == 0 for a in found)


def test_paired_differences_see_what_scatter_hides():
    exact = np.array([1.0, 2.0, 3.0, 4.0])
    shifted = exact + 0.1 + 0.01 * np.array([1, -1, 1, -1])
    assert _paired(shifted, exact, 1e-6) == pytest.approx(0.1 / (0.01 / np.sqrt(3)))
    assert _paired(exact + 1e-5, exact, 1e-4) == pytest.approx(0.1)  # below what an optimiser resolves


def chains(levels: list[list[float]]) -> xr.Dataset:
    values = np.array(levels)[:, :, None, None] * np.ones((1, 1, 1, 3))
    coords = {"P": [100, 200, 300, 400], "start": ["small"]}
    return xr.Dataset({"aG": (("seed", "P", "start", "draw"), values)}, coords=coords)


def test_branch_change_of_chains():
    found = _branch_change(chains([[0.01, 0.01, 0.2, 0.2], [0.01, 0.2, 0.2, 0.2]]), "small")
    assert found.mean == 200
    assert found.error >= 50 / np.sqrt(3)  # never better than the grid
    for nothing in ([[0.2] * 4] * 2, [[0.01, 0.2, 0.01, 0.2]] * 2, [[0.01, 0.01, np.nan, 0.2]] * 2):
        assert _branch_change(chains(nothing), "small") is NOTHING


def test_both_kinds_of_attention_may_jump():
    # linear attention is first-order too at these sizes
    _, blocks = study(Reproduction(problem=Problem(length=84, vocab=2, noise=0.9, token_scale=1.0), **QUICK))
    assert [name for name, block in blocks.items() if isinstance(block.method, Jump)] == ["jump-softmax", "jump-linear"]


def test_jumps_of_known_curves():
    """Two branches that grow: at its end one may be below the mean of what the bracket's ends have. The third has no jump."""

    def train(wanted):
        index, place = np.array(wanted).T
        copying = 0.1 + 0.15 * np.sqrt(np.maximum(place - 137, 0) / 263)
        curves = [np.where(place >= 137, copying, 3e-5 * place), np.where(place >= 311, copying, 3e-5 * place), 6e-4 * place]
        return np.choose(index, curves), np.full(len(wanted), NEVER)

    found = jumps((100, 400), 3, 5, train)
    np.testing.assert_array_equal(found.low, [136, 310, np.nan])
    np.testing.assert_array_equal(found.high, [137, 311, np.nan])
    assert (found.diverged == NEVER).all()
    # noise around zero is no jump, and of a run that was lost nothing is said
    noise = np.random.default_rng(0)

    def noisy(wanted):
        return noise.normal(0, 1e-3, len(wanted)) + [place >= 399 for _, place in wanted], np.full(len(wanted), NEVER)

    assert jumps((100, 400), 1, 5, noisy).high[0] == 399

    def lost(wanted):
        return train(wanted)[0], np.array([7 if place > 150 else NEVER for _, place in wanted])

    found = jumps((100, 400), 1, 5, lost)
    assert np.isnan(found.low[0])
    assert found.diverged[0] == 7


def test_scaling_exponents_of_known_powers():
    found = scaling(Problem.preset("paper"), (24, 48, 96))
    assert found.exponent("Eq. 17")[1] == pytest.approx([1.5, 1.5])
    assert found.exponent("fold scale")[1] == pytest.approx([2.0, 2.0])
    assert np.all(found.places["lower fold"] < found.places["P*"])
    assert np.all(found.places["P*"] < found.places["upper fold"])


def test_upper_fold_approaches_its_scale():
    found = scaling(Problem.preset("paper"), (256, 1024, 4096))
    ratio = found.places["upper fold"] / found.places["fold scale"]
    assert np.all(np.abs(np.diff(np.abs(ratio - 1))) > 0)
    assert abs(ratio[-1] - 1) < abs(ratio[0] - 1)
    assert ratio[-1] == pytest.approx(1, abs=0.02)  # corrections are of relative order 1 / L and r / P


def test_csv_has_the_union_of_columns():
    assert to_csv([{"a": 1}, {"a": 2, "b": 3}]).splitlines() == ["a,b", "1,", "2,3"]
