#!/usr/bin/env python3
"""Tests of tools/reference.py: against the golden cases, the format vectors, and arithmetic done by hand.

The cases in tests/golden called sample_* and edge_* and format_vectors.json were made by other programs, so they can prove the
reference wrong; the cases called reference_* were made by the reference itself and only keep it from changing unseen.
"""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "golden")
SCRIPT = os.path.join(HERE, "..", "tools", "reference.py")
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(SCRIPT))

import reference  # noqa: E402

FOREIGN_CASES = 10
WIDTH = {"f16": 4, "bf16": 4, "f32": 8}


def patterns(text):
    """'3c00*2 7e00' -> [0x3c00, 0x3c00, 0x7e00]"""
    out = []
    for word in text.split():
        digits, _, times = word.partition("*")
        out += [int(digits, 16)] * int(times or 1)
    return out


def hexes(array, digits):
    return [f"{int(value):0{digits}x}" for value in np.asarray(array).reshape(-1)]


def words(text, digits):
    return [f"{value:0{digits}x}" for value in patterns(text)]


def options_of(entry):
    names = {"rule": "mx_rule", "overflow": "mx_overflow", "scale": "fp8_scale"}
    return {names[key]: value for key, value in entry["options"].items()}


def f32_bits(values):
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def row_of_tokens(text, dtype):
    return np.array([patterns(text)], reference.BITS[dtype])


def run(*arguments):
    """main() in this process: (exit code, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = reference.main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def tree(directory):
    """{relative path: bytes} of every file."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, directory)] = file.read()
    return found


def cases(prefixes):
    return sorted(name for name in os.listdir(GOLDEN)
                  if name.startswith(prefixes) and os.path.exists(os.path.join(GOLDEN, name, "case.json")))


class GoldenCases(unittest.TestCase):
    def recompute(self, name):
        directory = os.path.join(GOLDEN, name)
        case = reference.case_from_json(os.path.join(directory, "case.json"))
        computed = set()
        for rank, array, values in reference.golden_arrays(case, directory):
            path = reference.file_of(directory, "golden", rank, array)
            computed.add(os.path.relpath(path, os.path.join(directory, "golden")))
            with open(path, "rb") as file:
                self.assertEqual(file.read(), np.ascontiguousarray(values).tobytes(), path)
        self.assertEqual(computed, set(tree(os.path.join(directory, "golden"))), "exactly these files")
        return case, computed

    def test_foreign_cases_byte_for_byte(self):
        names = cases(("sample_", "edge_"))
        self.assertEqual(len(names), FOREIGN_CASES)
        for name in names:
            with self.subTest(name):
                case, computed = self.recompute(name)
                self.assertEqual(len(computed), case.ranks * (5 if case.dispatch_quant == "none" else 6))

    def test_own_cases_byte_for_byte(self):
        names = cases("reference_")
        self.assertGreaterEqual(len(names), 8)
        for name in names:
            with self.subTest(name):
                self.recompute(name)
                self.assertLess(sum(map(len, tree(os.path.join(GOLDEN, name)).values())), 150 * 1024)

    def test_balanced_is_the_routing_of_the_sample(self):
        for name in cases("sample_"):
            directory = os.path.join(GOLDEN, name)
            case = reference.case_from_json(os.path.join(directory, "case.json"))
            for rank in range(case.ranks):
                with open(reference.file_of(directory, "input", rank, "expert_ids"), "rb") as file:
                    self.assertEqual(file.read(), reference.route(case, rank).tobytes(), f"{name}, rank {rank}")


