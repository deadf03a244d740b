"""Study files, cells and their identities, batches: what is planned, before anything runs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhead.problem import Problem, ProblemError
from copyhead.study.batch import MOST, Batch, Needs, batches, measured, shape_of
from copyhead.study.cell import EXPECTED, Cell, groups
from copyhead.study.study_file import Adam, Exact, Theory, line_of, parse, read

TEXT = """title = "a study"
seeds = 3
starts = ["small"]

[problem]
attention = "linear"

[grid]
length = [8, 12]
sequences = { geometric = [10, 1000, 5] }

[[method]]
kind = "theory"

[[method]]
kind = "adam"
steps = 200
"""


def test_a_study_file_gives_its_problems_methods_and_cells():
    study = parse(TEXT)
    assert study.title == "a study"
    assert study.problem == Problem.preset("paper", attention="linear")
    assert study.grid == {"length": (8, 12), "sequences": (10, 32, 100, 316, 1000)}
    assert study.methods == (Theory(), Adam(steps=200))
    assert study.seeds == (0, 1, 2)
    found = list(groups(study))
    assert [(group.problem.length, group.method.kind) for group, _ in found] == [
        (8, "theory"),
        (12, "theory"),
        (8, "adam"),
        (12, "adam"),
    ]
    assert [len(cells) for _, cells in found] == [5, 5, 15, 15]
    assert sum(len(cells) for _, cells in found) == study.planned
    assert {cell.seed for _, cells in found[:2] for cell in cells} == {EXPECTED}


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("[5, 7]", (5, 7)),
        ("{ range = [10, 30, 10] }", (10, 20, 30)),
        ("{ range = [10, 35, 10] }", (10, 20, 30)),
        ("{ geometric = [1, 4, 9] }", (1, 2, 3, 4)),  # whole numbers, each once
    ],
)
def test_axes_of_whole_numbers(given, values):
    assert parse(TEXT.replace("{ geometric = [10, 1000, 5] }", given)).sequences == values


def test_axes_of_other_fields():
    study = parse(TEXT.replace("length = [8, 12]", 'noise = { range = [0.1, 0.7, 0.2] }\nattention = ["softmax", "linear"]'))
    assert study.grid["noise"] == pytest.approx((0.1, 0.3, 0.5, 0.7))
    assert {problem.attention for problem in study.problems()} == {"softmax", "linear"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seeds = 3", "seeds = 0", "study, line 2: seeds: 0: must be a number >= 1 of data sets"),
        ("seeds = 3", "seeds = [1, 1]", r"study, line 2: seeds: \[1, 1\]: must be"),
        ('["small"]', '["big"]', "study, line 3: starts: starts = 'big'|study, line 3: starts: starts = "),
        ('"linear"', '"cubic"', "study, line 6: problem.attention: attention = 'cubic': must be one of softmax, linear"),
        ("attention =", "attenton =", "study, line 6: problem.attenton: attenton: no such field"),
        ("length = [8, 12]", "length = [8, 1]", "study, line 9: grid.length: length = 1: must be an integer >= 2"),
        ("length =", "lenth =", "study, line 9: grid.lenth: no such field; fields are length, vocab"),
        ("[8, 12]", "[]", r"study, line 9: grid.length: \[\]: must be a list, \{ range"),
        ("[8, 12]", "[8, 8]", "study, line 9: grid.length: .*must not repeat"),
        ("[10, 1000, 5]", "[0, 1000, 5]", "study, line 10: grid.sequences: .*must have 0 < first < last"),
        ("geometric", "logarithmic", "study, line 10: grid.sequences: .*must be { range"),
        ("[10, 1000, 5]", "[10, 1000]", "study, line 10: grid.sequences: .*must be { range"),
        ('kind = "adam"', 'kind = "adamw"', "study, line 16: method.kind: 'adamw': must be one of theory, exact, adam, sgld"),
        ("steps = 200", "steps = 2", "study, line 17: method.steps: steps = 2: must be an integer >= 100"),
        ("steps = 200", "stps = 200", "study, line 17: method.stps: stps: no such field; fields are kind, steps"),
        ("steps = 200", "network = { kind = 'deep' }", "study, line 17: method.network.kind: kind = 'deep': must be one of"),
        ("[problem]", "[problem", r"study: .*line 5"),
        ("title", "titel", "study, line 1: titel: no such field; fields are title, problem, grid"),
        (
            '[[method]]\nkind = "theory"',
            '[[method]]\nkind = "adam"\nsteps = 200',
            "study, line 17: .*is the same as an earlier",
        ),
    ],
)
def test_errors_name_line_field_value_and_range(old, new, expected):
    assert old in TEXT
    text = TEXT.replace(old, new, 1) if old != "attention =" else TEXT.replace(old, new)
    with pytest.raises(ProblemError, match=expected):
        parse(text)


def test_methods_with_data_need_sequences(tmp_path):
    with pytest.raises(ProblemError, match="sequences: must be given"):
        parse(TEXT.replace("sequences =", "vocab ="))
    with pytest.raises(ProblemError, match="cannot be read"):
        read(tmp_path / "nothing.toml")


def test_lines_of_nested_tables_and_arrays():
    assert line_of(TEXT, ("method", 0, "kind")) == 13
    assert line_of(TEXT, ("method", 1, "steps")) == 17
    assert line_of(TEXT, ("method", 1, "nowhere")) == 15
    assert line_of(TEXT, ("nowhere",)) is None


def identities(text: str) -> list[str]:
    return [cell.identity for _, cells in groups(parse(text)) for cell in cells]


def test_a_grown_grid_keeps_its_cells_and_a_changed_setting_makes_new_ones(tmp_path):
    old = identities(TEXT)
    assert len(set(old)) == len(old)
    grown = identities(TEXT.replace("[8, 12]", "[8, 10, 12]").replace("seeds = 3", "seeds = 5"))
    assert set(old) < set(grown)
    changed = identities(TEXT.replace("steps = 200", "steps = 300"))
    assert set(changed) & set(old) == set(old[:10])  # those of the theory
    assert not set(identities(TEXT.replace("[problem]", "[problem]\nnoise = 0.91"))) & set(old)
    law = tmp_path / "counts.txt"
    law.write_text("1 2 3 4\n")
    named = TEXT.replace("[problem]", f'[problem]\ntokens = "counts:{law}"')
    before = identities(named)
    law.write_text("1 2 3 40\n")
    assert not set(identities(named)) & set(before)


def test_an_axis_gives_the_identity_of_the_same_value_in_the_problem():
    one = parse(TEXT.replace("length = [8, 12]", "").replace("[problem]", "[problem]\nlength = 8"))
    assert {cell.identity for _, cells in groups(one) for cell in cells} < set(identities(TEXT))


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(1, 8),
    st.floats(1e5, 1e9),
    st.sampled_from([Adam(), Exact(), Theory()]),
)
def test_batches_hold_every_cell_once_and_fit_the_budget(counts, workers, budget, method):
    study = parse(TEXT)
    problem = next(iter(study.problems()))
    number = itertools.count()
    waiting = []
    for index, count in enumerate(counts):
        cells = [Cell(f"{next(number):016x}", 10.0, "small", seed) for seed in range(count)]
        waiting.append(((type(next(groups(study))[0]))(problem.replace(length=4 + index), method), cells))
    needs = {shape_of(group): Needs(2e4, 3e4) for group, _ in waiting}
    made = list(batches(waiting, budget, workers, needs))
    assert [cell for batch in made for _, cells in batch.groups for cell in cells] == [c for _, cells in waiting for c in cells]
    for batch in made:
        assert batch.size <= MOST[method.kind]
        assert batch.size * 3e4 + 2e4 <= budget or batch.size == 1
    assert len({batch.name for batch in made}) == len(made)
    if sum(counts) >= 2 * workers:
        assert len(made) >= workers


def test_a_budget_below_one_cell_is_refused():
    waiting = list(groups(parse(TEXT)))[2:]
    with pytest.raises(ProblemError, match=r"memory = 0.001 GB for each worker: must be at least 2 GB for one cell of adam"):
        list(batches(waiting, 1e6, 2, {shape_of(group): Needs(1e9, 1e9) for group, _ in waiting}))


def test_memory_is_measured_on_the_arrays_of_a_cell():
    """Moments, S_ij of L^2 V^2 float32, are its largest array; they are held as drawn and as packed."""
    (group, cells), *_ = [found for found in groups(parse(TEXT)) if found[0].method.kind == "adam"]
    found = measured(group, cells)
    moments = 4 * 8**2 * 4**2
    assert 1.5 * moments < found.cell < 6 * moments
    # one hot rows of 1000 sequences are drawn at least
    assert found.fixed > 4 * 1000 * 8 * 4
    assert isinstance(Batch(((group, tuple(cells)),)).name, str)
