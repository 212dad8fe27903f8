"""Layer by layer from disk: the same bits as in memory, two layers' weights at a time."""

import io
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from kimi_linear.reference.model import stream
from kimi_linear.reference.model.checkpoint import Checkpoint, CheckpointError, load_model, open_checkpoint, stations
from kimi_linear.reference.model.files import StoredTensor
from kimi_linear.reference.model.reader import reading_thread
from kimi_linear.reference.model.stream import stream_model
from kimi_linear.reference.model.writer import make_checkpoint, tiny_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made") / "a", tiny_config(6), seed=2, shards=4)


def ids(length=70):
    return torch.arange(length)[None] * 11 % 256


@pytest.fixture
def held(monkeypatch):
    """Bytes of each state while it is alive: what the reader handed out and nobody has dropped."""
    alive, peaks = {}, []
    read = Checkpoint.read_state

    def counted(self, station, device=None):
        state = read(self, station, device)
        for name, x in state.items():
            key = (station.prefix, name, threading.get_ident(), id(x))
            alive[key] = x.numel() * x.element_size()
            weakref.finalize(x.untyped_storage(), alive.pop, key, None)
        peaks.append(sum(alive.values()))
        return state

    monkeypatch.setattr(Checkpoint, "read_state", counted)
    return alive, peaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_logits_are_those_of_the_model_in_memory_bit_for_bit(made, dtype):
    want = load_model(made, dtype=dtype)(ids())
    got = stream_model(made, dtype=dtype)(ids())
    assert torch.equal(got.logits, want.logits)
    assert all(torch.equal(a, b) for a, b in zip(got.hidden_states, want.hidden_states, strict=True))
    assert want.logits.std() > 0.5


@torch.no_grad()
def test_masks_packing_caches_and_options_pass_through(made):
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :5] = False
    rows = ids(40).reshape(2, 20)
    memory, disk = (make(made, router_weights="biased") for make in (load_model, stream_model))
    assert torch.equal(disk(rows, attention_mask=mask).logits, memory(rows, attention_mask=mask).logits)
    offsets = torch.tensor([0, 7, 7, 40])
    assert torch.equal(disk(ids(40), cu_seqlens=offsets).logits, memory(ids(40), cu_seqlens=offsets).logits)
    first = disk(ids(30))
    assert torch.equal(disk(ids(), cache=first.cache).logits, memory(ids(), cache=memory(ids(30)).cache).logits)


def test_no_weight_is_held_between_calls(made, held):
    alive, _ = held
    model = stream_model(made)
    with torch.no_grad():
        model(ids())
    assert all(x.is_meta for x in model.state_dict().values())
    assert not alive


def test_at_most_two_pieces_are_held_at_once(made, held):
    _, peaks = held
    model = stream_model(made)
    sizes = [
        sum(x.numel() * x.element_size() for x in station.module.state_dict().values()) for station in stations(model)
    ]
    with torch.no_grad():
        model(ids())
    pairs = [a + b for a, b in pairwise(sizes)]
    assert len(peaks) == len(sizes)
    assert max(peaks) <= max(pairs)
    assert max(peaks) > max(sizes)  # the next piece is read ahead
    assert max(pairs) < 0.5 * sum(sizes)


def test_the_next_piece_is_read_while_a_layer_computes(made, monkeypatch):
    """When a layer has started, the reads of the embedding, of this layer and of the next were asked for."""
    readers = []
    read = Checkpoint.read_state

    def watched(self, station, device=None):
        readers.append(threading.current_thread().name)
        return read(self, station, device)

    monkeypatch.setattr(Checkpoint, "read_state", watched)
    threads = []
    monkeypatch.setattr(stream, "reading_thread", lambda: threads.append(reading_thread()) or threads[0])
    model = stream_model(made)
    reads_at_layer = []

    def count_reads(*_):
        threads[0].submit(int).result()  # one thread, in order: what was asked for before has been read
        reads_at_layer.append(len(readers))

    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(count_reads)
    with torch.no_grad():
        model(ids())
    assert all(name.startswith("weights") for name in readers)
    assert reads_at_layer == [n + 3 for n in range(6)]


