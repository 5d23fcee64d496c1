#!/usr/bin/env python3
"""The command line as a user meets it: exit codes, texts, files, and what is left behind.

    cli_test.py SWITCHYARD GOLDEN_DIR [unittest arguments]
"""

import glob
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SWITCHYARD, GOLDEN = sys.argv[1], sys.argv[2]
WATCHDOG_S = 240  # ends a command that hangs; no test depends on it otherwise


def command(*arguments, **more):
    return subprocess.run([SWITCHYARD, *map(str, arguments)], capture_output=True, text=True, timeout=WATCHDOG_S, **more)


def read(path, mode="r"):
    with open(path, mode) as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def environment_of(process):
    return dict(entry.split("=", 1) for entry in read(f"/proc/{process}/environ").split("\0") if "=" in entry)


class InAFolder(unittest.TestCase):
    """With a folder of its own for each test, and for commands that must end well."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def right(self, *arguments, **more):
        done = command(*arguments, **more)
        self.assertEqual(done.returncode, 0, f"{arguments}: {done.stdout}{done.stderr}")
        return done


class Cases(InAFolder):
    def test_every_golden_case_is_byte_equal_with_each_landing_workers_and_kernels(self):
        cases = sorted(glob.glob(GOLDEN + "/*/case.json"))
        self.assertGreaterEqual(len(cases), 11)
        for case in map(os.path.dirname, cases):
            for landing in ("packed", "padded", "in_place", "allgather", "two_level", "alltoallv"):
                for workers in (1, 3):
                    for simd in ("scalar", "auto"):
                        out = os.path.join(self.folder, "out")
                        shutil.rmtree(out, ignore_errors=True)
                        self.right("run", case, "--output", out, "--landing", landing, "--workers", workers, "--simd", simd)
                        said = self.right("verify", case, "--output", out).stdout
                        self.assertIn("right", said)
                        self.assertNotIn("DIFFERS", said)

    def test_gen_run_verify_round_trip_with_ragged_batches(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 4, "--bs", "5,0,1,7", "--h", 70, "--k", 3, "--experts", 6, "--routing", "drop", "--seed", 9)
        self.right("run", case)  # output goes to case/output
        self.assertTrue(os.path.exists(os.path.join(case, "output/chip_3/x_3.bin")))
        self.right("verify", case)

    def test_a_case_of_the_samples_generator_runs_when_its_options_are_given(self):
        case = os.path.join(self.folder, "sample")
        shutil.copytree(os.path.join(GOLDEN, "sample_r2_b6_h1024_k8_bf16_mx"), case)
        os.remove(os.path.join(case, "case.json"))
        flags = ("--chip-num-per-server", 2, "--bs", 6, "--h", 1024, "--k", 8, "--moe-expert-num", 16, "--token-dtype-choice", 0,
                 "--quant-mode", 4, "--comm-quant-mode", 2)
        self.right("run", case, *flags)
        self.right("verify", case, *flags)

    def test_verify_names_the_first_difference(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 2, "--bs", 4, "--h", 64, "--k", 2, "--quant-mode", 0, "--combine-quant", "none")
        self.right("run", case)
        path = os.path.join(case, "output/chip_1/x_1.bin")
        data = bytearray(read(path, "rb"))
        data[2 * (64 * 3 + 5)] ^= 1  # row 3, column 5, one ulp
        write(path, data)
        done = command("verify", case)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"chip_1/x_1.bin +DIFFERS: row 3, column 5: .*1 of 256 elements differ, by at most 1 ulp")

    def test_a_simulated_seed_plays_the_same_again_and_says_what_it_plays(self):
        said = [self.right("verify", "--sim", "--seed", 12, "--simd", simd).stdout for simd in ("scalar", "auto")]
        self.assertEqual(said[0], said[1])
        self.assertRegex(said[0], r"^seed 12: \d ranks, .*\n(.*\n)*script: dispatch 1.*\n(.*\n)*\d+ turns in .* events [0-9a-f]{16}: right\n$")
        traced = self.right("verify", "--sim", "--seed", 12, "--trace").stdout
        self.assertGreater(len(traced.splitlines()), len(said[0].splitlines()) + 20)
        self.assertEqual(traced.splitlines()[-1], said[0].splitlines()[-1])

    def test_many_simulated_seeds_end_in_one_line(self):
        self.assertRegex(self.right("verify", "--sim", "--seeds", 300).stdout, r"^300 seeds from 0, \d+ faults, .* ok, .*: right\n$")
        summary = json.loads(self.right("verify", "--sim", "--seeds", 300, "--json").stdout)
        self.assertEqual((summary["seeds"], summary["failures"]), (300, 0))
        self.assertGreater(summary["endings"]["peer_lost"], 0)

    def test_a_seed_that_goes_wrong_is_shown_with_the_command_that_plays_it_again(self):
        done = command("verify", "--sim", "--seeds", 100, "--break", "flag_before_puts")
        self.assertEqual(done.returncode, 1)
        again = re.search(r"again: switchyard (verify --sim --seed \d+ --break flag_before_puts --trace)", done.stdout)
        self.assertTrue(again, done.stdout)
        replayed = command(*again[1].split())
        self.assertEqual(replayed.returncode, 1)
        failure = done.stdout.split("\n  again:")[0].splitlines()[-1]
        self.assertIn(failure, replayed.stdout)

    def test_a_simulation_refuses_what_it_cannot_play(self):
        for arguments, word in ((("--sim", self.folder), "leave"), (("--sim", "--ranks", 3), "leave"), (("--sim", "--h", 3), "leave"),
                                (("--sim", "--break", "everything"), "old_flag"), ((), "--sim"), (("--seeds", 3), "--sim")):
            done = command("verify", *arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(word, done.stderr)

    def test_verify_fails_where_output_is_missing_or_short(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 2, "--bs", 4, "--h", 64, "--k", 2)
        self.assertEqual(command("verify", case).returncode, 1)
        self.right("run", case)
        os.truncate(os.path.join(case, "output/chip_0/x_0.bin"), 7)
        self.assertEqual(command("verify", case).returncode, 1)

    def test_run_fails_where_golden_differs(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 2, "--bs", 4, "--h", 64, "--k", 2)
        path = os.path.join(case, "golden/chip_0/ep_recv_count_0.bin")
        data = bytearray(read(path, "rb"))
        data[0] ^= 1
        write(path, data)
        done = command("run", case)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("ep_recv_count", done.stdout)

    def test_files_that_do_not_fit_the_options_are_refused(self):
        done = command("run", os.path.join(GOLDEN, "sample_r2_b6_h1024_k8_bf16_mx"), "--h", 512, "--output", self.folder)
        self.assertEqual(done.returncode, 2)
        self.assertIn("x_0.bin", done.stderr)
        self.assertIn("--h", done.stderr)

    def test_a_bad_id_in_a_case_fails_on_every_rank_with_its_place(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 3, "--bs", 4, "--h", 64, "--k", 2, "--experts", 6)
        path = os.path.join(case, "input/chip_1/expert_ids_1.bin")
        data = bytearray(read(path, "rb"))
        data[4 * 5 : 4 * 6] = (6).to_bytes(4, "little")  # token 2, slot 1
        write(path, data)
        done = command("run", case)
        self.assertEqual(done.returncode, 1)
        self.assertIn("ranks 0, 1, 2:", done.stderr)
        self.assertIn("rank 1: topk_ids[2][1] is 6; experts are 0..5", done.stderr)


    def test_a_missing_or_short_input_is_told_before_any_rank_starts(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 2, "--bs", 4, "--h", 64, "--k", 2)
        path = os.path.join(case, "input/chip_1/expert_ids_1.bin")
        os.truncate(path, 5)
        done = command("run", case)
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
        self.assertIn("expert_ids_1.bin has 5 bytes", done.stderr)
        os.remove(path)
        done = command("run", case)
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)

    def test_golden_is_never_overwritten(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 2, "--bs", 4, "--h", 64, "--k", 2)
        before = read(os.path.join(case, "golden/chip_0/x_0.bin"), "rb")
        done = command("run", case, "--output", os.path.join(case, "golden"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("golden", done.stderr)
        self.assertEqual(read(os.path.join(case, "golden/chip_0/x_0.bin"), "rb"), before)

    def test_a_description_that_is_wrong_is_refused_with_its_key(self):
        for text, said in (('{"ranks":0,"tokens_per_rank":[]}', "ranks"), ('{"ranks":2.9,"tokens_per_rank":[1,1]}', "ranks"),
                           ('{"ranks":2,"tokens_per_rank":[2,2.5]}', "tokens_per_rank"),
                           ('{"ranks":2,"tokens_per_rank":[-3,2]}', "tokens_per_rank"),
                           ('{"ranks":2,"tokens_per_rank":[2]}', "tokens_per_rank"),
                           ('{"ranks":2,"tokens_per_rank":[2,2],"dispatch_qaunt":"none"}', "dispatch_qaunt"),
                           ('{"ranks":2,"tokens_per_rank":[2,2],"dtype":"f8"}', "dtype"), ("[]", "object"), ("{", "case.json"),
                           ('{"ranks":' + "[" * 200_000 + "]" * 200_000 + "}", "ranks is a list"),
                           ('{"ranks":1,"tokens_per_rank":[1],"seed":"12\\u0000x"}', "seed is")):
            write(os.path.join(self.folder, "case.json"), text.encode())
            for word in ("run", "verify"):
                done = command(word, self.folder)
                self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), text + done.stderr)
                self.assertIn(said, done.stderr)
                self.assertIn("case.json", done.stderr)

    def test_a_description_may_spell_options_as_flags(self):
        case = os.path.join(self.folder, "case")
        self.right("gen", case, "--ranks", 2, "--bs", 4, "--h", 64, "--k", 2, "--expert-alignment", 16)
        path = os.path.join(case, "case.json")
        json_text = json.loads(read(path))
        json_text["expert-alignment"] = json_text.pop("expert_alignment")
        json_text["quant-mode"] = json_text.pop("dispatch_quant")
        write(path, json.dumps(json_text).encode())
        self.right("run", case)
        self.right("verify", case)


class Slow(unittest.TestCase):
    def test_a_rank_that_is_slowed_by_5_ms_is_named_and_the_timeline_shows_it(self):
        # Who is late is only as plain as the processors are free: where other programs take them for 10 ms at a time, any rank
        # may be late. So there are some tries; without the guard none of them names rank 2.
        for _ in range(5):
            with tempfile.TemporaryDirectory() as folder:
                file = os.path.join(folder, "t.json")
                done = command("trace", "--trace", file, "--ranks", 4, "--bs", 8, "--hidden", 64, "--experts", 8, "--topk", 2,
                               "--rounds", 40, "--slow", "2:5", "--landing", "packed")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                events = json.loads(read(file))["traceEvents"]
            if "no rank stands out" not in done.stdout:
                break
        self.assertRegex(done.stdout, r"rank 2 holds the others up: \d+\.\d+ ms per round each")
        spans = [e for e in events if e["ph"] == "X"]
        self.assertEqual({e["pid"] for e in spans}, {0, 1, 2, 3})
        self.assertEqual({e["args"]["epoch"] for e in spans}, set(range(1, 41)))
        for e in spans:
            self.assertLessEqual(e["args"]["waited_us"], e["dur"] + 0.001)
        # 40 rounds of 5 ms, in which the others have nothing to do but to wait for counts.
        for rank in (0, 1, 3):
            waited = sum(e["args"]["waited_us"] for e in spans if e["pid"] == rank and e["name"] == "wait for counts" and
                         e["args"].get("waited_for_rank") == 2)
            self.assertGreater(waited, 40 * 5000 / 2)

    def test_where_the_timeline_goes_is_told_before_the_run(self):
        done = command("trace", "--trace", "/nowhere/t.json", "--ranks", 2)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn("/nowhere/t.json", done.stderr)
        for slow in ("2", "2:", ":5", "a:b", "2:5x", "-1:5", "2:99999999"):
            self.assertEqual(command("run", "--ranks", 3, "--slow", slow).returncode, 2, slow)
        self.assertIn("ranks are 0..1", command("run", "--ranks", 2, "--slow", "2:5").stderr)

    def test_many_rounds_with_random_sleeps_are_right(self):
        for landing in ("packed", "padded", "in_place", "allgather", "two_level", "alltoallv"):
            done = command("verify", "--rounds", 150, "--jitter", "--ranks", 8, "--bs", "5,0,1,7,16,3,2,9", "--hidden", 96,
                           "--topk", 3, "--experts", 17, "--landing", landing)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("every byte of every round equals the reference: right", done.stdout)


class MadeUp(unittest.TestCase):
    def test_made_up_input_is_checked_against_the_reference(self):
        for routing in ("balanced", "uniform", "zipf", "lognormal", "onehot", "drop"):
            for landing, path in (("packed", "read"), ("padded", "push")):
                done = command("run", "--ranks", 3, "--bs", "5,0,9", "--h", 200, "--experts", 7, "--k", 3, "--routing", routing,
                               "--landing", landing, "--combine-path", path, "--rounds", 3)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("every byte of every round equals the reference: right", done.stdout)

    def test_json_is_one_object_per_line(self):
        done = command("run", "--ranks", 2, "--bs", 3, "--h", 64, "--json", "--rounds", 2)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([line.get("rank") for line in lines], [0, 1, None])
        self.assertTrue(lines[-1]["right"])
        self.assertEqual(lines[0]["rows_sent"], 3 * 8)
        self.assertEqual(len(lines[0]["dispatch_us"]), 2)
        self.assertEqual(done.stderr, "")  # no progress bar on a pipe

    def test_64_ranks_finish(self):
        done = command("run", "--ranks", 64, "--bs", 2, "--h", 64, "--k", 4, "--experts", 128, "--rounds", 3)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Balance(InAFolder):
    SHAPE = ("--ranks", 4, "--experts", 32, "--k", 4, "--routing", "zipf")

    def test_loads_are_recorded_planned_for_and_played(self):
        loads, table = (os.path.join(self.folder, name) for name in ("loads.ndjson", "table.json"))
        small = ("--h", 64, "--bs", 200, "--rounds", 3)
        for seed in (1, 1):
            self.right("run", *self.SHAPE, *small, "--seed", seed, "--loads", loads)
        lines = [json.loads(line) for line in read(loads).splitlines()]
        self.assertEqual(len(lines), 2)
        self.assertEqual(sum(lines[0]["experts"]), 4 * 200 * 4 * 3)
        self.assertEqual(sum(lines[0]["ranks"]), sum(lines[0]["experts"]))
        by_rank = [sum(lines[0]["experts"][8 * r:8 * r + 8]) for r in range(4)]  # experts lie in order
        self.assertEqual(lines[0]["ranks"], by_rank)

        planned = json.loads(self.right("plan", "--balance", "--loads", loads, "--ranks", 4, "--write", table, "--json").stdout)
        self.assertEqual((planned["experts"], planned["slots"]), (32, 40))
        self.assertAlmostEqual(planned["rank_imbalance_before"], max(by_rank) * 4 / sum(by_rank), 5)
        self.assertLessEqual(planned["rank_imbalance"], 1.15)
        self.assertLessEqual(planned["held_out_imbalance"], 1.15)
        written = json.loads(read(table))
        self.assertEqual(len(written["expert_of"]), 40)
        self.assertEqual(set(written["expert_of"]), set(range(32)))
        again = json.loads(self.right("plan", "--balance", "--loads", loads, "--ranks", 4, "--from", table, "--json").stdout)
        self.assertEqual((again["moves"], again["hash"]), (0, planned["hash"]))

        for landing, path in (("packed", "read"), ("padded", "push"), ("in_place", "read")):
            done = self.right("run", *self.SHAPE, *small, "--seed", 1, "--placement", table, "--compare", "--landing", landing,
                              "--combine-path", path)
            self.assertIn("every byte of every round equals the reference: right", done.stdout)
        done = self.right("run", *self.SHAPE, *small, "--seed", 1, "--placement", table, "--compare", "--json",
                          "--expert-us-per-row", 10)
        result = json.loads(done.stdout.splitlines()[-1])
        self.assertAlmostEqual(result["rank_imbalance_without"], planned["rank_imbalance_before"], 5)
        self.assertLessEqual(result["rank_imbalance"], 1.15)
        self.assertGreaterEqual(result["step_us_p50"], 10 * 4 * 200)  # the mean rank has 800 rows

    def test_a_preset_is_planned_and_printed(self):
        done = self.right("plan", "--balance", *self.SHAPE, "--bs", 500, "--ranks-per-group", 2)
        for word in ("32 experts on 4 ranks, 40 slots (8 of replicas), hierarchical", "max / mean", "Gini", "hot", "to move"):
            self.assertIn(word, done.stdout)

    def test_mistakes_are_told_in_one_line(self):
        bad = os.path.join(self.folder, "bad.json")
        write(bad, b'{"switchyard_placement": 1, "ranks": 2, "experts": 2, "expert_of": [0, 0]}')
        loads = os.path.join(self.folder, "loads")
        write(loads, b"[1, 2, 3]\n[1, 2]\n")
        deep, heavy = os.path.join(self.folder, "deep"), os.path.join(self.folder, "heavy")
        write(deep, b"[" + b"[" * 400_000 + b"]" * 400_000 + b"]\n")
        write(heavy, b"[" + b",".join([b"%d" % 2 ** 48] * 20_000) + b"]\n")
        odd = [os.path.join(self.folder, f"odd{i}") for i in range(4)]
        for path, load in zip(odd, ("-3", "1.5", "99999999999999999999", '"7"')):
            write(path, f"[1, 2]\n[5, {load}]\n".encode())
        for arguments, said in (
                *((("plan", "--balance", "--loads", path), "line 2: the load of expert 1 is") for path in odd),
                (("verify", "--sim", "--local"), "--sim"),
                (("plan",), "--balance"),
                (("plan", "--balance", "--loads", "/nonexistent"), "/nonexistent"),
                (("plan", "--balance", "--loads", loads), "line 2"),
                (("plan", "--balance", "--ranks", 2, "--loads", deep), "expert 0 is a list"),
                (("plan", "--balance", "--ranks", 2, "--loads", heavy), "line 1: more than 2^62 rows"),
                (("plan", "--balance", "--expert-bytes", -5), "--expert-bytes"),
                (("plan", "--balance", "--expert-bytes", 2 ** 63 - 1), "--expert-bytes"),
                (("plan", "--balance", "--replicas", "nan"), "--replicas"),
                (("plan", "--balance", "--hot", "nan"), "--hot"),
                (("run", "--ranks", 2, "--bs", 2, "--h", 8, "--k", 2, "--loads", "/nonexistent/x"), "/nonexistent/x cannot be"),
                (("plan", "--balance", "--slots", 1), "1 slots"),
                (("plan", "--balance", "--choice", "any"), "--choice"),
                (("plan", "--balance", "--from", bad), "expert 1 lies in no slot"),
                (("run", "--ranks", 2, "--experts", 2, "--placement", bad), "bad.json"),
                (("run", "--compare"), "--placement"),
                (("run", "--expert-us-per-row", -1), "--expert-us-per-row")):
            done = command(*arguments)
            self.assertEqual(done.returncode, 2, f"{arguments}: {done.stdout}{done.stderr}")
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
            self.assertIn(said, done.stderr)


class Landings(InAFolder):
    SHAPE = ("--ranks", 3, "--bs", "5,0,9", "--h", 40, "--k", 3, "--experts", 7)

    def test_the_routing_of_a_case_is_checked_without_communication(self):
        case = os.path.join(GOLDEN, "edge_ragged_drop_f16_mx_sat")
        lines = [json.loads(line) for line in self.right("verify", case, "--local", "--json").stdout.splitlines()]
        shape = json.loads(read(os.path.join(case, "case.json")))
        for line, tokens in zip(lines, shape["tokens_per_rank"], strict=True):
            self.assertEqual(line["tokens"], tokens)
            self.assertEqual(sum(line["counts"]) + line["unused"], tokens * shape["topk"])
            self.assertEqual(sum(line["rows_to"]), sum(line["counts"]))
        self.assertIn("without communication: right", self.right("verify", "--local", *self.SHAPE).stdout)

    def test_a_bad_id_is_named_with_its_place(self):
        case = os.path.join(self.folder, "case")
        shutil.copytree(os.path.join(GOLDEN, "sample_r4_b3_h256_k2_bf16_noquant"), case)
        path = os.path.join(case, "input/chip_2/expert_ids_2.bin")
        ids = bytearray(read(path, "rb"))
        ids[4 * 3:4 * 4] = (1000).to_bytes(4, "little")
        write(path, ids)
        done = command("verify", case, "--local")
        self.assertEqual(done.returncode, 1)
        self.assertIn("rank 2: topk_ids[1][1] is 1000", done.stdout)

    def test_every_landing_gives_the_bytes_of_the_reference(self):
        for more in (("--quant-mode", "mxfp8_e5m2"), ("--deliver-weights", "yes"), ("--expert-alignment", 16)):
            said = self.right("verify", "--landings", *more, *self.SHAPE).stdout
            for landing in ("packed", "padded", "in_place", "allgather", "two_level", "alltoallv"):
                self.assertRegex(said, rf"{landing} +\d+ bytes sent +dispatch and combine: every byte equals the reference")

    def test_landings_are_estimated_and_auto_takes_the_first(self):
        home = {"XDG_CACHE_HOME": self.folder}
        said = self.right("plan", "--landings", "--ranks", 2, "--bs", 64, "--h", 512, "--json", env={**os.environ, **home}).stdout
        lines = [json.loads(line) for line in said.splitlines()]
        self.assertEqual(len(lines), 6)
        self.assertEqual([line["us"] for line in lines], sorted(line["us"] for line in lines))
        run = self.right("run", "--ranks", 2, "--bs", 64, "--h", 512, "--rounds", 2, "--json", env={**os.environ, **home}).stdout
        self.assertEqual(json.loads(run.splitlines()[0])["landing"], lines[0]["landing"])

    def test_calibration_is_measured_kept_and_used(self):
        home = {**os.environ, "XDG_CACHE_HOME": self.folder}
        said = json.loads(self.right("plan", "--calibrate", "--json", env=home).stdout)
        self.assertEqual(said["calibration"], os.path.join(self.folder, "switchyard/calibration"))
        self.assertIn(said["calibration"], self.right("plan", "--landings", "--ranks", 2, env=home).stdout)
        write(said["calibration"], b"nonsense")
        done = command("plan", "--landings", "--ranks", 2, env=home)
        self.assertEqual(done.returncode, 2)
        self.assertIn("plan --calibrate", done.stderr)
        done = command("run", "--ranks", 2, "--bs", 2, "--h", 8, "--k", 1, "--rounds", 1, "--timeout", 20, env=home)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("plan --calibrate", done.stdout + done.stderr)

    def test_accuracy_of_a_format_is_told_on_the_values_that_were_sent(self):
        said = self.right("run", "--ranks", 2, "--bs", 16, "--h", 256, "--k", 2, "--rounds", 1, "--quant-mode", "mxfp8_e4m3").stdout
        self.assertRegex(said, r"dispatch_quant mxfp8_e4m3: SNR \d+\.\d dB, error")
        self.assertRegex(said, rf"dispatch_quant mxfp8_e4m3: .* of {16 * 256} values")
        case = os.path.join(self.folder, "case")  # even routing: a rank has 16 tokens and receives 32 rows
        self.right("gen", case, "--ranks", 2, "--bs", 16, "--h", 64, "--k", 2, "--dispatch-quant", "int8_token",
                   "--combine-quant", "int8_block8")
        said = self.right("run", case, "--rounds", 1).stdout
        self.assertRegex(said, rf"dispatch_quant int8_token: .* of {16 * 64} values")
        self.assertRegex(said, rf"combine_quant int8_block8: .* of {32 * 64} values")


class Environment(InAFolder):
    def test_options_of_the_environment_are_below_the_case_and_the_flags(self):
        def shape(*arguments, **options):
            environment = os.environ | {"SWITCHYARD_" + name.upper(): text for name, text in options.items()}
            return self.right("run", *arguments, "--rounds", 1, env=environment).stdout.splitlines()[0]
        made_up = ("--ranks", 2, "--bs", 4, "--h", 64, "--k", 2)
        self.assertIn("E 8 ", shape(*made_up))
        self.assertIn("E 6 ", shape(*made_up, experts="6"))
        self.assertIn("E 5 ", shape(*made_up, "--experts", 5, experts="6"))
        case = os.path.join(self.folder, "case")
        self.right("gen", case, *made_up, "--experts", 4, "--dispatch-quant", "none", "--combine-quant", "none")
        path = os.path.join(case, "case.json")
        self.assertIn("E 4 ", shape(case, experts="6"))
        shutil.rmtree(os.path.join(case, "golden"))  # of other formats
        description = json.loads(read(path))
        description.pop("dispatch_quant", None)
        write(path, json.dumps(description).encode())
        self.assertIn("dispatch none", shape(case))
        self.assertIn("dispatch int8_token", shape(case, dispatch_quant="int8_token"))


class Arguments(unittest.TestCase):
    def refused(self, *arguments, said):
        done = command(*arguments)
        self.assertEqual(done.returncode, 2, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertIn(said, done.stderr)
        self.assertEqual(done.stdout, "")

    def test_mistakes_are_told_in_one_line(self):
        self.refused("dance", said="dance")
        self.refused("run", "--quant-mode", "7", said="mxfp8_e5m2")
        self.refused("run", "--bs", "5,0,1", "--ranks", 2, said="one per rank")
        self.refused("run", "--bs", "x", said="--bs")
        self.refused("run", "--ranks", 0, said="--ranks")
        self.refused("run", "--no-such-flag", said="--no-such-flag")
        self.refused("run", "/nonexistent", said="/nonexistent")
        self.refused("run", "--dtype", "f32", said="f32")
        self.refused("run", "--mx-overflow", "inf", "--quant-mode", "mxfp8_e4m3", said="saturate")
        self.refused("run", "--routing", "random", said="zipf")
        self.refused("run", "--timeout", "0", said="--timeout")
        self.refused("run", "--expert-alignment", "3", said="16")
        self.refused("run", "--bs", "", said="--bs")
        self.refused("run", "--seed", "18446744073709551615", said="--seed")
        self.refused("run", "--tokens-max", 1, "--bs", 2, said="--tokens-max")
        foreign = "avx2" if platform.machine() == "aarch64" else "neon"
        self.refused("run", "--ranks", 2, "--bs", 2, "--simd", foreign, said=f"simd is {foreign}; this build on this processor has:")
        self.refused("run", "--output", "/proc/none", "--bs", 2, said="/proc/none")
        self.refused("verify", "/nonexistent", said="/nonexistent")
        self.refused("gen", "/tmp", "--quant-mode", "9", said="quant")

    def test_help_and_version(self):
        for arguments in (("--help",), ("run", "--help"), ("verify", "--help"), ("--version",)):
            done = command(*arguments)
            self.assertEqual(done.returncode, 0)
            self.assertIn("--landing" if arguments[0] in ("run", "verify") else "switchyard", done.stdout)


    def test_output_that_cannot_be_written_is_a_failure(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([SWITCHYARD, "run", "--ranks", "2", "--bs", "2", "--h", "64"], stdout=full, stderr=subprocess.PIPE,
                                  text=True, timeout=WATCHDOG_S)
        self.assertEqual(done.returncode, 1)
        self.assertIn("could not be written", done.stderr)


class Endings(unittest.TestCase):
    def start(self, *more):
        self.before = set(os.listdir("/dev/shm"))
        program = subprocess.Popen([SWITCHYARD, "run", "--ranks", "4", "--bs", "4", "--h", "64", "--rounds", "1000000", *more],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(program.stdout.close)
        self.addCleanup(program.stderr.close)
        deadline = time.monotonic() + WATCHDOG_S
        children = []
        while len(children) < 4:
            self.assertLess(time.monotonic(), deadline, "the ranks did not start")
            children = [int(c) for c in read(f"/proc/{program.pid}/task/{program.pid}/children").split()]
            time.sleep(0.05)
        time.sleep(1)  # well into its rounds
        self.port = environment_of(children[0])["MASTER_PORT"]
        return program, children

    def nothing_left(self, children):
        deadline = time.monotonic() + WATCHDOG_S
        while any(os.path.exists(f"/proc/{c}") and "Z" not in read(f"/proc/{c}/stat").split()[2] for c in children):
            self.assertLess(time.monotonic(), deadline, "a rank outlived its run")
            time.sleep(0.05)
        self.assertEqual(set(os.listdir("/dev/shm")) - self.before, set())
        self.assertNotIn(self.port, read("/proc/net/unix"))

    def test_a_killed_rank_is_named_by_the_others_and_nothing_is_left(self):
        program, children = self.start()
        rank_of = {c: int(environment_of(c)["RANK"]) for c in children}
        victim = children[2]
        os.kill(victim, signal.SIGKILL)
        out, err = program.communicate(timeout=WATCHDOG_S)
        self.assertEqual(program.returncode, 1)
        self.assertIn(f"rank {rank_of[victim]}: process killed by signal 9 (KILL)", err)
        self.assertIn(f"rank {rank_of[victim]} has died", err)
        self.nothing_left(children)

    def test_closed_streams_are_told_by_the_exit_code(self):
        for words, code in (("bogus", 2), ("verify no-such-folder", 2), ("--help", 1), ("run --cell-rows 1 --landing padded", 1),
                            ("plan --landings", 1), ("verify --local", 1)):
            done = subprocess.run(["sh", "-c", f'exec "$0" {words} >&- 2>&-', SWITCHYARD], timeout=WATCHDOG_S)
            self.assertEqual(done.returncode, code, words)

    def test_a_killed_launcher_takes_its_ranks_along(self):
        program, children = self.start()
        os.kill(children[1], signal.SIGSTOP)  # does not end because of the others, nor of a pipe that nobody reads
        program.kill()
        program.communicate(timeout=WATCHDOG_S)
        self.nothing_left(children)

    def test_a_stopped_rank_ends_the_run_at_the_deadline(self):
        program, children = self.start("--timeout", "2")
        os.kill(children[1], signal.SIGSTOP)
        out, err = program.communicate(timeout=WATCHDOG_S)
        self.assertEqual(program.returncode, 1)
        self.assertIn("timed out", err)
        self.nothing_left(children)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
