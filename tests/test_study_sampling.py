"""copyhead sample: data, samplers, theory beside, files."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from copyhead.problem import Problem, ProblemError
from copyhead.study.sampling import SamplingSettings, data_for, sample, save, sector

# So small that a sampler compiles and runs in seconds; a crossover, with one branch.
SMALL = Problem.preset("paper", length=6, vocab=3, chi=20.0, sequences=40)
QUICK = {"chains": 2, "warmup": 200, "draws": 400}
# |difference| in errors that a comparison of one mean allows; false alarms 6e-5 each
Z = 4.0


@pytest.fixture(scope="module")
def exact():
    return sample(SMALL, SamplingSettings(chains=4, warmup=200, draws=1000))


def test_both_starts_mix_where_there_is_one_branch(exact):
    assert exact.convergence.verdict == "mixed", exact.convergence.reason
    record = exact.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert "mixed" in str(exact)


@pytest.mark.parametrize(
    ("sampler", "more"),
    [
        ("mala", {"thin": 20}),
        ("sgld", {"thin": 20}),
        ("nuts", {"target": "joint", "draws": 300}),
        ("blackjax-hmc", {"target": "collapsed", "draws": 1500}),
    ],
)
def test_every_sampler_agrees_with_the_default_one(exact, sampler, more):
    """Also SGLD: its step of 0.03 shifts variances by some percent, and means by less than these errors."""
    other = sample(SMALL, SamplingSettings(sampler=sampler, **{**QUICK, **more}))
    for quantity in ("cG", "aG"):
        first, second = (
            next(iter(found.convergence.branches.values()))[quantity] if found is exact else _whole(found, quantity)
            for found in (exact, other)
        )
        assert second.bulk > 100  # it must have mixed for the comparison to mean anything
        assert second.rhat < 1.05
        assert abs(first.mean - second.mean) < Z * math.hypot(first.error, second.error)


def _whole(found, quantity):
    from copyhead.experiment.convergence import summary

    return summary(found.draws["posterior"].dataset[quantity].values)


def test_draws_are_arviz_data_readable_without_this_package(exact, tmp_path):
    save(exact, tmp_path / "draws.nc")
    assert [path.name for path in tmp_path.iterdir()] == ["draws.nc"]
    tree = xr.open_datatree(tmp_path / "draws.nc", engine="h5netcdf")
    posterior = tree["posterior"].dataset
    assert posterior.sizes == {"chain": 8, "draw": 1000}
    assert set(posterior.start.values) == {"small", "copy"}
    assert Problem.from_json(posterior.attrs["problem"]) == SMALL
    assert posterior.aG.attrs["long_name"]
    assert float(tree["sample_stats"].dataset.acceptance_rate.mean()) > 0.5


def test_equal_settings_give_equal_draws():
    one, two = (sample(SMALL, SamplingSettings(**QUICK)).draws["posterior"].dataset for _ in range(2))
    xr.testing.assert_equal(one, two)


def test_data_sets_are_prefixes_and_expected_moments_take_fractions():
    short, longer = (data_for(SMALL.replace(sequences=count), 3, False) for count in (10, 11))
    added = np.asarray(longer.tensor) - np.asarray(short.tensor)
    assert added.sum() == 6**2  # one more sequence: one pair of tokens for each pair of positions
    assert float(np.asarray(data_for(SMALL.replace(sequences=10.5), 0, True).tensor).sum()) == pytest.approx(
        10.5 * 36, rel=1e-6
    )


@pytest.mark.parametrize(
    ("problem", "settings", "words"),
    [
        (SMALL.replace(sequences=None), {}, "sequences = None: must be given"),
        (SMALL.replace(sequences=10.5), {}, "sequences = 10.5: must be an integer"),
        (SMALL, {"target": "joint"}, "target = 'joint': hmc has the collapsed posterior"),
        (SMALL.replace(head_dimension=4), {}, "head_dimension = 4"),
        (SMALL.replace(chi=1e7), {}, "chi = 1e+07: must be <= "),
        (SMALL.replace(vocab=1000), {}, "vocab = 1000: needs 4e+03 GB, which must be below 1.5 GB"),
        (SMALL.replace(sequences=1e9, chi=1e-4), {}, "sequences = 1e+09, length = 6"),
    ],
)
def test_bad_input_names_field_value_and_range(problem, settings, words):
    with pytest.raises(ProblemError, match=words.replace("(", r"\(").replace("+", r"\+")):
        sample(problem, SamplingSettings(**{**QUICK, **settings}))


def test_repeats_must_be_even():
    with pytest.raises(ProblemError, match="repeats = 5"):
        SamplingSettings(repeats=5)


def test_a_chain_that_has_not_chosen_a_sector_is_not_turned():
    """Turning every chain by the sign of its mean would give symmetric noise a positive mean."""
    random = np.random.default_rng(0)
    undecided, turned = random.normal(size=(20, 400)), random.normal(size=(2, 400)) - 3
    assert sector(np.concatenate([undecided, turned])).tolist() == [1.0] * 20 + [-1.0] * 2
