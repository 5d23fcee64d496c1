#!/usr/bin/env python3
"""The independent reference: what dispatch and combine must give, byte for byte, in plain numpy; and the maker of cases.

    python3 reference.py gen   DIR [options]   make a case: DIR/case.json, DIR/input, DIR/golden
    python3 reference.py check DIR [options]   compute golden again from input and compare (options only without case.json)

Exit code: 0 done and equal, 1 golden differs or a file is missing, 2 bad arguments (one line says what and how to mend it).
Needs Python 3.9 and numpy, nothing else; it reads nothing next to itself, so it also runs from standard input
(`python3 - gen DIR < reference.py`).

Numbers. Tokens are held as bit patterns: uint16 for f16 and bf16, uint32 for f32. The grids of E5M2 and E4M3 are tables that
follow from the definition of the format; rounding compares with the midpoints of the grid, which float64 holds exactly. All
other arithmetic is IEEE binary32 as numpy does it: one rounding per operation, subnormals kept, no fused multiply-add.

Layout of a case (all files little-endian, row-major; r = rank, T tokens, K topk, H hidden, N rows received, L local experts):

    input/chip_r/   x [T,H] token type, expert_ids [T,K] i32, expert_scales [T,K] f32, expand_x [N,H] token type
    golden/chip_r/  expand_x [N,H], dynamic_scales [N,S] (no file without quantisation), assist_info_for_combine [N,3] i32,
                    expert_token_nums [L] i64, ep_recv_count [L*R] i32, x [T,H] token type

With expert_alignment A > 1 the rows of every expert are padded to a multiple of A, the last expert's too. Then expand_x, in
golden and in input, dynamic_scales and assist_info_for_combine hold the padded rows. Golden's pad rows are zero (scales too),
their source info is -1; input/expand_x has random values there, which combine must not read. expert_token_nums and
ep_recv_count stay the true counts, and one more file, golden/chip_r/expert_offsets_r.bin [L+1] i64, gives the padded offset of
each expert, then the padded total.

Routing (--routing), K experts per token; a token repeats an expert only where K > E, and then (balanced apart) every expert is
drawn once before any is drawn again:

    balanced   as the CANN sample: slot s of the group, counted over ranks, tokens and k, goes to expert (s + s // E) mod E.
               Every expert gets an equal share, to one row; the seed plays no part
    uniform    random, all experts equally likely
    zipf       random, the n-th most popular expert has weight n^-1.2; which expert is how popular follows from the seed
    lognormal  random, an expert's weight is exp(g) with g normally distributed
    onehot     slot 0 of every token goes to one and the same expert (from the seed), the other slots uniform over the rest
    drop       uniform, then every slot is -1 with probability 1/4

Values (--values), for x and for the experts' output:

    gauss      standard normal
    uniform    -1 to 1
    wild       per row one of: any finite bit pattern; the same with NaN (quiet, signalling, both signs) and Inf strewn in and
               many zeros; subnormals and zeros; values near the largest; all zero, of both signs

Same options and seed give the same bytes: every array has a stream of its own, PCG64 seeded with (seed, purpose, rank).
"""

import argparse
import glob
import json
import os
import sys
from typing import NamedTuple

import numpy as np

DTYPES = ("f16", "bf16", "f32")
DISPATCH_FORMATS = ("none", "int8_token", "mxfp8_e5m2", "mxfp8_e4m3", "fp8_e4m3_block128")
COMBINE_FORMATS = ("none", "int8_block8", "int8_block128")
ROUTINGS = ("balanced", "uniform", "zipf", "lognormal", "onehot", "drop")
VALUES = ("gauss", "uniform", "wild")
ALIGNMENTS = (1, 16, 32, 128)

# Elements handled at once: bounds memory, and keeps temporaries in cache. The streams of the generator are cut by it too, so
# another value makes other cases.
CHUNK = 1 << 18

# What mistakes and help texts call this program: the command line that carries it says its own name.
PROGRAM = os.environ.get("SWITCHYARD_PROGRAM", "reference.py")


class Mistake(Exception):
    """Bad arguments or a bad case; the text says what and how to mend it."""


# ---------------------------------------------------------------------------------------------------------- token types

BITS = {"f16": np.dtype("<u2"), "bf16": np.dtype("<u2"), "f32": np.dtype("<u4")}
NAN_BITS = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000}
F32_NAN = np.array(NAN_BITS["f32"], np.uint32).view(np.float32)[()]


def to_f32(bits, dtype):
    """Token bit patterns of any shape -> float32 of the same shape; exact."""
    bits = np.ascontiguousarray(bits)
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float32)


