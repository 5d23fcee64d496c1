#!/usr/bin/env python3
"""Writes the first inputs of each fuzzer into fuzz/corpus/NAME/seed_*: whole, right runs for the fuzzers to change.
Writes fuzz/case.dict too: the flags and choices of the command line, which a fuzzer does not find letter by letter.

The other files of a corpus are what fuzzing has found since, minimised: ./dev fuzz NAME, then fuzz_NAME -merge=1.
The bytes follow the order in which the fuzzers ask for them (input.hpp): a choice among n is a byte modulo n.
"""
import glob
import os
import re
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "tests", "golden")


def write(fuzzer, name, content):
    folder = os.path.join(HERE, "corpus", fuzzer)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "seed_" + name), "wb") as file:
        file.write(content)


def case_seeds():
    """Arguments one a line, a zero byte, case.json."""
    for path in sorted(glob.glob(os.path.join(GOLDEN, "*", "case.json"))):
        with open(path, "rb") as file:
            write("case", os.path.basename(os.path.dirname(path)), b"run\nDIR\0" + b" ".join(file.read().split()))
    flags = ["--ranks", "3", "--bs", "5,0,1", "--h", "64", "--k", "2", "--moe-expert-num", "7", "--routing", "zipf", "--seed", "9",
             "--timeout", "0.5", "--landing", "padded", "--quant-mode", "4", "--comm-quant-mode", "2", "--token-dtype-choice", "1",
             "--expert-recv-info-type", "1", "--rounds", "3", "--json", "--output", "OUT"]
    write("case", "run_flags", ("run\n" + "\n".join(flags)).encode() + b"\0")
    for routing in ("balanced", "uniform", "lognormal", "onehot", "drop"):
        write("case", "run_" + routing, f"run\n--ranks=2\n--bs=4\n--h=8\n--k=3\n--routing={routing}".encode() + b"\0")
    write("case", "verify_sim", b"verify\n--sim\n--seed\n7\n--seeds\n3\n--trace\n--break\nold_flag\n--simd\nscalar\0")
    write("case", "verify_folder", b'verify\nDIR\n--json\n--output\nOUT\0{"ranks":1,"tokens_per_rank":[2],"hidden":8,"topk":1}')
    write("case", "verify_races", b"verify\n--rounds=5\n--jitter\n--ranks=2\n--slow\n1:5\0")
    write("case", "limits", b"run\n--slow=1:60000\n--ranks=4095\n--rounds=1000000\n--k=4096\n--timeout=1e9\n--bs=2147483648\0")
    write("case", "beyond_limits", b"run\n--slow=1:60001\0")
    write("case", "trace", b"trace\n--ranks\n4\n--slow\n2:5\n--trace\nFILE\n--waits\0")
    write("case", "help", b"run\n--help\0")


def case_dictionary():
    words = set()
    for source in ("src/core/options.cpp", "tools/case.cpp", "tools/flags.cpp"):
        with open(os.path.join(HERE, "..", source)) as file:
            text = file.read()
        for string in re.findall(r'"((?:[^"\\\n]|\\.)*)"', text):
            words.update(re.findall(r"--[a-z][a-z-]+", string))
            words.update(re.findall(r"([a-z0-9_]+)=\d", string))
    with open(os.path.join(HERE, "case.dict"), "w") as file:
        file.writelines(f'"{word}"\n' for word in sorted(words))


def window_seeds():
    """Ranks and options, then events: low 4 bits what, high 4 bits which rank. 7 lets every rank take one step."""
    for landing in range(3):
        for path in range(2):
            for dispatch_quant, combine_quant in ((0, 0), (2, 1), (4, 2)):
                # ranks, reachable, hidden, topk, experts, tokens_max, rows_max, depth, dtype, landing, path, formats, alignment,
                # weights, partial, kernels
                options = bytes([1, 1, 1, 1, 6, 3, 2, 1, 0, landing, path, dispatch_quant, combine_quant, path, path, landing == 1, 0])
                # An epoch: tokens, whether an id is bad, ids, tag, ...; the experts and combine ask for three bytes each.
                start = bytes([7]) + b"".join(bytes([3, 0]) + bytes([(i * 5 + r) % 7 for i in range(6)]) + bytes([0]) for r in range(3))
                epoch = start + bytes([7] * 4) + bytes([7] + [0, 1, 1] * 3) + bytes([7] * 3)
                write("window", f"epochs_{landing}{path}{dispatch_quant}", options + epoch * 2)
        options = bytes([0, 1, 0, 1, 3, 3, 1, 0, 0, landing, 0, 0, 0, 0, 0, 1, 1])
        start = bytes([7]) + (bytes([2, 0]) + bytes([1, 2, 3, 1]) + bytes([0])) * 2
        evil = b"".join(bytes([0x00, 0, 1, kind, 0, 1, 0, 1, 2, 3]) for kind in range(12))
        write("window", f"tampered_{landing}", options + start + evil + bytes([7] * 4) + start + evil)
        # Rank 1 ends; rank 0 asks, alone, and goes on.
        write("window", f"regroup_{landing}", options + start + bytes([0x13, 0, 1]) + bytes([7, 7, 5, 8, 8]) + start + bytes([7] * 4))


