"""Made checkpoints: the same bytes everywhere, valid, alive, and read by everyone."""

import hashlib
import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kimi_linear.reference.chunked import chunk_kda
from kimi_linear.reference.model.byte_tokenizer import BYTES, SPECIAL, VOCABULARY, byte_symbols
from kimi_linear.reference.model.checkpoint import count_parameters, load_model, open_checkpoint
from kimi_linear.reference.model.config import KimiLinearConfig
from kimi_linear.reference.model.draws import BLOCK, normal, uniform
from kimi_linear.reference.model.names import checkpoint_shapes
from kimi_linear.reference.model.tokenizer import load_tokenizer
from kimi_linear.reference.model.writer import make_checkpoint, split_evenly, tiny_config

SHA256 = {  # of make_checkpoint(folder, tiny_config(2), seed=5, shards=2)
    "config.json": "82812f18c9419b8eca58260f850755513d65ef88d787e0ca566085476de060fc",
    "generation_config.json": "039b2e1f8a76ca1bfb3b3e5a914667b718d6e346a78246e74d0cf393277f7ce4",
    "model-00001-of-00002.safetensors": "9dd848aa3ae7968006afe755f9c10858a1f5e0045455013a981e6e5c8e0983e7",
    "model-00002-of-00002.safetensors": "50a33ef76443e3e98422f546a6218c853b042803cb4dca4cb30ef4d690b02dcf",
    "model.safetensors.index.json": "32d2dcafd33d2b4e28cc20314ed73857d3d016e0f355124bd603d6cbb8d0e68e",
    "tokenizer.json": "7b72359a4f92efedd65fda0d0cd2172503f6dcc6a37884405482dd003dcb4f75",
    "tokenizer_config.json": "33d661cc3878e614614bc0a8bd5bae8dc20cad8ae9d72973c92e7b2459b734cb",
}


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_a_seed_gives_the_bytes_that_it_gave_when_this_was_written(tmp_path):
    assert digests(make_checkpoint(tmp_path / "a", tiny_config(2), seed=5, shards=2)) == SHA256


def test_another_seed_changes_every_tensor_and_nothing_else(tmp_path):
    a, b = (make_checkpoint(tmp_path / str(seed), tiny_config(2), seed=seed, shards=1) for seed in (0, 1))
    changed = {name for name, digest in digests(a).items() if digests(b)[name] != digest}
    assert changed == {"model-00001-of-00001.safetensors"}
    x, y = (load_file(folder / "model-00001-of-00001.safetensors") for folder in (a, b))
    assert all(not torch.equal(x[name], y[name]) for name in x)


def test_a_tensor_does_not_depend_on_what_else_is_written(tmp_path):
    one = make_checkpoint(tmp_path / "one", tiny_config(2), seed=3, shards=1)
    other = make_checkpoint(tmp_path / "other", tiny_config(5), seed=3, shards=7)
    small, large = ({k: v for f in d.glob("*.safetensors") for k, v in load_file(f).items()} for d in (one, other))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(small[name], large[name])
    assert not torch.equal(small[name], small[name.replace("q_proj", "k_proj")])


def test_draws_are_exact_functions_of_philox_words():
    """The formula once more, in integers and fractions of Python."""
    key = int.from_bytes(hashlib.sha256(b"7:name").digest()[:16], "little")
    words = [int(word) for word in np.random.Philox(key=key).random_raw(6)]
    quarters = [sum(word >> offset & 0xFFFF for offset in (0, 16, 32, 48)) for word in words]
    step = 0.5 / math.sqrt((2**32 - 1) / 3)
    assert normal(7, "name", (2, 3), mean=1.0, std=0.5).flatten().tolist() == [
        np.float32(1.0 + step * (quarter - 131070)).item() for quarter in quarters
    ]
    fractions = [(word >> 11) / 2**53 for word in words]
    assert uniform(7, "name", (6,), low=-3.0, high=1.0).tolist() == [
        np.float32(-3.0 + 4.0 * fraction).item() for fraction in fractions
    ]


def test_draws_have_the_moments_they_are_asked_for_across_blocks():
    x = normal(0, "x", (BLOCK + 1000,), mean=2.0, std=3.0)
    assert abs(x.mean() - 2) < 0.02
    assert abs(x.std() - 3) < 0.02
    assert not torch.equal(x[:1000], x[BLOCK:])
    y = uniform(0, "y", (10000,), low=-1.0, high=3.0)
    assert -1 <= y.min() < -0.99
    assert 2.99 < y.max() < 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_have_the_original_names_and_dtypes(tmp_path, dtype):
    folder = make_checkpoint(tmp_path / "a", tiny_config(5), dtype=dtype, shards=4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        held = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in held)
        tensors |= held
    config = KimiLinearConfig.from_json(folder)
    wanted = checkpoint_shapes(config)
    assert {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()} == wanted
    fp32 = {name for name, x in tensors.items() if x.dtype == torch.float32}
    if dtype == torch.bfloat16:
        assert {name.rsplit(".", 1)[1] for name in fp32} == {"A_log", "dt_bias"}
    assert index["metadata"]["total_size"] == sum(x.numel() * x.element_size() for x in tensors.values())
    assert len(index["weight_map"]) == len(wanted)


