"""Block shapes measured on the GPU at hand, for those who ask: without a table nothing here has an effect.

    python benchmarks/tune.py tuned.json          measure and write a table
    KIMI_LINEAR_TUNING=tuned.json python ..       use it, or call use_table("tuned.json")

A table is JSON: the device it was measured on, versions, and a launch for each kernel and size:

    {"device": "NVIDIA H200", "versions": {"torch": "2.11.0", "triton": "3.6.0"},
     "launches": {"tiles dtype=bfloat16 KP=128 VP=128 gate=1":
                  {"block": 64, "warps": 1, "stages": 1, "registers": null}}}

Block shapes change results by rounding only, but they do change bits: runs compare only under the same table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VARIABLE = "KIMI_LINEAR_TUNING"
KERNELS = ("tiles", "chunks", "state")
FIELDS = ("block", "warps", "stages", "registers")
INTERPRETER = "cpu"  # a table's device for the interpreter

FORGET: list[Callable[[], None]] = []  # what has to be forgotten when another table is set


class _Chosen:
    """The table in use."""

    path: str | None = os.environ.get(VARIABLE) or None
    table: dict[str, Any] | None = None  # read when first needed


def use_table(path: str | os.PathLike[str] | None) -> None:
    """Take launches from this table from now on; None goes back to the built-in ones. Raises ValueError."""
    table = None if path is None else read_table(Path(path))
    _Chosen.path, _Chosen.table = None if path is None else os.fspath(path), table
    for forget in FORGET:
        forget()


def look_up(kernel: str, device: torch.device, **sizes: Any) -> dict[str, Any] | None:
    """The tuned launch of a kernel for these sizes on this device, or None."""
    if _Chosen.path is None or device.type == "meta":
        return None
    if _Chosen.table is None:
        _Chosen.table = read_table(Path(_Chosen.path))
    measured_on, here = _Chosen.table["device"], device_name(device)
    if measured_on != here:
        raise ValueError(f"{_Chosen.path} must be a table of this device, {here}; got one of {measured_on}")
    return _Chosen.table["launches"].get(table_key(kernel, **sizes))


def device_name(device: torch.device) -> str:
    """As a table names a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER


def table_key(kernel: str, *, dtype: torch.dtype, KP: int, VP: int, gate: int) -> str:
    """A launch's name in a table."""
    return f"{kernel} dtype={str(dtype).removeprefix('torch.')} KP={KP} VP={VP} gate={gate}"


def read_table(path: Path) -> dict[str, Any]:
    """Read and check a table; ValueError says what is wrong with it."""
    try:
        table = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} must be a tuning table; got {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} must be a tuning table in JSON; got {error}") from None
    if not isinstance(table, dict) or not isinstance(table.get("device"), str):
        raise ValueError(f'{path} must name its "device"; got none')
    launches = table.get("launches")
    if not isinstance(launches, dict):
        raise ValueError(f'{path} must have "launches" by kernel and size; got {type(launches).__name__}')
    for key, launch in launches.items():
        _check_launch(path, key, launch)
    return table


def _check_launch(path: Path, key: str, launch: Any) -> None:
    kernel, *sizes = key.split(" ")
    named = dict(size.split("=", 1) for size in sizes if "=" in size)
    if kernel not in KERNELS or not {"KP", "VP"} <= named.keys():
        raise ValueError(f"{path} must name launches like {KERNELS[0]} dtype=.. KP=.. VP=.. gate=..; got {key}")
    if not isinstance(launch, dict) or tuple(launch) != FIELDS:
        raise ValueError(f"{path}: {key} must have {', '.join(FIELDS)}; got {launch}")
    most = int(named["VP" if kernel == "state" else "KP"])
    choices = {
        "block": [2**n for n in range(4, 9) if 2**n <= most],
        "warps": [1, 2, 4, 8],
        "stages": [1, 2, 3, 4],
        "registers": [None, *range(32, 256, 8)],
    }
    for name, allowed in choices.items():
        if launch[name] not in allowed:
            raise ValueError(f"{path}: {name} of {key} must be one of {allowed}; got {launch[name]}")
