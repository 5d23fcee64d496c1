#!/usr/bin/env python3
"""Runs the models of the flag protocol: every run must end without an error, every mutation must be caught.

    check.py quick            what ./dev test runs
    check.py long             everything, what ./dev test-long runs
    check.py quick bell       ... of one model only (or several)
    check.py trace epoch -DREASON_TWICE -DLATES=1 -DBADS=1      the shortest way to an error, step by step

The head of each model lists its runs and mutations, one a line:

    run quick|long MACROS...                                    no error, all states searched
    mutation quick|long assertion|deadlock MACROS...  what it changes     an error of that kind

The first macro of a mutation is the one that breaks the protocol; a macro that changes the model and that no line names is an
error. Needs spin and gcc; --jobs N runs N at a time.
"""
import argparse
import concurrent.futures
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
# For the compiler and the search: megabytes at most, steps deep, a hash table of 2^n slots at first. In the quick set the
# compiler is what takes the time.
SIZES = {"quick": (["-O0"], ["-m50000", "-w20"]), "long": (["-O2", "-DCOLLAPSE", "-DMEMLIM=8000"], ["-m2000000", "-w24"])}


@dataclasses.dataclass
class Run:
    model: str
    size: str
    expected: str  # "ok", "assertion" or "deadlock"
    macros: list

    @property
    def name(self):
        return " ".join([self.model, *self.macros])


def runs_of(model):
    """The runs and mutations that the head of a model lists, after a look that every macro it tests for is among them."""
    text = (HERE / f"{model}.pml").read_text()
    head, _, body = text.partition("*/")
    runs = []
    for line in head.splitlines():
        words = line.strip(" *").split()
        if words[:1] == ["run"] and words[1:2] and words[1] in ("quick", "long"):
            runs.append(Run(model, words[1], "ok", words[2:]))
        elif words[:1] == ["mutation"] and words[1:2] and words[1] in ("quick", "long"):
            size, expected, first, *rest = words[1:]
            macros = ["-D" + first]
            for word in rest:
                if not word.startswith("-D"):
                    break
                macros.append(word)
            runs.append(Run(model, size, expected, macros))
    named = {m[2:].partition("=")[0] for run in runs for m in run.macros}
    tested = set(re.findall(r"^\s*#\s*(?:ifdef|ifndef)\s+(\w+)", body, re.M)) | set(re.findall(r"defined\((\w+)\)", body))
    defined = set(re.findall(r"^\s*#\s*define\s+(\w+)", body, re.M))
    for macro in sorted(tested - named - defined):
        sys.exit(f"{model}.pml: #ifdef {macro}, but no run and no mutation in the head sets it.")
    for macro in sorted(named - tested):
        sys.exit(f"{model}.pml: a line of the head sets {macro}, which the model does not look at.")
    if not any(run.expected == "ok" for run in runs):
        sys.exit(f"{model}.pml: no run in the head.")
    return runs


def search(run, folder, shortest=False):
    """Searches all states in `folder`, or for the shortest way to an error; returns (outcome, states, depth, output)."""
    (folder / f"{run.model}.pml").write_text((HERE / f"{run.model}.pml").read_text())
    compiler, searcher = SIZES["quick" if run.expected != "ok" else run.size]
    if shortest:
        compiler, searcher = [*compiler, "-DREACH"], [*searcher, "-i"]
    for command in (["spin", "-a", *run.macros, f"{run.model}.pml"],
                    ["gcc", *compiler, "-w", "-DSAFETY", "-DVECTORSZ=2048", "-o", "pan", "pan.c"],
                    ["./pan", *searcher]):
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode and command[0] != "./pan":
            return "broken", 0, 0, done.stdout
    out = done.stdout
    states = re.search(r"([\d.e+]+) states, stored", out)
    depth = re.search(r"depth reached (\d+)", out)
    if "assertion violated" in out:
        outcome = "assertion"
    elif "invalid end state (" in out:
        outcome = "deadlock"
    elif "errors: 0" in out and not re.search(r"not completed|depth too small|out of memory|MEMLIM", out):
        outcome = "ok"
    else:
        outcome = "unfinished"
    return outcome, int(float(states.group(1))) if states else 0, int(depth.group(1)) if depth else 0, out


def check(run):
    """Runs it in a folder of its own; returns its line of the table and whether it is as expected."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome, states, depth, output = search(run, pathlib.Path(folder))
    good = outcome == run.expected
    said = outcome if run.expected == "ok" else f"caught ({outcome})" if good else f"NOT CAUGHT ({outcome})"
    seconds = time.monotonic() - start
    line = f"{'  ' if good else '! '}{said:20} {states:>10} states {depth:>7} deep {seconds:7.1f} s  {run.name}"
    if outcome == "broken":
        line += "\n" + output
    elif not good and outcome != "ok":
        line += f"\n    {pathlib.Path(__file__).name} trace {run.name}   shows the steps"
    return line, good, states


def trace(model, macros):
    run = Run(model, "long", "ok", macros)
    with tempfile.TemporaryDirectory() as folder:
        outcome, *_, output = search(run, pathlib.Path(folder), shortest=True)
        print(output if outcome in ("broken", "ok") else f"{run.name}: {outcome}")
        if outcome in ("assertion", "deadlock"):
            subprocess.run(["spin", "-t", "-p", "-g", *macros, f"{model}.pml"], cwd=folder)
    return 0 if outcome == "ok" else 1


def main():
    for tool, package in (("spin", "spin"), ("gcc", "gcc")):
        if not shutil.which(tool):
            sys.exit(f"{tool} is not installed (Debian package {package}; ./dev test installs it)")
    if sys.argv[1:2] == ["trace"] and len(sys.argv) > 2:
        return trace(sys.argv[2], sys.argv[3:])
    models = sorted(p.stem for p in HERE.glob("*.pml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=["quick", "long"])
    parser.add_argument("model", nargs="*", help=f"of {', '.join(models)}; all when none is named")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    for model in args.model:
        if model not in models:
            parser.error(f"there is no model {model}; there are {', '.join(models)}")
    runs = [run for model in args.model or models for run in runs_of(model) if args.set == "long" or run.size == "quick"]
    start = time.monotonic()
    bad = total = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for line, good, states in pool.map(check, runs):
            print(line, flush=True)
            bad += not good
            total += states
    mutations = sum(run.expected != "ok" for run in runs)
    print(f"{len(runs) - mutations} runs and {mutations} mutations, {total} states, {time.monotonic() - start:.0f} s: "
          f"{'all as they must be' if bad == 0 else f'{bad} NOT as expected'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
