"""Adam ends at the exact minimum of the action on the same data set."""

import numpy as np
import pytest

from copyhead.experiment.adam import AdamSettings, train
from copyhead.experiment.cells import assemble, data_sets
from copyhead.experiment.packed import PackedPath
from copyhead.model import moments, tokens
from copyhead.problem import Problem
from copyhead.theory.action import full_task
from copyhead.theory.full_matrix import measure, minimise


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("start", ["small", "copy"])
def test_adam_finds_the_minimum_of_the_closed_form_action(attention, start):
    """Two codes that share nothing above model/: trained (G, W), and the minimum over G with W marginalised."""
    problem = Problem(length=12, vocab=3, noise=0.8, attention=attention)
    path = PackedPath(problem)
    trained = train(assemble(path, [(300, 0, start, 1.0)]), path, AdamSettings(4000, 0.03))
    assert trained.converged.all()
    task = full_task(problem, moments.empirical(data_sets(problem, [300], 0)[0], problem.vocab))
    exact = minimise(task, trained.weights.logits[0].astype(float), attention)
    assert exact.converged
    # the minimum is quadratic: gradients below 1e-3 with curvature of order one leave logits within 1e-3
    assert np.abs(trained.weights.logits[0] - exact.logits).max() < 1e-3
    population = moments.population(tokens.uniform(problem.vocab))
    assert measure(exact.logits, task, population, attention).cG > 1.0  # P = 300 is above the transition: a copy head


def test_weights_return_to_zero_when_the_data_are_too_few():
    problem = Problem(length=12, vocab=3, noise=0.8, attention="linear")
    path = PackedPath(problem)
    trained = train(assemble(path, [(5, 0, "small", 1.0)]), path, AdamSettings(1500, 0.03))
    # P_c = 27 here: G = W = 0 is the only minimum, which decoupled or missing L2 terms would not give
    assert max(np.abs(part).max() for part in trained.weights) < 1e-4


def test_chunks_and_repetition_give_the_same_weights():
    problem = Problem(length=8, vocab=3, noise=0.9)
    path = PackedPath(problem)
    cells = assemble(path, [(60, seed, "small", 1.0) for seed in range(5)])
    first, again, other = (train(cells, path, AdamSettings(200), chunk=chunk) for chunk in (2, 2, 4))
    assert np.array_equal(first.weights.logits, again.weights.logits)
    assert np.allclose(first.weights.logits, other.weights.logits, atol=1e-5)  # float32, other order of sums


def test_a_short_run_is_reported_as_not_converged():
    problem = Problem(length=8, vocab=3, noise=0.9)
    path = PackedPath(problem)
    trained = train(assemble(path, [(200, 0, "copy", 1.0)]), path, AdamSettings(100, 0.001))
    assert not trained.converged.any()
