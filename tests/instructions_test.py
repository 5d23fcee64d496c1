#!/usr/bin/env python3
"""Instructions per column of every number kernel, and per row of dispatch and combine, against the recorded table.

    instructions_test.py [PROGRAM]             counts under callgrind, compares with instructions.json
    instructions_test.py [PROGRAM] --record    counts and writes instructions.json: after a change that is meant to cost, or to save

PROGRAM is build/instructions. No clock is read, so a busy machine changes nothing; but a count belongs to its compiler, flags and
C library. With others than those of the table only a count that is half as large again is refused.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TABLE = os.path.join(HERE, "instructions.json")
WATCHDOG_S = 600  # ends a program that hangs
ALLOWED = 1.03
ALLOWED_ELSEWHERE = 1.5
MADE_WITH = ("compiler", "build", "libc")
AGAIN = "if that is meant: tests/instructions_test.py --record"


def count(program):
    """Runs it under callgrind. {"compiler": ..., "sets": {set: present}, "counts": {case: instructions per unit}}"""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={folder}/dump", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        totals = {}
        for name in os.listdir(folder):
            with open(f"{folder}/{name}") as file:
                text = file.read()
            case = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
            if case:
                totals[case[1]] = int(re.search(r"^totals: (\d+)", text, re.M)[1])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {key: next(line[key] for line in lines if key in line) for key in MADE_WITH}
    found["sets"] = {line["set"]: line["present"] for line in lines if "set" in line}
    found["counts"] = {line["case"]: round(totals[line["case"]] / line["divisor"], 3) for line in lines if "case" in line}
    return found


def compare(recorded, found):
    """(errors, notes) in sentences. The last word of a case is its instruction set."""
    errors, notes = [], []
    changed = [f"{key} {found[key]!r}, recorded {recorded[key]!r}" for key in MADE_WITH if found[key] != recorded[key]]
    allowed = ALLOWED_ELSEWHERE if changed else ALLOWED
    if changed:
        notes.append(f"not made as the table was ({'; '.join(changed)}): refused is only what grew to more than {allowed} times. "
                     "To compare closely, record a table of your own before your change.")
    for name in sorted(recorded["counts"].keys() | found["counts"].keys()):
        before, now = recorded["counts"].get(name), found["counts"].get(name)
        if before is None:
            errors.append(f"{name}: {now} instructions, but the table does not have it; add it: tests/instructions_test.py --record")
        elif now is None:
            if found["sets"].get(name.split()[-1]) is False:
                notes.append(f"{name}: not counted, this build or processor has no such instruction set")
            else:
                errors.append(f"{name}: recorded, but not counted any more; {AGAIN}")
        elif now > before * allowed:
            errors.append(f"{name}: {now} instructions, recorded {before}: {now / before - 1:+.1%}, allowed {allowed - 1:+.0%}; "
                          f"{AGAIN}")
        elif now < before / ALLOWED and not changed:
            notes.append(f"{name}: {now} instructions, recorded {before}: {now / before - 1:+.1%}. Keep it: "
                         "tests/instructions_test.py --record")
    return errors, notes


class Compare(unittest.TestCase):
    """That the check can fail."""

    def setUp(self):
        self.made = {"compiler": "gcc 12", "build": "Release", "libc": "2.36", "sets": {"scalar": True, "avx2": True}}
        self.recorded = {**self.made, "counts": {"encode none f16 scalar": 10.0, "encode none f16 avx2": 0.5}}

    def found(self, scalar, avx2=0.5, **made):
        return {**self.made, "counts": {"encode none f16 scalar": scalar, "encode none f16 avx2": avx2}, **made}

    def test_equal_counts_say_nothing(self):
        self.assertEqual(compare(self.recorded, self.found(10.0)), ([], []))

    def test_two_percent_more_say_nothing(self):
        self.assertEqual(compare(self.recorded, self.found(10.2)), ([], []))

    def test_four_percent_more_are_an_error_that_names_everything(self):
        errors, notes = compare(self.recorded, self.found(10.4))
        self.assertEqual((len(errors), notes), (1, []))
        for word in ("encode none f16 scalar", "10.4", "10.0", "+4.0%", "--record"):
            self.assertIn(word, errors[0])

    def test_four_percent_less_are_a_note(self):
        errors, notes = compare(self.recorded, self.found(10.0, avx2=0.48))
        self.assertEqual((errors, len(notes)), ([], 1))
        self.assertIn("encode none f16 avx2: 0.48 instructions, recorded 0.5", notes[0])

    def test_another_compiler_is_told_and_loosens_the_bound(self):
        errors, notes = compare(self.recorded, self.found(14.9, compiler="gcc 13"))
        self.assertEqual((errors, len(notes)), ([], 1))
        self.assertIn("compiler 'gcc 13', recorded 'gcc 12'", notes[0])
        errors, _ = compare(self.recorded, self.found(15.1, compiler="gcc 13"))
        self.assertEqual(len(errors), 1)

    def test_a_new_case_and_a_lost_one_are_errors(self):
        found = self.found(10.0)
        found["counts"]["decode none f16 avx2"] = found["counts"].pop("encode none f16 avx2")
        errors, _ = compare(self.recorded, found)
        self.assertEqual(len(errors), 2)

    def test_a_set_that_is_not_there_is_a_note(self):
        found = self.found(10.0, sets={"scalar": True, "avx2": False})
        del found["counts"]["encode none f16 avx2"]
        errors, notes = compare(self.recorded, found)
        self.assertEqual((errors, len(notes)), ([], 1))


class Instructions(unittest.TestCase):
    program = ""

    def test_no_kernel_and_no_call_has_grown(self):
        with open(TABLE) as file:
            recorded = json.load(file)
        found = count(self.program)
        errors, notes = compare(recorded, found)
        self.assertGreaterEqual(len(found["counts"]), 40)
        for note in notes:
            print("note:", note)
        self.assertEqual(errors, [], "\n" + "\n".join(errors))


def main(arguments):
    record = "--record" in arguments
    rest = [a for a in arguments if a != "--record"]
    program = rest.pop(0) if rest and not rest[0].startswith("-") else os.path.join(HERE, "..", "build", "instructions")
    if not os.access(program, os.X_OK):
        raise SystemExit(f"instructions_test.py: there is no program {program}; ./dev test builds it, where valgrind is installed")
    if record:
        found = count(program)
        with open(TABLE, "w") as file:
            json.dump({key: found[key] for key in (*MADE_WITH, "counts")}, file, indent=1, sort_keys=True)
            file.write("\n")
        print(f"{TABLE}: {len(found['counts'])} counts recorded")
        return
    Instructions.program = program
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)


if __name__ == "__main__":
    main(sys.argv[1:])
