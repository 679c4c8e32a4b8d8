"""From narrow numbers to wider ones, exactly, by a few operations on packed words.

Two neighboring numbers of 8 bits in a row are read as one word of 16. The products then have the layouts of 16 bits,
and tensor cores read such tiles transposed from shared memory by whole words, not by single bytes. Each word gives an
even and an odd column.
"""

import triton
import triton.language as tl

from ..device import interpreting

# int8: the low seven bits become the mantissa of 128 + these bits, from which 128 or, for a negative value, 256 is
# subtracted; float16 has enough mantissa bits for 1024 + 128 + the value, from which 1152 is subtracted
_INT8_BF16 = """
    lop3.b32 e, x, 0x007f007f, 0x43004300, 0xEA;
    lop3.b32 c, x, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 y, e, one, c;"""
_INT8_FP16 = """
    lop3.b32 e, x, 0x00ff00ff, 0x64806480, 0x6A;
    fma.rn.f16x2 y, e, one, c;"""


def _int8(to: str) -> str:
    body, one, c = (_INT8_BF16, "0x3F803F80", "0") if to == "bf16" else (_INT8_FP16, "0x3C003C00", "0xE480E480")
    odd = body.replace("x, ", "h, ").replace(" y", " $1")
    start = f"mov.b32 one, {one}; mov.b32 c, {c}; shr.u32 h, $2, 8;"
    return "{.reg .b32 e, c, h, one;" + start + body.replace("x, ", "$2, ").replace(" y", " $0") + odd + "}"


def _e4m3(to: str) -> str:
    """Move exponent and mantissa to their place in the wider number, put the sign in front, and multiply by the power
    of two between the two biases. This also scales numbers below the smallest normal one correctly."""
    shift, mask, power = (4, "0x07f007f0", "0x7B807B80") if to == "bf16" else (7, "0x3f803f80", "0x5C005C00")
    kind = "bf16x2" if to == "bf16" else "f16x2"
    return f"""{{.reg .b32 e, s, power, zero;
    mov.b32 power, {power};
    mov.b32 zero, 0x80008000;
    shl.b32 e, $2, {shift};
    and.b32 e, e, {mask};
    shl.b32 s, $2, 8;
    lop3.b32 e, s, 0x80008000, e, 0xEA;
    fma.rn.{kind} $0, e, power, zero;
    shr.u32 e, $2, {8 - shift};
    and.b32 e, e, {mask};
    lop3.b32 e, $2, 0x80008000, e, 0xEA;
    fma.rn.{kind} $1, e, power, zero;}}"""


# the conversion of compute capability 8.9 and newer takes two neighbors of a word of four, and keeps NaN
E4M3_FP16_NAN = tl.constexpr("""{.reg .b32 x; .reg .b16 even, odd;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {even, odd}, x;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;}""")
INT8_BF16, INT8_FP16 = tl.constexpr(_int8("bf16")), tl.constexpr(_int8("fp16"))
E4M3_BF16, E4M3_FP16 = tl.constexpr(_e4m3("bf16")), tl.constexpr(_e4m3("fp16"))
PACKED = tl.constexpr(not interpreting())


@triton.jit
def widened(pairs, dtype: tl.constexpr, stored: tl.constexpr, NAN: tl.constexpr = False):
    """The even and the odd numbers of pairs (int16) of stored ones, int8 or e4m3, in dtype. e4m3's NaN reads as 480,
    with NAN as NaN, which takes fewer instructions to float16."""
    if PACKED and dtype == tl.bfloat16:
        code: tl.constexpr = INT8_BF16 if stored == tl.int8 else E4M3_BF16
        return tl.inline_asm_elementwise(code, "=r,=r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    elif PACKED and dtype == tl.float16:
        e4m3: tl.constexpr = E4M3_FP16_NAN if NAN else E4M3_FP16
        code: tl.constexpr = INT8_FP16 if stored == tl.int8 else e4m3
        return tl.inline_asm_elementwise(code, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        even, odd = pairs.to(tl.int8), (pairs >> 8).to(tl.int8)
        return even.to(stored, bitcast=True).to(dtype), odd.to(stored, bitcast=True).to(dtype)