class FormatVectors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        path = os.path.join(GOLDEN, "format_vectors.json")
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} is missing: the vectors that the reference must reproduce")
        with open(path, encoding="utf-8") as file:
            cls.vectors = json.load(file)

    def test_encode(self):
        self.assertGreaterEqual(len(self.vectors["encode_vectors"]), 118)
        for entry in self.vectors["encode_vectors"]:
            with self.subTest(entry["id"]):
                fmt, dtype = entry["format"], entry["token_type"]
                bits = row_of_tokens(entry["input"], dtype)
                self.assertEqual(bits.shape[1], entry["hidden"])
                elements, scales = reference.encode(fmt, bits, dtype, **options_of(entry))
                self.assertEqual(hexes(elements.view(np.uint8), 2), words(entry["expected_element_bytes"], 2))
                self.assertEqual(scales.tobytes().hex(), "".join(words(entry["expected_scale_bytes"], 2 * scales.itemsize)))
                self.assertEqual(hexes(scales.view(f"u{scales.itemsize}"), 2 * scales.itemsize),
                                 words(entry["scale_patterns"], 2 * scales.itemsize))
                values = reference.decode(fmt, elements, scales, dtype)
                if entry["decoded_as"] == "f32":
                    self.assertEqual(hexes(f32_bits(values), 8), words(entry["decoded"], 8))
                else:
                    self.assertEqual(entry["decoded_as"], dtype)
                    self.assertEqual(hexes(reference.from_f32(values, dtype), 4), words(entry["decoded"], 4))

    def test_decode(self):
        self.assertGreaterEqual(len(self.vectors["decode_vectors"]), 9)
        for entry in self.vectors["decode_vectors"]:
            with self.subTest(entry["id"]):
                elements = np.array([patterns(entry["element_bytes"])], np.uint8)
                scales = np.array([patterns(entry["scale_bytes"])], np.uint8)
                values = reference.decode(entry["format"], elements, scales, "f16")
                self.assertEqual(hexes(f32_bits(values), 8), words(entry["expected_f32"], 8))

    def test_decode_tables(self):
        codes = np.arange(256, dtype=np.uint8).reshape(1, -1)
        one = np.full((1, 8), 127, np.uint8)
        for name, fmt in (("e5m2", "mxfp8_e5m2"), ("e4m3", "mxfp8_e4m3")):
            values = reference.decode(fmt, codes, one, "f16")
            self.assertEqual(hexes(f32_bits(values), 8), words(self.vectors["decode_tables"][name], 8))

    def test_combine(self):
        self.assertGreaterEqual(len(self.vectors["combine_vectors"]), 21)
        for entry in self.vectors["combine_vectors"]:
            with self.subTest(entry["id"]):
                dtype, slots = entry["token_type"], entry["slots"]
                # Unused slots have a NaN weight and no row: whoever reads them is found out.
                rows = np.array([[int(slot["value"], 16) if slot else reference.NAN_BITS[dtype]] for slot in slots],
                                reference.BITS[dtype])
                weights = np.array([[int(slot["weight"] or "3f800000", 16) if slot else 0x7FC00000 for slot in slots]],
                                   np.uint32)
                where = np.array([[0 if slot else -1 for slot in slots]])
                row = np.array([[k if slot else -1 for k, slot in enumerate(slots)]])
                unweighted = any(slot and slot["weight"] is None for slot in slots)
                shared = None if entry["shared"] is None else row_of_tokens(entry["shared"], dtype)
                out = reference.combine([rows], reference.Places(where, row), None if unweighted else weights.view(np.float32),
                                        dtype, shared=shared)
                self.assertEqual(hexes(out, 4), [entry["expected_out"]])

    def test_dispatch(self):
        self.assertGreaterEqual(len(self.vectors["dispatch_vectors"]), 6)
        for entry in self.vectors["dispatch_vectors"]:
            with self.subTest(entry["id"]):
                ids = [np.array(rows, np.int32).reshape(-1, entry["topk"]) for rows in entry["topk_ids"]]
                received, places = reference.dispatch(ids, entry["experts"], cumsum=entry["cumsum"])
                self.assertEqual(len(received), entry["ranks"])
                for rank, (got, expected) in enumerate(zip(received, entry["expected"])):
                    first, last = reference.experts_of(rank, entry["ranks"], entry["experts"])
                    self.assertEqual(list(range(first, last)), expected["experts"])
                    self.assertEqual(got.source_info.tolist(), expected["assist_info_for_combine"])
                    self.assertEqual(got.expert_token_nums.tolist(), expected["expert_token_nums"])
                    self.assertEqual(got.ep_recv_count.tolist(), expected["ep_recv_count"])
                    for row, (source, token, k) in enumerate(got.source_info.tolist()):
                        self.assertEqual((places[source].rank[token, k], places[source].row[token, k]), (rank, row))
                for source, rows in enumerate(ids):
                    self.assertTrue(((places[source].rank < 0) == (rows < 0)).all())

    def test_exhaustive_digests(self):
        self.assertGreaterEqual(len(self.vectors["exhaustive_digests"]["digests"]), 40)
        for entry in self.vectors["exhaustive_digests"]["digests"]:
            with self.subTest(f"{entry['format']} {entry['options']} {entry['token_type']} {entry['set']}"):
                fmt, dtype = entry["format"], entry["token_type"]
                bits = np.arange(65536, dtype=np.uint16)
                if not fmt.startswith("mx"):
                    bits = bits[np.isfinite(reference.to_f32(bits, dtype))]
                rows = bits.reshape(-1, 1)
                if entry["set"] == "with_one":
                    rows = np.stack([bits, np.full_like(bits, {"f16": 0x3C00, "bf16": 0x3F80}[dtype])], axis=1)
                self.assertEqual(rows.shape, (entry["rows"], entry["hidden"]))
                elements, scales = reference.encode(fmt, rows, dtype, **options_of(entry))
                self.assertEqual(hashlib.sha256(elements.tobytes()).hexdigest(), entry["elements_sha256"])
                self.assertEqual(hashlib.sha256(scales.tobytes()).hexdigest(), entry["scales_sha256"])