def from_f32(values, dtype):
    """float32 -> token bit patterns, to nearest, ties to even; every NaN becomes the canonical one of the type."""
    values = np.ascontiguousarray(values, np.float32)
    with np.errstate(all="ignore"):
        if dtype == "f16":
            bits = values.astype(np.float16).view(np.uint16)
        elif dtype == "bf16":
            # Adding half a unit, less one where the kept part is even, carries into the kept half exactly when it must.
            wide = values.view(np.uint32)
            bits = ((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
        else:
            bits = values.view(np.uint32).copy()
    nan = np.isnan(values)
    if nan.any():
        bits[nan] = NAN_BITS[dtype]
    return bits


# ----------------------------------------------------------------------------------------------------- the grids of fp8

class Grid(NamedTuple):
    """An 8-bit float format. `values` [256] float64 of every code; `steps` float64: see grid_codes."""
    values: np.ndarray
    steps: np.ndarray
    largest: int  # code of the largest finite value
    emax: int     # exponent of the largest binade


def make_grid(exponent_bits, mantissa_bits, largest, infinity):
    """The grid of a sign, `exponent_bits`, `mantissa_bits` format whose largest finite code is `largest`."""
    bias = (1 << (exponent_bits - 1)) - 1
    code = np.arange(128)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits)).astype(np.float64)
    magnitude = np.ldexp(significand, np.maximum(exponent, 1) - bias - mantissa_bits)

    # Between codes c and c+1 lies one midpoint. A value on it goes to the even code (whose last mantissa bit is 0): to c when c
    # is even, so all values above the midpoint go up; else to c+1, so all values above its float64 predecessor go up. The first
    # code past `largest` stands for the value that would follow in the grid, which is how overflow after rounding is seen.
    middle = (magnitude[:largest + 1] + magnitude[1:largest + 2]) / 2
    steps = np.where(code[:largest + 1] % 2 == 0, middle, np.nextafter(middle, 0.0))

    positive = magnitude.copy()
    positive[largest + 1:] = np.nan
    if infinity is not None:
        positive[infinity] = np.inf
    return Grid(np.concatenate([positive, -positive]), steps, largest, int(exponent[largest]) - bias)


E5M2 = make_grid(5, 2, largest=0x7B, infinity=0x7C)
E4M3 = make_grid(4, 3, largest=0x7E, infinity=None)
GRIDS = {"mxfp8_e5m2": E5M2, "mxfp8_e4m3": E4M3, "fp8_e4m3_block128": E4M3}
NAN_CODE = 0x7F  # the canonical NaN of both


def grid_codes(values, grid, saturate=True):
    """float32 or float64 numbers, not NaN -> uint8 codes: nearest, ties to even, sign of zero kept.

    What rounds past the largest finite value becomes that value, or the next code (E5M2: Inf) without `saturate`.
    """
    codes = np.searchsorted(grid.steps, np.abs(values).astype(np.float64), side="left").astype(np.uint8)
    if saturate:
        np.minimum(codes, np.uint8(grid.largest), out=codes)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))


# -------------------------------------------------------------------------------------------------------- number formats

BLOCKS = {"mxfp8_e5m2": 32, "mxfp8_e4m3": 32, "fp8_e4m3_block128": 128, "int8_block8": 8, "int8_block128": 128}


