"""The tensors that a folder of safetensors files holds, found without reading them.

    model.safetensors.index.json    names the file of every tensor: {"weight_map": {tensor: file}}
    model.safetensors               one file with all of them, where there is no index

What is wrong with the files is collected, and raised at once as a `CheckpointError` that names them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message lists all that is wrong with it, by file and by name."""


class StoredTensor(NamedTuple):
    """Where a tensor lies and what its file's header says of it; dtype in safetensors' words: BF16, F32."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, by the name it is stored under. Reads headers only."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} must be a folder with a checkpoint; got {_kind(folder)}")
    if (folder / INDEX).exists():
        return _indexed(folder)
    if (folder / SINGLE).exists():
        return _headers(folder / SINGLE)
    shards = len(list(folder.glob("*.safetensors")))
    raise CheckpointError(f"{folder} must hold {INDEX} or {SINGLE}; got {shards} other safetensors files")


def read_json(file: Path) -> Any:
    """The contents of a JSON file of the checkpoint."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} must be a JSON file; got no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} must be a JSON file; got {error}") from None


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The file's tensors through safetensors, mapped into memory until the block ends."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(_complaint(file, error)) from None


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """What the index names, each tensor looked up in its file's header."""
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, tensors in sorted(_by_file(folder / INDEX).items()):
        try:
            headers = _headers(folder / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += _disagreements(folder / name, tensors, headers)
        found |= {tensor: headers[tensor] for tensor in tensors if tensor in headers}
    if problems:
        raise CheckpointError("\n".join(problems))
    return found


def _by_file(index: Path) -> Mapping[str, list[str]]:
    """The index turned round: file name -> names of its tensors."""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must hold a weight_map from tensor to file; got {_brief(content)}")
    files = defaultdict(list)
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CheckpointError(f"{index} must name a file of its folder for {tensor}; got {file!r}")
        files[file].append(tensor)
    return files


def _headers(file: Path) -> dict[str, StoredTensor]:
    if not file.is_file():
        raise CheckpointError(f"{file} must be a safetensors file; got {_kind(file)}")
    with opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118, it is no dict
        return {name: StoredTensor(file, tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}


def _disagreements(file: Path, indexed: Iterable[str], held: Iterable[str]) -> list[str]:
    """What the index says of a file and the file does not, and the reverse."""
    lacking = sorted(set(indexed) - set(held))
    unlisted = sorted(set(held) - set(indexed))
    return [f"{file} must hold {name}, as {INDEX} says; got a file without it" for name in lacking] + [
        f"{INDEX} must name {name} for {file}, which holds it; got no such entry" for name in unlisted
    ]


def _complaint(file: Path, error: Exception) -> str:
    """What is wrong with a file that safetensors refuses: where it is too short, by how much."""
    size = file.stat().st_size
    wanted = _promised_size(file)
    if wanted is not None and size != wanted:
        return f"{file} must be {wanted} bytes long, as its header says; got {size} bytes"
    return f"{file} must be a safetensors file; got {size} bytes that are none ({error})"


def _promised_size(file: Path) -> int | None:
    """Length of the file by its own header, None where that cannot be read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
        if length > file.stat().st_size:
            return None
        header = stream.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return HEADER_LENGTH_BYTES + length + max(ends, default=0)


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a file" if path.exists() else "no such file"


def _brief(content: Any) -> str:
    return f"the keys {sorted(content)}" if isinstance(content, dict) else f"a {type(content).__name__}"