class ByHand(unittest.TestCase):
    def test_padded_rows(self):
        # 2 ranks, 3 experts: rank 0 owns experts 0 and 1, rank 1 owns 2. Expert 0 gets 1 row, expert 1 none, expert 2 gets 17.
        ids = [np.array([[0]] + [[2]] * 9, np.int32), np.array([[2]] * 8, np.int32)]
        received, places = reference.dispatch(ids, 3, alignment=16, cumsum=True)
        self.assertEqual(received[0].expert_offsets.tolist(), [0, 16, 16])
        self.assertEqual(received[0].source_info.tolist(), [[0, 0, 0]] + [[-1, -1, -1]] * 15)
        self.assertEqual(received[0].expert_token_nums.tolist(), [1, 1])
        self.assertEqual(received[0].ep_recv_count.tolist(), [1, 1, 1, 1])
        self.assertEqual(received[1].expert_offsets.tolist(), [0, 32])
        self.assertEqual(received[1].source_info.tolist(), [[0, t, 0] for t in range(1, 10)] + [[1, t, 0] for t in range(8)]
                         + [[-1, -1, -1]] * 15)
        self.assertEqual(received[1].ep_recv_count.tolist(), [9, 17])
        self.assertEqual(places[1].row.tolist(), [[9 + t] for t in range(8)])
        x = [np.arange(1, 11, dtype=np.uint16).reshape(-1, 1), np.arange(101, 109, dtype=np.uint16).reshape(-1, 1)]
        rows = reference.rows_from(x, received[1].source_info)[:, 0].tolist()
        self.assertEqual(rows, list(range(2, 11)) + list(range(101, 109)) + [0] * 15)

    def test_padding_starts_each_expert_at_a_multiple(self):
        received, _ = reference.dispatch([np.array([[0, 1, 1]], np.int32)], 2, alignment=32)
        self.assertEqual(received[0].expert_offsets.tolist(), [0, 32, 64])
        self.assertEqual(received[0].source_info[[0, 32, 33]].tolist(), [[0, 0, 0], [0, 0, 1], [0, 0, 2]])
        self.assertEqual((received[0].source_info[:, 0] < 0).sum(), 61)
        self.assertEqual(received[0].expert_token_nums.tolist(), [1, 2])

    def test_id_out_of_range_names_rank_token_slot(self):
        for bad in (-2, 4):
            ids = [np.zeros((1, 2), np.int32), np.array([[0, 1], [3, bad]], np.int32)]
            with self.assertRaises(reference.Mistake) as caught:
                reference.dispatch(ids, 4)
            self.assertEqual(str(caught.exception), f"rank 1, token 1, slot 1: expert id {bad}; allowed is -1..3")

    def test_rounding_to_tokens(self):
        # 1 + 2^-11 lies between 1 and 1 + 2^-10 of f16; 1 + 2^-8 between 1 and 1 + 2^-7 of bf16. 2^-25 is half the least f16.
        def f16(x):
            return int(reference.from_f32(np.array([x], np.float32), "f16")[0])

        def bf16(x):
            return int(reference.from_f32(np.array([x], np.float32), "bf16")[0])

        self.assertEqual([f16(1 + 2**-11), f16(1 + 3 * 2**-11), f16(1 + 2**-11 + 2**-20)], [0x3C00, 0x3C02, 0x3C01])
        self.assertEqual([bf16(1 + 2**-8), bf16(1 + 3 * 2**-8), bf16(1 + 2**-8 + 2**-20)], [0x3F80, 0x3F82, 0x3F81])
        self.assertEqual([f16(2.0**-25), f16(-2.0**-25), f16(3 * 2.0**-25), f16(2.0**-24)], [0x0000, 0x8000, 0x0002, 0x0001])
        self.assertEqual([f16(65519), f16(65520), f16(-np.inf), f16(-np.nan)], [0x7BFF, 0x7C00, 0xFC00, 0x7E00])
        largest = float(np.array([0x7F7FFFFF], np.uint32).view(np.float32)[0])
        self.assertEqual([bf16(largest), bf16(-np.inf), bf16(-np.nan), bf16(-0.0)], [0x7F80, 0xFF80, 0x7FC0, 0x8000])

    def test_f32_tokens_pass_unrounded(self):
        rows = np.array([[0x3F800001], [0xFFC00001]], np.uint32)
        places = reference.Places(np.zeros((2, 1), np.int64), np.array([[0], [1]]))
        out = reference.combine([rows], places, None, "f32")
        self.assertEqual(hexes(out, 8), ["3f800001", "7fc00000"])

    def test_rows_do_not_depend_on_how_many_are_encoded_at_once(self):
        bits = np.random.default_rng(1).integers(0, 65536, (600, 1000), np.uint16)
        for fmt in reference.DISPATCH_FORMATS[1:] + reference.COMBINE_FORMATS[1:]:
            whole = reference.encode(fmt, bits, "bf16")
            for row in (0, 261, 262, 599):
                single = reference.encode(fmt, bits[row:row + 1], "bf16")
                self.assertEqual([whole[0][row].tobytes(), whole[1][row].tobytes()], [single[0].tobytes(), single[1].tobytes()])


