"""Reading checkpoints: every layout gives the same model, and every fault its own message, before anything runs."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_linear.reference.model import tokenizer as tokenizer_module
from kimi_linear.reference.model.byte_tokenizer import byte_symbols
from kimi_linear.reference.model.checkpoint import (
    LISTED,
    CheckpointError,
    MisfitError,
    RoundedWarning,
    count_parameters,
    load_model,
    open_checkpoint,
)
from kimi_linear.reference.model.model import KimiLinearForCausalLM
from kimi_linear.reference.model.names import checkpoint_shapes
from kimi_linear.reference.model.presets import KIMI_LINEAR_48B
from kimi_linear.reference.model.tokenizer import load_tokenizer
from kimi_linear.reference.model.writer import make_checkpoint, tiny_config

INDEX = "model.safetensors.index.json"
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
DEPRECATED = "ignore:`rope_scaling` is deprecated:FutureWarning"  # transformers, of the released config.json


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint in the original layout, in three shards. Not to be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("made") / "original", tiny_config(), seed=11)


@pytest.fixture
def folder(made, tmp_path):
    """A copy to break."""
    return shutil.copytree(made, tmp_path / "copy")


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory):
    """What transformers saves of it, by its two formats and in two precisions."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    parent = tmp_path_factory.mktemp("saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
        wide.save_pretrained(parent / "default", max_shard_size="200KB")
        wide.save_pretrained(parent / "in tree", save_original_format=False)
        narrow = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
        narrow.save_pretrained(parent / "bf16")
    return parent


def ids(length=40):
    return torch.arange(length)[None] * 7 % 256


def logits(model):
    with torch.no_grad():
        return model(ids()).logits


