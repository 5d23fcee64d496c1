#!/usr/bin/env python3
"""`switchyard doctor` as an engineer meets it: findings that are provoked for real, and groups that are stopped or killed for real.

    doctor_test.py SWITCHYARD [unittest arguments]
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

SWITCHYARD = sys.argv[1]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CHECKS = ["build", "cpus", "kernels", "memory", "overcommit", "open files", "address space", "file size", "locked memory", "threads", "/dev/shm",
          "huge pages", "NUMA", "kernel", "namespaces", "job"]
SANITIZED = "SY_TEST_SANITIZED" in os.environ
WATCHDOG_S = 240  # ends what hangs; no test depends on it otherwise


def command(*arguments, before=(), **more):
    return subprocess.run([*before, SWITCHYARD, *map(str, arguments)], capture_output=True, text=True, timeout=WATCHDOG_S, **more)


def read(path):
    with open(path) as file:
        return file.read()


def environment_of(process):
    return dict(entry.split("=", 1) for entry in read(f"/proc/{process}/environ").split("\0") if "=" in entry)


class Manual(unittest.TestCase):
    """docs/troubleshooting.md goes by error code, and speaks of checks that there are."""
    text = read(os.path.join(ROOT, "docs", "troubleshooting.md"))

    def test_every_error_code_has_its_chapter(self):
        codes = re.findall(r"^    (\w+) = \d+,", read(os.path.join(ROOT, "include", "switchyard", "status.hpp")), re.M)
        self.assertEqual((codes[0], len(codes)), ("ok", 12))
        chapters = re.findall(r"^## (\w+)$", self.text, re.M)
        self.assertEqual(chapters, codes[1:])

    def test_what_doctor_is_said_to_find_is_a_check(self):
        named = set(re.findall(r"^\| “[^|]* \| ([\w ]+) \| ", self.text.split("\n## system\n")[1].split("\n## ")[0], re.M))
        named |= set(re.findall(r'`doctor` finds "([^"]+)"', self.text))
        self.assertGreaterEqual(len(named), 6)
        self.assertLessEqual(named, set(CHECKS))

    def test_the_texts_it_quotes_are_in_the_source(self):
        sources = ""
        for folder, _, files in os.walk(os.path.join(ROOT, "src")):
            for file in files:
                sources += re.sub(r'"\s+"', "", read(os.path.join(folder, file)))
        quoted = re.findall(r"“([^”]+)”", self.text)
        self.assertGreaterEqual(len(quoted), 12)
        for text in quoted:
            for part in filter(None, map(str.strip, text.split("…"))):
                self.assertTrue(part in sources, f"no source says: {part}")


class Checks(unittest.TestCase):
    def doctor(self, *arguments, before=(), **more):
        """The findings by name, and the exit code."""
        done = command("doctor", "--json", *arguments, before=before, **more)
        self.assertIn(done.returncode, (0, 1), done.stdout + done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        checks, summary = lines[:-1], lines[-1]
        for check in checks:
            self.assertIn(check["level"], ("ok", "note", "finding"), check)
            self.assertTrue(check["seen"], check)
            if check["level"] == "finding":
                self.assertTrue(check["why"] and check["cure"], check)
        findings = [c["check"] for c in checks if c["level"] == "finding"]
        self.assertEqual(summary["findings"], len(findings))
        self.assertEqual(done.returncode, 1 if findings else 0, done.stdout)
        return {c["check"]: c for c in checks}

    def test_looks_at_everything_it_promises(self):
        checks = self.doctor("--no-probe")
        self.assertEqual(list(checks), CHECKS)
        # These calls work wherever the tests of the library do.
        self.assertEqual(set(checks["kernel"]["facts"]["calls"].values()), {"ok"})
        for kind in ("net", "user", "pid"):
            self.assertEqual(checks["namespaces"]["facts"][kind], os.readlink(f"/proc/self/ns/{kind}"))
        self.assertEqual(checks["cpus"]["facts"]["allowed"], sorted(os.sched_getaffinity(0)))
        self.assertIn("scalar", checks["kernels"]["facts"]["kernels"])

    def test_the_text_says_the_same_as_json(self):
        cpu = min(os.sched_getaffinity(0))
        done = command("doctor", "--ranks", 4, "--no-probe", before=("taskset", "-c", str(cpu)))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"cpus +FINDING +1 of \d+ allowed")
        self.assertRegex(done.stdout, r" why:  ranks that share CPUs")
        self.assertRegex(done.stdout, r" cure: .*--ranks 1 --workers 1")
        self.assertRegex(done.stdout, r"\d+ findings?; docs/troubleshooting.md")

    def test_too_few_cpus(self):
        cpu = min(os.sched_getaffinity(0))
        checks = self.doctor("--ranks", 4, "--no-probe", before=("taskset", "-c", str(cpu)))
        self.assertEqual(checks["cpus"]["level"], "finding")
        self.assertEqual((checks["cpus"]["facts"]["wanted"], checks["cpus"]["facts"]["allowed"]), (4, [cpu]))
        checks = self.doctor("--ranks", 1, "--workers", 3, "--no-probe", before=("taskset", "-c", str(cpu)))
        self.assertEqual(checks["cpus"]["facts"]["wanted"], 3)
        self.assertEqual(checks["cpus"]["level"], "finding")

    def test_a_cgroup_quota(self):
        for folder, file, text in (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "50000"), ("/sys/fs/cgroup", "cpu.max", "50000 100000")):
            path = os.path.join(folder, f"switchyard-doctor-test-{os.getpid()}")
            try:
                os.mkdir(path)
            except OSError:
                continue
            try:
                try:
                    with open(os.path.join(path, file), "w") as f:
                        f.write(text)
                except OSError:
                    continue  # not the version of this machine
                enter = f'echo $$ > {path}/cgroup.procs && exec "$0" "$@"'
                checks = self.doctor("--ranks", 1, "--no-probe", before=("sh", "-c", enter))
                self.assertEqual(checks["cpus"]["level"], "finding", checks["cpus"])
                self.assertAlmostEqual(checks["cpus"]["facts"]["quota"], 0.5)
                self.assertIn(path, checks["cpus"]["seen"])
                return
            finally:
                os.rmdir(path)
        self.skipTest("no cgroup may be made here")

    def test_open_files(self):
        checks = self.doctor("--ranks", 8, "--no-probe", before=("prlimit", "--nofile=20:20"))
        self.assertEqual(checks["open files"]["level"], "finding")
        self.assertEqual(checks["open files"]["facts"]["limit"], 20)
        self.assertIn("prlimit --nofile=", checks["open files"]["cure"])
        checks = self.doctor("--ranks", 8, "--no-probe", before=("prlimit", "--nofile=20:4096"))
        self.assertRegex(checks["open files"]["cure"], r"^ulimit -n \d+")

    @unittest.skipIf(SANITIZED, "the sanitizer itself needs files")
    def test_open_files_are_what_a_group_really_needs(self):
        shape = ("--ranks", 6, "--h", 8, "--k", 2, "--bs", 1, "--no-probe")
        need = self.doctor(*shape)["open files"]["facts"]["need"]
        run = ("run", "--ranks", 6, "--h", 8, "--k", 2, "--bs", 1, "--rounds", 1)
        done = command(*run, before=("prlimit", f"--nofile={need}"))
        self.assertEqual(done.returncode, 0, done.stderr)
        # Not asked for out of caution only: with the margin for a program's own files gone and a few less, no group opens.
        done = command(*run, before=("prlimit", f"--nofile={need - 12}"))
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("ulimit -n", done.stderr)

    def test_file_size(self):
        checks = self.doctor("--ranks", 2, "--no-probe", before=("prlimit", "--fsize=65536:65536"))
        self.assertEqual(checks["file size"]["level"], "finding")
        self.assertIn("--fsize=", checks["file size"]["cure"])
        self.assertEqual(self.doctor("--ranks", 2, "--no-probe", before=("prlimit", "--fsize=unlimited"))["file size"]["level"], "ok")

    @unittest.skipIf(SANITIZED, "the sanitizer itself needs terabytes of addresses")
    def test_address_space(self):
        shape = ("--ranks", 3, "--tokens-max", 4096)
        need = self.doctor(*shape, "--no-probe", before=("prlimit", "--as=unlimited"))["address space"]["facts"]["need"]
        checks = self.doctor(*shape, "--no-probe", before=("prlimit", f"--as={need // 2}"))
        self.assertEqual(checks["address space"]["level"], "finding")
        self.assertRegex(checks["address space"]["cure"], r"ulimit -v \d+|prlimit --as=\d+")
        done = command("run", *shape, "--rounds", 1, before=("prlimit", f"--as={need // 2}"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("could not be mapped", done.stderr)

    def test_threads_of_a_user(self):
        if os.geteuid() == 0:
            try:
                done = command("doctor", "--json", "--ranks", 4, "--no-probe", before=("prlimit", "--nproc=3:3"), user=65534, group=65534, extra_groups=[])
            except PermissionError:
                self.skipTest("that user may not run this program")
            if done.returncode not in (0, 1):
                self.skipTest("that user may not run this program")
            checks = {c["check"]: c for c in map(json.loads, done.stdout.splitlines()[:-1])}
        else:
            checks = self.doctor("--ranks", 4, "--no-probe", before=("prlimit", "--nproc=3:3"))
        self.assertEqual(checks["threads"]["level"], "finding", checks["threads"])
        self.assertEqual(checks["threads"]["facts"], {"wanted": 4, "limit": 3})
        self.assertRegex(checks["threads"]["cure"], r"ulimit -u \d+")

    def test_memory_that_no_machine_has(self):
        checks = self.doctor("--ranks", 8, "--tokens-max", 50_000_000, "--experts", 8, "--h", 7168, "--k", 1, "--rows-max", 50_000_000, "--no-probe")
        self.assertEqual(checks["memory"]["level"], "finding")
        self.assertIn("--tokens-max", checks["memory"]["cure"])

    def test_huge_pages_that_are_not_there(self):
        checks = self.doctor("--ranks", 4, "--tokens-max", 1_000_000, "--huge-pages", "yes", "--no-probe")
        self.assertEqual(checks["huge pages"]["level"], "finding")
        self.assertRegex(checks["huge pages"]["cure"], r"^sysctl vm.nr_hugepages=\d+$")

    def test_a_job_of_several_hosts(self):
        checks = self.doctor("--ranks", 1, "--no-probe", env={**os.environ, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
        self.assertEqual(checks["job"]["level"], "finding")

    def test_another_network_namespace_shows_and_works(self):
        if not shutil.which("unshare") or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0:
            self.skipTest("no network namespace may be made here")
        checks = self.doctor("--ranks", 2, before=("unshare", "-n"))
        self.assertNotEqual(checks["namespaces"]["facts"]["net"], os.readlink("/proc/self/ns/net"))
        self.assertNotIn("error", checks["probe"]["facts"], checks["probe"])

    def test_the_probe_measures(self):
        probe = self.doctor("--ranks", 2)["probe"]
        facts = probe["facts"]
        self.assertEqual(facts["ranks"], 2)
        self.assertGreater(facts["round_trips"], 0)
        self.assertGreaterEqual(facts["rounds"], 5)
        self.assertGreater(facts["dispatch_gb_s"], 0)
        # Whatever the machine does meanwhile, the verdict follows from the numbers.
        worse = facts["latency_us"] >= 50 or facts["dispatch_share_of_stream"] < 0.6
        expected = "note" if not facts["each_rank_has_a_cpu"] else "finding" if worse else "ok"
        self.assertEqual(probe["level"], expected)

    def test_a_probe_that_cannot_open_a_session_says_why(self):
        probe = self.doctor("--ranks", 2, before=("prlimit", "--fsize=65536"))["probe"]
        self.assertEqual(probe["level"], "finding")
        self.assertIn("file size limit", probe["facts"]["error"])

    def test_bad_arguments(self):
        for bad in (("--ranks", 0), ("--ranks", "many"), ("--dtype", "f8"), ("--no-such",), ("--hidden", 2**30, "--tokens-max", 2**27)):
            done = command("doctor", *bad)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), f"{bad}: {done.stdout}{done.stderr}")


class Groups(unittest.TestCase):
    def start(self, *arguments, ranks=3):
        """A run that does not end by itself: its parent, and the processes of its ranks."""
        parent = subprocess.Popen([SWITCHYARD, "run", "--ranks", str(ranks), "--h", "64", "--k", "2", "--bs", "4", "--rounds", "1000000",
                                   "--timeout", "600", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(parent.wait)
        self.addCleanup(parent.kill)  # and its ranks with it
        until = time.monotonic() + WATCHDOG_S
        children = {}
        while len(children) < ranks:
            self.assertLess(time.monotonic(), until, "the ranks did not start")
            time.sleep(0.05)
            for child in read(f"/proc/{parent.pid}/task/{parent.pid}/children").split():
                try:
                    children[int(environment_of(child)["RANK"])] = int(child)
                except (KeyError, OSError):
                    pass  # it has not become a rank yet
        return parent, children

    def look(self, children):
        """What doctor says about the group that has one of these processes, and its exit code; other groups are not this test's."""
        done = command("doctor", "--group", "--json")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        for group in lines[:-1]:
            if any(m["process"] in children.values() for m in group["members"]):
                return group, done.returncode
        return None, done.returncode

    def wait_for(self, children, condition, what):
        until = time.monotonic() + WATCHDOG_S
        while True:
            group, code = self.look(children)
            if group and condition(group):
                return group, code
            self.assertLess(time.monotonic(), until, f"{what} did not show: {group}")

    def test_a_group_that_moves(self):
        _, children = self.start()
        group, _ = self.wait_for(children, lambda g: g["moves"], "a moving group")
        self.assertEqual((group["ranks"], group["hidden"], group["topk"], group["tokens_max"]), (3, 64, 2, 4))
        self.assertEqual({m["rank"]: m["process"] for m in group["members"]}, children)
        self.assertEqual(group["remarks"], [])
        self.assertGreater(group["epochs_per_s"], 0)

    def test_a_stopped_rank_is_named_and_so_are_those_that_wait_for_it(self):
        for landing in ("packed", "padded", "in_place", "allgather", "two_level", "alltoallv"):
            with self.subTest(landing=landing):
                parent, children = self.start("--landing", landing)
                self.wait_for(children, lambda g: g["moves"], "a moving group")
                os.kill(children[1], signal.SIGSTOP)
                group, code = self.wait_for(children, lambda g: not g["moves"], "a group at rest")
                self.assertEqual(code, 1)
                members = {m["rank"]: m for m in group["members"]}
                self.assertEqual(members[1]["state"], "stopped")
                for r in (0, 2):
                    self.assertEqual(members[r]["awaited"], [1], group)
                    self.assertIsNotNone(members[r]["waited_s"], group)
                    self.assertRegex(members[r]["text"], r"^waits in (dispatch|combine) \d+ for the (counts|rows|experts' output) of rank 1$")
                waited_s = {r: members[r]["waited_s"] for r in (0, 2)}
                texts = [r["text"] for r in group["remarks"]]
                self.assertTrue(any(re.match(rf"ranks 0 and 2 wait in (dispatch|combine) \d+ for the .* of rank 1, whose process {children[1]} is stopped; "
                                             r"the first of them called \d+\.\d s ago$", t)
                                    for t in texts), texts)
                trouble = [r for r in group["remarks"] if r["trouble"]]
                self.assertEqual(len(trouble), 1, trouble)
                self.assertTrue(trouble[0]["text"].startswith(f"rank 1 (process {children[1]}) is stopped"), trouble)
                self.assertEqual(trouble[0]["cure"], f"kill -CONT {children[1]}")
                time.sleep(1)
                later, _ = self.look(children)
                for r in (0, 2):  # still the same call
                    self.assertGreaterEqual(later["members"][r]["waited_s"], waited_s[r] + 1)
                subprocess.run(trouble[0]["cure"].split(), check=True)
                self.wait_for(children, lambda g: g["moves"], "a group that moves again")
                parent.kill()
                parent.wait()

    def test_a_killed_rank_is_named(self):
        parent, children = self.start()
        self.wait_for(children, lambda g: g["moves"], "a moving group")
        # The survivors would see it within milliseconds and end: they are stopped first; so is the parent, which would bury it.
        for process in (parent.pid, children[0], children[2]):
            os.kill(process, signal.SIGSTOP)
        os.kill(children[1], signal.SIGKILL)
        group, code = self.wait_for(children, lambda g: g["members"][1]["state"] == "zombie", "a zombie")
        self.assertEqual(code, 1)
        self.assertEqual(group["members"][1]["phase"], "ended")
        texts = [r["text"] for r in group["remarks"] if r["trouble"]]
        self.assertTrue(any(t.startswith(f"rank 1 (process {children[1]}) has ended without closing its session") for t in texts), texts)
        text = command("doctor", "--group").stdout
        self.assertRegex(text, rf"\n +1 +{children[1]} +zombie ")
        os.kill(parent.pid, signal.SIGCONT)
        self.wait_for(children, lambda g: g["members"][1]["state"] == "gone", "its burial")

    def test_a_rank_that_waits_for_others_to_open_is_listed(self):
        rank = subprocess.Popen([SWITCHYARD, "run", "--ranks", "2", "--h", "64", "--timeout", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                env={**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": f"doctor{os.getpid()}",
                                     "SWITCHYARD_REPORT_FD": "2"})
        self.addCleanup(rank.wait)
        self.addCleanup(rank.kill)
        until = time.monotonic() + WATCHDOG_S
        while True:
            done = command("doctor", "--group", "--json")
            if rank.pid in json.loads(done.stdout.splitlines()[-1])["opening"]:
                break
            self.assertLess(time.monotonic(), until, done.stdout)
        self.assertRegex(command("doctor", "--group").stdout, rf"process(es)? .*\b{rank.pid}\b.* waits? in Session::open")

    def test_groups_of_others_are_not_shown(self):
        if os.geteuid() != 0:
            self.skipTest("only root can be somebody else")
        _, children = self.start()
        self.wait_for(children, lambda g: g["moves"], "a moving group")
        try:
            done = command("doctor", "--group", "--json", user=65534, group=65534, extra_groups=[])
        except PermissionError:
            self.skipTest("that user may not run this program")
        self.assertNotIn(str(children[0]), done.stdout)

    def test_looking_changes_nothing(self):
        _, children = self.start()
        self.wait_for(children, lambda g: g["moves"], "a moving group")
        for process in children.values():
            os.kill(process, signal.SIGSTOP)
        first, _ = self.wait_for(children, lambda g: not g["moves"], "a group at rest")
        second, _ = self.look(children)
        for group in (first, second):
            for key in ("moves", "epochs_per_s", "watched_s"):
                del group[key]
            for member in group["members"]:
                del member["waited_s"]
        self.assertEqual(first, second)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
