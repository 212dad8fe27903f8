"""Do matrix products in Hopper machine code read the shared memory that the PTX says?

A `wgmma` finds its operands through 64-bit descriptors: the low word has the address, the high word how the tile
lies there. ptxas 12.8, which comes with Triton 3.6, sometimes builds the high word of a descriptor from a register
that is not zero, or from one that was never written:

    UIADD3   UR22, UP0, UR5, 0x20             low word: an address in UR5, 512 bytes on
    UIADD3.X UR23, UR5, -0x3ffffff0, UP0      high word: the constant, plus UR5 where PTX has 0

and rows of the product are wrong from the second step of 16 on. Nothing warns of it. So the uniform registers are
followed here through the disassembly, with shared memory at the address that Hopper gives it, and every descriptor
that a product uses is compared with those in the PTX. Where they run out, a descriptor waits in ordinary registers;
those are not followed, and such a product is not judged.

Triton has met faults of this kind before: triton #7196, flash-linear-attention #1262.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

SHARED_BASE = 0x400  # the first KiB of a block's shared memory belongs to the driver
WORD = 2**32
WRITES_PAIRS = re.compile(r"\.(64|WIDE)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\w+ )?([A-Z][\w.]*) ?(.*?) ;")

MOVED = "moved"  # what comes from an ordinary register
Word = int | str | None  # None: never written, or by an instruction that has no place in a descriptor
Words = dict[str, Word]


def wrong_descriptors(ptx: str, sass: str) -> list[str]:
    """What is wrong with the descriptors in a kernel's machine code, a line each; none where nothing is."""
    layouts = set(ptx_layouts(ptx))
    wanted = " or ".join(sorted(map(hex, layouts)))
    return [
        f"line {line}: a descriptor's high word must be {wanted}; got {in_words(high)}"
        for line, high in used_layouts(sass)
        if high not in layouts and high != MOVED
    ]


def in_words(high: Word) -> str:
    return hex(high) if isinstance(high, int) else "no constant"


def ptx_layouts(ptx: str) -> Iterator[int]:
    """High word of every descriptor that a `wgmma` of the PTX names."""
    made = dict(re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), %rd\d+, (-?\d+);", ptx))
    for operands in re.findall(r"wgmma\.mma_async\S* (.*);", ptx):
        for register in re.findall(r"%rd\d+", re.sub(r"\{.*?\}", "", operands)):
            if register in made:
                yield int(made[register]) % WORD**2 // WORD


def used_layouts(sass: str) -> Iterator[tuple[int, Word]]:
    """Line and high word of every descriptor that a product uses."""
    words: Words = {"URZ": 0}
    carries: dict[str, Word] = {}
    for line, text in enumerate(sass.splitlines(), 1):
        found = INSTRUCTION.search(text)
        if found is None:
            continue
        predicate, name, operands = found.groups()
        if name.startswith("HGMMA"):
            for register in high_registers(operands):
                yield line, words.get(register)
        else:
            step(words, carries, predicate, name, [x.strip() for x in operands.split(",")])


def high_registers(operands: str) -> list[str]:
    """A product takes four uniform registers: A's descriptor in the first two, if A is not in registers, then B's."""
    first = re.search(r"gdesc\[UR(\d+)\]", operands)
    if first is None:
        return []
    n = int(first[1])
    a_in_shared = operands.split(",")[1].strip().startswith("gdesc")
    return [f"UR{n + 1}", f"UR{n + 3}"] if a_in_shared else [f"UR{n + 3}"]


def step(words: Words, carries: dict[str, Word], predicate: str | None, name: str, operands: list[str]) -> None:
    """One instruction's effect on the uniform registers; what is not followed leaves None."""
    target = operands[0]
    if not re.fullmatch(r"UR\d+", target):
        return
    pair = [target, f"UR{int(target[2:]) + 1}"] if WRITES_PAIRS.search(name) else [target]
    follow = FOLLOWED.get(name)
    results = [None, None] if predicate or follow is None else follow(words, carries, operands)
    words.update(zip(pair, results, strict=False))


