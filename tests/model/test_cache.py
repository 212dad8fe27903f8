"""However a text is cut into calls, padded, packed or batched, it gives the same."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from judge import assert_same_bits, assert_within_envelope, bounds_of
from kimi_linear.reference.model import Cache, KimiLinearForCausalLM, MLAState, load_tensors
from kimi_linear.reference.model.generate import prefill
from model_cases import CONFIGS, SMALL, random_tokens, small_model

T = 29
IDS = random_tokens(2, T, seed=5)


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in (layer.latents if isinstance(layer, MLAState) else layer)]


def results(out) -> list[torch.Tensor]:
    return [out.logits.detach(), *tensors_of(out.cache)]


def in_pieces(model, ids, cuts):
    """Logits of all pieces, side by side, and the last cache."""
    cache, logits = None, []
    for start, end in pairwise([0, *cuts, ids.shape[1]]):
        out = model(ids[:, start:end], cache=cache)
        cache = out.cache
        logits.append(out.logits)
    return out._replace(logits=torch.cat(logits, dim=1))


@pytest.fixture(scope="module")
def model():
    return small_model().requires_grad_(False)


@pytest.fixture(scope="module")
def exact(model):
    return results(model(IDS))


@pytest.fixture(scope="module")
def bounds(model, exact):
    """What rounding does to one call, and to several."""
    several = range(4, T, 4)
    return bounds_of(exact, lambda: results(model(IDS)), lambda: results(in_pieces(model, IDS, several)))


# Splits


@given(st.sets(st.integers(0, T)))
@settings(max_examples=15)
def test_a_text_may_be_read_in_any_pieces(model, exact, bounds, cuts):
    got = results(in_pieces(model, IDS, sorted(cuts)))
    assert_within_envelope(got, exact, bounds)


def test_a_text_may_be_read_token_by_token(model, exact, bounds):
    got = results(in_pieces(model, IDS, range(1, T)))
    assert_within_envelope(got, exact, bounds)
    in_fp32 = small_model(dtype=torch.float32).requires_grad_(False)
    assert_within_envelope(results(in_pieces(in_fp32, IDS, range(1, T))), exact, bounds)
    assert_within_envelope(results(in_pieces(in_fp32, IDS, (11,))), exact, bounds)


def test_a_call_without_its_cache_gives_something_else(model, exact, bounds):
    """So the tests above do see the cache, and each part of it."""
    first = model(IDS[:, :20]).cache
    got = model(IDS[:, 20:], cache=first).logits
    for broken in (without_kda_states(first), without_convolutions(first), with_shuffled_latents(first)):
        other = model(IDS[:, 20:], cache=broken).logits
        assert (other - got).abs().max() > 1e-3 * got.abs().max()


def without_kda_states(cache):
    return changed(cache, lambda x: x if isinstance(x, MLAState) else x._replace(S=0 * x.S))


def without_convolutions(cache):
    return changed(cache, lambda x: x if isinstance(x, MLAState) else x._replace(conv_k=0 * x.conv_k))


def with_shuffled_latents(cache):
    return changed(cache, lambda x: MLAState(x.latents[::-1]) if isinstance(x, MLAState) else x)


def changed(cache, change):
    return Cache(tuple(map(change, cache.layers)), cache.lengths)


def test_a_call_leaves_the_cache_it_was_given_as_it_was(model):
    cache = model(IDS[:, :9]).cache
    before = [x.clone() for x in tensors_of(cache)]
    once, again = (model(IDS[:, 9:], cache=cache) for _ in range(2))
    for x, y in zip(before, tensors_of(cache), strict=True):
        assert_same_bits(x, y)
    assert_same_bits(once.logits, again.logits)
    assert cache.lengths == (9, 9)
    assert once.cache.lengths == (T, T)


def test_an_empty_call_passes_the_cache_through(model):
    cache = model(IDS).cache
    out = model(IDS[:, :0], cache=cache)
    assert out.logits.shape == (2, 0, SMALL.vocab_size)
    for x, y in zip(tensors_of(out.cache), tensors_of(cache), strict=True):
        assert_same_bits(x, y)


def test_sequences_may_leave_the_cache_come_twice_and_change_places(model):
    cache = model(IDS[:, :9]).cache
    rows = [1, 0, 1]
    got = model(IDS[rows, 9:], cache=cache.select(rows)).logits
    want = model(IDS[:, 9:], cache=cache).logits
    exact = [want[rows]]
    assert_within_envelope(
        [got], exact, bounds_of(exact, lambda: [model(IDS[rows, 9:], cache=cache.select(rows)).logits])
    )


def test_the_cache_has_the_size_that_was_promised(model):
    """Linear in the tokens only in MLA layers, R + P numbers a token."""
    short, long = model(IDS[:, :9]).cache, model(IDS).cache
    numbers = SMALL.kv_lora_rank + SMALL.qk_rope_head_dim
    assert long.nbytes - short.nbytes == 8 * 2 * (T - 9) * numbers * len(SMALL.mla_layers)


# Padding and packing

LENGTHS = (7, 0, 16, 1, 11)


def padded(lengths, side, filler):
    """A batch with each row's tokens on one side, and its mask."""
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), filler), torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, place] = random_tokens(length, seed=row)
        mask[row, place] = True
    return ids, mask


