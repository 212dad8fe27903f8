"""Descriptors followed through machine code: what the PTX says, a high word gone wrong, a high word never written."""

import pytest

from machine_code import wrong_descriptors

LAYOUT = 0xC0000010  # 32-byte swizzle, 256 bytes from one group of 8 rows to the next
PTX = f"""
    cvt.u64.u32 %rd1, %r1;
    or.b64 %rd2, %rd1, {(LAYOUT << 32) - 2**64};
    wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {{%r9,%r10}}, {{%r5,%r6,%r7,%r8}}, %rd2, 0, 1, 1, 1;
    add.s64 %rd3, %rd1, {(LAYOUT << 32) + 32 - 2**64};
    wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {{%r9,%r10}}, {{%r5,%r6,%r7,%r8}}, %rd3, %p2, 1, 1, 1;
"""
ADDRESS = [
    "S2UR UR6, SR_CgaCtaId",
    "UMOV UR8, 0x400",
    "ULEA UR8, UR6, UR8, 0x18",
    "USHF.R.U32.HI UR5, URZ, 0x4, UR8",
    "USGXT.U32 UR5, UR5, 0xe",
]
FIRST = ["UMOV UR14, UR5", "UMOV UR15, 0xc0000010", "HGMMA.64x16x16.F32 R56, R72, gdesc[UR12].tnspB, RZ, !UPT"]
SECOND = "HGMMA.64x16x16.F32 R56, R76, gdesc[UR20].tnspB, R56, gsb0"


def machine_code(*instructions):
    return "\n".join(f"        /*{16 * i:04x}*/      {text} ;" for i, text in enumerate(instructions))


def second_step(high, *before):
    """Two products; the second one's descriptor is 32 units on, its high word made by this instruction."""
    return machine_code(*ADDRESS, *FIRST, *before, "UIADD3 UR22, UP0, UR5, 0x20, URZ", high, SECOND)


RIGHT = {
    "from no register": second_step("UIADD3.X UR23, URZ, -0x3ffffff0, URZ, UP0, !UPT"),
    "from a register that is 0": second_step("UIADD3.X UR23, UR4, -0x3ffffff0, URZ, UP0, !UPT", "UMOV UR4, URZ"),
    "as a constant": second_step("UMOV UR23, 0xc0000010"),
    "as a pair": machine_code(*ADDRESS, *FIRST, "UIADD3.64 UR22, UR14, 0x20, URZ", SECOND),
    "as a difference of pairs": machine_code(
        *ADDRESS,
        *FIRST,
        "UMOV UR30, UR5",
        "UMOV UR31, URZ",
        "UMOV UR26, 0xffffffe0",
        "UMOV UR27, 0x3fffffef",
        "UIADD3.64 UR22, UR30, -UR26, URZ",
        SECOND,
    ),
    "where nobody looks": second_step("R2UR UR23, R7"),
    "from an unknown address": machine_code(
        "R2UR UR5, R3",
        *FIRST,
        "UIADD3 UR22, UP0, UR5, 0x20, URZ",
        "UIADD3.X UR23, URZ, -0x3ffffff0, URZ, UP0, !UPT",
        SECOND,
    ),
}
WRONG = {
    "from the address": second_step("UIADD3.X UR23, UR5, -0x3ffffff0, URZ, UP0, !UPT"),
    "from what was never written": second_step("UIADD3.X UR23, UR11, -0x3ffffff0, URZ, UP0, !UPT"),
    "from an argument": second_step("UIADD3.X UR23, UR4, -0x3ffffff0, URZ, UP0, !UPT", "ULDC.64 UR4, c[0x0][0x278]"),
    "from the upper half of a pair": second_step(
        "UIADD3.X UR23, UR5, -0x3ffffff0, URZ, UP0, !UPT", "ULDC.64 UR4, c[0x0][0x278]"
    ),
    "under a condition": second_step("@UP3 UMOV UR23, 0xc0000010"),
    "with another swizzle": second_step("UMOV UR23, 0x80000010"),
}


@pytest.mark.parametrize("made", RIGHT)
def test_descriptors_that_agree_with_the_ptx_are_right_however_they_are_made(made):
    assert wrong_descriptors(PTX, RIGHT[made]) == []


@pytest.mark.parametrize("made", WRONG)
def test_a_high_word_that_is_not_the_constant_of_the_ptx_is_reported(made):
    (line,) = wrong_descriptors(PTX, WRONG[made])
    assert "must be 0xc0000010" in line


def test_the_line_is_that_of_the_product():
    code = WRONG["from the address"]
    (line,) = wrong_descriptors(PTX, code)
    number = int(line.removeprefix("line ").split(":")[0])
    assert SECOND in code.splitlines()[number - 1]


def test_a_product_with_both_operands_in_shared_memory_has_two_descriptors():
    both = "HGMMA.64x16x16.F32 R24, gdesc[UR12], RZ, !UPT"
    code = machine_code(*ADDRESS, "UMOV UR15, 0xc0000010", both)
    assert len(wrong_descriptors(PTX, code)) == 1
    assert (
        wrong_descriptors(PTX, machine_code(*ADDRESS, "UMOV UR15, 0xc0000010", "UMOV UR13, 0xc0000010", both)) == []
    )


def test_each_of_two_wrong_descriptors_of_a_product_is_told_as_it_is():
    both = "HGMMA.64x16x16.F32 R24, gdesc[UR12], RZ, !UPT"
    code = machine_code(*ADDRESS, "UMOV UR13, 0x80000010", "UMOV UR15, 0x40000040", both)
    first, second = wrong_descriptors(PTX, code)
    assert first.endswith("got 0x80000010")
    assert second.endswith("got 0x40000040")


def test_a_kernel_without_products_has_nothing_wrong():
    assert wrong_descriptors("add.s32 %r1, %r2, %r3;", machine_code(*ADDRESS)) == []
