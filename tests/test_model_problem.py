"""Problem: what it refuses and how it says so, round trips, and the two numbers derived from its fields."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhead.prediction import predict
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


def written(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize("target", ["lag:32", "lags:1=0", "lags:1=1,1=-1", "lags:2=1,40=1"])
def test_lags_are_below_the_length_and_not_all_zero(target):
    with pytest.raises(ProblemError) as caught:
        Problem(**PAPER, target=target).scored  # noqa: B018
    expected = "lags must be >= 0 and < length = 32, with a weight that is not zero"
    assert str(caught.value) == f"target = {target!r}: {expected}"


@pytest.mark.parametrize("target", ["lag", "lag:-1", "lag:1.5", "lags:1", "lags:1=", "matrix:", "lags:1=nan"])
def test_a_target_of_no_known_form_is_named(target):
    with pytest.raises(ProblemError, match=r"^target = "):
        Problem(**PAPER, target=target)


def test_equal_lags_are_added_and_zero_weights_left_out():
    assert Problem(**PAPER, target="lags:3=1,1=2,3=-0.5,4=0").lags == {1: 2.0, 3: 0.5}
    assert Problem(**PAPER, target="lag:7").lags == {7: 1.0}
    assert Problem(**PAPER, cyclic=False, target="lags:3=1,5=1").scored == 29


@pytest.mark.parametrize(
    ("text", "causal", "message"),
    [
        ("0 0\n1 0\n0 1", True, "must be 3 x 3 (length), is (3, 2)"),
        ("0 0 0\n0 0 0\n0 0 0", True, "must not be zero everywhere"),
        ("0 0 1\n1 0 0\n0 1 0", True, "must be zero above the diagonal with causal = True"),
        ("", False, "is empty"),
        (" \n\n", False, "is empty"),
        (b"\0\1\2", False, "is binary; must be text in UTF-8"),
        (b"1 \xff 3", False, "must be text in UTF-8 (byte 2 is not)"),
        ("1 2 3\n1 2\n", False, "line 2: must have 3 numbers, has 2"),
        ("1 2 3\n1 two 3\n", False, "line 2: must be numbers, is '1 two 3'"),
        ("1 2 3\n1 inf 3\n1 2 3", False, "must be a table of finite numbers"),
        ("# nothing\n", False, "must be a table of finite numbers"),
    ],
)
def test_a_target_file_that_does_not_fit_is_named(tmp_path: Path, text, causal, message):
    path = written(tmp_path / "target", text)
    problem = Problem(length=3, vocab=4, noise=0.9, target=f"matrix:{path}", causal=causal, cyclic=not causal)
    with pytest.raises(ProblemError) as caught:
        problem.target_matrix  # noqa: B018
    separator = ", " if message.startswith("line") else ": "
    assert str(caught.value) == f"target file = {path!r}{separator}{message}"


def test_a_target_file_is_read_again_when_it_changes(tmp_path: Path):
    path = tmp_path / "target"
    problem = Problem(
        length=2, vocab=4, noise=0.9, target=f"matrix:{written(path, '0; 1' + chr(10) + '# x' + chr(10) + '1,0')}"
    )
    assert problem.target_matrix.tolist() == [[0, 1], [1, 0]]
    problem.target_matrix[0] = 7  # a copy
    assert problem.target_matrix.tolist() == [[0, 1], [1, 0]]
    written(path, "0 0\n0.25 0")
    assert (problem.target_matrix.tolist(), problem.scored) == ([[0, 0], [0.25, 0]], 1)
    path.unlink()
    with pytest.raises(ProblemError, match="cannot be read"):
        problem.target_matrix  # noqa: B018


@pytest.mark.parametrize("heads", [0, 9, 1.5])
def test_heads_are_one_to_eight(heads):
    with pytest.raises(ProblemError) as caught:
        Problem(**PAPER, heads=heads)
    assert str(caught.value) == f"heads = {heads!r}: must be an integer >= 1 and <= 8"


def test_a_causal_mask_is_open():
    with pytest.raises(ProblemError) as caught:
        Problem(**PAPER, causal=True, cyclic=True)
    assert str(caught.value) == "causal = True: needs cyclic = False, since the last positions are hidden from the first"
    assert Problem.preset("paper", causal=True).cyclic is False
    assert Problem(**PAPER).replace(causal="true").scored == 31


NEW = {"causal": True, "heads": 2, "tokens": "zipf:1", "target": "lag:2"}


@pytest.mark.parametrize("field", NEW)
@pytest.mark.parametrize("other", [{"content": True, "token_scale": 1.0}, {"head_dimension": 8}], ids=str)
def test_attention_that_reads_tokens_and_separate_matrices_are_for_the_paper_only(field, other):
    problem = Problem.preset("paper", **{field: NEW[field]}).replace(**other)
    with pytest.raises(ProblemError) as caught:
        predict(problem)
    assert "\n" not in str(caught.value)
    assert any(part in str(caught.value) for part in ("content = True", "head_dimension = 8", f"{field} = "))


def test_tokens_in_the_logits_need_equal_rows_and_columns(tmp_path: Path):
    with pytest.raises(ProblemError) as caught:
        predict(Problem.preset("paper", causal=True, token_scale=0.5))
    assert str(caught.value) == "token_scale = 0.5: must be 0 where rows or columns of the target differ"
    chain = written(tmp_path / "chain", "0.2 0.8\n0.6 0.4")
    with pytest.raises(ProblemError, match=r"correlated tokens need cyclic = True and a target of lags"):
        predict(Problem.preset("paper", vocab=2, cyclic=False, tokens=f"markov:{chain}"))


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
