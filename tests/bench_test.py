#!/usr/bin/env python3
"""`switchyard bench` as a user meets it: what takes part, what is printed, and that a wrong contestant cannot hide.

    bench_test.py SWITCHYARD [unittest arguments]
"""

import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SWITCHYARD = sys.argv[1]
WATCHDOG_S = 600  # ends a command that hangs; no test depends on it otherwise
TINY = ("--hidden", 96, "--topk", 3, "--rounds", 4)


def bench(*arguments, **more):
    command = [SWITCHYARD, "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S, **more)


def contestants():
    said = bench("--list").stdout.split("contestants of this build\n")[1].split("\n\n")[0]
    return [line.split()[0] for line in said.splitlines()]


class Bench(unittest.TestCase):
    def right(self, *arguments, **more):
        done = bench(*arguments, **more)
        self.assertEqual(done.returncode, 0, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertEqual(done.stderr, "")  # no progress on a pipe
        return done.stdout

    def lines(self, *arguments):
        return [json.loads(line) for line in self.right(*arguments, "--json").splitlines()]

    def test_every_contestant_of_the_build_is_right_and_has_all_fields(self):
        names = contestants()
        self.assertGreaterEqual(set(names), {"limit", "packed", "in_place", "padded", "sample", "allgather"})
        machine, *results = self.lines("decode", "--quant", "none,mxfp8_e5m2/int8_block8", *TINY)
        for field in ("compiler", "build", "kernels", "processor", "cpus", "seed", "load_before", "start"):
            self.assertIn(field, machine)
        self.assertEqual({r["contestant"] for r in results}, set(names))
        for r in results:
            self.assertTrue(r["checked"])
            self.assertEqual(r["tokens"], [8, 8])
            self.assertLessEqual(r["min_us"], r["p50_us"])
            self.assertLessEqual(r["p50_us"], r["p99_us"])
            self.assertLessEqual(r["p99_us"], r["max_us"])
            self.assertGreater(r["min_us"], 0)
            self.assertTrue(r["settings"])
        for name in names:
            calls = {r["call"] for r in results if r["contestant"] == name}
            self.assertGreaterEqual(calls, {"dispatch", "combine"})
            self.assertEqual("first_touch" in calls, name != "limit")
        formats = {(r["dispatch_quant"], r["combine_quant"]) for r in results}
        self.assertEqual(formats, {("none", "none"), ("mxfp8_e5m2", "int8_block8")})

    def test_bytes_waiting_and_limit_are_told(self):
        results = self.lines("prefill", "--contestants", "limit,packed,in_place,sample", *TINY)[1:]
        of = {(r["contestant"], r["call"]): r for r in results}
        row = 96 * 2
        self.assertEqual(of["limit", "dispatch"]["bytes_per_rank"], 256 * 3 * row)
        self.assertEqual(of["packed", "dispatch"]["bytes_per_rank"], 256 * 3 * (row + 12))  # with source info
        self.assertEqual(of["in_place", "dispatch"]["bytes_per_rank"], 256 * 3 * 4)  # topk_ids; nothing else moves
        self.assertEqual(of["sample", "dispatch"]["bytes_per_rank"], 2 * 256 * 3 * (row + 12))  # window, then copy
        self.assertEqual(of["packed", "dispatch"]["allocations"], 0)
        self.assertEqual(of["limit", "dispatch"]["of_limit"], 1)
        self.assertGreater(of["packed", "dispatch"]["own_us"], 0)
        self.assertGreaterEqual(of["packed", "dispatch"]["wait_us"], 0)
        self.assertIsNone(of["limit", "dispatch"]["wait_us"])

    def test_scenarios_with_uneven_ranks_are_right(self):
        for ranks in (1, 3):
            self.right("hot", "one", "ragged", "--ranks", ranks, "--experts-per-rank", 3, *TINY)

    def test_a_wrong_contestant_fails_the_bench(self):
        for name in contestants():
            done = bench("decode", "--sabotage", name, *TINY)
            if name == "limit":  # delivers nothing that could be wrong
                continue
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertIn(f"{name}: row 0 of expand_x differs from the reference", done.stderr)
            self.assertNotIn("median", done.stdout)

    def test_the_default_is_short_and_readable(self):
        said = self.right("--hidden", 64, "--rounds", 4)
        self.assertIn("decode   2 ranks   T 8  K 8  E 8  H 64", said)
        self.assertIn("prefill   2 ranks   T 256", said)
        self.assertIn("results equal to the reference: yes", said)
        self.assertIn("x packed", said)
        self.assertNotIn("first_touch", said)

    def test_every_bar_is_judged(self):
        arguments = ("--bars", "--hidden", 64, "--rounds", 4)
        bars = [line for line in self.lines(*arguments) if "bar" in line]
        self.assertGreaterEqual(len(bars), 44)
        for bar in bars:
            self.assertEqual(bar["reached"], not bar["missing"] and
                             (bar["measured"] <= bar["bound"] if bar["at_most"] else bar["measured"] >= bar["bound"]))
        absent = {bar["bar"] for bar in bars if bar["missing"]}
        if {"open_mpi", "gloo"} <= set(contestants()):
            self.assertEqual(absent, set())
        said = self.right(*arguments)
        for bar in bars:
            self.assertIn(bar["bar"], said)
        self.assertRegex(said, r"\d+ of \d+ bars reached")

    def test_curves_walk_every_axis_and_name_steps(self):
        lines = self.lines("--curves", "--hidden", 64, "--rounds", 4)[1:]
        steps = [line for line in lines if "step" in line]
        axes = {}
        for s in steps:
            axes.setdefault(s["curve"], set()).add(s["at"])
            self.assertEqual(s["cliff"], s["step"] > 1.3 and s["step"] > 1.3 * s["limit_step"])
        self.assertEqual({a: len(v) for a, v in axes.items()},
                         {"tokens": 13, "ranks": 7, "topk": 5, "experts": 8, "hidden": 6, "skew": 5})
        cost = {(r["label"], r["call"]): r["cost_ns"] for r in lines if r.get("curve") == "tokens" and r.get("at") == 256
                and "cost_ns" in r and "p50_us" in r}
        row = next(r for r in lines if r.get("curve") == "tokens" and r.get("at") == 256 and r.get("label") == "packed"
                   and r["call"] == "dispatch" and "p50_us" in r)
        share = min(1, len(os.sched_getaffinity(0)) / 2)
        self.assertAlmostEqual(cost["packed", "dispatch"], 1000 * row["p50_us"] * share / (256 * 8), places=3)

    def test_the_seed_table_has_the_published_times_beside_ours(self):
        said = self.right("--seed-table", "--hidden", 64, "--rounds", 4)
        self.assertIn("another machine", said)
        for published in ("17.1", "16.6", "170.0", "113.0", "19.4", "18.8", "150.7", "108.0", "1.50", "1.40"):
            self.assertIn(published, said)

    def test_mistakes_are_told_in_one_line(self):
        for arguments, said in ((("dance",), "prefill"), (("--contestants", "nccl"), "--list"), (("--ranks", "0"), "--ranks"),
                                (("--quant", "int3"), "mxfp8_e5m2"), (("--rounds", "0"), "--rounds"),
                                (("--sabotage", "packed", "--contestants", "limit"), "sabotage"),
                                (("--no-such-flag",), "--no-such-flag"),
                                (("large", "--ranks", "512", "--hidden", "65536"), "GiB are free")):
            done = bench(*arguments)
            self.assertEqual(done.returncode, 2, f"{arguments}: {done.stdout}{done.stderr}")
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
            self.assertIn(said, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_every_kernel_is_compared_with_memcpy(self):
        if not os.access(os.path.join(os.path.dirname(SWITCHYARD), "switchyard-kernels"), os.X_OK):
            self.assertIn("libbenchmark-dev", bench("--kernels").stderr)
            self.skipTest("this build has no switchyard-kernels")
        names = self.right("--kernels", "--benchmark_list_tests").split()
        for place in ("cache", "memory"):
            for token in ("f16", "bf16"):
                for word in ("none", "int8_token", "mxfp8_e5m2", "mxfp8_e4m3", "fp8_e4m3_block128", "int8_block8", "int8_block128"):
                    for work in ("encode", "decode"):
                        self.assertIn(f"{work}/{word}_{token}/scalar/{place}/manual_time", names)
            for rest in ("combine/none_f32", "combine/int8_block8_f16", "combine_encoded/int8_block128_bf16", "copy/f16", "stream/f16"):
                self.assertIn(f"{rest}/scalar/{place}/manual_time", names)
        some = ("--kernels", "--benchmark_filter=(encode/mxfp8_e5m2_f16|copy/f16)/scalar/cache", "--benchmark_min_time=0.01")
        runs = json.loads(bench(*some, "--benchmark_format=json").stdout)["benchmarks"]
        shares = {run["name"].split("/")[0]: run["of_memcpy"] for run in runs}
        self.assertEqual(set(shares), {"encode", "copy"})
        self.assertGreater(shares["encode"], 0)
        self.assertGreater(shares["copy"], shares["encode"])  # by two orders of magnitude
        said = self.right(*some)
        self.assertIn("Share of memcpy", said)
        self.assertRegex(said, r"encode +mxfp8_e5m2 f16 .* \d\.\d\d / -")
        self.assertEqual(bench("--kernels", "--no-such-flag").returncode, 2)

    def test_a_killed_bench_takes_its_ranks_along(self):
        for more in ((), ("--contestants", "limit,packed")):  # by mpirun where there is one, and by fork
            with tempfile.TemporaryDirectory() as folder:
                arguments = [SWITCHYARD, "bench", "decode", "--ranks", "3", "--hidden", "64", "--rounds", "1000000", *more]
                program = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                           env={**os.environ, "TMPDIR": folder})
                marker = f"SWITCHYARD_BENCH_FOLDER={folder}"
                self.wait_for(lambda: len(self.ranks_of(marker)) >= 3, "the ranks did not start")
                time.sleep(1)  # well into its rounds
                program.send_signal(signal.SIGKILL)
                program.wait()
                self.wait_for(lambda: not self.ranks_of(marker), "a rank outlived its bench")

    def test_nothing_is_left_behind(self):
        with tempfile.TemporaryDirectory() as folder:
            self.right("one", *TINY, env={**os.environ, "TMPDIR": folder})
            self.assertEqual(glob.glob(folder + "/switchyard*"), [])

    def wait_for(self, there, otherwise):
        deadline = time.monotonic() + WATCHDOG_S
        while not there():
            self.assertLess(time.monotonic(), deadline, otherwise)
            time.sleep(0.05)

    def ranks_of(self, marker):
        found = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{process}/environ") as file:
                    environment = file.read()
                with open(f"/proc/{process}/stat") as file:
                    alive = file.read().rsplit(")", 1)[1].split()[0] != "Z"
            except OSError:
                continue
            if alive and marker in environment:
                found.append(int(process))
        return found


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
