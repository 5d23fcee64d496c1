#!/usr/bin/env python3
"""Ranks killed or stopped at random moments: the survivors end within their deadline and name the culprit; nothing is left.

    kills.py SWITCHYARD [--kills N] [--seed S]

Every attempt starts ranks that dispatch and combine with random sleeps wherever a phase ends, waits a random time (also while
they still meet), and kills one (in one attempt of five it only stops it). Prints the seed; the same seed makes the same choices.
"""

import argparse
import collections
import os
import random
import re
import signal
import subprocess
import sys
import time

WATCHDOG_S = 120  # of an attempt: a hang, not slowness
TIMEOUT_MS = 4000


def read(path):
    with open(path) as file:
        return file.read()


def children_of(pid):
    try:
        return [int(c) for c in read(f"/proc/{pid}/task/{pid}/children").split()]
    except OSError:
        return []


def rank_of(pid):
    try:
        entries = read(f"/proc/{pid}/environ").split("\0")
        return int(dict(e.split("=", 1) for e in entries if "=" in e)["RANK"])
    except (OSError, KeyError):
        return None


def alive(pid):
    try:
        return read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Failure(Exception):
    pass


def attempt(switchyard, dice, happened):
    ranks = dice.choice((2, 3, 4, 5))
    landing = dice.choice(("packed", "padded", "in_place", "allgather", "two_level", "alltoallv"))
    path = dice.choice(("read", "push"))
    stop = dice.random() < 0.2
    arguments = ["run", "--ranks", str(ranks), "--bs", "8", "--hidden", "64", "--experts", "9", "--topk", "2", "--rounds", "1000000",
                 "--landing", landing, "--combine-path", path, "--jitter-us", str(dice.choice((0, 300, 3000))),
                 "--workers", str(dice.choice((1, 2))), "--timeout", str(TIMEOUT_MS / 1000)]
    program = subprocess.Popen([switchyard, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + WATCHDOG_S
        while len(children := children_of(program.pid)) < ranks:
            if program.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"the ranks did not start: {program.communicate()[1]}")
            time.sleep(0.002)
        time.sleep(dice.choice((0.1, 0.4, 1.5, 1.5, 1.5)) * dice.random())
        victim = dice.choice(children)
        # Between its fork and its exec a process is not a rank yet, and has not got its number.
        while (rank := rank_of(victim)) is None and alive(victim) and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(victim, signal.SIGSTOP if stop else signal.SIGKILL)
        struck = time.monotonic()
        try:
            _, err = program.communicate(timeout=WATCHDOG_S)
        except subprocess.TimeoutExpired as hang:
            raise Failure("somebody hangs") from hang
        took = time.monotonic() - struck
        if program.returncode != 1:
            raise Failure(f"exit code {program.returncode}: {err}")
        # A survivor waits one deadline at most; the launcher gives a failed group another and 5 s more to end.
        if took > 2 * TIMEOUT_MS / 1000 + 5 + 10:
            raise Failure(f"the end took {took:.1f} s: {err}")
        named = re.findall(r"rank (\d+)", err)
        if str(rank) not in named:
            raise Failure(f"rank {rank} was {'stopped' if stop else 'killed'} and is not named: {err}")
        # A survivor that says so first makes the launcher end the rest, and it cannot tell its own kill from ours.
        if not stop and "killed by signal 9" not in err and "has died" not in err and "ended before" not in err:
            raise Failure(f"the kill of rank {rank} is not told: {err}")
        left = [c for c in children if alive(c)]
        if left:
            raise Failure(f"processes {left} outlived their run")
        words = [w for w in ("has died", "timed out", "gave up", "did not come", "did not end in time") if w in err]
        happened["stopped" if stop else "killed", words[0] if words else "told by the launcher only"] += 1
    except Failure as failure:
        raise Failure(f"{' '.join(arguments)}: {failure}") from failure
    finally:
        for pid in children_of(program.pid):
            os.kill(pid, signal.SIGKILL)
        program.kill()
        program.wait()


def sockets():
    return sum("switchyard" in line for line in read("/proc/net/unix").splitlines())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("switchyard")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    flags = parser.parse_args()
    print(f"seed {flags.seed}", flush=True)
    dice = random.Random(flags.seed)
    happened = collections.Counter()
    files_before, sockets_before = set(os.listdir("/dev/shm")), sockets()
    for i in range(flags.kills):
        try:
            attempt(flags.switchyard, dice, happened)
        except Failure as failure:
            print(f"attempt {i + 1} of seed {flags.seed}: {failure}")
            return 1
    left = set(os.listdir("/dev/shm")) - files_before
    if left or sockets() > sockets_before:
        print(f"left behind: {left}, {sockets() - sockets_before} sockets")
        return 1
    for (what, said), count in sorted(happened.items()):
        print(f"{count:5} {what}: {said}")
    print(f"{flags.kills} attempts: every run ended in time, named the rank, and left nothing behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
