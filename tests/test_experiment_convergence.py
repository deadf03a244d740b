"""The verdict on chains: what a naive R-hat calls converged, it calls metastable."""

import numpy as np
import pytest
from arviz_stats.base.array import array_stats

from copyhead.experiment.convergence import ESS_GATE, RHAT_GATE, judge, summary

DRAWS = 1000


def chains(count: int, mean: float = 0.0, memory: float = 0.0, seed: int = 0) -> np.ndarray:
    """Autoregressive chains of variance one; their ESS is draws (1 - memory) / (1 + memory)."""
    random = np.random.default_rng(seed)
    found = np.empty((count, DRAWS))
    state = random.normal(size=count)
    for draw in range(DRAWS):
        state = memory * state + np.sqrt(1 - memory**2) * random.normal(size=count)
        found[:, draw] = mean + state
    return found


def both(small: np.ndarray, copy: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    return {"small": {"cG": small}, "copy": {"cG": copy}}


def test_chains_of_one_distribution_are_mixed_and_joined():
    found = judge(both(chains(4, seed=1), chains(4, seed=2)))
    assert found.verdict == "mixed"
    assert list(found.branches) == ["all"]
    assert abs(found.branches["all"]["cG"].mean) < 4 * found.branches["all"]["cG"].error


def test_two_branches_are_metastable_though_each_start_alone_looks_converged():
    small, copy = chains(4, seed=1), chains(4, mean=30.0, seed=2)
    assert all(float(array_stats.rhat(one, chain_axis=0, draw_axis=1)) < RHAT_GATE for one in (small, copy))
    found = judge(both(small, copy))
    assert found.verdict == "metastable"
    assert [round(found.branches[start]["cG"].mean) for start in ("small", "copy")] == [0, 30]  # never averaged
    assert found.between["cG"] > 1.5
    assert "cG" in found.reason


def test_chains_that_left_their_branch_are_counted_and_not_averaged():
    copy = chains(4, mean=30.0, seed=2)
    copy[:2, 100:] -= 30.0
    found = judge(both(chains(4, seed=1), copy))
    assert found.verdict == "not converged"
    assert "2 of 4 chains from the copy start have left" in found.reason


def test_short_or_slow_chains_are_not_converged():
    found = judge(both(chains(2, memory=0.99, seed=1), chains(2, memory=0.99, seed=2)))
    assert found.verdict == "not converged"
    assert f"at least {ESS_GATE:g}" in found.reason


@pytest.mark.parametrize("spoiled", [np.nan, 0.0])
def test_a_chain_that_is_lost_or_never_moved_is_no_evidence(spoiled):
    """A frozen chain has no within-chain variance: R-hat and ESS computed from it would be meaningless, or perfect."""
    draws = chains(4, seed=1)
    draws[0] = spoiled
    assert not summary(draws).passed
    assert judge(both(draws, chains(4, seed=2))).verdict == "not converged"


def test_error_and_effective_size_of_a_known_process():
    """ESS of a first-order autoregression: N (1 - m) / (1 + m) = 8000 / 3 at m = 1/2; 10% for the estimate of ESS itself."""
    found = summary(chains(8, memory=0.5, seed=3))
    assert found.bulk == pytest.approx(8 * DRAWS / 3, rel=0.1)
    assert found.error == pytest.approx(found.deviation / np.sqrt(found.bulk), rel=0.1)
    assert found.passed
