"""Generation: the tokens, when it stops, and that company changes nothing."""

import pytest
import torch

from judge import assert_same_bits
from kimi_linear.reference.model.generate import decode, generate, prefill, stream
from kimi_linear.reference.model.sampling import Sampling, in_nucleus
from model_cases import SMALL, random_tokens, small_model

PROMPTS = [random_tokens(length, seed=length).tolist() for length in (13, 1, 7)]


@pytest.fixture(scope="module")
def model():
    return small_model().requires_grad_(False)


def greedy_by_hand(model, prompt, steps):
    """The whole text again for every token."""
    text = list(prompt)
    for _ in range(steps):
        text.append(model(torch.tensor([text])).logits[0, -1].argmax().item())
    return text[len(prompt) :]


def test_greedy_generation_takes_the_likeliest_token_each_time(model):
    got = generate(model, PROMPTS, max_new_tokens=9, stop_ids=())
    assert got == [greedy_by_hand(model, prompt, 9) for prompt in PROMPTS]
    assert len({*got[0], *got[1], *got[2]}) > 9


@pytest.mark.parametrize("piece", [1, 3, 13])
def test_the_size_of_a_prefills_pieces_does_not_change_the_text(model, piece):
    whole = generate(model, PROMPTS, max_new_tokens=5, stop_ids=())
    assert generate(model, PROMPTS, max_new_tokens=5, stop_ids=(), prefill_piece=piece) == whole


def test_a_sequence_ends_with_its_stop_token_and_the_others_go_on(model):
    free = generate(model, PROMPTS, max_new_tokens=9, stop_ids=())
    stop = free[0][3]
    got = generate(model, PROMPTS, max_new_tokens=9, stop_ids=[stop])
    want = [text[: text.index(stop) + 1] if stop in text else text for text in free]
    assert got == want
    assert len(got[0]) <= 4
    assert max(map(len, got)) == 9


def test_a_config_says_where_to_stop_unless_the_caller_does(model):
    first = generate(model, PROMPTS[:1], max_new_tokens=2, stop_ids=())[0]
    object.__setattr__(model, "config", SMALL.__class__(**{**vars(SMALL), "eos_token_id": (5, first[0])}))
    assert generate(model, PROMPTS[:1], max_new_tokens=2) == [first[:1]]
    object.__setattr__(model, "config", SMALL)


def test_tokens_come_one_step_at_a_time(model):
    steps = stream(model, PROMPTS, max_new_tokens=4, stop_ids=())
    first = next(steps)
    assert set(first) == {0, 1, 2}
    rest = list(steps)
    assert len(rest) == 3
    texts = [[step[prompt] for step in (first, *rest)] for prompt in range(3)]
    assert texts == generate(model, PROMPTS, max_new_tokens=4, stop_ids=())


def test_generation_keeps_no_graph(model):
    model = small_model()
    logits, cache = prefill(model, PROMPTS)
    assert logits.requires_grad
    seen = [tokens for tokens in stream(model, PROMPTS[:1], max_new_tokens=2, stop_ids=())]
    assert len(seen) == 2
    assert decode(model, torch.tensor([1, 2, 3]), cache).cache.lengths == (14, 2, 8)


def test_the_same_seed_draws_the_same_text_and_another_does_not(model):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        options = {"sampling": Sampling(temperature=1.5, top_p=0.9), "generator": generator, "stop_ids": ()}
        return generate(model, PROMPTS, max_new_tokens=6, **options)

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


# Sampling


def test_a_draw_follows_the_probabilities_at_its_temperature():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    draws = Sampling(temperature=0.7)(logits.expand(20_000, 4), torch.Generator().manual_seed(0))
    share = torch.bincount(draws, minlength=4) / 20_000
    want = torch.softmax(logits / 0.7, 0)
    assert (share - want).abs().max() < 4 * (0.25 / 20_000) ** 0.5  # four standard errors
    assert share[3] == 0


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    p = torch.tensor([[0.1, 0.5, 0.05, 0.35], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    assert in_nucleus(p, 0.5).tolist() == [[False, True, False, False], [True, True, False, False]]
    assert in_nucleus(p, 0.51).tolist() == [[False, True, False, True], [True, True, True, False]]
    assert in_nucleus(p, 1e-9).sum(-1).tolist() == [1, 1]
    assert in_nucleus(p, 1.0).all()


def test_top_p_bounds_what_is_drawn():
    logits = torch.tensor([0.1, 0.5, 0.05, 0.35]).log()
    draws = Sampling(temperature=1.0, top_p=0.8)(logits.expand(2000, 4), torch.Generator().manual_seed(0))
    assert set(draws.tolist()) == {1, 3}


def test_temperature_zero_takes_the_lowest_id_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    assert_same_bits(Sampling()(logits), torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("temperature must be 0", lambda m: Sampling(temperature=-1.0)),
        ("temperature must be 0", lambda m: Sampling(temperature=float("nan"))),
        ("top_p must be above 0", lambda m: Sampling(top_p=0.0)),
        ("top_p must be above 0 and at most 1; got 1.5", lambda m: Sampling(top_p=1.5)),
        (r"prompts must be one or more of one or more tokens; got lengths \[\]", lambda m: prefill(m, [])),
        (r"prompts must be .*; got lengths \[2, 0\]", lambda m: prefill(m, [[1, 2], []])),
        ("prefill_piece must be 1 or more tokens; got 0", lambda m: prefill(m, [[1]], 0)),
    ],
)
def test_a_wrong_call_is_refused_by_name(model, message, call):
    with pytest.raises(ValueError, match=message):
        call(model)