def rendezvous_seeds():
    """Size, then who is played: 1 the guests, 0 rank 0; 2 more for a session. An event: high 4 bits what, then two bytes of changes for a message."""
    whole = bytes([0, 0])
    for size in (2, 3):
        hellos = b"".join(bytes([(r - 1) | (r - 1) << 2]) + whole for r in range(1, size))
        mapped = b"".join(bytes([0x40 | (r - 1) | (r - 1) << 2]) + whole for r in range(1, size))
        heard = bytes([0xA0 | r for r in range(size - 1)])  # each guest takes a message: welcome, the deals, the end
        for who, name in ((1, "guests"), (3, "session_guests")):
            write("rendezvous", f"{name}_{size}", bytes([size - 2, who]) + hellos + heard * size + mapped + heard)
        deals = b"".join(bytes([0x30 | r]) + whole for r in (0, 2)[: size - 1])
        for who, name in ((0, "rank_0"), (2, "session_rank_0")):
            write("rendezvous", f"{name}_{size}", bytes([size - 2, who]) + bytes([0]) + whole + deals + bytes([0x90, 0x80, 8 | 7]))
    write("rendezvous", "failed", bytes([1, 1, 0]) + whole + bytes([0x60]) + bytes([0x20, 2, 3]) + b"why")
    write("rendezvous", "refused", bytes([0, 0, 0x70]) + bytes([0x20, 2, 3]) + b"why")
    for word in range(12):  # of the card: magic, version, how many options, a refusal, values
        changed = struct.pack("<H", 0x20) + bytes([1, 0, 0x3F, word, 1, 1])
        write("rendezvous", f"card_{word}", bytes([0, 3, 0]) + changed + bytes([0xA0, 0xA0, 0x40]) + whole + bytes([0xA0]))
    short = struct.pack("<H", 0x20) + bytes([0, 3]) + b"abc"  # smaller than the head of a card
    write("rendezvous", "card_short", bytes([0, 3, 0]) + short + bytes([0xA0, 0xA0, 0x40]) + whole + bytes([0xA0]))
    for bit in range(16):
        changed = struct.pack("<H", 1 << bit) + bytes([4, 200, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        write("rendezvous", f"hello_{bit}", bytes([0, 1, 0]) + changed)
        write("rendezvous", f"deal_{bit}", bytes([0, 0, 0]) + whole + bytes([0x30]) + changed)


def c_api_seeds():
    """Calls: a byte says which. 3 as the size of a struct is the right one."""
    def opened(kind, changes=0, more=b""):
        return bytes([0, 0, 1, 1, 3, 3]) + struct.pack("<H", changes) + more + bytes([3, kind])

    dispatch = bytes([1, 0, 1, 3, 0, 1, 2, 3, 0, 1, 2, 3, 3, 1, 0])
    rows = bytes([10, 1, 0, 3]) + bytes([11, 0, 1, 1]) + bytes([11, 0, 0, 1, 0, 1, 1]) + bytes([12, 0, 1, 0, 1, 0, 1, 2, 1, 1])
    combine = bytes([4, 0, 1, 6, 3, 1])
    write("c_api", "round", opened(3) + dispatch + rows + combine + dispatch + combine + bytes([8, 0]))
    for landing in range(1, 4):
        write("c_api", f"landing_{landing}", opened(3, 0x0180, bytes([1, landing])) + dispatch + rows + combine + bytes([13, 0, 1, 2, 1, 1, 0]))
    write("c_api", "two_ranks", opened(1, 0, b"") + bytes([1, 1]) + dispatch + dispatch + bytes([9, 0, 1, 1, 0, 1]) + bytes([7, 0]))
    write("c_api", "group_of_one", opened(0) + bytes([0, 0, 0, 1, 1, 3]) + dispatch + combine)
    write("c_api", "options", bytes([15, 3]) + bytes(32) + bytes([14, 0, 3, 3, 3, 0, 1]) + bytes([16, 3, 9, 8, 17, 3]))
    write("c_api", "stale", opened(3) + dispatch + bytes([17, 0, 1]) + combine + rows + bytes([6, 1, 1]) + bytes([18, 2, 0, 1]) + combine)


if __name__ == "__main__":
    case_seeds()
    case_dictionary()
    window_seeds()
    rendezvous_seeds()
    c_api_seeds()