def test_shards_keep_the_order_of_the_layers_and_are_about_as_large_as_each_other():
    sizes = {str(number): size for number, size in enumerate([5, 1, 1, 1, 30, 2, 2, 2, 2, 2])}
    for shards in range(1, 11):
        groups = split_evenly(sizes, shards)
        assert len(groups) == shards
        assert all(groups)
        assert [name for group in groups for name in group] == list(sizes)
    assert [len(group) for group in split_evenly(dict.fromkeys("abcdefghi", 1), 3)] == [3, 3, 3]


@pytest.mark.parametrize("shards", [0, 11])
def test_a_number_of_shards_that_cannot_be_is_refused(shards):
    with pytest.raises(ValueError, match=f"shards must be 1 to 10, the number of tensors; got {shards}"):
        split_evenly(dict.fromkeys("abcdefghij", 1), shards)


def test_nothing_is_written_when_the_shards_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="shards must be 1 to 56"):
        make_checkpoint(tmp_path / "a", tiny_config(2), shards=1000)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_holds_something_is_not_written_to(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        make_checkpoint(tmp_path)
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        make_checkpoint(tmp_path / "note")
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size must be 260 or more, a token a byte; got 259"):
        make_checkpoint(tmp_path / "a", tiny_config(vocab_size=259))


def test_a_dtype_that_checkpoints_are_not_stored_in_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dtype must be torch.bfloat16 or torch.float32; got torch.float16"):
        make_checkpoint(tmp_path / "a", dtype=torch.float16)


def test_the_tiny_config_has_every_kind_of_layer_and_ends_in_mla():
    config = tiny_config(5)
    assert config.mla_layers == (3, 4)
    assert config.dense_layers == (0,)
    assert config.moe_layers == (1, 2, 3, 4)
    assert tiny_config(1).mla_layers == ()
    assert tiny_config(hidden_size=80).hidden_size == 80
    assert count_parameters(config).activated < count_parameters(config).total < 1_000_000


def test_a_made_model_is_alive(tmp_path):
    """Logits that differ, experts that all get tokens, gates between the extremes, a residual that grows slowly."""
    folder = make_checkpoint(tmp_path / "a", tiny_config(8))
    seen = []

    def watch(q, k, v, g, beta, *, front_end, **options):
        seen.append(front_end(q, k, g, beta)[2].exp())
        return chunk_kda(q, k, v, g, beta, front_end=front_end, **options)

    model = load_model(folder, kda=watch)
    chosen = []
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.gate.register_forward_hook(lambda _, __, routing: chosen.append(routing.experts))
    with torch.no_grad():
        out = model(torch.tensor([load_tokenizer(folder).encode("It asks the memory what it already believes.")]))
    assert 1 < out.logits.std() < 6
    assert 0.1 < out.logits.softmax(-1).amax(-1).mean() < 0.9
    sizes = [x.square().mean().sqrt() for x in out.hidden_states]
    assert all(0.5 < after / before < 2 for before, after in pairwise(sizes))
    assert all(len(experts.unique()) == model.config.num_experts for experts in chosen)
    decay = torch.cat([x.flatten() for x in seen])
    assert decay.quantile(0.1) < 0.8
    assert decay.quantile(0.9) > 0.99


def test_the_byte_tokenizer_says_what_it_means(tmp_path):
    folder = make_checkpoint(tmp_path / "a", tiny_config(2))
    tokenizer = load_tokenizer(folder)
    text = "Hé 字\n\t\0[BOS]x<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids == [*"Hé 字\n\t\0".encode(), BYTES, ord("x"), BYTES + 2]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([BYTES + n]) for n in range(len(SPECIAL))] == list(SPECIAL)
    assert len(set(byte_symbols())) == BYTES
    assert open_checkpoint(folder).config.vocab_size == VOCABULARY


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_transformers_reads_config_weights_tokenizer_and_stops_where_we_do(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    folder = make_checkpoint(tmp_path / "a", tiny_config(5), seed=1)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert (
        model.num_parameters() == count_parameters(tiny_config(5)).total - 4 * 7
    )  # their correction bias is a buffer
    assert model.generation_config.eos_token_id == tiny_config(5).eos_token_id
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Two  spaces, é, [BOS]"
    assert tokenizer.encode(text, add_special_tokens=False) == load_tokenizer(folder).encode(text)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[0], SPECIAL[2], SPECIAL[3])
