"""Problem: what it refuses and how it says so, round trips, and the two numbers derived from its fields."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhead.problem import PRESETS, Problem, ProblemError

PAPER = {"length": 32, "vocab": 4, "noise": 0.9}
POSITIVE = "a finite number > 0"
LENGTH, VOCAB = "an integer >= 2 and <= 100000", "an integer >= 2 and <= 1e+06"

BAD_FIELDS = [
    ("length", 1, LENGTH),
    ("length", 100_001, LENGTH),
    ("length", 32.5, LENGTH),
    ("length", "many", LENGTH),
    ("length", None, LENGTH),
    ("vocab", 1, VOCAB),
    ("vocab", 1_000_001, VOCAB),
    ("vocab", -4, VOCAB),
    ("noise", 0.0, POSITIVE),
    ("noise", -0.9, POSITIVE),
    ("noise", math.inf, POSITIVE),
    ("noise", math.nan, POSITIVE),
    ("noise", "loud", POSITIVE),
    ("logit_variance", 0.0, POSITIVE),
    ("logit_variance", math.inf, POSITIVE),
    ("output_variance", -1.0, POSITIVE),
    ("output_variance", math.nan, POSITIVE),
    ("chi", 0.0, POSITIVE),
    ("chi", math.inf, POSITIVE),
    ("position_scale", 0.0, POSITIVE),
    ("token_scale", -0.1, "a finite number >= 0"),
    ("token_scale", math.inf, "a finite number >= 0"),
    ("sequences", 0.0, POSITIVE),
    ("sequences", -300.0, POSITIVE),
    ("sequences", math.nan, POSITIVE),
    ("attention", "sigmoid", "one of softmax, linear"),
    ("attention", None, "one of softmax, linear"),
    ("cyclic", "perhaps", "true or false"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD_FIELDS)
def test_a_bad_field_is_named_with_its_value_and_its_range(field, value, allowed):
    with pytest.raises(ProblemError) as caught:
        Problem(**{**PAPER, field: value})
    assert str(caught.value) == f"{field} = {value!r}: must be {allowed}"


@pytest.mark.parametrize("field", ["length", "vocab", "noise"])
def test_a_missing_field_is_named(field):
    fields = {name: value for name, value in PAPER.items() if name != field}
    with pytest.raises(ProblemError, match=rf"^{field}: missing; must be given \("):
        Problem(**fields)


def test_an_unknown_field_is_named_with_the_fields_there_are():
    with pytest.raises(ProblemError) as caught:
        Problem(**PAPER, layers=2)
    assert str(caught.value) == f"layers: no such field; fields are {', '.join(Problem.model_fields)}"


def test_every_bad_field_is_named_at_once():
    with pytest.raises(ProblemError) as caught:
        Problem(length=1, vocab=4, noise=-1.0)
    assert [part.split(" = ")[0] for part in str(caught.value).split("; ")] == ["length", "noise"]


def test_replace_validates_and_leaves_the_original_alone():
    problem = Problem(**PAPER)
    assert problem.replace(length=64).length == 64
    assert problem.length == 32
    with pytest.raises(ProblemError, match=r"^length = 0: must be an integer"):
        problem.replace(length=0)


def test_a_problem_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Problem(**PAPER).noise = 1.0


def test_presets_take_overrides_and_unknown_ones_are_named():
    problem = Problem.preset("paper", length=64)
    assert (problem.length, problem.vocab, problem.noise, problem.chi) == (64, 4, 0.9, 50.0)
    with pytest.raises(ProblemError) as caught:
        Problem.preset("papers")
    assert str(caught.value) == f"preset = 'papers': must be one of {', '.join(sorted(PRESETS))}"


@pytest.mark.parametrize(("cyclic", "scored"), [(True, 32), (False, 31)])
def test_kappa_is_the_noise_times_the_scored_positions(cyclic, scored):
    problem = Problem(**PAPER, cyclic=cyclic)
    assert problem.scored == scored
    assert problem.kappa == scored * 0.9  # exact: the same product


def finite(least: float = 1e-300, **bounds):
    return st.floats(min_value=least, max_value=1e300, **bounds)


problems = st.builds(
    Problem,
    length=st.integers(2, 100_000),
    vocab=st.integers(2, 1_000_000),
    noise=finite(),
    logit_variance=finite(),
    output_variance=finite(),
    chi=finite(),
    position_scale=finite(),
    token_scale=finite(0.0),
    attention=st.sampled_from(["softmax", "linear"]),
    cyclic=st.booleans(),
    sequences=st.none() | finite(),
)


@given(problem=problems)
def test_json_and_toml_give_the_problem_back(problem):
    assert Problem.from_json(problem.to_json()) == problem
    assert Problem.from_toml(problem.to_toml()) == problem
    assert Problem(**json.loads(problem.to_json())) == problem


@pytest.mark.parametrize(("suffix", "write"), [(".json", Problem.to_json), (".toml", Problem.to_toml)])
def test_files_give_the_problem_back(tmp_path: Path, suffix, write):
    problem = Problem(**PAPER, attention="linear", cyclic=False, sequences=300.0)
    path = tmp_path / f"problem{suffix}"
    path.write_text(write(problem), encoding="utf-8")
    assert Problem.from_file(path) == problem
    assert Problem.from_file(str(path)) == problem


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("problem.yaml", "length: 32", "must end in .json or .toml"),
        ("problem.json", "{", "Expecting"),
        ("problem.json", "[32, 4, 0.9]", "must be an object of named fields"),
        ("problem.json", '{"length": 32, "vocab": 4, "noise": NaN}', "noise = nan: must be a finite number > 0"),
        ("problem.toml", "length = ", "Invalid value"),
        ("problem.toml", "length = 32\nvocab = 4\nnoise = 0", "noise = 0: must be a finite number > 0"),
    ],
)
def test_a_bad_file_is_a_problem_error(tmp_path: Path, name, text, message):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProblemError, match=message.replace(".", r"\.")):
        Problem.from_file(path)
