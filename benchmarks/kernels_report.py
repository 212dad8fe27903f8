"""Compile every Triton kernel, in every configuration that ships, for GPUs that need not be there.

    python benchmarks/kernels_report.py [--json] [--target cuda:90 ...] [--kernel NAME ...]

Prints registers, shared memory and spills a target, and exits with 1 where a kernel does not fit, or where Hopper's
machine code has products that read shared memory otherwise than the PTX says (`machine_code`). A kernel module takes
part by being named in KERNEL_MODULES and having `configurations()`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Compiling and interpreting exclude each other, and the choice is made when triton is imported.
os.environ.pop("TRITON_INTERPRET", None)
# The default changes with the Triton version; what ships is compiled with products and sums fused.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from machine_code import wrong_descriptors

KERNEL_MODULES = ["recurrent", "decode", "chunk_launch", "short_conv", "short_conv_update"]
# Shared memory that one block may have, in bytes.
SHARED_LIMIT = {
    "cuda:80": 163 * 1024,
    "cuda:90": 227 * 1024,
    "cuda:100": 227 * 1024,
    "cuda:120": 99 * 1024,
    "hip:gfx942": 64 * 1024,
    "hip:gfx950": 160 * 1024,
}
# Bytes of stack a thread that a kernel may take in half precision: what it did when last looked at, to be lowered
# only. The tiles kernel keeps a tile in one warp on purpose; the others spill nothing on cuda:90.
SPILL_LIMIT = {"kda_tiles_kernel": 64, "kda_chunks_kernel": 208, "kda_state_kernel": 168}
ALIGNED = [["tt.divisibility", 16]]
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: registers a thread, shared bytes a block, spilled bytes or registers.

    wrong_products counts products of Hopper's machine code whose operands are described otherwise than in PTX.
    """

    kernel: str
    configuration: str
    target: str
    num_warps: int
    registers: int
    shared: int
    spills: int
    wrong_products: int

    @property
    def fits(self) -> bool:
        """Shared memory exists, no spill beyond a known one (AMD's compiler spills as it likes), right products."""
        spills = 0 if self.target.startswith("hip") else self.spills
        small = self.shared <= SHARED_LIMIT[self.target] and spills <= SPILL_LIMIT.get(self.kernel, 0)
        return small and not self.wrong_products


def report(modules: list[str], targets: list[str], brief: bool) -> Iterator[Resources]:
    """Compile the configurations of these modules for these targets; launches that compile alike, once.

    brief: of each kernel and gate only the first configuration.
    """
    for name in modules:
        module = importlib.import_module(f"kimi_linear.triton_kernels.{name}")
        seen = set()
        for target in targets:
            for configuration in configurations(module, SHARED_LIMIT[target]):
                source, key = source_of(configuration.launch, target.split(":")[0])
                gate = (target, configuration.launch.kernel.__name__, configuration.name.split(" ")[0])
                if (target, key) not in seen and not (brief and gate in seen):
                    yield compile_for(target, configuration, source)
                seen |= {(target, key), gate}


def configurations(module: Any, shared_memory: int) -> list[Any]:
    """A module's launches; those that depend on it for a GPU with this much shared memory a block."""
    aware = "shared_memory" in inspect.signature(module.configurations).parameters
    return module.configurations(shared_memory) if aware else module.configurations()


def source_of(launch: Any, backend: str) -> tuple[ASTSource, str]:
    """The source as Triton would specialise it for this launch, and a key that equal launches share."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialise = not parameter.do_not_specialize
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
            if backend == "hip" and parameter.name == "PRECISION":
                constants[(i,)] = "ieee"  # what the launch chooses there; AMD has no tf32
        else:
            signature[parameter.name] = type_of(value, (i,), constants, attributes, specialise)
    key = str((signature, constants, attributes, launch.options()))
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes), key


def type_of(value: Any, path: tuple[int, ...], constants: dict, attributes: dict, specialise: bool) -> Any:
    """Triton's type of one argument; fills in what it takes as a constant or as a multiple of 16."""
    if isinstance(value, tuple):
        return tuple(type_of(x, (*path, i), constants, attributes, specialise) for i, x in enumerate(value))
    if value is None or (specialise and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        attributes[path] = ALIGNED
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if specialise and value % 16 == 0:
        attributes[path] = ALIGNED
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_for(target: str, configuration: Any, source: ASTSource) -> Resources:
    """Compile one configuration for one target and read what it takes."""
    backend, arch = target.split(":")
    gpu = GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
    launch = configuration.launch
    options = launch.options()
    if backend == "hip":
        options.pop("maxnreg", None)
    compiled = triton.compile(source, target=gpu, options=options)
    registers, spills = cuda_registers(compiled) if backend == "cuda" else amd_registers(compiled)
    name, shared = launch.kernel.__name__, compiled.metadata.shared
    wrong = len(wrong_descriptors(compiled.asm["ptx"], disassembly(compiled))) if target == "cuda:90" else 0
    return Resources(name, configuration.name, target, launch.num_warps, registers, shared, spills, wrong)


def cuda_registers(compiled: Any) -> tuple[int, int]:
    """Registers a thread and bytes of stack, where a spill goes, from the machine code itself."""
    usage = read_machine_code(compiled, "cuobjdump", "-res-usage")
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def disassembly(compiled: Any) -> str:
    return read_machine_code(compiled, "nvdisasm")


def read_machine_code(compiled: Any, tool: str, *options: str) -> str:
    """What a tool that comes with Triton says of a compiled kernel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def amd_registers(compiled: Any) -> tuple[int, int]:
    """Vector registers a thread and how many were spilled, from the assembly's own notes."""
    notes = {
        key: int(value)
        for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count): +(\d+)", compiled.asm["amdgcn"])
    }
    return notes["vgpr_count"], notes["vgpr_spill_count"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--brief", action="store_true", help="only the first configuration of a kernel and gate")
    parser.add_argument("--target", nargs="+", choices=list(SHARED_LIMIT), default=list(SHARED_LIMIT))
    parser.add_argument("--kernel", nargs="+", choices=KERNEL_MODULES, default=KERNEL_MODULES)
    arguments = parser.parse_args()
    all_fit = True
    for row in report(arguments.kernel, arguments.target, arguments.brief):
        all_fit &= row.fits
        if arguments.json:
            print(json.dumps(asdict(row) | {"fits": row.fits}), flush=True)
        else:
            numbers = f"{row.registers:4} registers {row.shared:6} B shared {row.spills:4} spilled"
            numbers += f" {row.wrong_products} wrong products" if row.wrong_products else ""
            print(
                f"{row.kernel:22} {row.configuration:44} {row.target:10} {row.num_warps} warps {numbers}", flush=True
            )
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
