"""Plays a CUDA driver on the CPU: kernels are compiled and bound by Triton, and a launch is written down, not run."""

import json
import os

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget

SHARED = 232448
LAUNCHES: list = []
BINDS = [0]


class Launcher:
    """Notes a launch; the arguments as a device would see them, memory of the call's own as None."""

    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        LAUNCHES.append((self.name, [x, y, z, stream], [seen(a) for a in arguments]))


class Utils:
    def load_binary(self, *_):
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, _):
        return {"max_shared_mem": SHARED, "multiprocessor_count": 132}

    def unload_module(self, _):
        pass


class Driver:
    utils, launcher_cls = Utils(), Launcher

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 7

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


triton.runtime.driver.set_active(Driver())

from kimi_linear.reference import FrontEnd, SoftplusGate  # noqa: E402
from kimi_linear.triton_kernels import chunk_kda, decode_step, fused_recurrent_kda, replay, support  # noqa: E402

support.INTERPRETED = True  # the CPU's tensors play the GPU's
replay.can_replay = lambda device: not replay._hooked()
KNOWN: dict = {}
KEPT: list = []  # a freed tensor's address would name the next one that is given it


def seen(argument):
    if isinstance(argument, torch.Tensor):
        argument = argument.data_ptr()
    if isinstance(argument, tuple):
        return [seen(x) for x in argument]
    if isinstance(argument, int) and argument > 2**32:
        return KNOWN.get(argument)
    return argument if argument is None or isinstance(argument, int | float | bool | str) else str(argument)


def inputs(seed, offset=0):
    torch.manual_seed(seed)

    def draw(*shape):
        buffer = torch.randn(torch.Size(shape).numel() + offset).bfloat16()
        return buffer[offset:].view(shape)

    x = draw(1, 40, 1, 16), draw(1, 40, 1, 16), draw(1, 40, 2, 16), draw(1, 40, 2, 16), draw(1, 40, 2)
    state = torch.randn(1, 2, 16, 16)
    front_end = FrontEnd(SoftplusGate(torch.rand(2), torch.randn(2, 16)))
    KEPT.append((x, state, front_end))
    KNOWN.update({y.data_ptr(): f"{seed} {i}" for i, y in enumerate((*x, state, front_end.gate.A_log))})
    return x, state, front_end


def note(call):
    """Launches and binder calls of one call."""
    LAUNCHES.clear()
    BINDS[0] = 0
    call()
    return [list(launch) for launch in LAUNCHES], BINDS[0]


def forget():
    from kimi_linear.triton_kernels import chunk_launch, decode, recurrent

    replay._kernels.clear()
    for module in (chunk_launch, decode, recurrent):
        module.CALLS.known.clear()


def count_binds():
    original = triton.runtime.jit.JITFunction.run

    def run(self, *arguments, **options):
        BINDS[0] += 1
        return original(self, *arguments, **options)

    triton.runtime.jit.JITFunction.run = run


def main():
    count_binds()
    x, state, front_end = inputs(0)
    other, other_state, _ = inputs(1)
    skewed, *_ = inputs(2, offset=3)
    cu = torch.tensor([0, 40])
    slots = torch.tensor([0])
    options = {"front_end": front_end, "output_final_state": True}
    tokens = [y[:, :1] for y in x]
    calls = {
        "chunk_kda": lambda x=x, state=state: chunk_kda(*x, initial_state=state, **options),
        "chunk_kda packed": lambda: chunk_kda(*x, initial_state=state, cu_seqlens=cu, **options),
        "fused_recurrent_kda": lambda: fused_recurrent_kda(*x, initial_state=state, **options),
        "decode_step": lambda: decode_step(*tokens, front_end=front_end, state_pool=state, slot_indices=slots),
    }
    heard = {}
    for name, call in calls.items():
        first, binds = note(call)
        replayed, none = note(call)
        heard[name] = {
            "through triton": first,
            "replayed": replayed,
            "binder calls": {"first": binds, "replayed": none},
        }
    chunk = calls["chunk_kda"]
    heard["chunk_kda"]["other tensors"], _ = note(lambda: chunk(other, other_state))
    forget()
    heard["chunk_kda"]["other tensors, through triton"], _ = note(lambda: chunk(other, other_state))
    chunk()
    hook = lambda _: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    heard["a profiler listens"] = {"binder calls": note(chunk)[1]}
    triton.knobs.runtime.launch_enter_hook.remove(hook)
    heard["an address is no multiple of 16"] = {"binder calls": note(lambda: chunk(skewed))[1]}
    print(json.dumps(heard))


if __name__ == "__main__":
    main()
