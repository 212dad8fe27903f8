"""Text to token ids and back, by the file that comes with a checkpoint.

    tokenizer.json      through `tokenizers`
    tiktoken.model      through `tiktoken` (the extra of that name): base64 of each token's bytes and its rank

The released checkpoint comes with the second. Above its ranks lie 256 special tokens; tokenizer_config.json names
those that have a name. Special tokens written out in a text become their ids; none is added.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .files import CheckpointError, read_json

TOKENIZER_JSON = "tokenizer.json"
TIKTOKEN_MODEL = "tiktoken.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = 256  # ids above the ranks

# How the released tokenizer splits a text before it merges bytes. Only Han characters keep to themselves; words
# may start with one sign that is no letter; capitals end where small letters begin a new word.
_SMALL, _CAPITAL = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Ll}", r"\p{Lu}\p{Lt}"))
_SIGN, _CLITIC = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = (
    r"[\p{Han}]+",
    f"{_SIGN}{_CAPITAL}*{_SMALL}+{_CLITIC}",
    f"{_SIGN}{_CAPITAL}+{_SMALL}*{_CLITIC}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


@runtime_checkable
class Tokenizer(Protocol):
    """What the command line needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, special tokens their names."""


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint; tokenizer.json where both files are there."""
    folder = Path(folder)
    if (folder / TOKENIZER_JSON).exists():
        return _Merges(folder / TOKENIZER_JSON)
    if (folder / TIKTOKEN_MODEL).exists():
        return _Ranks(folder / TIKTOKEN_MODEL)
    raise CheckpointError(f"{folder} must hold {TOKENIZER_JSON} or {TIKTOKEN_MODEL}; got neither")


class _Merges:
    """A tokenizer.json."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as FromFile

        try:
            self.tokenizer = FromFile.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise CheckpointError(f"{file} must be a tokenizer of the `tokenizers` library; got {error}") from None

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


class _Ranks:
    """A tiktoken.model, with its special tokens."""

    def __init__(self, file: Path) -> None:
        ranks = _read_ranks(file)
        special = _special_tokens(file.parent / TOKENIZER_CONFIG, len(ranks))
        self.encoding = _tiktoken(file).Encoding(
            file.stem, pat_str="|".join(SPLITS), mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> list[int]:
        return list(self.encoding.encode(text, allowed_special="all"))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.encoding.decode(list(ids)))


def _tiktoken(file: Path) -> Any:
    try:
        import tiktoken
    except ImportError:
        hint = "pip install 'kimi-linear-reference[tiktoken]'"
        raise ImportError(f"{file} must be read by the package tiktoken; got no such package: {hint}") from None
    return tiktoken


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Not by tiktoken's own reader: that keeps a copy in a cache, and returns it when the file has changed."""
    ranks = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            want = "base64 of a token, a space, its rank"
            raise CheckpointError(f"{file}, line {number} must be {want}; got {line[:40]!r}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file} must rank its tokens 0 .. {len(ranks) - 1}; got gaps or repetitions")
    return ranks


def _special_tokens(config: Path, first: int) -> dict[str, int]:
    """Names of the ids above the ranks; those that the checkpoint does not name are reserved."""
    content = read_json(config) if config.exists() else {}
    named = {int(key): entry["content"] for key, entry in content.get("added_tokens_decoder", {}).items()}
    ids = range(first, first + SPECIAL_TOKENS)
    return {named.get(number, f"<|reserved_token_{number}|>"): number for number in ids}
