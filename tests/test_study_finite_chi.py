"""Theory at finite chi against sampling, small: the table, and precursors on the way to P_c."""

import json
import math

import numpy as np
import pytest

from copyhead.problem import Problem
from copyhead.study import finite_chi
from copyhead.theory.precursors import precursors

pytestmark = pytest.mark.slow

# At this chi the next order of the expansion, relative size some 1/chi, is below the errors of so few draws.
CHI = 200.0
PROBLEM = Problem.preset("paper", length=10, vocab=3, attention="linear", chi=CHI)
FEW = finite_chi.Settings(chains=2, warmup=200, draws=2000, steps=12_000)
# Largest of some ten |z|; their errors are estimates, so more than the normal 3
Z = 5.0


@pytest.fixture(scope="module")
def rows():
    return finite_chi.compare(PROBLEM, (CHI,), FEW)


def test_means_and_deviations_are_those_of_the_theory(rows):
    assert {row.quantity for row in rows} == set(finite_chi.QUANTITIES)
    assert len({row.P for row in rows}) >= 3
    good = [row for row in rows if row.status == "good"]
    assert len(good) >= len(rows) / 2
    for row in good:
        assert row.error > 0
        assert abs(row.z) < Z, row
        assert abs(row.z_deviation) < Z, row


def test_precursors_grow_towards_the_transition_as_in_the_theory():
    (found,) = finite_chi.approach(PROBLEM, CHI, precursors(PROBLEM, farthest=0.4, nearest=0.1, points=4), FEW, points=3)
    assert found.approach.place == "P_c"
    assert set(found.status) == {"mixed"}
    limit = found.approach.susceptibility[np.isin(found.approach.sequences, found.sequences)]
    # far from P_c, where the rounding at finite chi is not felt
    assert abs(found.susceptibility[0] - limit[0]) < Z * found.susceptibility_error[0]
    assert np.all(np.diff(found.susceptibility) > 0)


def test_records_are_json_without_nan(rows):
    study = finite_chi.FiniteChiStudy([*rows[:1], rows[0]._replace(theory=math.nan)], [])
    record = finite_chi.records(study)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["compared"][1]["theory"] is None
    (_, first, _) = finite_chi.text(study).splitlines()
    assert first.split()[:4] == ["linear", f"{CHI:g}", f"{rows[0].P:.1f}", rows[0].branch]
    assert f"{rows[0].mean:.5f} +- {rows[0].error:.5f}" in first