@pytest.mark.parametrize(
    "config", [CONFIGS["four_layers"], CONFIGS["query_latent"]], ids=["four_layers", "query_latent"]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_each_row_gives_alone(config, side):
    model = small_model(config).requires_grad_(False)
    ids, mask = padded(LENGTHS, side, SMALL.pad_token_id)
    batch = model(ids, attention_mask=mask)
    for row, length in enumerate(LENGTHS):
        if length == 0:
            continue
        alone = model(ids[row : row + 1, mask[row]])
        exact = results(alone)
        bounds = bounds_of(exact, lambda row=row: results(model(ids[row : row + 1, mask[row]])))
        got = [batch.logits[row, mask[row]][None], *tensors_of(batch.cache.select([row]))]
        assert_within_envelope(got, exact, bounds)
    assert batch.cache.lengths == LENGTHS


def test_what_stands_in_the_padding_changes_nothing_to_the_bit(model):
    ids, mask = padded(LENGTHS, "left", SMALL.pad_token_id)
    other, _ = padded(LENGTHS, "left", 17)
    outside, _ = padded(LENGTHS, "left", -100)  # no token at all
    assert not torch.equal(ids, other)
    for filled in (other, outside):
        for x, y in zip(
            results(model(ids, attention_mask=mask)), results(model(filled, attention_mask=mask)), strict=True
        ):
            assert_same_bits(x, y)
    assert not model(ids, attention_mask=mask).logits[~mask].any()


def test_packed_segments_give_what_a_padded_batch_gives_to_the_bit(model):
    ids, mask = padded(LENGTHS, "left", 0)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = model(ids[mask][None], cu_seqlens=offsets)
    batch = model(ids, attention_mask=mask)
    assert_same_bits(packed.logits[0], batch.logits[mask])
    for x, y in zip(tensors_of(packed.cache), tensors_of(batch.cache), strict=True):
        assert_same_bits(x, y)
    for x, y in zip(packed.hidden_states, batch.hidden_states, strict=True):
        assert_same_bits(x[0], y[mask])


def test_sequences_of_different_lengths_go_on_together(model):
    """A padded batch, then a step with a hole in it, then a token for each: as if each had been alone."""
    ids, mask = padded(LENGTHS, "left", 0)
    cache = model(ids, attention_mask=mask).cache
    more, hole = random_tokens(5, 3, seed=8), torch.tensor([[True, False, True]] * 5)
    cache = model(more, attention_mask=hole, cache=cache).cache
    last = random_tokens(5, 1, seed=9)
    got = model(last, cache=cache).logits
    for row in range(5):
        text = torch.cat([ids[row, mask[row]], more[row, hole[row]], last[row]])[None]
        exact = [model(text).logits[:, -1]]
        bounds = bounds_of(exact, lambda text=text: [model(text).logits[:, -1]])
        assert_within_envelope([got[row]], exact, bounds)


def test_a_full_mask_is_no_mask_to_the_bit(model):
    out = model(IDS, attention_mask=torch.ones_like(IDS, dtype=torch.bool))
    assert_same_bits(out.logits, model(IDS).logits)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 15))
@settings(max_examples=5)
def test_prompts_of_any_lengths_may_be_read_in_pieces_of_any_size(model, lengths, piece):
    prompts = [random_tokens(length, seed=n).tolist() for n, length in enumerate(lengths)]
    got = prefill(model, prompts, piece)
    assert got.cache.lengths == tuple(lengths)
    want = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    bounds = bounds_of([want], lambda: [prefill(model, prompts, piece).logits])
    assert_within_envelope([got.logits], [want], bounds)


# Neighbours

POISON = 50  # a token whose embedding is NaN


