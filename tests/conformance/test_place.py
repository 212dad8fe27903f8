"""Where and when: the first bad row in time, the pattern of the others, and the law of growth."""

import math

import pytest
import torch

from kimi_linear.conformance.adapter import Capabilities, Contract
from kimi_linear.conformance.cases import Case
from kimi_linear.conformance.growth import fit_growth
from kimi_linear.conformance.place import locate
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.spread import heads_in_words, in_words

C = 32
CASE = Case("x", "x", "", B=2, T="3C+5", H=2, group=2, K=6, V=5)


def place_of(mark, case=CASE, name="o"):
    """The place of ratios that `mark` sets in [B, T, heads] of ones."""
    problem = problem_of(case, Capabilities(), Contract(chunk_size=C))
    heads = 2 if name in ("dq", "dk") else 4
    ratio = torch.ones(*problem.judge.v.shape[:2], heads).double()
    mark(ratio)
    return locate(ratio, name, 4.0, problem)


def marks(index):
    def mark(ratio):
        ratio[index] = 9.0

    return mark


ALL, TOKENS = slice(None), torch.arange(3 * C + 5)
PATTERNS = {
    "every token": (ALL, ALL, ALL),
    "token 40 alone": (ALL, 40, ALL),
    "the first token alone": (ALL, 0, ALL),
    "every token from 41 on": (ALL, slice(41, None), ALL),
    "the last chunk alone": (ALL, slice(3 * C, None), ALL),
    "chunk 1 alone": (ALL, slice(C, 2 * C), ALL),
    "every chunk but the first": (ALL, slice(C, None), ALL),
    "row 31 of each chunk": (ALL, TOKENS % C == 31, ALL),
    "each chunk from row 9 on": (ALL, TOKENS % C >= 9, ALL),
    "rows 16 to 19 of each chunk": (ALL, (TOKENS % C >= 16) & (TOKENS % C < 20), ALL),
    "every 16th token": (ALL, TOKENS % 16 == 15, ALL),
    "24 of 101 tokens, in no simple pattern": (ALL, (TOKENS**2) % 17 == 4, ALL),
}


@pytest.mark.parametrize(("words", "index"), PATTERNS.items(), ids=PATTERNS.keys())
def test_the_tokens_of_an_error_are_told_as_the_pattern_that_a_kernel_would_make(words, index):
    said = place_of(marks(index)).spread[0]
    if "no simple" in words:
        assert "no simple pattern" in said
    elif "first token" in words:
        assert said in (words, "token 0 alone")
    elif "16th" in words:
        assert "16th" in said
    else:
        assert said == words


def test_a_pattern_that_half_agrees_is_not_told():
    def mark(ratio):
        ratio[:, torch.arange(0, 101, 3)] = 9.0

    assert "in no simple pattern" in place_of(mark).spread[0]


def test_the_first_bad_row_is_the_first_in_time_with_its_chunk_row_and_sub_chunk():
    def mark(ratio):
        ratio[0, 90, 3] = 50.0
        ratio[1, 2 * C + 17, 1] = 9.0

    place = place_of(mark)
    assert place.index == (1, 2 * C + 17, 1)
    assert (place.chunk, place.row, place.subchunk) == (2, 17, 1)
    assert str(place) == "first bad row of o: batch 1, token 81 (chunk 2, row 17, sub-chunk 1), head 1"
    assert place.ratio == 50.0
    assert place.ratio_before == 1.0


def test_gradients_are_read_from_the_end_where_a_backward_begins():
    def mark(ratio):
        ratio[0, :70, 1] = 2.0 ** (torch.arange(70).flip(0) / 4 + 3)

    place = place_of(mark, name="dk")
    assert place.index == (0, 69, 1)
    assert place.law == "exponential"
    assert "from the end" in str(place)
    assert place_of(mark, name="dq").index == (0, 0, 1)


def test_a_packed_token_is_named_by_its_segment_and_the_pattern_counts_from_there():
    case = Case("x", "x", "", lengths=("C+3", 0, "C+9"), past_end=4, K=6, V=5, H=2, group=2)

    def mark(ratio):
        ratio[:, 2 * C + 3 : 2 * C + 12] = 9.0  # the second chunk of segment 2

    place = place_of(mark, case)
    assert (place.segment, place.token_of_segment, place.chunk, place.row) == (2, C, 1, 0)
    assert "token 32 of segment 2, chunk 1, row 0" in str(place)
    assert place.spread == ("the last chunk alone", "all heads", "segment 2 alone")
    past = place_of(lambda ratio: ratio[:, -4:].fill_(9.0), case)
    assert past.spread[0] == "rows past the last segment alone"
    assert "past the last segment" in str(past)


def test_channels_are_told_where_the_error_is_in_a_part_of_them():
    problem = problem_of(CASE, Capabilities(), Contract(chunk_size=C))
    errors = torch.zeros(2, 101, 4, 5).double()
    errors[..., 3:] = 20.0
    place = locate(errors.square().mean(-1).sqrt(), "o", 4.0, problem, errors)
    assert place.spread[-1] == "value channels 3 to 4"
    everywhere = torch.full_like(errors, 20.0)
    assert "channel" not in " ".join(locate(everywhere.mean(-1), "o", 4.0, problem, everywhere).spread)


def test_a_state_is_told_by_segments_heads_and_key_channels():
    problem = problem_of(CASE, Capabilities(), Contract(chunk_size=C))
    ratio = torch.zeros(2, 4, 6).double()
    ratio[1, :, 4:] = 9.0
    place = locate(ratio, "final_state", 4.0, problem)
    assert place.index == (1, 0, 4)
    assert place.spread == ("batch item 1 alone", "all heads", "key channels 4 to 5")


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([0, 1, 2, 3], "all heads"),
        ([1, 3], "value head 1 of each group"),
        ([2, 3], "all value heads of key head 1"),
        ([2], "head 2 alone"),
        ([1, 2], "heads 1 to 2"),
    ],
)
def test_heads_are_told_by_the_groups_that_a_kernel_loops_over(heads, words):
    assert heads_in_words(heads, 4, 2) == words


def test_a_list_is_told_as_a_range_or_a_step_where_it_is_one():
    assert in_words([0], 1, "head") == "the only head"
    assert in_words([1, 4, 7], 9, "segment") == "every third segment from 1 on"
    assert in_words([0, 1, 5], 9, "segment") == "segments 0, 1, 5"
    assert in_words([*range(0, 40, 2), 41], 99, "segment").endswith("and 13 more")


NOISE = torch.rand(64, generator=torch.Generator().manual_seed(0)).add(0.5).tolist()
LAWS = {
    "constant": [9 * noise for noise in NOISE],
    "square root": [6 * math.sqrt(n + 1) * noise for n, noise in enumerate(NOISE)],
    "linear": [4.0 * (n + 1) * noise for n, noise in enumerate(NOISE)],
    "exponential": [5 * 1.2**n * noise for n, noise in enumerate(NOISE)],
    "fades": [5e3 * 0.8**n * noise for n, noise in enumerate(NOISE)],
    "not finite": [9.0] * 20 + [math.inf],
    "unknown": [9.0] * 3,
    "irregular": [10.0 ** (3 * (n % 2)) for n in range(30)],
}


@pytest.mark.parametrize("law", LAWS)
def test_the_law_of_growth_is_told_through_noise_of_a_half(law):
    growth = fit_growth(LAWS[law])
    assert growth.law == law
    if law in ("exponential", "fades"):
        assert abs(growth.rate - (1.2 if law == "exponential" else 0.8)) < 0.02
    assert len(growth.fitted) in (0, len(LAWS[law]))