def scale_shape(fmt, hidden, dtype):
    """(number of scales per row, their dtype) of a format other than none."""
    if fmt == "int8_token":
        return 1, np.dtype("<f4")
    count = -(-hidden // BLOCKS[fmt])
    if fmt in ("mxfp8_e5m2", "mxfp8_e4m3"):
        return count + count % 2, np.dtype("u1")
    if fmt == "int8_block8":
        return count, BITS[dtype]
    return count, np.dtype("<f4")


def element_type(fmt):
    """numpy type of a quantised element."""
    return np.dtype("i1") if fmt.startswith("int8") else np.dtype("u1")


def in_blocks(values, block):
    """[rows,H] -> [rows, ceil(H/block), block], the tail filled with zeros."""
    rows, hidden = values.shape
    count = -(-hidden // block)
    if count * block != hidden:
        padded = np.zeros((rows, count * block), values.dtype)
        padded[:, :hidden] = values
        values = padded
    return values.reshape(rows, count, block)


def fitting_exponent(amax, grid):
    """Least e with largest * 2^e >= amax, for float64 amax > 0; exact, as both are taken apart into m * 2^e, 0.5 <= m < 1."""
    mantissa, exponent = np.frexp(amax)
    limit_mantissa, limit_exponent = np.frexp(grid.values[grid.largest])
    return exponent - limit_exponent + (mantissa > limit_mantissa)


def encode_mx(x, hidden, fmt, mx_rule, mx_overflow):
    """x [rows, blocks, 32] f32 -> elements [rows,H] u8, scales [rows,S] u8."""
    grid = GRIDS[fmt]
    wide = x.astype(np.float64)
    amax = np.abs(wide).max(axis=2)
    bad = ~np.isfinite(amax)
    zero = amax == 0
    safe = np.where(bad | zero, 1.0, amax)
    if mx_rule == "floor":
        exponent = np.frexp(safe)[1] - 1 - grid.emax
    else:
        exponent = fitting_exponent(safe, grid)
    exponent = np.clip(exponent, -127, 127)
    exponent[zero] = -127
    # float64 holds x / 2^exponent exactly: at most 24 bits, exponents within -149-127 .. 127+127.
    scaled = np.ldexp(wide, -exponent[:, :, None])
    scaled[bad] = 0.0
    elements = grid_codes(scaled, grid, saturate=mx_overflow == "saturate")
    elements[bad] = NAN_CODE
    scales = np.zeros((x.shape[0], scale_shape(fmt, hidden, None)[0]), np.uint8)
    scales[:, :amax.shape[1]] = np.where(bad, 255, exponent + 127)
    return elements.reshape(x.shape[0], -1)[:, :hidden], scales


def encode_scaled(x, hidden, fmt, dtype, fp8_scale):
    """The formats with a quotient x/scale. x [rows, blocks, columns] f32 -> elements [rows,H] u8 or i8, scales [rows,S]."""
    amax = np.abs(x).max(axis=2)
    bad = ~np.isfinite(amax)
    amax[bad] = 1.0
    if fmt == "fp8_e4m3_block128" and fp8_scale == "ue8m0":
        exponent = fitting_exponent(np.where(amax == 0, 1.0, amax).astype(np.float64), E4M3)
        scale = np.where(amax == 0, 1.0, np.ldexp(1.0, exponent)).astype(np.float32)  # >= 2^-141: exact in f32
    else:
        scale = amax / np.float32(448 if fmt == "fp8_e4m3_block128" else 127)
        scale[scale == 0] = 1.0
    quotient = x / scale[:, :, None]
    quotient[bad] = 0.0
    if fmt == "fp8_e4m3_block128":
        elements = grid_codes(quotient, E4M3)
        elements[bad] = NAN_CODE
    else:
        if fmt != "int8_token":
            quotient = quotient.astype(np.float16).astype(np.float32)
        np.rint(quotient, out=quotient)
        np.clip(quotient, -127, 127, out=quotient)
        elements = quotient.astype(np.int8)
    scale[bad] = F32_NAN
    if fmt == "int8_block8":
        scale = from_f32(scale, dtype)
    return elements.reshape(x.shape[0], -1)[:, :hidden], scale


def chunks(rows, hidden):
    """Slices of rows that hold about CHUNK elements each."""
    step = max(1, CHUNK // hidden)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def encode(fmt, bits, dtype, mx_rule="floor", mx_overflow="saturate", fp8_scale="f32"):
    """Token bit patterns [rows,H] -> (elements [rows,H] u8 or i8, scales [rows,S] as scale_shape says).

    The scales of int8_block8 are bit patterns of the token type. Every row is encoded by itself; mx_rule and mx_overflow matter
    to mx formats, fp8_scale to fp8_e4m3_block128.
    """
    rows, hidden = bits.shape
    count, kind = scale_shape(fmt, hidden, dtype)
    elements, scales = np.empty((rows, hidden), element_type(fmt)), np.empty((rows, count), kind)
    with np.errstate(all="ignore"):
        block = BLOCKS.get(fmt, hidden)
        for part in chunks(rows, -(-hidden // block) * block):
            x = in_blocks(to_f32(bits[part], dtype), block)
            if fmt in ("mxfp8_e5m2", "mxfp8_e4m3"):
                elements[part], scales[part] = encode_mx(x, hidden, fmt, mx_rule, mx_overflow)
            else:
                elements[part], scales[part] = encode_scaled(x, hidden, fmt, dtype, fp8_scale)
    return elements, scales


def decode(fmt, elements, scales, dtype):
    """(elements [rows,H], scales [rows,S]) -> float32 [rows,H], NaNs canonical.

    For int8_block8 and int8_block128 this is the 'value': already rounded to the token type, then widened.
    """
    rows, hidden = elements.shape
    with np.errstate(all="ignore"):
        if fmt in ("mxfp8_e5m2", "mxfp8_e4m3"):
            scale = np.ldexp(1.0, scales.astype(np.int32) - 127)
            scale[scales == 255] = np.nan
        elif fmt == "int8_block8":
            scale = to_f32(scales, dtype)
        else:
            scale = scales
        numbers = GRIDS[fmt].values[elements] if fmt in GRIDS else elements.astype(np.float32)
        blocks = in_blocks(numbers, BLOCKS.get(fmt, hidden))
        # The fp8 products are exact in float64 (24 + 4 bits at most), so this rounds once; those of int8 are f32 products.
        product = (blocks * scale[:, :blocks.shape[1], None]).astype(np.float32)
        values = np.ascontiguousarray(product.reshape(rows, blocks.shape[1] * blocks.shape[2])[:, :hidden])
        if fmt in ("int8_block8", "int8_block128"):
            return to_f32(from_f32(values, dtype), dtype)
        values[np.isnan(values)] = F32_NAN
    return values


# --------------------------------------------------------------------------------------------------------------- dispatch

def experts_of(rank, ranks, experts):
    """(first, last + 1) expert of a rank: contiguous, the first E mod R ranks own one more."""
    share, more = divmod(experts, ranks)
    first = rank * share + min(rank, more)
    return first, first + share + (rank < more)


class Received(NamedTuple):
    """What one rank receives. N counts pad rows too where the alignment is above 1, except in the two arrays of counts."""
    source_info: np.ndarray        # [N,3] i32: source rank, token, k; -1 in pad rows
    expert_token_nums: np.ndarray  # [L] i64
    ep_recv_count: np.ndarray      # [L*R] i32
    expert_offsets: np.ndarray     # [L+1] i64


class Places(NamedTuple):
    """Where the slots of one source rank went: rank and row there, both [T,K] i64, -1 for an unused slot."""
    rank: np.ndarray
    row: np.ndarray


def dispatch(topk_ids, experts, alignment=1, cumsum=False):
    """topk_ids: one [T,K] i32 per rank -> ([Received per rank], [Places per source rank])."""
    ranks, topk = len(topk_ids), topk_ids[0].shape[1]
    for rank, ids in enumerate(topk_ids):
        wrong = np.argwhere((ids < -1) | (ids >= experts))
        if len(wrong):
            token, slot = wrong[0]
            raise Mistake(f"rank {rank}, token {token}, slot {slot}: expert id {ids[token, slot]}; "
                          f"allowed is -1..{experts - 1}")
    tokens = [len(ids) for ids in topk_ids]
    slots = np.array(tokens, np.int64) * topk

    # All slots in the order (source rank, token, k). A stable sort by expert then gives the order of the contract.
    expert = np.concatenate([np.asarray(ids, np.int64).reshape(-1) for ids in topk_ids])
    source = np.repeat(np.arange(ranks), slots)
    position = np.arange(len(expert)) - (np.cumsum(slots) - slots)[source]  # token * K + k
    used = np.flatnonzero(expert >= 0)
    order = used[np.argsort(expert[used], kind="stable")]

    counts = np.bincount(expert[used] * ranks + source[used], minlength=experts * ranks).reshape(experts, ranks)
    per_expert = counts.sum(axis=1)
    starts = np.cumsum(per_expert) - per_expert
    padded = -(-per_expert // alignment) * alignment

    slot_rank, slot_row = np.full(len(expert), -1, np.int64), np.full(len(expert), -1, np.int64)
    received = []
    for rank in range(ranks):
        first, last = experts_of(rank, ranks, experts)
        offsets = np.concatenate([[0], np.cumsum(padded[first:last])]).astype(np.int64)
        if offsets[-1] >= 2**31:
            raise Mistake(f"rank {rank} would receive {offsets[-1]} rows; fewer than 2147483648 are allowed: take fewer tokens")
        begin = starts[first] if first < last else 0
        mine = order[begin:begin + per_expert[first:last].sum()]
        local = expert[mine] - first
        rows = offsets[local] + np.arange(len(mine)) - (starts[first:last] - begin)[local]
        slot_rank[mine], slot_row[mine] = rank, rows
        info = np.full((offsets[-1], 3), -1, "<i4")
        info[rows] = np.stack([source[mine], position[mine] // topk, position[mine] % topk], axis=1)
        nums = per_expert[first:last]
        received.append(Received(info, (np.cumsum(nums) if cumsum else nums).astype("<i8"),
                                 np.cumsum(counts[first:last]).astype("<i4"), offsets.astype("<i8")))
    cuts = np.cumsum(slots)[:-1]
    return received, [Places(where.reshape(-1, topk), row.reshape(-1, topk))
                      for where, row in zip(np.split(slot_rank, cuts), np.split(slot_row, cuts))]


def rows_from(sources, source_info):
    """Rows of the sources in the order of source_info. sources: one [T,width] per rank -> [N,width]; pad rows are zero."""
    out = np.zeros((len(source_info), sources[0].shape[1]), sources[0].dtype)
    for rank, source in enumerate(sources):
        here = np.flatnonzero(source_info[:, 0] == rank)
        out[here] = source[source_info[here, 1]]
    return out


# ---------------------------------------------------------------------------------------------------------------- combine

def wire_values(bits, dtype, wire):
    """What combine sees of experts' output [rows,H]: float32, after the wire format."""
    if wire == "none":
        return to_f32(bits, dtype)
    return decode(wire, *encode(wire, bits, dtype), dtype)


def combine(expert_rows, places, weights, dtype, wire="none", shared=None):
    """Tokens of one source rank from the experts' rows.

    expert_rows: one [N,H] of token bits per rank; places: of this source rank; weights [T,K] f32, or None for 1;
    shared: [T,H] of token bits, or None -> token bits [T,H].
    """
    tokens, topk = places.rank.shape
    hidden = expert_rows[0].shape[1]
    out = np.empty((tokens, hidden), BITS[dtype])
    with np.errstate(all="ignore"):
        for part in chunks(tokens, hidden):
            where, row = places.rank[part], places.row[part]
            acc = np.zeros((len(where), hidden), np.float32)
            for k in range(topk):
                used = np.flatnonzero(where[:, k] >= 0)
                bits = np.empty((len(used), hidden), BITS[dtype])
                for rank in np.unique(where[used, k]):
                    here = np.flatnonzero(where[used, k] == rank)
                    bits[here] = expert_rows[rank][row[used[here], k]]
                term = wire_values(bits, dtype, wire)
                if weights is not None:
                    term = weights[part][used, k][:, None] * term
                acc[used] = acc[used] + term
            if shared is not None:
                acc = acc + to_f32(shared[part], dtype)
            out[part] = from_f32(acc, dtype)
    return out


# ------------------------------------------------------------------------------------------------------------------ cases

class Case(NamedTuple):
    """The options of a case, by their names in case.json."""
    ranks: int
    tokens_per_rank: tuple
    hidden: int
    topk: int
    experts: int
    dtype: str
    dispatch_quant: str = "none"
    mx_rule: str = "floor"
    mx_overflow: str = "saturate"
    fp8_scale: str = "f32"
    combine_quant: str = "none"
    expert_token_nums: str = "count"
    expert_alignment: int = 1
    routing: str = "balanced"
    values: str = "gauss"
    seed: int = 0


CHOICES = {"dtype": DTYPES, "dispatch_quant": DISPATCH_FORMATS, "mx_rule": ("floor", "ceil"),
           "mx_overflow": ("saturate", "inf"), "fp8_scale": ("f32", "ue8m0"), "combine_quant": COMBINE_FORMATS,
           "expert_token_nums": ("count", "cumsum"), "expert_alignment": ALIGNMENTS}


def check_case(case):
    """Raises Mistake for options that do not fit together."""
    for name in ("ranks", "hidden", "topk", "experts"):
        value = getattr(case, name)
        if type(value) is not int or not 1 <= value < 2**31:
            raise Mistake(f"{name} is {value!r}; give a number from 1 to 2147483647")
    for name, allowed in CHOICES.items():
        if getattr(case, name) not in allowed:
            raise Mistake(f"{name} is {getattr(case, name)!r}; give one of {', '.join(map(str, allowed))}")
    if len(case.tokens_per_rank) != case.ranks:
        raise Mistake(f"token counts are given for {len(case.tokens_per_rank)} ranks but there are {case.ranks}; "
                      f"give one number or {case.ranks}, as in --bs 5,0,1,7")
    for tokens in case.tokens_per_rank:
        if type(tokens) is not int or not 0 <= tokens < 2**31:
            raise Mistake(f"token count {tokens!r}; give a number from 0 to 2147483647")
    if case.ranks * case.experts > 2**28:
        raise Mistake(f"ranks * experts is {case.ranks * case.experts}; at most {2**28} is handled: take fewer")
    if case.mx_overflow == "inf" and case.dispatch_quant == "mxfp8_e4m3":
        raise Mistake("mxfp8_e4m3 has no infinity; take --mx-overflow saturate, or --quant-mode mxfp8_e5m2")
    if case.dtype == "f32" and (case.dispatch_quant, case.combine_quant) != ("none", "none"):
        raise Mistake("f32 tokens are not quantised; add --quant-mode none --combine-quant none, or take --dtype f16 or bf16")


def case_from_json(path):
    """Case from a case.json. Keys that are missing get the defaults of Case, unknown keys are remarks."""
    try:
        with open(path, encoding="utf-8") as file:
            read = json.load(file)
        known = {key: value for key, value in read.items() if key in Case._fields}
        known["tokens_per_rank"] = tuple(known["tokens_per_rank"])
        if known.get("mx_overflow") == "sat":
            known["mx_overflow"] = "saturate"
        case = Case(**known)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Mistake(f"{path} is not a case ({error}); make one with gen") from None
    check_case(case)
    return case


def file_of(directory, side, rank, name):
    """Path of one array of a case; side is input, golden or output."""
    return os.path.join(directory, side, f"chip_{rank}", f"{name}_{rank}.bin")


def read_rows(path, kind, columns, rows=None, at_least=0):
    """A file as [rows, columns], mapped rather than read so that large cases need little memory."""
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}; a case needs this file") from None
    width = columns * kind.itemsize
    found, rest = divmod(size, width)
    if rest or found < at_least or (rows is not None and found != rows):
        expected = f"{rows} rows" if rows is not None else f"at least {at_least} whole rows"
        raise Mistake(f"{path} holds {size} bytes; the case wants {expected} of {width} bytes")
    if not found:
        return np.empty((0, columns), kind)
    return np.memmap(path, kind, "r", shape=(found, columns))


def progress(text):
    """Shows how far long work is, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def golden_arrays(case, directory):
    """Computes the right results of the inputs in `directory`; yields (rank, name, array [rows, columns] or [n])."""
    everyone = range(case.ranks)
    ids = [np.array(read_rows(file_of(directory, "input", rank, "expert_ids"), np.dtype("<i4"), case.topk,
                              case.tokens_per_rank[rank])) for rank in everyone]
    weights = [np.array(read_rows(file_of(directory, "input", rank, "expert_scales"), np.dtype("<f4"), case.topk,
                                  case.tokens_per_rank[rank])) for rank in everyone]
    tokens = [read_rows(file_of(directory, "input", rank, "x"), BITS[case.dtype], case.hidden, case.tokens_per_rank[rank])
              for rank in everyone]
    received, places = dispatch(ids, case.experts, case.expert_alignment, case.expert_token_nums == "cumsum")
    expert_rows = [read_rows(file_of(directory, "input", rank, "expand_x"), BITS[case.dtype], case.hidden,
                             at_least=len(received[rank].source_info)) for rank in everyone]

    # A row is the same whichever experts it goes to, so each token is encoded once.
    scales = None
    if case.dispatch_quant != "none":
        encoded = [encode(case.dispatch_quant, x, case.dtype, case.mx_rule, case.mx_overflow, case.fp8_scale) for x in tokens]
        tokens, scales = [pair[0] for pair in encoded], [pair[1] for pair in encoded]
    for rank in everyone:
        progress(f"dispatch and combine, rank {rank + 1} of {case.ranks}")
        got = received[rank]
        yield rank, "expand_x", rows_from(tokens, got.source_info)
        if scales is not None:
            yield rank, "dynamic_scales", rows_from(scales, got.source_info)
        yield rank, "assist_info_for_combine", got.source_info
        yield rank, "expert_token_nums", got.expert_token_nums
        yield rank, "ep_recv_count", got.ep_recv_count
        if case.expert_alignment > 1:
            yield rank, "expert_offsets", got.expert_offsets
        yield rank, "x", combine(expert_rows, places[rank], weights[rank], case.dtype, case.combine_quant)
    progress("")


# -------------------------------------------------------------------------------------------------------------- generator

# One stream per purpose and rank, so that changing one array never shifts another.
STREAM_X, STREAM_ROUTE, STREAM_WEIGHTS, STREAM_EXPERTS, STREAM_POPULARITY = range(5)


def stream(case, purpose, rank=0):
    """The random stream of one array."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([case.seed, purpose, rank])))


def wild_rows(rng, rows, hidden, dtype):
    """Hostile token bits [rows,H]; see the text at the top."""
    total, fraction = {"f16": (16, 10), "bf16": (16, 7), "f32": (32, 23)}[dtype]
    exponent_max = (1 << (total - 1 - fraction)) - 1
    sign = rng.integers(0, 2, (rows, hidden), np.uint32) << np.uint32(total - 1)
    mantissa = rng.integers(0, 1 << fraction, (rows, hidden), np.uint32)
    exponent = rng.integers(0, exponent_max, (rows, hidden), np.uint32)
    chance = rng.integers(0, 256, (rows, hidden), np.uint32)
    kind = rng.integers(0, 8, rows)  # 0-2 finite, 3-4 with NaN and Inf, 5 subnormal, 6 near the largest, 7 zero
    exponent[kind == 6] = exponent_max - 1
    exponent[(kind == 5) | (kind == 7)] = 0
    mantissa[kind == 7] = 0
    zero = np.where(np.isin(kind, (3, 4, 5))[:, None], chance >= 192, False)
    exponent[zero], mantissa[zero] = 0, 0
    special = np.where(np.isin(kind, (3, 4))[:, None], chance < 2, False)
    exponent[special] = exponent_max
    infinite = special & (chance == 0)
    mantissa[infinite] = 0
    mantissa[special & ~infinite] |= 1  # never the pattern of Inf; the quiet bit stays random
    return (sign | (exponent << np.uint32(fraction)) | mantissa).astype(BITS[dtype])


def random_rows(rng, case, rows):
    """Yields token bits [some, H] until there are `rows` of them."""
    for part in chunks(rows, case.hidden):
        shape = (part.stop - part.start, case.hidden)
        if case.values == "wild":
            yield wild_rows(rng, *shape, case.dtype)
        elif case.values == "uniform":
            yield from_f32(rng.random(shape, np.float32) * np.float32(2) - np.float32(1), case.dtype)
        else:
            yield from_f32(rng.standard_normal(shape, np.float32), case.dtype)


def log_popularity(case):
    """[E] float64: the logarithm of how likely each expert is; the same for all ranks."""
    rng = stream(case, STREAM_POPULARITY)
    if case.routing == "zipf":
        return -1.2 * np.log(1.0 + rng.permutation(case.experts))
    if case.routing == "lognormal":
        return rng.standard_normal(case.experts)
    return np.zeros(case.experts)


def route(case, rank):
    """Expert ids [T,K] i32 of one rank."""
    tokens, topk, experts = case.tokens_per_rank[rank], case.topk, case.experts
    if case.routing == "balanced":
        slot = (sum(case.tokens_per_rank[:rank]) * topk + np.arange(tokens * topk)).reshape(tokens, topk)
        return ((slot + slot // experts) % experts).astype("<i4")
    rng = stream(case, STREAM_ROUTE, rank)
    likely = log_popularity(case)
    hot = int(stream(case, STREAM_POPULARITY).integers(experts))
    rounds = -(-topk // experts)
    ids = np.empty((tokens, topk), "<i4")
    for part in chunks(tokens, experts * rounds):
        # The K largest of (log weight + Gumbel noise) are K draws without repetition; a round that is used up starts afresh.
        keys = likely + rng.gumbel(size=(part.stop - part.start, rounds, experts))
        if case.routing == "onehot":
            keys[:, 0, hot] = np.inf
        ids[part] = np.argsort(-keys, axis=2, kind="stable").reshape(len(keys), -1)[:, :topk]
    if case.routing == "drop":
        ids[rng.random((tokens, topk)) < 0.25] = -1
    return ids


def token_weights(case, rank):
    """Weights [T,K] f32: positive, uneven as a softmax makes them, sum 1 per token up to rounding."""
    raw = stream(case, STREAM_WEIGHTS, rank).random((case.tokens_per_rank[rank], case.topk))
    raw = raw * raw * raw + 2.0**-10
    total = np.zeros(len(raw))
    for k in range(case.topk):  # in this order on every machine, which sum() does not promise
        total = total + raw[:, k]
    return (raw / total[:, None]).astype("<f4")


def write_file(directory, side, rank, name, parts):
    """Writes arrays one after another into the file of that name."""
    path = file_of(directory, side, rank, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        for part in parts:
            file.write(np.ascontiguousarray(part).data)


def clear_case(directory):
    """Removes the arrays of an older case in the same place; touches nothing in a directory that does not hold a case."""
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise Mistake(f"{directory} is a file; name a directory")
    old = [side for side in ("input", "golden") if os.path.exists(os.path.join(directory, side))]
    if old and not os.path.exists(os.path.join(directory, "case.json")):
        raise Mistake(f"{directory} has {old[0]}/ but no case.json, so it is not replaced; name a new directory")
    for side in old:
        for path in glob.glob(os.path.join(glob.escape(directory), side, "chip_*", "*.bin")):
            os.remove(path)
        for path in glob.glob(os.path.join(glob.escape(directory), side, "chip_*")):
            if not os.listdir(path):
                os.rmdir(path)


def generate(case, directory):
    """Writes a whole case."""
    check_case(case)
    clear_case(directory)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "case.json"), "w", encoding="utf-8") as file:
        json.dump(case._asdict(), file, indent=1)
        file.write("\n")
    ids = [route(case, rank) for rank in range(case.ranks)]
    received, _ = dispatch(ids, case.experts, case.expert_alignment)
    for rank in range(case.ranks):
        progress(f"input, rank {rank + 1} of {case.ranks}")
        write_file(directory, "input", rank, "x", random_rows(stream(case, STREAM_X, rank), case, case.tokens_per_rank[rank]))
        write_file(directory, "input", rank, "expert_ids", [ids[rank]])
        write_file(directory, "input", rank, "expert_scales", [token_weights(case, rank)])
        write_file(directory, "input", rank, "expand_x",
                   random_rows(stream(case, STREAM_EXPERTS, rank), case, len(received[rank].source_info)))
    for rank, name, array in golden_arrays(case, directory):
        write_file(directory, "golden", rank, name, [array])
    return sum(len(got.source_info) for got in received)


# ------------------------------------------------------------------------------------------------------------------ check

GOLDEN_NAMES = ("expand_x", "dynamic_scales", "assist_info_for_combine", "expert_token_nums", "ep_recv_count", "expert_offsets",
                "x")


def first_difference(path, array):
    """None if the file holds exactly the array, else one line that says where they part."""
    try:
        found = np.fromfile(path, np.uint8)
    except OSError as error:
        return f"{path}: {error.strerror}"
    expected = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if len(found) != len(expected):
        return f"{path}: {len(found)} bytes, the reference gives {len(expected)}"
    unequal = np.flatnonzero(found != expected)
    if not len(unequal):
        return None
    place = int(unequal[0]) // array.dtype.itemsize
    row, column = divmod(place, array.shape[1]) if array.ndim == 2 else (place, 0)
    size = array.dtype.itemsize
    texts = [bytes(side[place * size:(place + 1) * size])[::-1].hex() for side in (found, expected)]
    return f"{path}: row {row}, column {column}: 0x{texts[0]}, the reference gives 0x{texts[1]} ({len(unequal)} bytes differ)"


def check(case, directory):
    """Compares golden with what the inputs give: None when equal, else one line about the first difference."""
    seen = set()
    for rank, name, array in golden_arrays(case, directory):
        path = file_of(directory, "golden", rank, name)
        seen.add(path)
        difference = first_difference(path, array)
        if difference:
            progress("")
            return difference
    for rank in range(case.ranks):
        for name in GOLDEN_NAMES:
            path = file_of(directory, "golden", rank, name)
            if path not in seen and os.path.exists(path):
                return f"{path}: is there, but these options give no such file"
    return None


# ----------------------------------------------------------------------------------------------------------- command line

class OneLineParser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and no usage text."""

    def error(self, message):
        raise Mistake(f"{message}; --help lists what is accepted")


def whole_number(low):
    """A reader of an option: a number from `low` up that fits 31 bits."""
    def read(text):
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to 2147483647")
        return value
    return read


def token_counts(text):
    """'8' -> (8,); '5,0,1,7' -> (5, 0, 1, 7)."""
    return tuple(whole_number(0)(part) for part in text.split(","))


def choice(*names, **numbers):
    """A reader of an option: one of the names, or an alias `_<text>` that stands for one."""
    aliases = {key.lstrip("_"): value for key, value in numbers.items()}

    def read(text):
        value = aliases.get(text, text)
        if value not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join([*names, *aliases])}")
        return value
    return read


def make_parser():
    parser = OneLineParser(prog=PROGRAM, allow_abbrev=False, description="Makes and checks Switchyard cases.")
    parser.add_argument("command", type=choice("gen", "check"), metavar="gen|check")
    parser.add_argument("directory", metavar="DIR")

    def add(*flags, **more):
        parser.add_argument(*flags, **more)

    add("--ranks", "--chip-num-per-server", type=whole_number(1), default=2, help="ranks of the group (2)")
    add("--bs", type=token_counts, default=(8,), help="tokens of every rank, or one number per rank: 5,0,1,7 (8)")
    add("--h", "--hidden", dest="hidden", type=whole_number(1), default=7168, help="width of a token (7168)")
    add("--k", "--topk", dest="topk", type=whole_number(1), default=8, help="experts per token (8)")
    add("--experts", "--moe-expert-num", type=whole_number(1), help="routed experts of the group (4 per rank)")
    add("--dtype", type=choice(*DTYPES), default="f16", help="token type: f16, bf16, f32 (f16)")
    add("--token-dtype-choice", dest="dtype", type=choice("bf16", "f16", _0="bf16", _1="f16"), default=argparse.SUPPRESS,
        help="token type as the sample counts: 0 bf16, 1 f16")
    add("--quant-mode", "--dispatch-quant", dest="dispatch_quant", default="mxfp8_e5m2",
        type=choice(*DISPATCH_FORMATS, _0="none", _2="int8_token", _4="mxfp8_e5m2"),
        help="0 none, 2 int8_token, 4 mxfp8_e5m2, mxfp8_e4m3, fp8_e4m3_block128 (4)")
    add("--combine-quant", "--comm-quant-mode", dest="combine_quant", default="int8_block8",
        type=choice(*COMBINE_FORMATS, _0="none", _2="int8_block8"), help="0 none, 2 int8_block8, int8_block128 (2)")
    add("--mx-rule", type=choice("floor", "ceil"), default="floor", help="floor or ceil (floor)")
    add("--mx-overflow", type=choice("saturate", "inf", sat="saturate"),
        help="saturate or inf (saturate; inf for a check without case.json)")
    add("--fp8-scale", type=choice("f32", "ue8m0"), default="f32", help="f32 or ue8m0 (f32)")
    add("--expert-recv-info-type", "--expert-token-nums", dest="expert_token_nums", default="count",
        type=choice("count", "cumsum", _1="count", _0="cumsum"), help="expert_token_nums: 1 count, 0 cumsum (1)")
    add("--expert-alignment", type=choice(*map(str, ALIGNMENTS)), default="1",
        help="rows of each expert start at a multiple of 1, 16, 32 or 128 (1)")
    add("--seed", "--random-seed", type=whole_number(0), default=0, help="seed of all random values (0)")
    add("--routing", type=choice(*ROUTINGS), default="balanced", help=f"{', '.join(ROUTINGS)} (balanced)")
    add("--values", type=choice(*VALUES), default="gauss", help=f"{', '.join(VALUES)} (gauss)")
    return parser


def case_from_arguments(arguments):
    """Case from the command line; without case.json a check takes overflow as the sample does."""
    options = {name: value for name, value in vars(arguments).items() if name in Case._fields}
    counts = arguments.bs * arguments.ranks if len(arguments.bs) == 1 else arguments.bs
    options.update(tokens_per_rank=counts, experts=arguments.experts or 4 * arguments.ranks,
                   expert_alignment=int(arguments.expert_alignment),
                   mx_overflow=arguments.mx_overflow or ("saturate" if arguments.command == "gen" else "inf"))
    case = Case(**options)
    check_case(case)
    return case


def main(arguments):
    """Runs the command line without the program's name; returns the exit code."""
    try:
        arguments = make_parser().parse_args(arguments)
        directory = arguments.directory
        if arguments.command == "gen":
            case = case_from_arguments(arguments)
            rows = generate(case, directory)
            tokens = sum(case.tokens_per_rank)
            print(f"{directory}: {case.ranks} ranks, {tokens} tokens, {rows} rows of {case.hidden} {case.dtype}")
            return 0
        described = os.path.join(directory, "case.json")
        case = case_from_json(described) if os.path.exists(described) else case_from_arguments(arguments)
        difference = check(case, directory)
        print(difference or f"{directory}: golden is what the reference gives")
        return 1 if difference else 0
    except Mistake as mistake:
        print(f"{PROGRAM}: {mistake}", file=sys.stderr)
    except OSError as error:
        where = error.filename or directory
        print(f"{PROGRAM}: {where}: {error.strerror}; name a directory that can be read and written", file=sys.stderr)
    except MemoryError:
        print("error: not enough memory for a case of this size; take fewer tokens or a smaller topk", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
