"""The whole model against transformers' Kimi Linear, from the same checkpoint.

In fp64 both must agree to rounding of fp64 (transformers' casts to fp32 are widened for that), in fp32 each
must be the fp64 result to rounding of fp32. The bounds are what rounding does to either code, in fp64, on the
same tokens: their chunk form subtracts cumulative gates, which costs it a few roundings more than ours.
"""

import pytest
import torch

from hf_oracle import fp64_throughout, oracle
from judge import assert_within_envelope, bounds_of
from kimi_linear.reference.model.generate import generate
from model_cases import CONFIGS, random_tokens, small_model

STEPS = 64
CLEAR_MARGIN = 1e-3  # between the two best logits: a hundred times what fp32 moves them by

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning"),
    pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS),
]


def results(model, ids):
    """Logits, the final norm's output, the embedding and the output of each layer but the last."""
    with torch.no_grad():
        out = model.model(ids)
        return [model.lm_head(out.x), out.x, *out.hidden_states[:-1]]


def their_results(model, ids):
    """The same of transformers' model, whose hidden states have the final norm's output for the last layer's."""
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
    *layers, norm = out.hidden_states
    return [out.logits, norm, *layers]


@pytest.mark.slow
def test_logits_and_every_layer_agree(config, tmp_path):
    ids = random_tokens(2, 67, seed=1)  # a chunk and a bit
    ours, theirs = small_model(config), oracle(config, tmp_path)

    def their_exact():
        with fp64_throughout():
            return their_results(theirs, ids)

    exact = results(ours, ids)
    bounds = bounds_of(exact, lambda: results(ours, ids), their_exact)
    got = their_exact()
    assert got[0].dtype == torch.float64
    assert len(got) == config.num_hidden_layers + 2
    assert_within_envelope(got, exact, bounds)  # in fp64

    assert_within_envelope(results(small_model(config, torch.float32), ids), exact, bounds)
    assert_within_envelope(their_results(theirs.float(), ids), exact, bounds)


def test_greedy_tokens_agree_for_64_steps(config, tmp_path):
    prompt = random_tokens(1, 23, seed=7)  # one whose 64 choices are all clear in fp32
    ours, theirs = small_model(config, torch.float32), oracle(config, tmp_path, torch.float32)
    with torch.no_grad():
        options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        logits, cache, _ = ours(prompt)
        margins, tokens = [], []
        for _ in range(STEPS):
            best, second = logits[0, -1].topk(2).values
            margins.append((best - second).item())
            tokens.append(logits[0, -1].argmax().item())
            logits, cache, _ = ours(torch.tensor([tokens[-1:]]), cache=cache)
    assert tokens == text[0, prompt.shape[1] :].tolist()
    assert min(margins) > CLEAR_MARGIN
    assert len(set(tokens)) > STEPS // 4  # no loop of a few tokens


@pytest.mark.slow
def test_gradients_agree(config, tmp_path):
    ids = random_tokens(2, 19, seed=3)
    ours, theirs = small_model(config), oracle(config, tmp_path)

    def gradients():
        return our_gradients(ours, ids)

    exact = gradients()
    bounds = bounds_of(list(exact.values()), lambda: list(gradients().values()))
    with fp64_throughout():
        got = their_gradients(theirs, ids)
    assert got.keys() == exact.keys()
    assert_within_envelope([got[name] for name in exact], list(exact.values()), bounds, gradients=True)
    silent = [name for name, gradient in exact.items() if not gradient.any()]
    assert not silent


def test_left_padded_prompts_continue_with_the_same_tokens(config, tmp_path):
    ours, theirs = small_model(config).requires_grad_(False), oracle(config, tmp_path)
    prompts = [random_tokens(length, seed=length).tolist() for length in (3, 11, 7)]
    ids = torch.tensor([[config.pad_token_id] * (11 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (11 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with fp64_throughout():
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        texts = theirs.generate(ids, attention_mask=mask, **options)
    assert generate(ours, prompts, max_new_tokens=12, stop_ids=()) == texts[:, 11:].tolist()


def test_biased_router_weights_are_those_of_the_code_beside_the_checkpoint(config, tmp_path, monkeypatch):
    """That code adds the bias in place to the scores that it then takes the weights from."""
    router = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear").KimiLinearTopkRouter
    unchanged = router.forward

    def in_place(self, x):
        _, _, chosen = unchanged(self, x)
        scores = (x.flatten(0, -2) @ self.weight.T).sigmoid()
        scores += self.e_score_correction_bias
        mixing = scores.gather(1, chosen)
        if self.norm_topk_prob:
            mixing = mixing / mixing.sum(-1, keepdim=True)
        return None, mixing * self.routed_scaling_factor, chosen

    ids = random_tokens(1, 19, seed=4)
    ours, theirs = small_model(config, router_weights="biased"), oracle(config, tmp_path)
    exact = results(ours, ids)
    bounds = bounds_of(exact, lambda: results(ours, ids))
    with fp64_throughout():
        unbiased = their_results(theirs, ids)
        monkeypatch.setattr(router, "forward", in_place)
        biased = their_results(theirs, ids)
    assert_within_envelope(biased, exact, bounds)
    assert (biased[0] - unbiased[0]).abs().max() > 0.01


def our_gradients(model, ids):
    model.zero_grad()
    loss(model(ids).logits, ids).backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


def their_gradients(model, ids):
    loss(model(ids, use_cache=False).logits, ids).backward()
    return under_our_names({name: x.grad for name, x in model.named_parameters()})


def loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def under_our_names(theirs):
    """transformers' parameters (or their gradients) by the names of ours."""
    ours = {}
    sparse = {name.split(".mlp.")[0] for name in theirs if ".mlp.gate." in name}
    for name, x in theirs.items():
        name = name.replace(".forget_gate.", ".")
        if name.split(".mlp.")[0] in sparse:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("self_attn.conv1d.weight"):
            ours |= {name.replace("conv1d", f"{p}_conv1d"): part for p, part in zip("qkv", x.chunk(3), strict=True)}
        elif name.endswith("experts.gate_up_proj"):
            halves = zip(("w1", "w3"), x.chunk(2, dim=1), strict=True)
            ours |= {name.replace("gate_up_proj", w): half for w, half in halves}
        else:
            ours[name.replace(".experts.down_proj", ".experts.w2")] = x
    return ours
