#!/usr/bin/env python3
"""Keeps the models and the code in step.

In the code, every store and load of a flag, and every step that leads to one, names its place in a model:

    rank.link.ring();  // model: ring_after_raises

In the models, the step that stands for it names the place in the code, just above:

    // label ring_after_raises = src/ep/flags.cpp raise_all

This test says what is missing on either side, or named in another function than the label claims. At its end it damages both
sides, one name at a time, and fails if that goes unnoticed.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Where flags are stored and loaded, and by what.
WATCHED = {
    "src/ep/flags.cpp": r"link\.(raise|ring|poll|lost)\(|\b(raise_all|see|has_closed|load_acquire|reason_text)\(",
    "src/ep/dispatch.cpp": r"\b(raise_all|leave|send_reason|reason_text|see|has_closed)\(|\bawait_\.begin(_gate)?\(",
    "src/ep/combine.cpp": r"\b(raise_all|leave|send_reason|reason_text|see|has_closed|drop)\(|\bawait_\.begin\(",
    "src/ep/regroup.cpp": r"link\.(raise|ring|poll|lost)\(|\b(turn_of|ask|has_closed)\(rank|\.(load|compare_exchange\w*)\(",
    "src/ep/exchange.cpp": r"link\.(raise|ring)\(|\bsee\(",
    "src/session.cpp": r"ep::(drop|raise_closed|leave|raise_all|see)\(|begin_gate\(|\bpoll\((true|false)\)|"
                       r"\b(link_?|l)\.(announce|sleep|awake|raise|ring)\(",
    "src/transport/mapped.cpp": r"[\w)]\.(load|store|exchange|fetch_\w+)\(|atomic_thread_fence\(|futex_\w+\(",
    "src/ep/workers.hpp": r"[\w)]\.(load|store|fetch_\w+|wait)\(",
}
# Functions whose accesses are no step of the protocol.
FREE = {
    ("src/ep/workers.hpp", "stop"): "ends the threads",
    ("src/transport/mapped.cpp", "futex_wait"): "the system call itself",
    ("src/transport/mapped.cpp", "futex_wake_all"): "the system call itself",
}
NAMES = re.compile(r"\bmodel:\s*(\w+(?:,\s*\w+)*)")
LABEL = re.compile(r"^\s*//\s*label\s+(\w+)\s*=\s*(\S+)\s+(\S+)\s*$")


def function_at(lines, at):
    """The function around line `at`: its name as it is defined, without the class where it stands inside of it."""
    def code(i):
        return lines[i].split("//")[0].rstrip()

    def name_in(i):
        called = re.search(r"([\w:~]+)\(", code(i))
        return called.group(1) if called else None

    def inside(first, indent):  # of a class: the nearest function that begins after line `first`, or that of a class in it
        for i in range(at, first, -1):
            if not re.match(rf" {{{indent}}}[\w~]", lines[i]):
                continue
            if re.match(r"\s*(class|struct)\b", lines[i]):
                return inside(i, indent + 4)
            statement = re.match(r"\s*(if|for|while|switch|try|do|return|else)\b", lines[i])
            if code(i).endswith(("{", "}")) and name_in(i) and not statement:
                return name_in(i)
        return None

    for i in range(at, -1, -1):
        if not re.match(r"[A-Za-z]", lines[i]) or re.match(r"(template|namespace|using|public|private|protected)\b", lines[i]):
            continue
        return inside(i, 4) if re.match(r"(class|struct)\b", lines[i]) else name_in(i)
    return None


def names_above(lines, at):
    """The model names that speak of the statement in line `at`: on one of its lines, or in the comment above it."""
    def code(i):
        return lines[i].split("//")[0].rstrip()

    first = at
    while first > 0 and code(first - 1) and not code(first - 1).endswith((";", "{", "}", ":")):
        if lines[first - 1].startswith("#"):
            break
        first -= 1
    last = at
    while last + 1 < len(lines) and not code(last).endswith((";", "{", "}")):
        last += 1
    text = lines[first:last + 1]
    while first > 0 and (lines[first - 1].lstrip().startswith("//") or lines[first - 1].startswith("#")):
        first -= 1
        text.append(lines[first])
    return [name for line in text for found in NAMES.findall(line) for name in re.split(r",\s*", found)]


def complaints(sources, models):
    """What is not in step. `sources` and `models` map a path to a text."""
    out = []
    labels = {}
    for path, text in models.items():
        for number, line in enumerate(text.splitlines(), 1):
            found = LABEL.match(line)
            if not found:
                if re.match(r"^\s*//\s*label\b", line):
                    out.append(f"{path}:{number}: expected '// label NAME = FILE FUNCTION', found '{line.strip()}'")
                continue
            name, file, function = found.groups()
            if name in labels:
                out.append(f"{path}:{number}: label {name} stands twice")
            labels[name] = (file, function, f"{path}:{number}")
    named = set()
    for path, text in sources.items():
        lines = text.splitlines()
        for at, line in enumerate(lines):
            for name in [name for found in NAMES.findall(line) for name in re.split(r",\s*", found)]:
                function = function_at(lines, at)
                if name not in labels:
                    out.append(f"{path}:{at + 1}: names {name}, which is no label of a model")
                elif labels[name][:2] != (path, function):
                    out.append(f"{path}:{at + 1}: names {name} in {function}(); {labels[name][2]} says it stands in "
                               f"{labels[name][1]}() of {labels[name][0]}")
                else:
                    named.add(name)
            watched = WATCHED.get(path)
            code = line.split("//")[0]
            if not watched or not re.match(r"\s", line) or not re.search(watched, code):
                continue
            if (path, function_at(lines, at)) not in FREE and not names_above(lines, at):
                out.append(f"{path}:{at + 1}: names no place in a model: {code.strip()}")
    for name, (file, function, where) in labels.items():
        if name not in named:
            out.append(f"{where}: label {name} is not named in {function}() of {file}")
    return out


def damaged(sources, models):
    """Both sides with one fault each, and what it is."""
    for path, text in sources.items():
        for found in NAMES.finditer(text):
            start, end = found.span()
            yield f"{path} without '{found.group()}'", {**sources, path: text[:start] + text[end:]}, models
    for path, text in models.items():
        for line in text.splitlines():
            if LABEL.match(line):
                yield f"{path} without '{line.strip()}'", sources, {**models, path: text.replace(line + "\n", "", 1)}
    path = "src/ep/flags.cpp"
    more = "\nvoid raise_twice(Rank& rank) {\n    rank.link.raise(0, 0, 1);\n}\n"
    text = sources[path].replace("\nvoid send_reason(", more + "\nvoid send_reason(")
    yield f"{path} with a new store", {**sources, path: text}, models
    moved = sources[path].replace("model: raise_gone", "")
    moved = moved.replace("const Place place{p,", "// model: raise_gone\n        const Place place{p,")
    yield f"{path} with raise_gone in another function", {**sources, path: moved}, models


def main():
    sources = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "src").rglob("*.[ch]pp"))}
    models = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "tests/model").glob("*.pml"))}
    found = complaints(sources, models)
    for line in found:
        print(line)
    if found:
        return 1
    unnoticed = count = 0
    for what, bad_sources, bad_models in damaged(sources, models):
        count += 1
        if (bad_sources, bad_models) == (sources, models) or not complaints(bad_sources, bad_models):
            print(f"this damage went unnoticed: {what}")
            unnoticed += 1
    places = sum(len(NAMES.findall(text)) for text in sources.values())
    print(f"{places} places in the code and the models are in step; {count} kinds of damage, {unnoticed} unnoticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
