"""Texts as token statistics: units, the vocabulary, windows, and their pair frequencies against brute force."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhead.model import corpus, tokens
from copyhead.problem import Problem
from copyhead.record import ProblemError

TEXT = "It's a cat, a CAT and the dog_1; the cat's. \u00c9t\u00e9! 42 \u4e2d\u6587"


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def problem(path, unit="char", vocab=4, **fields):
    return Problem.preset("paper", tokens=f"corpus:{path}", unit=unit, vocab=vocab, **fields)


def spelled(law):
    return [law.names[k] for k in law.ring]


def brute(ring, vocab, length, cyclic):
    """Averages over all N windows, one pair after the other."""
    found = np.zeros((length, vocab, vocab))
    windows = [[ring[(s + i) % len(ring)] for i in range(length)] for s in range(len(ring))]
    for d in range(length):
        places = [(i, (i + d) % length) for i in range(length)] if cyclic else [(i, i + d) for i in range(length - d)]
        for window in windows:
            for i, j in places:
                found[d, window[i], window[j]] += 1 / (len(places) * len(windows))
    return found


@pytest.mark.parametrize("cyclic", [True, False])
@given(ring=st.lists(st.integers(0, 3), min_size=6, max_size=20), length=st.integers(2, 5))
def test_pairs_are_the_averages_over_all_windows(ring, length, cyclic):
    law = corpus.Corpus(np.array(ring, np.int32), tuple("abcd"), 4)
    # rounding of sums of at most 100 terms
    np.testing.assert_allclose(law.pairs(length, cyclic), brute(ring, 4, length, cyclic), atol=1e-14)
    np.testing.assert_allclose(law.marginal(length, cyclic), np.diagonal(law.pairs(length, cyclic)[0]), atol=1e-15)


@pytest.mark.parametrize("cyclic", [True, False])
@pytest.mark.parametrize(("unit", "vocab"), [("char", 5), ("byte", 3), ("word", 4)])
def test_frequencies_of_windows_are_the_pair_probabilities(tmp_path, unit, vocab, cyclic):
    law, length, count = tokens.law(problem(written(tmp_path / "text", TEXT), unit, vocab)), 4, 40_000
    drawn, pairs = law.draw(tokens.stream(0, "train"), count, length, cyclic), law.pairs(length, cyclic)
    assert drawn.shape == (count, length)
    for lag in range(length):
        left = drawn if cyclic else drawn[:, : length - lag]
        right = np.roll(drawn, -lag, axis=1) if cyclic else drawn[:, lag:]
        found = np.bincount((left * vocab + right).ravel(), minlength=vocab**2).reshape(vocab, vocab) / left.size
        # Five standard errors: a mean over positions of zeros and ones varies at most as one of them does, p (1 - p).
        assert np.all(np.abs(found - pairs[lag]) <= 5 * np.sqrt(pairs[lag] * (1 - pairs[lag]) / count) + 1e-12)


@pytest.mark.parametrize("cyclic", [True, False])
def test_a_draw_is_a_window_of_the_ring_and_a_prefix_of_every_larger_draw(tmp_path, cyclic):
    law = tokens.law(problem(written(tmp_path / "text", "abcdefghij"), vocab=12))
    large = law.draw(tokens.stream(1, "train"), 400, 9, cyclic)
    np.testing.assert_array_equal(law.draw(tokens.stream(1, "train"), 300, 9, cyclic), large[:300])
    begin = large[:, 0]
    assert set(begin) == set(range(10))
    np.testing.assert_array_equal(large, (begin[:, None] + np.arange(9)) % 10)


def test_characters_are_taken_as_they_are(tmp_path):
    law = corpus.read(written(tmp_path / "text", "b\u00e9B\na\u00e9\U0001f600\r"), "char", 12)
    assert spelled(law) == list("b\u00e9B\na\u00e9\U0001f600\r")


def test_bytes_of_any_file(tmp_path):
    content = bytes([0, 255, 7, 255, 0, 255])
    law = corpus.read(written(tmp_path / "text", content), "byte", 5)
    assert law.names == ("0xff", "0x00", "0x07", "<unused 1>", "<unused 2>")
    assert spelled(law) == [f"0x{byte:02x}" for byte in content]
    assert spelled(corpus.read(written(tmp_path / "letter", "\u00e9\u00e9x"), "byte", 3)) == ["0xc3", "0xa9"] * 2 + ["0x78"]


def test_words_are_lower_cased_runs_and_single_marks(tmp_path):
    law = corpus.read(written(tmp_path / "text", TEXT + " e\u0301te\u0301... o\u2019er"), "word", 40)
    expected = "it's a cat , a cat and the dog _ 1 ; the cat's . \u00e9t\u00e9 ! 42 \u4e2d\u6587 \u00e9t\u00e9 . . . o\u2019er"
    assert spelled(law) == expected.split()


def test_tokens_are_ordered_by_count_and_then_by_the_unit(tmp_path):
    path = written(tmp_path / "text", "ccbbaaad")
    assert corpus.read(path, "char", 4).names == ("a", "b", "c", "d")
    law = corpus.read(path, "char", 6)
    assert law.names == ("a", "b", "c", "d", "<unused 1>", "<unused 2>")
    np.testing.assert_array_equal(law.marginal(4, True), np.array([3, 2, 2, 1, 0, 0]) / 8)
    words = written(tmp_path / "words", "z b a. z! b a")
    assert corpus.read(words, "word", 5).names == ("a", "b", "z", "!", ".")


def test_units_beyond_the_vocabulary_are_one_token(tmp_path):
    path = written(tmp_path / "text", "ccbbaaadee")
    law = corpus.read(path, "char", 3)
    assert law.names == ("a", "b", corpus.OTHER)
    assert spelled(law) == [corpus.OTHER] * 2 + ["b"] * 2 + ["a"] * 3 + [corpus.OTHER] * 3
    said = tokens.describe(problem(path, vocab=3, length=4))
    assert said == json.loads(json.dumps(said))
    assert (said["other_share"], said["text_units"], said["text_tokens"], said["unit"]) == (0.5, 5, 10, "char")
    assert tokens.describe(problem(path, vocab=5, length=4))["other_share"] == 0
    said = tokens.describe(problem(path, vocab=9, length=4))
    assert (said["other_share"], said["occurring"], said["vocab"]) == (0, 5, 9)


def test_tokens_that_do_not_occur_are_never_drawn(tmp_path):
    law = corpus.read(written(tmp_path / "text", "abcab"), "char", 6)
    drawn = law.draw(tokens.stream(2, "train"), 1000, 4, True)
    assert set(np.unique(drawn)) == {0, 1, 2}


@pytest.mark.parametrize("what", ["marginal", "pairs", "draw"])
def test_a_text_needs_one_token_more_than_the_length(tmp_path, what):
    path = written(tmp_path / "text", "abcab")
    law = corpus.read(path, "char", 3)

    def ask(length):
        if what == "draw":
            return law.draw(tokens.stream(0, "train"), 2, length, False)
        return getattr(law, what)(length, False)

    ask(4)
    with pytest.raises(ProblemError) as error:
        ask(5)
    assert str(error.value) == f"tokens file = {path!r}: must have at least 6 tokens for length = 5, has 5"


@pytest.mark.parametrize(
    ("content", "unit", "message"),
    [
        ("", "byte", "is empty"),
        (" \n", "char", "is empty"),
        (b"a\0b", "char", "is binary; must be text in UTF-8"),
        (b"ab\xff", "word", "must be text in UTF-8 (byte 2 is not)"),
        ("\u00a0\u2003", "word", "has no words"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, unit, message):
    path = written(tmp_path / "text", content)
    with pytest.raises(ProblemError) as error:
        tokens.law(problem(path, unit))
    assert str(error.value) == f"tokens file = {path!r}: {message}"


def test_a_changed_text_or_unit_is_another_law(tmp_path):
    path = written(tmp_path / "text", "abcabcabc")
    first = tokens.law(problem(path))
    assert tokens.law(problem(path)) is first
    assert tokens.law(problem(path, "byte")).names == ("0x61", "0x62", "0x63", "<unused 1>")
    written(tmp_path / "text", "xyzxyzxyzx")
    assert tokens.law(problem(path)).names == ("x", "y", "z", "<unused 1>")


def test_a_large_vocabulary_is_counted_in_seconds(tmp_path):
    random = np.random.default_rng(0)
    words = " ".join(f"w{k}" for k in random.zipf(1.3, 300_000) % 5000)
    begin = time.perf_counter()
    law = tokens.law(problem(written(tmp_path / "text", words), "word", 1000))
    pairs = law.pairs(32, True)
    # About one second on one slow core; a loop in Python over lags and tokens takes minutes.
    assert time.perf_counter() - begin < 20
    assert (pairs.shape, pairs.dtype) == ((32, 1000, 1000), np.float64)
    np.testing.assert_allclose(pairs.sum((1, 2)), 1, rtol=1e-9)