def value(words: Words, operand: str) -> Word:
    """A register's word, or a constant's."""
    negative, name = operand.startswith("-"), operand.lstrip("-").removesuffix(".reuse")
    known = words.get(name) if name.startswith("UR") else int(name, 0) if re.match(r"\d", name) else None
    return (-known if negative else known) % WORD if isinstance(known, int) else known


def total(words: Words, operands: list[str], carry: Word = 0) -> tuple[Word, Word]:
    """Sum and carry. An unknown carry comes from an unknown address, which has 14 bits: it is 0."""
    terms = [value(words, x) for x in operands]
    known = [x for x in terms if isinstance(x, int)]
    if len(known) < len(terms):
        return (None if None in terms else MOVED), None
    s = sum(known) + (carry if isinstance(carry, int) else 0)
    return s % WORD, s // WORD


def move(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    return [value(words, operands[1])]


def block_in_cluster(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    return [0 if operands[1] == "SR_CgaCtaId" else None]


def add(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    """UIADD3 d, [UPc,] a, b, c"""
    carry_to = operands[1] if operands[1].startswith("UP") else None
    s, carry = total(words, operands[2:5] if carry_to else operands[1:4])
    if carry_to:
        carries[carry_to] = carry
    return [s]


def add_with_carry(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    """UIADD3.X d, a, b, c, UPc, !UPT"""
    return [total(words, operands[1:4], carries.get(operands[4]))[0]]


def add_pairs(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    """UIADD3.64 d, a, b, c: a register stands for itself and the next one, and minus is that of 64 bits."""
    names = [operand.lstrip("-") for operand in operands[1:4]]
    lows = [value(words, name) for name in names]
    highs = [words.get(f"UR{int(name[2:]) + 1}") if re.fullmatch(r"UR\d+", name) else 0 for name in names]
    signs = [-1 if operand.startswith("-") else 1 for operand in operands[1:4]]
    if not all(isinstance(high, int) for high in highs):
        return [None if None in highs else MOVED] * 2
    any_address = [low if isinstance(low, int) else 1 for low in lows]  # not 0, and too small to carry
    s = sum(sign * (WORD * high + low) for sign, high, low in zip(signs, highs, any_address, strict=True))
    return [s % WORD if any_address == lows else MOVED, s // WORD % WORD]


def of_numbers(operation: Callable[..., int], *operands: Word) -> list[Word]:
    """An operation's result where all operands are numbers."""
    numbers = [x for x in operands if isinstance(x, int)]
    if len(numbers) < len(operands):
        return [None if None in operands else MOVED]
    return [operation(*numbers) % WORD]


def shift_right(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    """USHF.R.U32.HI d, URZ, n, a"""
    return of_numbers(lambda n, a: a >> n, *(value(words, x) for x in operands[2:4]))


def shift_and_add(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    """ULEA d, a, b, n: (a << n) + b"""
    return of_numbers(lambda a, b, n: (a << n) + b, *(value(words, x) for x in operands[1:4]))


def low_bits(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    """USGXT.U32 d, a, n: the n low bits"""
    return of_numbers(lambda a, n: a % (1 << n), *(value(words, x) for x in operands[1:3]))


def moved(words: Words, carries: dict[str, Word], operands: list[str]) -> list[Word]:
    return [MOVED]


FOLLOWED: dict[str, Callable[[Words, dict[str, Word], list[str]], list[Word]]] = {
    "UMOV": move,
    "R2UR": moved,
    "S2UR": block_in_cluster,
    "UIADD3": add,
    "UIADD3.X": add_with_carry,
    "UIADD3.64": add_pairs,
    "USHF.R.U32.HI": shift_right,
    "ULEA": shift_and_add,
    "USGXT.U32": low_bits,
}
