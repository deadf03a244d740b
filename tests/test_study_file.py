"""Study files, cells and their identities, batches: what is planned, before anything runs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhead.problem import Problem, ProblemError
from copyhead.study import batch
from copyhead.study.batch import MOST, Batch, Needs, batches, measured, needs
from copyhead.study.cell import BOTH, Cell, Group, groups
from copyhead.study.study_file import EXPECTED, Adam, Exact, Theory, line_of, parse, read

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
    assert [block.method for block in study.blocks] == [Theory(), Adam(steps=200)]
    for block in study.blocks:
        assert block.problem == Problem.preset("paper", attention="linear")
        assert block.grid == {"length": (8, 12), "sequences": (10, 32, 100, 316, 1000)}
        assert (block.starts, block.seeds) == (("small",), (0, 1, 2))
    found = list(groups(study.blocks))
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
    assert parse(TEXT.replace("{ geometric = [10, 1000, 5] }", given)).blocks[0].sequences == values


def test_axes_of_other_fields():
    study = parse(TEXT.replace("length = [8, 12]", 'noise = { range = [0.1, 0.7, 0.2] }\nattention = ["softmax", "linear"]'))
    assert study.blocks[0].grid["noise"] == pytest.approx((0.1, 0.3, 0.5, 0.7))
    assert {problem.attention for problem in study.blocks[1].problems()} == {"softmax", "linear"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seeds = 3", "seeds = 0", "study, line 2: seeds: 0: must be a number >= 1 of data sets"),
        ("seeds = 3", "seeds = [1, 1]", r"study, line 2: seeds: \[1, 1\]: must be"),
        ('["small"]', '["big"]', r"study, line 3: starts: \['big'\]: must be a list of small, copy"),
        ('"linear"', '"cubic"', "study, line 6: problem.attention: attention = 'cubic': must be one of softmax, linear"),
        ("attention =", "attenton =", "study, line 6: problem.attenton: attenton: no such field"),
        ("length = [8, 12]", "length = [8, 1]", "study, line 9: grid.length: length = 1: must be an integer >= 2"),
        ("length =", "lenth =", "study, line 9: grid.lenth: no such field; fields are length, vocab"),
        ("[8, 12]", "[]", r"study, line 9: grid.length: \[\]: must be a list, \{ range"),
        ("[8, 12]", "[8, 8]", "study, line 9: grid.length: .*must not repeat"),
        ("[10, 1000, 5]", "[0, 1000, 5]", "study, line 10: grid.sequences: .*must have 0 < first < last"),
        ("geometric", "logarithmic", "study, line 10: grid.sequences: .*must be { range"),
        ("[10, 1000, 5]", "[10, 1000]", "study, line 10: grid.sequences: .*must be { range"),
        (
            'kind = "adam"',
            'kind = "adamw"',
            "study, line 16: method.kind: 'adamw': must be one of theory, exact, adam, sgld, jump, ladder",
        ),
        ("steps = 200", "steps = 2", "study, line 17: method.steps: steps = 2: must be an integer >= 100"),
        ("steps = 200", "stps = 200", "study, line 17: method.stps: stps: no such field; fields are steps, rate"),
        ("steps = 200", "network = { kind = 'deep' }", "study, line 17: method.network.kind: kind = 'deep': must be one of"),
        ("[problem]", "[problem", r"study: .*line 5"),
        ("title", "titel", "study, line 1: titel: no such field; fields are title, method, problem, grid"),
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
    return [cell.identity for _, cells in groups(parse(text).blocks) for cell in cells]


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
    assert {cell.identity for _, cells in groups(one.blocks) for cell in cells} < set(identities(TEXT))


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(1, 8),
    st.floats(1e5, 1e9),
    st.sampled_from([Adam(), Exact(), Theory()]),
)
def test_batches_hold_every_cell_once_and_fit_the_budget(counts, workers, budget, method):
    study = parse(TEXT)
    problem = next(study.blocks[0].problems())
    number = itertools.count()
    waiting = []
    for index, count in enumerate(counts):
        cells = [Cell(f"{next(number):016x}", 10.0, "small", seed) for seed in range(count)]
        waiting.append((Group(problem.replace(length=4 + index), method), cells))
    made = list(batches(waiting, budget, workers, [Needs(2e4, 3e4)] * len(waiting)))
    assert [cell for one in made for _, cells in one.groups for cell in cells] == [c for _, cells in waiting for c in cells]
    for one in made:
        assert one.size <= MOST[method.kind]
        assert one.size * 3e4 + 2e4 <= budget or one.size == 1
    assert len({one.name for one in made}) == len(made)
    if sum(counts) >= 2 * workers:
        assert len(made) >= workers


def test_a_budget_below_one_cell_is_refused():
    waiting = list(groups(parse(TEXT).blocks))[2:]
    with pytest.raises(ProblemError, match=r"memory = 0.001 GB for each worker: must be at least 2 GB for one cell of adam"):
        list(batches(waiting, 1e6, 2, [Needs(1e9, 1e9)] * len(waiting)))


def test_memory_is_measured_on_the_arrays_of_a_cell():
    """Moments, S_ij of L^2 V^2 float32, are its largest array; they are held as drawn and as packed."""
    (group, cells), *_ = [found for found in groups(parse(TEXT).blocks) if found[0].method.kind == "adam"]
    found = measured(group, cells, 1000)
    moments = 4 * 8**2 * 4**2
    assert 1.5 * moments < found.cell < 6 * moments
    # one hot rows of 1000 sequences are drawn at least
    assert found.fixed > 4 * 1000 * 8 * 4
    assert isinstance(Batch(((group, tuple(cells)),)).name, str)


def test_memory_is_measured_once_for_all_smaller_sizes(monkeypatch):
    """Of 2 lengths and 5 P, and another number of steps: one measurement, at the largest of both."""
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr(
        batch, "measured", lambda group, cells, place: seen.append((group.problem.length, place)) or Needs(10.0, 1.0)
    )
    more = "[[method]]\nkind = 'adam'\nsteps = 300\ngrid = { length = [8, 12], sequences = [100, 900] }\n"
    waiting = list(groups(parse(TEXT + more + "[[method]]\nkind = 'jump'\nsections = 5\nbracket = [10, 700]\n").blocks))
    found = needs(waiting)
    assert seen == [(12, 1000.0)]
    # theory of two lengths; Adam; Adam with other steps; a jump trains at five P at once
    assert found == [Needs(0, 0)] * 2 + [Needs(10, 1)] * 4 + [Needs(10, 5)] * 2
    # what reads tokens needs other arrays
    reading = "network = { kind = 'kernel' }\nproblem = { token_scale = 1.0, content = true }\n"
    other = parse(TEXT + "[[method]]\nkind = 'adam'\n" + reading)
    seen.clear()
    needs(list(groups(other.blocks)))
    assert len(seen) == 2


OWN = """seeds = 2
[problem]
length = 10
noise = 0.5
[grid]
sequences = [30, 50]
[[method]]
kind = "theory"
[[method]]
kind = "adam"
problem = { length = 20 }
grid = { sequences = [70], vocab = [2, 3] }
starts = ["copy"]
seeds = [4, 6, 7]
[[method]]
kind = "jump"
bracket = [20, 200]
[[method]]
kind = "ladder"
seeds = [-1, 0]
starts = ["small"]
"""


def test_a_method_may_have_its_own_problem_grid_starts_and_seeds():
    study = parse(OWN)
    theory, adam, jump, ladder = study.blocks
    assert (theory.planned, adam.planned, jump.planned, ladder.planned) == (4, 6, 4, 4)
    # fields of its problem are laid over those of the file
    assert [(p.length, p.vocab, p.noise) for p in adam.problems()] == [(20, 2, 0.5), (20, 3, 0.5)]
    found = {group.method.kind: cells for group, cells in groups(study.blocks)}
    assert {(cell.sequences, cell.start, cell.seed) for cell in found["adam"]} == {(70, "copy", s) for s in (4, 6, 7)}
    # a jump has no P, though the grid of the file has; a ladder no start
    assert {(cell.sequences, cell.start) for cell in found["jump"]} == {(None, "small"), (None, "copy")}
    assert {(cell.sequences, cell.start, cell.seed) for cell in found["ladder"]} == {
        (place, BOTH, seed) for place in (30, 50) for seed in (EXPECTED, 0)
    }
    assert study.axes == {"length": [10, 20], "vocab": [4, 2, 3]}
    assert parse(study.to_toml()) == study


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("length = 20", "length = 1", "study, line 11: method.problem.length: length = 1: must be an integer >= 2"),
        ("vocab = [2, 3]", "vocab = [0]", "study, line 12: method.grid.vocab: vocab = 0: must be an integer >= 2"),
        ("[4, 6, 7]", "[4, -1]", r"study, line 14: method.seeds: \[4, -1\]: must be a number >= 1"),
        ("[20, 200]", "[200, 20]", r"study, line 17: method.bracket: bracket = .*must be two ascending integers >= 1"),
        ("seeds = [-1, 0]", "repeats = 3", "study, line 20: method.repeats: repeats = 3: must be"),
    ],
)
def test_errors_of_what_a_method_has_of_its_own(old, new, expected):
    assert old in OWN
    with pytest.raises(ProblemError, match=expected):
        parse(OWN.replace(old, new))


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_jump_is_a_cell():
    """The search of a cell ends at two neighbouring P around the window of the theory; a bracket without a jump says so."""
    from copyhead.study.methods import NOT_CONVERGED, OK, run_cells
    from copyhead.theory.transition import phases

    text = "[problem]\nlength = 20\n[[method]]\nkind = 'jump'\n"
    (group, cells), *_ = groups(parse(text).blocks)
    found = run_cells(group, cells)
    assert list(found.status.values) == [OK, OK]
    assert (found.high - found.low).values.tolist() == [1, 1]
    window = phases(group.problem).transitions[0].window
    assert window is not None
    # one data set differs from expected moments by some percent; the two starts leave at different ends
    for cell, edge in zip(cells, (window[1], window[0]), strict=True):
        assert found.high.values[cells.index(cell)] == pytest.approx(edge, rel=0.15)
    (group, cells), *_ = groups(parse(text + "bracket = [10, 20]\n").blocks)
    assert list(run_cells(group, cells).status.values) == [NOT_CONVERGED] * 2