class Generator(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name="case"):
        return os.path.join(self.folder.name, name)

    def gen(self, *options, name="case"):
        code, out, err = run("gen", self.path(name), "--h", 40, *options)
        self.assertEqual((code, err), (0, ""), out)
        with open(os.path.join(self.path(name), "case.json"), encoding="utf-8") as file:
            return json.load(file)

    def ids(self, case, name="case"):
        return [np.fromfile(reference.file_of(self.path(name), "input", rank, "expert_ids"), "<i4").reshape(-1, case["topk"])
                for rank in range(case["ranks"])]

    def test_defaults(self):
        code, _, err = run("gen", self.path())
        self.assertEqual((code, err), (0, ""))
        with open(os.path.join(self.path(), "case.json"), encoding="utf-8") as file:
            case = json.load(file)
        self.assertEqual(case, {
            "ranks": 2, "tokens_per_rank": [8, 8], "hidden": 7168, "topk": 8, "experts": 8, "dtype": "f16",
            "dispatch_quant": "mxfp8_e5m2", "mx_rule": "floor", "mx_overflow": "saturate", "fp8_scale": "f32",
            "combine_quant": "int8_block8", "expert_token_nums": "count", "expert_alignment": 1, "routing": "balanced",
            "values": "gauss", "seed": 0})
        self.assertEqual(run("check", self.path())[0], 0)
        sizes = {path: len(data) for path, data in tree(self.path()).items()}
        self.assertEqual(sizes["input/chip_1/x_1.bin"], 8 * 7168 * 2)
        self.assertEqual(sizes["input/chip_1/expand_x_1.bin"], 64 * 7168 * 2)
        self.assertEqual(sizes["golden/chip_1/expand_x_1.bin"], 64 * 7168)
        self.assertEqual(sizes["golden/chip_1/dynamic_scales_1.bin"], 64 * 224)
        self.assertEqual(len(sizes), 1 + 2 * (4 + 6))

    def test_aliases_of_the_sample(self):
        case = self.gen("--chip-num-per-server", 3, "--bs", "2", "--topk", 2, "--moe-expert-num", 5, "--token-dtype-choice", 0,
                        "--dispatch-quant", 2, "--comm-quant-mode", 0, "--expert-recv-info-type", 0, "--random-seed", 9,
                        "--mx-overflow", "sat", "--mx-rule", "ceil", "--fp8-scale", "ue8m0")
        expected = {"ranks": 3, "tokens_per_rank": [2, 2, 2], "topk": 2, "experts": 5, "dtype": "bf16", "hidden": 40, "seed": 9,
                    "dispatch_quant": "int8_token", "combine_quant": "none", "expert_token_nums": "cumsum",
                    "mx_overflow": "saturate", "mx_rule": "ceil", "fp8_scale": "ue8m0"}
        self.assertEqual({key: case[key] for key in expected}, expected)
        self.assertEqual(self.gen("--token-dtype-choice", 1, "--quant-mode", 4)["dtype"], "f16")

    def test_balanced_shares_are_equal(self):
        for topk, experts, bs in ((8, 16, "6"), (3, 8, "8"), (5, 3, "3"), (7, 8, "16"), (8, 8, "5,2")):
            case = self.gen("--bs", bs, "--k", topk, "--experts", experts, name=f"k{topk}e{experts}")
            ids = np.concatenate(self.ids(case, f"k{topk}e{experts}"))
            shares = np.bincount(ids.reshape(-1), minlength=experts)
            self.assertLessEqual(shares.max() - shares.min(), 0 if ids.size % experts == 0 else 1)
            if topk <= experts:
                self.assertTrue(all(len(set(row)) == topk for row in ids.tolist()))

    def test_no_repeats_unless_topk_exceeds_experts(self):
        for routing in ("uniform", "zipf", "lognormal", "onehot"):
            case = self.gen("--bs", 20, "--k", 5, "--experts", 6, "--routing", routing, name=routing)
            ids = np.concatenate(self.ids(case, routing))
            self.assertTrue(all(len(set(row)) == 5 for row in ids.tolist()), routing)
            self.assertTrue(((0 <= ids) & (ids < 6)).all())
            case = self.gen("--bs", 20, "--k", 7, "--experts", 3, "--routing", routing, name=routing)
            for row in np.concatenate(self.ids(case, routing)).tolist():
                self.assertEqual([len(set(row[0:3])), len(set(row[3:6]))], [3, 3])

    def test_routings_are_what_they_say(self):
        case = self.gen("--bs", 30, "--k", 3, "--routing", "onehot", name="onehot")
        self.assertEqual(len(set(np.concatenate(self.ids(case, "onehot"))[:, 0].tolist())), 1)
        case = self.gen("--bs", 500, "--k", 4, "--routing", "drop", "--h", 1, name="drop")
        share = (np.concatenate(self.ids(case, "drop")) == -1).mean()
        self.assertTrue(0.2 < share < 0.3, share)
        loads = {}
        for routing in ("uniform", "zipf", "lognormal"):
            case = self.gen("--bs", 500, "--k", 1, "--experts", 16, "--h", 1, "--routing", routing, name=routing)
            loads[routing] = np.bincount(np.concatenate(self.ids(case, routing)).reshape(-1), minlength=16).max() * 16 / 1000
        self.assertLess(loads["uniform"], 1.6)
        self.assertGreater(loads["zipf"], 4)  # 16 / sum of n^-1.2, n = 1..16, is 6.0
        self.assertGreater(loads["lognormal"], 1.6)

    def test_same_seed_same_bytes(self):
        options = ("--routing", "zipf", "--values", "wild", "--k", 3, "--bs", "5,9")
        self.gen(*options, "--seed", 4, name="a")
        self.gen(*options, "--seed", 4, name="b")
        self.gen(*options, "--seed", 5, name="c")
        self.assertEqual(tree(self.path("a")), tree(self.path("b")))
        a, c = tree(self.path("a")), tree(self.path("c"))
        for array in ("x", "expert_ids", "expert_scales", "expand_x"):
            self.assertNotEqual(a[f"input/chip_0/{array}_0.bin"], c[f"input/chip_0/{array}_0.bin"])

    def test_ragged_and_empty_ranks(self):
        case = self.gen("--ranks", 4, "--bs", "5,0,1,7", "--k", 2)
        self.assertEqual(case["tokens_per_rank"], [5, 0, 1, 7])
        self.assertEqual([len(ids) for ids in self.ids(case)], [5, 0, 1, 7])
        self.gen("--ranks", 3, "--bs", 0, "--quant-mode", "fp8_e4m3_block128", "--combine-quant", "int8_block128")
        self.assertEqual(run("check", self.path())[0], 0)

    def test_every_format_generates_and_checks(self):
        for dtype in ("f16", "bf16"):
            for quant in reference.DISPATCH_FORMATS:
                for wire in reference.COMBINE_FORMATS:
                    self.gen("--dtype", dtype, "--quant-mode", quant, "--combine-quant", wire, "--values", "wild", "--routing",
                             "drop", "--expert-alignment", 16, "--bs", "3,2")
                    self.assertEqual(run("check", self.path())[0], 0, (dtype, quant, wire))
                    scales = reference.file_of(self.path(), "golden", 0, "dynamic_scales")
                    self.assertEqual(os.path.exists(scales), quant != "none")

    def test_weights_are_positive_and_sum_to_one(self):
        self.gen("--bs", 50)
        weights = np.fromfile(reference.file_of(self.path(), "input", 0, "expert_scales"), "<f4").reshape(50, 8)
        self.assertTrue((weights > 0).all())
        self.assertTrue(np.allclose(weights.sum(axis=1, dtype=np.float64), 1, atol=1e-6))

    def test_wild_values_hold_every_kind(self):
        for dtype, infinity, least_normal in (("f16", 0x7C00, 0x0400), ("bf16", 0x7F80, 0x0080)):
            self.gen("--values", "wild", "--dtype", dtype, "--bs", 100, "--h", 300)
            bits = np.fromfile(reference.file_of(self.path(), "input", 0, "x"), "<u2")
            magnitude = bits & 0x7FFF
            self.assertTrue((magnitude > infinity).any())
            self.assertEqual(set(bits[magnitude == infinity].tolist()), {infinity, infinity | 0x8000})
            self.assertEqual(set(bits[magnitude == 0].tolist()), {0, 0x8000})
            self.assertTrue(((magnitude > 0) & (magnitude < least_normal)).any())
            self.assertIn(infinity - 1, magnitude.tolist())

    def test_check_finds_a_changed_byte_and_a_missing_or_extra_file(self):
        self.gen("--k", 2)
        path = reference.file_of(self.path(), "golden", 1, "x")
        with open(path, "r+b") as file:
            file.seek((3 * 40 + 7) * 2)
            old = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old ^ 1]))
        code, out, _ = run("check", self.path())
        self.assertEqual(code, 1)
        self.assertIn("x_1.bin: row 3, column 7: 0x", out)
        self.gen("--k", 2)
        os.remove(path)
        self.assertEqual(run("check", self.path())[0], 1)
        self.gen("--k", 2)
        extra = reference.file_of(self.path(), "golden", 0, "expert_offsets")
        with open(extra, "wb"):
            pass
        code, out, _ = run("check", self.path())
        self.assertEqual((code, out), (1, f"{extra}: is there, but these options give no such file\n"))

    def test_check_without_case_file_takes_options(self):
        options = ("--k", 2, "--bs", "3,1", "--mx-overflow", "inf", "--dtype", "bf16")
        self.gen(*options)
        os.remove(os.path.join(self.path(), "case.json"))
        self.assertEqual(run("check", self.path(), "--h", 40, *options[:4], "--dtype", "bf16")[0], 0)
        code, _, err = run("check", self.path(), "--h", 41, *options)
        self.assertEqual((code, err.count("\n")), (2, 1))

    def test_an_older_case_is_replaced_whole(self):
        self.gen("--ranks", 3, "--expert-alignment", 16)
        self.gen("--ranks", 2, "--quant-mode", 0)
        self.assertEqual(len(tree(self.path())), 1 + 2 * (4 + 5))
        self.assertFalse(os.path.exists(os.path.join(self.path(), "golden", "chip_2")))
        self.assertEqual(run("check", self.path())[0], 0)

    def test_a_directory_that_is_no_case_is_left_alone(self):
        os.makedirs(os.path.join(self.path(), "input"))
        code, _, err = run("gen", self.path())
        self.assertEqual((code, err.count("\n")), (2, 1))
        self.assertEqual(os.listdir(self.path()), ["input"])

    def test_bad_arguments_end_with_2_and_one_line(self):
        for arguments, word in (
                ((), "DIR"),
                (("make", "D"), "make"),
                (("gen",), "DIR"),
                (("gen", "D", "--ranks", "0"), "--ranks"),
                (("gen", "D", "--ranks", "x"), "--ranks"),
                (("gen", "D", "--bs", "5,,1"), "--bs"),
                (("gen", "D", "--bs", "-1"), "--bs"),
                (("gen", "D", "--bs", "5,0,1"), "3 ranks"),
                (("gen", "D", "--h", "0"), "--h"),
                (("gen", "D", "--k", "1.5"), "--k"),
                (("gen", "D", "--experts", "0"), "--experts"),
                (("gen", "D", "--dtype", "f64"), "f64"),
                (("gen", "D", "--dtype", "f32"), "f32"),
                (("gen", "D", "--quant-mode", "3"), "'3'"),
                (("gen", "D", "--combine-quant", "int8_token"), "int8_token"),
                (("gen", "D", "--quant-mode", "mxfp8_e4m3", "--mx-overflow", "inf"), "mxfp8_e4m3"),
                (("gen", "D", "--expert-alignment", "8"), "--expert-alignment"),
                (("gen", "D", "--routing", "fair"), "fair"),
                (("gen", "D", "--values", "odd"), "odd"),
                (("gen", "D", "--seed", "-1"), "--seed"),
                (("gen", "D", "--sede", "1"), "--sede"),
                (("check", self.path("nowhere")), "nowhere")):
            with self.subTest(arguments):
                code, out, err = run(*arguments)
                self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
                self.assertTrue(err.startswith("reference.py: ") and word in err, err)
        self.assertFalse(os.path.exists("D"))

    def test_runs_from_standard_input(self):
        with open(SCRIPT, "rb") as file:
            text = file.read()
        done = subprocess.run([sys.executable, "-", "gen", self.path(), "--h", "8", "--bs", "1"], input=text,
                              capture_output=True, check=False, cwd=self.folder.name)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertEqual(run("check", self.path())[0], 0)
        done = subprocess.run([sys.executable, "-", "gen", self.path(), "--h", "none"], input=text, capture_output=True,
                              check=False, cwd=self.folder.name)
        self.assertEqual((done.returncode, done.stderr.count(b"\n")), (2, 1))


if __name__ == "__main__":
    unittest.main()
