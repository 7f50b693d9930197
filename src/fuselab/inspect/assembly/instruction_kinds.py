"""The kinds of SASS and AMD instructions: which memory they touch, how wide, or what they compute.

The names are those of the instruction tables in NVIDIA's "CUDA Binary Utilities" manual, sm_75 to
sm_120, and of AMD's "CDNA3 Instruction Set Architecture".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fuselab.inspect.assembly.sass import Instruction

# Instructions that touch memory: space and direction by base name.
_MEMORY = {
    **dict.fromkeys(("LDG", "LD"), ("global", "load")),
    **dict.fromkeys(("STG", "ST"), ("global", "store")),
    **dict.fromkeys(("LDS", "LDSM", "LDTM"), ("shared", "load")),
    **dict.fromkeys(("STS", "STSM", "STTM"), ("shared", "store")),
    "LDL": ("local", "load"),
    "STL": ("local", "store"),
    **dict.fromkeys(("LDGSTS", "UBLKCP", "UTMALDG", "UTMALDT"), ("global to shared", "copy")),
    **dict.fromkeys(("UTMASTG", "UBLKRED", "UTMAREDG"), ("shared to global", "copy")),
    **dict.fromkeys(("ATOM", "ATOMG", "RED", "REDG"), ("global", "atomic")),
    "ATOMS": ("shared", "atomic"),
}
# Copies by the tensor memory accelerator have no width of their own: one instruction moves a tile.
_TILES = frozenset(("UBLKCP", "UTMALDG", "UTMALDT", "UTMASTG", "UBLKRED", "UTMAREDG"))
_MATRIX = re.compile(r"^(?:U?[HIDBQOE]G?MMA|UTC\w*MMA\w*)$")
_KINDS = (
    ("matrix", _MATRIX),
    ("barrier", re.compile(r"^(?:BAR|UCGABAR_\w+|SYNCS|WARPGROUP|ARRIVES)$")),
    ("float64", re.compile(r"^D(?:ADD|MUL|FMA|SETP|MNMX)$")),
    ("float16", re.compile(r"^H(?:ADD2|MUL2|FMA2|SETP2|SET2|MNMX2)$")),
    ("special", re.compile(r"^(?:MUFU|RRO)$")),
    ("conversion", re.compile(r"^(?:F2F|F2FP|F2I|I2F|I2FP|I2I|I2IP|FRND|F2IP|UF2F\w*|UI2F\w*)$")),
    (
        "float32",
        re.compile(r"^U?F(?:ADD|MUL|FMA|SETP|SET|SEL|MNMX|CHK|SWZADD|ADD2|MUL2|FMA2)[23]?$"),
    ),
    ("warp", re.compile(r"^U?(?:SHFL|VOTE|VOTEU|REDUX|CREDUX|MATCH|WARPSYNC|ELECT|NANOSLEEP)$")),
    (
        "control",
        re.compile(
            r"^U?(?:BRA|BRX|BRXU|CALL|RET|EXIT|BSSY|BSYNC|BREAK|JMP|NOP|KILL|YIELD|BMOV|WARPSYNC"
            r"|RPCMOV|PREEXIT|ACQBULK|ENDCOLLECTIVE|DEPBAR|LDGDEPBAR|LDTM|MEMBAR|ERRBAR|CCTL\w*"
            r"|CGAERRBAR|FENCE|UTMACMDFLUSH|LEPC|BPT)$"
        ),
    ),
    ("constant", re.compile(r"^U?(?:LDC|LDCU)$")),
)
# A move that ptxas spells as arithmetic on zeros, because that unit is free.
_ZERO_ARITHMETIC = re.compile(r"^\w+, -RZ, RZ,")


@dataclass(frozen=True)
class Access:
    """Memory instructions of one space, direction and width in bits; None where a tile moves."""

    space: str
    direction: str
    bits: int | None


def access(one: Instruction) -> Access | None:
    """Return what memory an instruction touches, or None."""
    place = _MEMORY.get(one.base)
    if place is None:
        return None
    return Access(*place, None if one.base in _TILES else width(one))


def width(one: Instruction) -> int:
    """Return the bits that a memory instruction moves per thread: 32 unless it says otherwise."""
    if one.base in ("LDSM", "STSM"):
        count = one.modifiers[-1]
        return 32 * (int(count) if count.isdigit() else 1)
    for modifier in one.modifiers:
        if modifier in ("128", "64", "256"):
            return int(modifier)
        if modifier in ("U8", "S8", "U16", "S16"):
            return int(modifier[1:])
    # F16x2, BF16x2 and F32x2 are vectors of atomics.
    return 32


def kind(one: Instruction) -> str:
    """Return the kind of an instruction: memory, matrix, barrier, float32, integer, ..."""
    if one.base in _MEMORY:
        return "memory"
    if _ZERO_ARITHMETIC.match(one.operands) and one.base in ("HFMA2", "FFMA", "FADD", "HADD2"):
        return "integer"  # a constant
    if one.base == "HADD2" and "F32" in one.modifiers and ", -RZ, " in one.operands:
        return "conversion"  # of 16 bits to float32
    for name, pattern in _KINDS:
        if pattern.match(one.base):
            return name
    return "integer"


def mix(found: Iterable[Instruction]) -> Counter[str]:
    """Return how many instructions there are of each kind, ``uniform`` datapath ones included in
    their kinds."""
    return Counter(map(kind, found))


def accesses(found: Iterable[Instruction]) -> Counter[Access]:
    """Return how many instructions there are of each memory access."""
    return Counter(one for one in map(access, found) if one is not None)


def matrix(found: Iterable[Instruction]) -> Counter[str]:
    """Return the matrix instructions by opcode."""
    return Counter(one.opcode for one in found if _MATRIX.match(one.base))


def barriers(found: Iterable[Instruction]) -> Counter[str]:
    """Return the instructions that wait for other threads, by base name."""
    return Counter(one.base for one in found if kind(one) == "barrier")


# --- AMD -----------------------------------------------------------------------------------------

_AMD_MEMORY = re.compile(
    r"^(?P<unit>global|flat|buffer|ds|scratch)_(?P<what>load|store|read|write|atomic)\w*"
)
_AMD_BITS = {
    "dwordx4": 128,
    "dwordx3": 96,
    "dwordx2": 64,
    "dword": 32,
    "b128": 128,
    "b96": 96,
    "b64": 64,
    "b32": 32,
    "b16": 16,
    "b8": 8,
    "short": 16,
    "ushort": 16,
    "sshort": 16,
    "byte": 8,
    "ubyte": 8,
    "sbyte": 8,
    "d16": 16,
}
_AMD_SPACES = {"ds": "shared", "scratch": "local"}


def amd_access(opcode: str) -> Access | None:
    """Return what memory an AMD instruction touches, or None."""
    match = _AMD_MEMORY.match(opcode)
    if match is None:
        return None
    what = {"read": "load", "write": "store"}.get(match["what"], match["what"])
    bits = next((_AMD_BITS[word] for word in reversed(opcode.split("_")) if word in _AMD_BITS), 32)
    return Access(_AMD_SPACES.get(match["unit"], "global"), what, bits)


def amd_kind(opcode: str) -> str:
    """Return the kind of an AMD instruction."""
    if amd_access(opcode):
        return "memory"
    for name, pattern in (
        ("matrix", r"v_(s?mfma|smfmac)"),
        ("barrier", r"s_barrier"),
        ("constant", r"s_(load|buffer_load)"),
        ("control", r"s_(c?branch|waitcnt|endpgm|nop|setpc|swappc|call|sleep|set\w+)"),
        ("conversion", r"v_cvt"),
        ("special", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
        ("float64", r"v_\w*_f64"),
        ("float16", r"v_\w*_(f16|bf16)"),
        ("float32", r"v_\w*_f32"),
    ):
        if re.match(pattern, opcode):
            return name
    return "integer"
