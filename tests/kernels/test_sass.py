"""Tests of how instructions are counted, on a listing made by hand."""

from __future__ import annotations

from tests.kernels import sass

LISTING = """
	.target	sm_90
	.section	.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
        /*0040*/                   IMAD.WIDE.U32 R8, R9, -0x2daee0ad, RZ ;
        /*0050*/                   FMUL R4, R4, R8 ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   FADD R4, R4, R4 ;
.L_x_3:
        /*0080*/               @P2 BRA `(.L_x_5) ;
        /*0090*/                   MUFU.EX2 R4, R4 ;
        /*00a0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
.L_x_4:
        /*00b0*/                   IADD3 R2, R2, 0x10, RZ ;
        /*00c0*/               @P3 BRA `(.L_x_1) ;
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   STG.E desc[UR4][R2.64], R4 ;
        /*00f0*/                   CALL.REL.NOINC `($helper) ;
        /*0100*/                   BRA `(.L_x_4) ;
.L_x_6:
        /*0110*/                   BRA `(.L_x_6);
"""


def test_the_longest_way_round_the_loop() -> None:
    ((name, blocks),) = sass.parse(LISTING)
    assert name == "kernel"
    path = sass.hot_path(blocks)
    assert path is not None
    # Not what comes before the loop, and not the block with the narrow store.
    assert path.opcodes == {
        "LDG.E.128": 1, "BRA": 4, "IMAD.WIDE.U32": 1, "FMUL": 1, "MUFU.EX2": 1, "STG.E.128": 1, "IADD3": 1,
    }  # fmt: skip
    assert (path.count(), path.loads, path.stores, path.count("MUFU")) == (10, 1, 1, 1)
    assert path.cycles == 10


def test_each_pass_over_a_row() -> None:
    listing = "\t.section\t.text.kernel\n"
    for name, access in enumerate(("LDG.E.128 R4, [R2]", "FADD R4, R4, R4", "STG.E.128 [R2], R4")):
        listing += f".L_{name}:\n /*0000*/ {access} ;\n /*0010*/ @P0 BRA `(.L_{name}) ;\n"
    ((_, blocks),) = sass.parse(listing + " /*0020*/ EXIT ;\n")
    assert sorted((path.loads, path.stores, path.count()) for path in sass.hot_paths(blocks)) == [(0, 1, 2), (1, 0, 2)]


def test_a_way_without_some_operand() -> None:
    ((_, blocks),) = sass.parse(LISTING)
    path = sass.hot_path(blocks, without="0x2daee0ad")
    assert path is not None
    assert path.opcodes == {"LDG.E.128": 1, "BRA": 3, "FADD": 1, "MUFU.EX2": 1, "STG.E.128": 1, "IADD3": 1}
    assert path.cycles == 8  # the special function's unit is the slowest


def test_no_way_of_16_bytes() -> None:
    ((_, blocks),) = sass.parse(LISTING.replace("LDG.E.128 R4", "LDG.E.64 R4"))
    assert sass.hot_path(blocks) is None


def test_an_inner_loop_counts_once() -> None:
    inner = "MUFU.EX2 R4, R4 ;\n.L_x_7:\n /*0091*/ FADD R4, R4, R4 ;\n /*0092*/ @P4 BRA `(.L_x_7) ;\n /*0093*/ NOP ;"
    ((_, blocks),) = sass.parse(LISTING.replace("MUFU.EX2 R4, R4 ;", inner))
    path = sass.hot_path(blocks)
    assert path is not None
    assert path.count() == 13
