"""Training time: gradient descent and Adam beside the flow, small; the recorder; numbers, figure and errors."""

import json

import numpy as np
import pytest

from copyhead.experiment import adam, recorded
from copyhead.experiment.adam import AdamSettings
from copyhead.experiment.cells import assemble, data_sets
from copyhead.experiment.observables import Observables
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.recorded import DescentSettings, Recorded
from copyhead.model import targets
from copyhead.problem import Problem, ProblemError
from copyhead.report.style import save
from copyhead.report.training_figures import training_times
from copyhead.study import training
from copyhead.study.training_record import TrainingSettings
from copyhead.theory.flow import Levels

pytestmark = pytest.mark.slow

# folds at 170.5 and 180.3
PROBLEM = Problem(length=22, vocab=4, noise=0.9)


@pytest.fixture(scope="module")
def found():
    fewer = {
        "ADAM": AdamSettings(1000, 0.03),
        "POINTS": 4,
        "SCALES": (1e-3, 0.1),
        "FRACTIONS": (0.1, 0.2, 0.4),
        "DISTANCES": np.array([1e-2, 1e-3]),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fewer.items():
            patch.setattr(training, name, value)
        return training.study(PROBLEM, TrainingSettings(seeds=8, grid=(150, 175, 220)))


def by_sequences(found, sequences):
    return next(place for place in found.places if sequences == place.P)


def test_both_starts_jump_outside_the_folds_and_stay_between_them(found):
    assert [(place.P, place.start, place.theory.status) for place in found.places] == [
        (150, "copy", "jumped"),
        (175, "small", "stays"),
        (220, "small", "jumped"),
    ]
    assert by_sequences(found, 175).data.jumped == 0
    assert [one.start for one in found.slowing] == ["small", "copy"]


def test_gradient_descent_on_population_moments_is_the_flow_within_two_percent(found):
    for place in found.places:
        assert max(place.deviation.values()) < 0.02
        if place.theory.status == "jumped":
            assert place.population == pytest.approx(place.theory.time, rel=0.01)
    # eta is a small part of the limit by default, and the error is of first order: it grows with eta over the sweep
    assert np.all(np.diff(found.rates.deviation) > 0)
    assert found.rates.deviation[-1] / found.rates.deviation[-3] == pytest.approx(4, rel=0.3)
    assert found.scales.population == pytest.approx(found.scales.theory, rel=0.01)


def test_data_sets_jump_at_the_time_of_the_flow_from_their_own_starts(found):
    for place in found.places:
        if place.theory.status != "jumped":
            continue
        assert place.data.jumped == place.paired.jumped == 8
        # eight data sets give their own error to 25%, and the bias of finite P is of the order of that error
        assert abs(place.z) < 5
        assert place.data.mean == pytest.approx(place.theory.time, rel=0.15)
        assert np.isfinite(place.adam.mean)
        assert place.data.error == pytest.approx(place.data.scatter / np.sqrt(8))


def test_numbers_are_json_without_nan_and_the_figure_is_drawn(found, tmp_path):
    record = found.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    stays = next(place for place in record["places"] if place["P"] == 175)
    assert stays["theory"]["time"] is None
    assert stays["z"] is None
    assert len(record["curves"]["data"]["aG"]) == 8
    lines = str(found).splitlines()
    assert lines[2].split()[:3] == ["150", "copy", "jumped"]
    save(training_times(found), tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_recorded_gradient_descent_is_the_rule_of_gradient_descent(quick):
    problem = Problem(length=8, vocab=3, noise=0.9)
    path = PackedPath(problem)
    data = path.collect(data_sets(problem, [60], 0) + data_sets(problem, [60], 1))
    start = recorded.small_starts(problem, 0.1, [0, 1])
    seen = recorded.train(problem, start, data, DescentSettings(0.02), np.array([0, 1, 5]))
    weights, packed = path.prepare(start, data, None)
    target = targets.shift(8, cyclic=True).T  # the logits of the loop are transposed
    for step in range(5):
        if step < 2:
            logits = np.asarray(weights.logits)
            on, off = np.sum(target * logits, axis=(1, 2)) / 8, np.sum((1 - target) * logits, axis=(1, 2)) / 56
            assert seen.observables.cG[:, step] == pytest.approx(on - off, abs=1e-6)
        weights = type(weights)(*(w - 0.02 * s for w, s in zip(weights, path.slope(weights, packed, None), strict=True)))
    assert seen.observables.overlap[:, -1] == pytest.approx(np.trace(weights.output, axis1=1, axis2=2) / 3, abs=1e-5)
    assert seen.finite.all()


def test_recorded_adam_ends_where_adam_ends(quick):
    problem = Problem(length=8, vocab=3, noise=0.9)
    path, settings = PackedPath(problem), AdamSettings(300, 0.03)
    cells = assemble(path, [(200, seed, "small", 1.0) for seed in (0, 1)])
    end = adam.train(cells, path, settings).weights
    seen = recorded.train(problem, cells.start, cells.data, settings, np.array([0, 7, 300]))
    # float32, other order of operations
    assert seen.observables.overlap[:, -1] == pytest.approx(np.trace(end.output, axis1=1, axis2=2) / 3, abs=1e-4)


def test_small_starts_are_those_of_the_network_at_its_scale():
    problem = Problem(length=8, vocab=3, noise=0.9)
    begin = assemble(PackedPath(problem), [(20, 3, "small", 1.0)]).start
    for ours, theirs in zip(recorded.small_starts(problem, 0.01, [3]), begin, strict=True):
        assert np.array_equal(ours, theirs)


def test_an_unstable_rate_shows_as_not_finite(quick):
    problem = Problem(length=8, vocab=3, noise=0.9)
    data = PackedPath(problem).collect(data_sets(problem, [60], 0))
    seen = recorded.train(problem, recorded.small_starts(problem, 0.1, [0]), data, DescentSettings(1.0), np.array([0, 100]))
    assert not seen.finite[0]
    assert np.isnan(training.jump_times(seen, Levels("small", 0.0, 0.5, np.nan)))
    with pytest.raises(ValueError, match="must increase from zero"):
        recorded.train(problem, recorded.small_starts(problem, 0.1, [0]), data, DescentSettings(1.0), np.array([5, 5]))


def test_time_of_a_jump_lies_where_aG_passes_the_middle():
    aG = np.array([[0.0, 0.1, 0.3, 0.5], [0.0, 0.0, 0.1, 0.1], [0.0, -0.1, -0.3, -0.5]])
    nothing = np.zeros_like(aG)
    seen = Recorded(
        np.array([0, 10, 20, 40]), Observables(*(aG if n == "aG" else nothing for n in Observables._fields)), [True] * 3
    )
    # halfway from 0 to 0.4 is passed in the middle of the second stretch; a mirror image counts, a run below does not
    assert training.jump_times(seen, Levels("small", 0.0, 0.4, np.nan)) == pytest.approx([15, np.nan, 15], nan_ok=True)
    fallen = seen._replace(observables=seen.observables._replace(aG=0.5 - aG))
    assert training.jump_times(fallen, Levels("copy", 0.5, 0.1, np.nan))[0] == pytest.approx(15)


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"sequences": 300.5}, {}, "sequences = 300.5: must be an integer >= 1"),
        ({"token_scale": 1.0}, {}, "token_scale = 1: training time is known"),
        ({"heads": 2}, {}, "heads = 2: training time is known"),
        (
            {"sequences": 260.0},
            {"rate": 0.5, "grid": (260,)},
            "rate = 0.5: must be below 0.027.* at P = 260, the stability limit",
        ),
        ({"sequences": 260.0}, {"rate": 1e-9, "grid": (260,)}, "rate = 1e-09: must be at least .* at P = 260"),
        ({"length": 50_000}, {}, "GB, which must be below"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(fields, settings, message):
    with pytest.raises(ProblemError, match=message):
        training.study(PROBLEM.replace(**fields), TrainingSettings(**settings))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 1}, "seeds = 1: must be an integer >= 2 and <= 1000"),
        ({"scale": 0}, "scale = 0: must be a finite number > 0 and <= 1"),
        ({"rate": -0.1}, "rate = -0.1: must be a finite number > 0"),
        ({"steps": 10}, "steps = 10: must be an integer >= 400"),
    ],
)
def test_settings_name_field_value_and_range(fields, message):
    with pytest.raises(ProblemError) as caught:
        TrainingSettings(**fields)
    assert message in str(caught.value)