def poisoned(config):
    """A model that computes NaN wherever the token POISON has been."""
    model = small_model(config).requires_grad_(False)
    model.model.embed_tokens.weight[POISON] = torch.nan
    return model


@pytest.mark.parametrize("form", ["batch", "packed"])
def test_a_nan_in_one_sequence_leaves_the_others_as_they_were_to_the_bit(form):
    """Without experts: how many tokens share an expert may change the order of its sums (next test)."""
    model = poisoned(replace(SMALL, num_experts=0))
    ids = random_tokens(3, 17, seed=6).clamp(max=POISON - 1)
    bad = ids.clone()
    bad[1, 5] = POISON
    offsets = torch.tensor([0, 17, 34, 51])
    call = {"batch": model, "packed": lambda x: model(x.reshape(1, -1), cu_seqlens=offsets)}[form]
    clean, dirty = call(ids), call(bad)
    for x, y in ((clean.logits, dirty.logits), *zip(clean.hidden_states, dirty.hidden_states, strict=True)):
        x, y = x.reshape(3, 17, -1), y.reshape(3, 17, -1)
        assert_same_bits(y[[0, 2]], x[[0, 2]])
    logits = dirty.logits.reshape(3, 17, -1)
    assert logits[1, 5:].isnan().all()
    for row in (0, 2):
        for x, y in zip(tensors_of(clean.cache.select([row])), tensors_of(dirty.cache.select([row])), strict=True):
            assert_same_bits(x, y)


def test_a_nan_in_one_sequence_moves_the_others_by_rounding_at_most_where_experts_are_shared():
    model = poisoned(SMALL)
    ids = random_tokens(3, 17, seed=6).clamp(max=POISON - 1)
    bad = ids.clone()
    bad[1, 5] = POISON
    exact = [model(ids).logits[[0, 2]]]
    bounds = bounds_of(exact, lambda: [model(ids).logits[[0, 2]]])
    got = model(bad).logits
    assert_within_envelope([got[[0, 2]]], exact, bounds)
    assert got[1, 5:].isnan().all()


def test_later_tokens_do_not_change_earlier_logits_without_experts_to_the_bit():
    model = small_model(replace(SMALL, num_experts=0)).requires_grad_(False)
    other = IDS.clone()
    other[:, 20:] = random_tokens(2, T - 20, seed=11)
    assert_same_bits(model(other).logits[:, :20], model(IDS).logits[:, :20])
    assert not torch.equal(model(other).logits[:, 20:], model(IDS).logits[:, 20:])


# Errors


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"input_ids must be \[B, T\] of int32 or int64; got \[29\]", lambda m: m(IDS[0])),
        ("input_ids must be .* of int32 or int64; got .*float32", lambda m: m(IDS.float())),
        (
            r"input_ids must be in \[0, 101\); got \d+ to 101",
            lambda m: m(IDS.clamp(max=90).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(101))),
        ),
        (r"input_ids must be in \[0, 101\); got -1", lambda m: m(IDS - 1 - IDS.min())),
        ("attention_mask must be bool", lambda m: m(IDS, attention_mask=torch.ones_like(IDS))),
        ("attention_mask must be bool", lambda m: m(IDS, attention_mask=torch.ones(2, 4, dtype=torch.bool))),
        ("cu_seqlens must be None unless B = 1", lambda m: m(IDS, cu_seqlens=torch.tensor([0, T]))),
        ("cu_seqlens must end at T=29; got 7", lambda m: m(IDS[:1], cu_seqlens=torch.tensor([0, 7]))),
        ("cu_seqlens must be offsets that start at 0", lambda m: m(IDS[:1], cu_seqlens=torch.tensor([1, T]))),
        (r"cu_seqlens must be \[N \+ 1\]", lambda m: m(IDS[:1], cu_seqlens=torch.tensor([0.0, T]))),
        (
            "attention_mask must be None beside cu_seqlens",
            lambda m: m(IDS[:1], cu_seqlens=torch.tensor([0, T]), attention_mask=IDS[:1] >= 0),
        ),
        ("cache must hold N=2 sequences", lambda m: m(IDS, cache=m(IDS[:1]).cache)),
    ],
)
def test_a_wrong_call_is_refused_by_name(model, message, call):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_a_model_in_integers_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of"):
        KimiLinearForCausalLM(SMALL, dtype=torch.int8, device="meta")
    with pytest.raises(ValueError, match="tensors must cover the model"):
        load_tensors(KimiLinearForCausalLM(SMALL), [])