def test_a_call_that_fails_leaves_a_model_that_works(made):
    def faulty(*_, **__):
        raise RuntimeError("no such kernel")

    model = stream_model(made)
    right = model.model.layers[1].self_attn.kda
    with torch.no_grad():
        want = model(ids()).logits
        model.model.layers[1].self_attn.kda = faulty
        with pytest.raises(RuntimeError, match="no such kernel"):
            model(ids())
        assert all(x.is_meta for x in model.state_dict().values())
        model.model.layers[1].self_attn.kda = right
        assert torch.equal(model(ids()).logits, want)


def test_a_checkpoint_that_does_not_fit_is_refused_before_a_call(tmp_path):
    folder = make_checkpoint(tmp_path / "a", tiny_config(2), shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="must be a safetensors file; got no such file"):
        stream_model(folder)


def test_a_file_that_breaks_after_the_check_is_named_by_the_call(tmp_path):
    folder = make_checkpoint(tmp_path / "a", tiny_config(2), shards=2)
    model = stream_model(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"gone")
    with pytest.raises(CheckpointError, match=r"00002-of-00002.safetensors must be a safetensors file; got 4 bytes"):
        model(ids())


GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed blocks from 1 MB on leave the process at once
PEAK = """
    import sys
    from pathlib import Path
    import torch
    from kimi_linear.reference.model.checkpoint import load_model
    from kimi_linear.reference.model.stream import stream_model
    from kimi_linear.reference.model.writer import make_checkpoint, tiny_config

    def resident():
        status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
        return int(status.split()[0]) * 1024

    small, large, how = sys.argv[1:]
    make = load_model if how == "memory" else stream_model
    torch.set_num_threads(1)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        make(small)(ids)  # libraries, threads
        before = resident()
        make(large)(ids)
    print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_peak_memory_is_that_of_two_layers_and_not_of_the_model(tmp_path):
    """Resident bytes of a fresh process, mapped files too: 8 layers of 23 MB, beside which 9 MB of buffers vanish."""
    width = 27_000
    config = tiny_config(8, num_experts=0, intermediate_size=width)
    small = make_checkpoint(tmp_path / "small", tiny_config(2))
    large = make_checkpoint(tmp_path / "large", config, shards=4, dtype=torch.float32)
    layer, total = 3 * 72 * width * 4, sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert total > 7 * layer
    peaks = {}
    for how in ("memory", "disk"):
        command = [sys.executable, "-c", textwrap.dedent(PEAK), str(small), str(large), how]
        done = subprocess.run(command, env=os.environ | GIVE_BACK, capture_output=True, text=True, check=True)
        peaks[how] = int(done.stdout)
    assert peaks["memory"] > 0.9 * total
    assert peaks["disk"] < 4 * layer  # two filled, and the pages that one is copied from


def test_where_a_tensor_lies_is_all_that_a_checkpoint_holds(made):
    checkpoint = open_checkpoint(made)
    assert all(isinstance(x, StoredTensor) for x in checkpoint.stored.values())
    assert {x.file.name for x in checkpoint.stored.values()} == {file.name for file in made.glob("*.safetensors")}


@pytest.mark.parametrize("threads", [1, 3])
def test_the_reading_thread_copies_alone_and_changes_nobody_elses_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with reading_thread() as reader, ThreadPoolExecutor(max_workers=1) as later:
        assert reader.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == threads
        assert later.submit(torch.get_num_threads).result() == threads
        reader.submit(torch.zeros(200_000).add, 1).result()
        assert reader.submit(torch.get_num_threads).result() == 1
    torch.set_num_threads(before)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("make", [load_model, stream_model])
def test_a_bar_is_drawn_on_a_terminal_and_nothing_elsewhere(made, monkeypatch, make):
    monkeypatch.setenv("TERM", "xterm")  # a dumb one gets no bar
    shown = {}
    for kind in (Terminal, io.StringIO):
        monkeypatch.setattr("sys.stderr", kind())
        with torch.no_grad():
            make(made)(ids(3))
        shown[kind] = sys.stderr.getvalue()
    words = "loading layers" if make is load_model else "running layers"
    assert words in shown[Terminal]
    assert "100%" in shown[Terminal]
    assert shown[io.StringIO] == ""
