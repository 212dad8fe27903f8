"""`make-checkpoint`, `check`, `logits` and `generate`, as a user meets them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.cli.texts import as_text
from kimi_linear.reference.model.checkpoint import load_model
from kimi_linear.reference.model.generate import generate
from kimi_linear.reference.model.sampling import Sampling
from kimi_linear.reference.model.tokenizer import load_tokenizer
from kimi_linear.reference.model.writer import make_checkpoint, tiny_config

TEXT = "It asks the memory [BOS] é"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made") / "a", tiny_config(4), seed=8)


# make-checkpoint


def test_make_checkpoint_writes_what_the_function_writes(tmp_path, made):
    output = run("make-checkpoint", "--layers", 4, "--seed", 8, tmp_path / "b").output
    assert "4 layers, 370,864 parameters, 3 shards, seed 8." in output
    assert {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()} == {
        file.name: file.read_bytes() for file in made.iterdir()
    }


def test_make_checkpoint_takes_shards_and_dtype(tmp_path):
    run("make-checkpoint", "--layers", 2, "--shards", 5, "--dtype", "fp32", tmp_path / "b")
    files = list((tmp_path / "b").glob("*.safetensors"))
    assert len(files) == 5
    assert {x.dtype for file in files for x in load_file(file).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "must be a new or empty folder; got one with files in it"),
        (("--shards", 1000), "must be a new or empty folder"),
    ],
)
def test_make_checkpoint_leaves_a_full_folder_alone(made, options, message):
    before = sorted(file.name for file in made.iterdir())
    result = run("make-checkpoint", *options, made, code=1)
    assert f"Error: {made} {message}" in result.stderr
    assert sorted(file.name for file in made.iterdir()) == before


def test_make_checkpoint_refuses_a_dtype_that_is_not_stored(tmp_path):
    result = run("make-checkpoint", "--dtype", "fp64", tmp_path / "b", code=1)
    assert "Error: dtype must be torch.bfloat16 or torch.float32; got torch.float64" in result.stderr
    assert not (tmp_path / "b").exists()


# check


def test_check_lists_names_shapes_dtypes_and_counts(made):
    output = run("inspect", made).output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert rows[0] == ["model.embed_tokens.weight", "1", "260 x 72", "BF16", "18,720"]
    assert ["model.layers.*.self_attn.A_log", "3", "1 x 1 x 5 x 1", "F32", "15"] in rows
    assert ["model.layers.*.block_sparse_moe.experts.*.w2.weight", "21", "72 x 40", "BF16", "60,480"] in rows
    assert sum(int(row[4].replace(",", "")) for row in rows) == 370_864
    assert "142 tensors in 3 files: all 142 of the model are there, no others." in output
    assert "370,864 parameters, 267,184 activated by a token." in output


def test_check_of_a_config_alone_counts_without_weights(made, tmp_path):
    shutil.copy(made / "config.json", tmp_path)
    output = run("inspect", tmp_path / "config.json").output
    assert "142 tensors wanted by the config; no weights were looked for." in output
    assert "370,864 parameters, 267,184 activated by a token." in output


def test_check_knows_the_released_model():
    output = run("inspect", "--preset", "kimi-linear-48b").output
    assert "20,493 tensors wanted by the config" in output
    assert "49,122,681,728 parameters, 3,484,459,904 activated by a token." in output


def test_check_says_all_that_is_wrong(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "b")
    content = json.loads((folder / "config.json").read_text())
    content["linear_attn_config"]["num_heads"] = 4
    (folder / "config.json").write_text(json.dumps(content))
    result = run("inspect", folder, code=1)
    assert "model.layers.0.self_attn.A_log must be [1, 1, 4, 1]; got [1, 1, 5, 1]" in result.stderr
    assert "of another shape" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [(), ("--preset", "none"), ("here", "--preset", "kimi-linear-48b")])
def test_check_wants_one_thing_to_check(arguments):
    run("inspect", *arguments, code=2)


# logits


@pytest.mark.parametrize("options", [(), ("--stream-layers",)])
def test_logits_are_the_models(made, tmp_path, options):
    output = run("logits", made, "--text", TEXT, "--top", 3, "--out", tmp_path / "x.safetensors", *options).output
    saved = load_file(tmp_path / "x.safetensors")
    ids = load_tokenizer(made).encode(TEXT)
    with torch.no_grad():
        want = load_model(made)(torch.tensor([ids])).logits
    assert saved["input_ids"].tolist() == [ids]
    assert torch.equal(saved["logits"], want)
    best = want[0, -1].argsort(descending=True)[:3]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert [int(row[0]) for row in rows] == best.tolist()
    assert [row[2] for row in rows] == [f"{want[0, -1, token]:.4f}" for token in best]
    assert f"{len(ids)} tokens, 260 logits each." in output


def test_precision_and_mixing_weights_change_the_logits(made, tmp_path):
    results = []
    for options in ((), ("--dtype", "bf16"), ("--router-weights", "biased")):
        run("logits", made, "--text", TEXT, "--out", tmp_path / "x.safetensors", *options)
        results.append(load_file(tmp_path / "x.safetensors")["logits"])
    assert results[1].dtype == torch.bfloat16
    assert not torch.equal(results[0], results[1].float())
    assert (results[0] - results[2]).abs().max() > 0.1


def test_a_text_without_a_token_is_refused(made):
    assert "Error: --text must hold one token or more; got ''" in run("logits", made, "--text", "", code=1).stderr
    assert "Error: --prompt must hold one" in run("generate", made, "--prompt", "", code=1).stderr


def test_logits_are_compared_with_recorded_ones_and_with_transformers(made, tmp_path):
    file = tmp_path / "golden.safetensors"
    ids = " ".join(map(str, load_tokenizer(made).encode(TEXT)))
    run("logits", made, "--text", TEXT, "--out", file)
    for options in (("--tier", "naive"), ("--stream-layers",)):
        output = run("logits", made, "--ids", ids, "--against", file, *options).output
        assert "likeliest next token differs at 0 tokens" in " ".join(output.split())
    assert (
        "Against transformers: largest difference"
        in run("logits", made, "--ids", ids, "--against", "transformers").output
    )


def test_logits_of_a_wrong_model_fail_the_comparison(made, tmp_path):
    file = tmp_path / "golden.safetensors"
    run("logits", made, "--text", TEXT, "--out", file)
    saved = load_file(file)
    saved["logits"][0, 2] = -saved["logits"][0, 2]
    save_file(saved, file)
    result = run("logits", made, "--text", TEXT, "--against", file, code=1)
    assert "at token 2, vocabulary entry" in result.output
    assert "differs at 1 tokens" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --text or --ids"),
        (("--text", "x", "--ids", "1"), "give --text or --ids"),
        (("--ids", "1 two"), "--ids must be token ids"),
        (("--ids", "1 2", "--against", "missing"), "--against must be transformers, or a file that --out wrote"),
    ],
)
def test_logits_refuses_what_it_cannot_read(made, options, message):
    assert message in run("logits", made, *options, code=1).stderr


def test_logits_refuses_a_record_of_other_tokens(made, tmp_path):
    file = tmp_path / "golden.safetensors"
    run("logits", made, "--ids", "1 2 3", "--out", file)
    result = run("logits", made, "--ids", "1 2 4", "--against", file, code=1)
    assert "--against must be of the same 3 tokens" in result.stderr


@pytest.mark.parametrize("command", [("logits", "--text"), ("generate", "--prompt")])
def test_a_folder_without_a_checkpoint_is_an_error_without_a_traceback(tmp_path, command):
    result = run(command[0], tmp_path, command[1], "x", code=1)
    assert f"Error: {tmp_path} must hold tokenizer.json or tiktoken.model; got neither" in result.stderr
    assert isinstance(result.exception, SystemExit)


# generate


def test_generate_prints_what_the_model_continues_with(made):
    tokenizer = load_tokenizer(made)
    model, ids = load_model(made), tokenizer.encode(TEXT)
    (greedy,) = generate(model, [ids], max_new_tokens=40)
    printed = run("generate", made, "--prompt", TEXT, "--max-new-tokens", 40).output
    assert letters(printed) == letters(tokenizer.decode(greedy))
    assert len(letters(printed)) > 5
    sampling, rng = Sampling(temperature=0.9, top_p=0.8), torch.Generator().manual_seed(4)
    (drawn,) = generate(model, [ids], max_new_tokens=40, sampling=sampling, generator=rng)
    options = ("--temperature", 0.9, "--top-p", 0.8, "--seed", 4)
    printed = run("generate", made, "--prompt", TEXT, "--max-new-tokens", 40, *options).output
    assert letters(printed) == letters(tokenizer.decode(drawn))
    assert drawn != greedy


def test_generate_prints_the_same_whole_as_in_pieces(made):
    options = ("--prompt", TEXT, "--max-new-tokens", 20)
    streamed = run("generate", made, *options, "--stream").output
    assert run("generate", made, *options, "--no-stream").output == streamed
    assert len(streamed) > 2


def letters(text):
    """What survives whatever becomes of broken UTF-8."""
    return [character for character in text if character.isascii() and character.isprintable()]


def test_what_a_model_writes_does_not_command_the_terminal(made, monkeypatch):
    def escapes(*_, **__):
        return iter([{0: token} for token in b"a\x1b[2Jb\x07\r\tc\n"])

    monkeypatch.setattr("kimi_linear.cli.texts.stream", escapes)
    output = run("generate", made, "--prompt", "x").output
    assert output == "a\ufffd[2Jb\ufffd\ufffd\tc\n\n"


@pytest.mark.parametrize(("option", "value"), [("--top-p", "0"), ("--top-p", "1.5")])
def test_sampling_that_cannot_be_is_refused(made, option, value):
    result = run("generate", made, "--prompt", "x", option, value, code=1)
    assert "Error: top_p must be above 0 and at most 1" in result.stderr


def test_text_is_shown_when_its_characters_are_complete(made):
    tokenizer = load_tokenizer(made)
    pieces = list(as_text(tokenizer, iter("aé字".encode())))
    assert pieces == ["a", "é", "字"]
    assert list(as_text(tokenizer, iter([0xC3, ord("b"), 0xE5]))) == ["\ufffdb", "\ufffd"]
    assert "".join(as_text(tokenizer, iter([0xFF] * 5 + [ord("c")]))) == "\ufffd" * 5 + "c"