def tensors_of(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def rewrite(folder, change):
    """The same checkpoint in one file, after `change` of its tensors."""
    tensors = tensors_of(folder)
    change(tensors)
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors")


def refused(folder):
    """The message that a broken checkpoint is refused with; the same to whoever asks."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    with pytest.raises(CheckpointError) as again:
        open_checkpoint(str(folder))
    assert str(caught.value) == str(again.value)
    return str(caught.value)


# What is loaded


def test_every_tensor_arrives_at_its_place(made):
    model, stored = load_model(made), tensors_of(made)
    state = model.state_dict()
    experts = {name for name in stored if ".experts." in name}
    for name in set(stored) - experts:
        assert torch.equal(state[name], stored[name].float()), name
    for name in experts:
        stack, number, matrix = name.removesuffix(".weight").rsplit(".", 2)
        assert torch.equal(state[f"{stack}.{matrix}"][int(number)], stored[name].float()), name
    assert len(experts) == 3 * 3 * 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_decay_rates_and_router_are_fp32_or_wider_whatever_the_rest_is(made, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    stored = tensors_of(made)
    for name, x in load_model(made, dtype=dtype).state_dict().items():
        kept = name.endswith(("A_log", "dt_bias", ".gate.weight", "e_score_correction_bias"))
        assert x.dtype == (wide if kept else dtype), name
        if kept:
            assert torch.equal(x, stored[name].to(wide)), name


def test_a_loaded_model_outlives_its_files(folder, made):
    model = load_model(folder)
    before = logits(model)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(load_model(made)), before)
    assert not any(x.is_meta for x in model.state_dict().values())


def test_one_file_and_several_shards_give_the_same_model(folder, made):
    rewrite(folder, lambda tensors: None)
    assert [file.name for file in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert torch.equal(logits(load_model(folder)), logits(load_model(made)))


def test_the_operator_and_the_mixing_weights_can_be_chosen(made):
    def silent(q, k, v, g, beta, *, initial_state, **options):
        return torch.zeros_like(v), initial_state

    outputs = [
        logits(load_model(made)),
        logits(load_model(made, kda=silent)),
        logits(load_model(made, router_weights="biased")),
    ]
    assert all((a - b).abs().max() > 0.1 for n, a in enumerate(outputs) for b in outputs[:n])


# As transformers saves it


@pytest.mark.parametrize("name", ["default", "in tree"])
def test_what_transformers_saves_is_the_same_model(made, saved, name):
    original, loaded = load_model(made).state_dict(), load_model(saved / name).state_dict()
    assert original.keys() == loaded.keys()
    assert all(torch.equal(original[key], loaded[key]) for key in original)


def test_the_saved_layouts_are_the_two_that_differ_from_the_original(saved):
    """Should transformers mend its names, this test says so, and the table in `layouts` gets shorter."""
    default, in_tree = (set(open_checkpoint(saved / name).stored) for name in ("default", "in tree"))
    original = set(checkpoint_shapes(tiny_config()))
    assert default - original == {f"model.layers.0.block_sparse_moe.{x}_proj.weight" for x in ("gate", "up", "down")}
    assert "model.layers.1.mlp.experts.gate_up_proj" in in_tree
    assert "model.layers.0.self_attn.conv1d.weight" in in_tree
    assert "model.layers.0.self_attn.forget_gate.A_log" in in_tree
    assert len(in_tree) < len(default) == len(original)
    assert len(list((saved / "default").glob("*.safetensors"))) > 1


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize("name", ["original", "default", "in tree"])
def test_logits_are_those_of_transformers_in_fp32(made, saved, name):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from kimi_linear.conformance import RATIO_LIMIT, envelope, error_ratio, rounded_runs

    where = made if name == "original" else saved / name
    theirs = logits(transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32))
    exact = load_model(where, dtype=torch.float64)
    (runs,) = rounded_runs(lambda: [logits(exact)])
    limit = RATIO_LIMIT * envelope(logits(exact), runs)
    assert error_ratio(theirs, logits(exact), limit).max() < 1
    assert error_ratio(logits(load_model(where)), logits(exact), limit).max() < 1
    assert 0 < limit.max() < 1e-3


def test_decay_rates_that_were_rounded_before_load_with_a_warning(made, saved):
    with pytest.warns(RoundedWarning, match=r"holds 3 decay rates in BF16, model.layers.0.self_attn.A_log among"):
        rounded = load_model(saved / "bf16")
    assert rounded.model.layers[0].self_attn.A_log.dtype == torch.float32
    assert not torch.equal(logits(rounded), logits(load_model(made)))


# What does not fit


def test_all_that_is_missing_unexpected_or_misshaped_is_one_error(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.2.block_sparse_moe.experts.4.w3.weight"]
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(3)
        tensors["model.layers.0.self_attn.A_log"] = torch.zeros(5)
        tensors["lm_head.weight"] = torch.zeros(260, 72, dtype=torch.int8)

    rewrite(folder, change)
    assert refused(folder).splitlines() == [
        f"{folder} must hold the tensors that its config.json asks for; got",
        "  2 missing:",
        "    model.layers.2.block_sparse_moe.experts.4.w3.weight",
        "    model.norm.weight",
        "  1 unexpected:",
        "    model.layers.1.self_attn.q_proj.bias",
        "  1 of another shape:",
        "    model.layers.0.self_attn.A_log must be [1, 1, 5, 1]; got [5]",
        "  1 of another dtype:",
        "    lm_head.weight must be one of F64, F32, F16, BF16; got I8",
    ]


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_error(folder):
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    with pytest.raises(MisfitError) as caught:
        open_checkpoint(folder)
    assert len(caught.value.layout.missing) == 63
    assert str(caught.value).count("\n    model.layers.") == LISTED
    assert str(caught.value).endswith(f"… and {63 - LISTED} more")


def test_a_stack_of_too_few_experts_is_of_another_shape(saved, tmp_path):
    folder = shutil.copytree(saved / "in tree", tmp_path / "copy")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    rewrite_single(folder, lambda tensors: tensors.update({name: tensors[name][:6].clone()}))
    assert f"{name} must be [7, 80, 72]; got [6, 80, 72]" in refused(folder)


def rewrite_single(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_config_of_another_model_is_told_by_the_shapes(folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"kv_lora_rank": 30, "num_hidden_layers": 4}))
    message = refused(folder)
    assert "model.layers.3.self_attn.kv_a_layernorm.weight must be [30]; got [28]" in message
    assert "3 of another shape" in message


# Broken files


def test_a_truncated_shard_is_told_by_its_length(folder):
    whole = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(whole[:-1000])
    want = f"{folder / LAST} must be {len(whole)} bytes long, as its header says; got {len(whole) - 1000} bytes"
    assert refused(folder) == want


@pytest.mark.parametrize("content", [b"", b"\x00\x01", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
def test_a_file_that_is_no_safetensors_file_is_refused_by_name(folder, content):
    (folder / FIRST).write_bytes(content)
    assert refused(folder).startswith(
        f"{folder / FIRST} must be a safetensors file; got {len(content)} bytes that are none ("
    )


def test_a_header_of_garbage_is_refused_by_name(folder):
    whole = bytearray((folder / FIRST).read_bytes())
    whole[8:40] = b"\xff" * 32
    (folder / FIRST).write_bytes(bytes(whole))
    assert f"{folder / FIRST} must be a safetensors file; got {len(whole)} bytes that are none" in refused(folder)


def test_every_broken_shard_is_named_at_once(folder):
    (folder / FIRST).unlink()
    (folder / LAST).write_bytes(b"x" * 100)
    first, second = refused(folder).splitlines()
    assert first == f"{folder / FIRST} must be a safetensors file; got no such file"
    assert second.startswith(f"{folder / LAST} must be a safetensors file; got 100 bytes that are none")


def change_index(folder, change):
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def test_an_index_and_a_shard_that_disagree_name_the_tensor(folder):
    def change(content):
        content["weight_map"]["model.norm.weight"] = FIRST

    change_index(folder, change)
    assert refused(folder).splitlines() == [
        f"{folder / FIRST} must hold model.norm.weight, as {INDEX} says; got a file without it",
        f"{INDEX} must name model.norm.weight for {folder / LAST}, which holds it; got no such entry",
    ]


@pytest.mark.parametrize("file", [7, None, "../elsewhere.safetensors", ""])
def test_an_index_that_names_no_file_of_the_folder_is_refused(folder, file):
    change_index(folder, lambda content: content["weight_map"].update({"lm_head.weight": file}))
    want = f"{folder / INDEX} must name a file of its folder for lm_head.weight; got {file!r}"
    assert refused(folder) == want


@pytest.mark.parametrize(
    ("content", "got"), [("{}", "the keys []"), ("[]", "a list"), ('{"weight_map": {}}', "keys")]
)
def test_an_index_without_a_map_is_refused(folder, content, got):
    (folder / INDEX).write_text(content)
    message = refused(folder)
    assert message.startswith(f"{folder / INDEX} must hold a weight_map from tensor to file; got ")
    assert got in message


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_that_is_no_json_is_refused_by_name(folder, name):
    (folder / name).write_text('{"weight_map": ')
    assert refused(folder).startswith(f"{folder / name} must be a JSON file; got ")


def test_a_missing_config_is_refused_by_name(folder):
    (folder / "config.json").unlink()
    assert refused(folder) == f"{folder / 'config.json'} must be a JSON file; got no such file"


def test_a_config_that_is_refused_gets_the_name_of_its_file(folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"hidden_act": "gelu"}))
    message = refused(folder)
    assert message.startswith(f"{folder / 'config.json'}: config: hidden_act must be 'silu'")
    (folder / "config.json").write_text("[1]")
    assert refused(folder) == f"{folder / 'config.json'} must hold an object; got a list"


def test_a_folder_without_weights_is_refused(folder, tmp_path):
    (folder / INDEX).unlink()
    want = f"{folder} must hold {INDEX} or model.safetensors; got 3 other safetensors files"
    assert refused(folder) == want
    assert (
        refused(tmp_path / "nowhere")
        == f"{tmp_path / 'nowhere'} must be a folder with a checkpoint; got no such file"
    )
    assert refused(folder / FIRST) == f"{folder / FIRST} must be a folder with a checkpoint; got a file"


def test_nothing_is_built_before_the_names_are_checked(folder, monkeypatch):
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    built = []
    monkeypatch.setattr(KimiLinearForCausalLM, "__init__", lambda *_, **__: built.append(1))
    assert "model.norm.weight" in refused(folder)
    assert not built


# Sizes


def test_the_released_model_has_its_published_number_of_parameters():
    assert count_parameters(KIMI_LINEAR_48B) == (49_122_681_728, 3_484_459_904)
    assert len(checkpoint_shapes(KIMI_LINEAR_48B)) == 20_493


def test_a_model_without_experts_activates_all_its_parameters():
    total, activated = count_parameters(tiny_config(num_experts=0))
    assert total == activated > 0


# Tokenizers

PATTERN_SHA256 = "de5781783b193d5ccf5b1b28edfa70fa816ce78d54603fdc422cfd8d4ea4411f"

RANKS = {bytes([byte]): byte for byte in range(256)} | {b"he": 256, b"ll": 257, b"hell": 258, b"hello": 259}


def write_ranks(folder, ranks=RANKS):
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named = {"260": {"content": "[BOS]"}, "262": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))


def test_a_rank_file_is_read_with_its_special_tokens(tmp_path):
    pytest.importorskip("tiktoken")
    write_ranks(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("[BOS]hello, hell<|im_end|>") == [260, 259, *b", ", 258, 262]
    assert tokenizer.decode([261, 262, 515]) == "<|reserved_token_261|><|im_end|><|reserved_token_515|>"
    assert tokenizer.encode("字é\n") == list("字é\n".encode())
    assert tokenizer.decode(tokenizer.encode("A b\u00a0c 12345 字")) == "A b\u00a0c 12345 字"


def test_ranks_are_merged_within_words_and_not_across(tmp_path):
    pytest.importorskip("tiktoken")
    write_ranks(tmp_path, RANKS | {b"o ": 260, b"o1": 261, b"123": 262, b"34": 263, b"oH": 264})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello hello") == [259, *b" ", 259]
    assert tokenizer.encode("hello1234") == [259, 262, *b"4"]
    assert tokenizer.encode("helloHello") == [259, *b"H", *b"e", 257, *b"o"]


def test_a_changed_rank_file_is_read_again(tmp_path):
    pytest.importorskip("tiktoken")
    write_ranks(tmp_path)
    assert load_tokenizer(tmp_path).encode("hello") == [259]
    write_ranks(tmp_path, {token: rank for token, rank in RANKS.items() if rank < 259})
    assert load_tokenizer(tmp_path).encode("hello") == [258, ord("o")]


def test_both_kinds_of_file_agree_on_what_a_byte_is(made, tmp_path):
    pytest.importorskip("tiktoken")
    write_ranks(tmp_path, {token: rank for token, rank in RANKS.items() if rank < 256})
    text = "".join(byte_symbols()) + "\n\0 字"
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(made).encode(text) == list(text.encode())


@pytest.mark.parametrize("line", [b"aGVsbG8=", b"aGVsbG8= five", b"a 5", b"aGVsbG8= 5 6"])
def test_a_bad_line_of_a_rank_file_is_told_by_its_number(tmp_path, line):
    (tmp_path / "tiktoken.model").write_bytes(b"aA== 0\n" + line + b"\n")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    want = "base64 of a token, a space, its rank"
    assert str(caught.value) == f"{tmp_path / 'tiktoken.model'}, line 2 must be {want}; got {line!r}"


def test_ranks_with_gaps_are_refused(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"aA== 0\naQ== 2\n")
    with pytest.raises(CheckpointError, match=r"must rank its tokens 0 \.\. 1; got gaps or repetitions"):
        load_tokenizer(tmp_path)


def test_a_rank_file_without_tiktoken_says_what_to_install(tmp_path, monkeypatch):
    write_ranks(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ImportError, match=r"got no such package: pip install 'kimi-linear-reference\[tiktoken\]'"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_and_a_broken_one_are_refused(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == f"{tmp_path} must hold tokenizer.json or tiktoken.model; got neither"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"tokenizer.json must be a tokenizer of the `tokenizers` library; got "
    ):
        load_tokenizer(tmp_path)


def test_the_splits_are_those_of_the_released_tokenizer():
    """Its pattern in one piece, as a checksum: tiktoken's results hang on every character of it."""
    pattern = "|".join(tokenizer_module.SPLITS)
    assert hashlib.sha256(pattern.encode()).hexdigest() == PATTERN_SHA256


def test_reading_a_checkpoint_imports_no_model_library_and_no_terminal():
    modules = ", ".join(
        f"kimi_linear.reference.model.{name}" for name in ("checkpoint", "stream", "tokenizer", "writer")
    )
    foreign = {"transformers", "tokenizers", "tiktoken", "rich", "triton", "typer"}
    code = f"import sys, torch; before = set(sys.modules); import {modules}; print(*(set(sys.modules) - before))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "kimi_linear.reference.model.stream" in printed
    assert not foreign & {name.split(".")[0] for name in printed}
