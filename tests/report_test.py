#!/usr/bin/env python3
"""The page of `switchyard bench --report`: its numbers, that it reaches for nothing outside, and how a browser shows it.

    report_test.py SWITCHYARD [unittest arguments]

The browser is chromium; SWITCHYARD_NO_BROWSER=1 leaves that half out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from html.parser import HTMLParser

SWITCHYARD = sys.argv[1]
WATCHDOG_S = 600  # ends a command that hangs; no test depends on it otherwise
HOSTILE = "<script>alert(1)</script> & \"two\" 'quotes'"


def bench(*arguments):
    command = [SWITCHYARD, "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S)


# ---- what a page must say, computed here

def number_text(value):
    if value == 0:
        return "0"
    if abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def time_text(us):
    for least, factor, unit in ((999500, 1e-6, "s"), (999.5, 1e-3, "ms"), (0.9995, 1, "µs")):
        if us >= least or us == 0 and unit == "µs":
            return f"{number_text(us * factor)} {unit}"
    return f"{number_text(us * 1000)} ns"


# ---- lines made by hand

MACHINE = {"switchyard": "0.1.0", "command": "switchyard bench decode --seed 7", "begun": "2025-01-31 09:00 UTC",
           "processor": HOSTILE, "cpus": 4, "seed": 7, "start": [{"ranks": 3, "by": "fork"}], "something_new": [1, 2]}


def result(**fields):
    ranks = fields.get("ranks", 3)
    line = {"scenario": "decode", "cell": f"decode/{ranks}", "ranks": ranks, "tokens": [8] * ranks, "hidden": 64, "topk": 2,
            "experts": 4 * ranks, "dtype": "f16", "dispatch_quant": "none", "combine_quant": "none", "routing": "uniform",
            "seed": 7, "contestant": "packed", "call": "dispatch", "settings": HOSTILE, "checked": True, "rounds": 40,
            "p50_us": 100.0, "p99_us": 150.0, "min_us": 90.0, "max_us": 200.0, "slowest_rank_p50_us": 95.0,
            "bytes_per_rank": 1e6, "gb_per_s": 10.0, "allocations": 0, "own_us": 80.0, "wait_us": 20.0, "of_limit": 0.5,
            "rows_per_rank": 16, **fields}
    line.setdefault("label", line["contestant"])
    return line


def crafted():
    """Everything a page can hold. Waits: rank 2 for rank 0 is the longest. Rows cost 2, 3, 3.6 us: one step of 1.5, one of 1.2."""
    lines = [MACHINE,
             result(wait_by_rank_us=[[0, 1.5, 2], [3, 0, 12.25], [40, 0.5, 0]]),
             result(contestant="limit", p50_us=50.0, own_us=None, wait_us=None, of_limit=1.0),
             result(contestant="gloo", p50_us=1700.0, p99_us=1800.0, own_us=None, wait_us=None, of_limit=50 / 1700),
             result(label=HOSTILE, contestant="in_place", p50_us=25.0, of_limit=2.0),
             result(call="combine", wait_by_rank_us=[[0, 0, 0]] * 3),
             result(ranks=12, wait_by_rank_us=[[0 if i == j else i + j / 4 for j in range(12)] for i in range(12)]),
             result(ranks=17, wait_by_rank_us=[[7 if (i, j) == (16, 3) else 0 for j in range(17)] for i in range(17)])]
    for at, p50 in ((64, 1536.0), (256, 2304.0), (1024, 2764.8)):
        lines.append(result(ranks=2, scenario="curve", cell="tokens/2", label=f"{at} tokens", tokens=[at] * 2, curve="tokens",
                            at=at, rows_per_rank=768, p50_us=p50))
    for at, p50 in (("even", 80.0), ("zipf", 96.0), ("one", 160.0)):
        lines.append(result(ranks=2, scenario="curve", cell="skew/2", label=at, curve="skew", at=at, rows_per_rank=16, p50_us=p50))
    for at in (512, 2048):  # four times the columns, five times the time: 1.25 a column
        lines.append(result(ranks=2, scenario="curve", cell="hidden/2", label=f"H {at}", curve="hidden", at=at, hidden=at,
                            p50_us={512: 16.0, 2048: 80.0}[at]))
    bar = {"cell": "decode/3", "bound": 1.15, "at_most": True, "measured": 0.98, "of_best": 0.97, "from_own_start": 0.0,
           "missing": False, "reached": True}
    lines += [{"bar": "first", **bar}, {"bar": HOSTILE, **bar, "at_most": False, "bound": 10, "measured": 6.25, "reached": False},
              {"bar": "third", **bar, "missing": True, "measured": 0.0, "reached": False}]
    for form, published, sample in (("none", 170, 500.0), ("quantised", 113, 400.0)):
        lines.append({"seed_table": "dispatch", "cell": "prefill/8", "format": form, "published_us_other_machine": published,
                      "sample_us": sample, "packed_us": sample / 2, "padded_us": 0})
    return lines


# ---- a page, read

class Node:
    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    def text(self):
        return "".join(c if isinstance(c, str) else c.text() for c in self.children)

    def all(self, tag=None, **wanted):
        for child in self.children:
            if isinstance(child, str):
                continue
            if (tag is None or child.tag == tag) and all(v in child.attributes.get(k.rstrip("_"), "").split()
                                                         for k, v in wanted.items()):
                yield child
            yield from child.all(tag, **wanted)

    def first(self, tag=None, **wanted):
        return next(self.all(tag, **wanted), None)


class Page(HTMLParser):
    VOID = {"meta"}

    def __init__(self, html):
        super().__init__()
        self.html = html
        self.root = Node("", [])
        self.open = [self.root]
        self.feed(html)
        self.close()
        assert len(self.open) == 1, f"never closed: {[n.tag for n in self.open]}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(self.open[-1].children[-1])

    def handle_startendtag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {self.get_starttag_text()}"
        self.open[-1].children.append(Node(tag, attrs))

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>, line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)

    def section(self, name):
        return self.root.first("section", id=name)

    def figures(self, name):
        """(head, note, drawing) of each."""
        out = []
        for figure in self.section(name).all("figure"):
            caption = figure.first("figcaption")
            note = caption.first("span")
            out.append((caption.first("b").text(), note.text() if note else "", figure.first("svg")))
        return out

    def rows(self, name):
        return [[cell.text() for cell in row.children if not isinstance(cell, str)]
                for row in self.section(name).first("tbody").all("tr")]


def bars_of(drawing):
    """Label -> the texts right of its bar."""
    rows = {}
    for row in drawing.all("g"):
        words = [t.text() for t in row.all("text")]
        rows[words[0]] = list(reversed(words[1:]))
    return rows


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def at(self, name):
        return os.path.join(self.folder, name)

    def right(self, *arguments):
        done = bench(*arguments)
        self.assertEqual(done.returncode, 0, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertEqual(done.stderr, "")
        return done.stdout

    def read(self, name):
        with open(self.at(name), encoding="utf-8") as file:
            return Page(file.read())

    def write(self, lines, name="lines.json"):
        with open(self.at(name), "w", encoding="utf-8") as file:
            file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        return self.at(name)

    def page_of(self, lines):
        self.assertEqual(self.right("--from", self.write(lines), "--report", self.at("crafted.html")), "")
        return self.read("crafted.html")

    def measured(self):
        """A short run: its lines, its page."""
        said = self.right("decode", "prefill", "--contestants", "limit,packed,in_place,sample", "--hidden", 96, "--topk", 3,
                          "--rounds", 4, "--json", "--report", self.at("page.html"))
        self.assertEqual(os.listdir(self.folder), ["page.html"])  # nothing else is left
        return said, [json.loads(line) for line in said.splitlines()], self.read("page.html")

    # ---- numbers

    def test_a_run_gives_a_page_with_the_numbers_of_its_lines(self):
        said, lines, page = self.measured()
        machine, *results = lines
        self.assertEqual(page.root.first("pre", id="lines").text(), said)
        command = "switchyard bench decode prefill --contestants limit,packed,in_place,sample --hidden 96 --topk 3 --rounds 4"
        self.assertEqual(machine["command"], command)
        self.assertEqual(page.root.first("pre", class_="command").text(), command)
        self.assertRegex(machine["begun"], r"^\d{4}-\d\d-\d\d \d\d:\d\d UTC$")
        self.assertIn(machine["begun"], page.root.first("p", class_="lead").text())
        self.assertIn(machine["processor"], page.root.first("dl").text())

        table = list(page.section("all").first("tbody").all("tr"))
        self.assertEqual(len(table), len(results))
        for row, r in zip(table, results):
            exact = [(float(d.attributes["value"]), d.text()) for d in row.all("data")]
            in_us = [r[f] for f in ("p50_us", "p99_us", "min_us", "max_us", "own_us", "wait_us") if r[f] is not None]
            self.assertEqual(exact[:1 + len(in_us)], [(r["rounds"], str(r["rounds"]))] + [(us, f"{us:.1f}") for us in in_us])
            self.assertEqual([v for v, _ in exact[1 + len(in_us):]],
                             [r[f] for f in ("of_limit", "bytes_per_rank", "gb_per_s", "allocations") if r[f] is not None])
            self.assertEqual(row.first("th").text(), r["label"])

        of = {(r["cell"], r["call"], r["label"]): r for r in results}
        heads = [h.text() for h in page.section("peers").all("h3")]
        self.assertEqual(heads, ["decode, 2 ranks", "prefill, 2 ranks"])
        calls = {"dispatch": "dispatch", "dispatch + first touch": "first_touch", "combine": "combine"}
        drawings = page.figures("peers")
        self.assertEqual([head for head, _, _ in drawings], list(calls) * 2)
        for i, (head, note, drawing) in enumerate(drawings):
            cell, call = ("decode/2", "prefill/2")[i // 3], calls[head]
            self.assertEqual(note, "ratio to packed")
            base = of[cell, call, "packed"]["p50_us"]
            expected = {label: [time_text(r["p50_us"]), "1" if label == "packed" else "×" + number_text(r["p50_us"] / base)]
                        for (at, of_call, label), r in of.items() if (at, of_call) == (cell, call)}
            found = bars_of(drawing)
            tiles = [label for label in found if label.endswith(", tiles")]
            self.assertEqual(bool(tiles), call == "first_touch")
            self.assertEqual({k: v for k, v in found.items() if k not in tiles}, expected)
            for r in (r for (at, of_call, _), r in of.items() if (at, of_call) == (cell, call)):
                self.assertTrue(any(f"p50 {time_text(r['p50_us'])}, p99 {time_text(r['p99_us'])}" in t.text()
                                    for t in drawing.all("title")))

        for cell, (head, _, drawing) in zip(("decode/2", "prefill/2"), page.figures("limit")):
            texts = [t.text() for t in drawing.all("text")]
            for (at, _, label), r in of.items():
                if at == cell and r["of_limit"] is not None and label != "limit":
                    self.assertIn(f"{100 * r['of_limit']:.0f} %", texts)
            self.assertIn("1/1.15", texts)
        for cell, (head, _, drawing) in zip(("decode/2", "prefill/2"), page.figures("waiting")):
            texts = [t.text() for t in drawing.all("text")]
            for (at, _, _), r in of.items():
                if at == cell and r["wait_us"] is not None:
                    self.assertIn(time_text(r["own_us"]), texts)
                    self.assertIn(time_text(r["wait_us"]), texts)

        times = page.figures("tokens")  # 8 and 256 tokens
        self.assertEqual([head for head, _, _ in times], ["dispatch, 2 ranks", "combine, 2 ranks"])
        for head, _, drawing in times:
            self.assertEqual(len(list(drawing.all("path", class_="line"))), 4)
            tips = [t.text() for t in drawing.all("title")]
            for (cell, call, label), r in of.items():
                if call == head.split(",")[0]:
                    self.assertIn(f"{label}, {r['tokens'][0]} tokens: {time_text(r['p50_us'])} ({cell})", tips)
        glance = page.rows("summary")
        self.assertEqual([row[0] for row in glance], ["decode, 2 ranks", "prefill, 2 ranks"])
        packed, sample = of["prefill/2", "combine", "packed"], of["prefill/2", "combine", "sample"]
        self.assertEqual(glance[1][5:], [time_text(packed["p50_us"]), f"{100 * packed['of_limit']:.0f} %",
                                         f"sample ×{number_text(sample['p50_us'] / packed['p50_us'])}"])
        for absent in ("curves", "bars", "seed"):
            self.assertIsNone(page.section(absent))

    def test_bars_are_as_long_as_their_times(self):
        page = self.page_of(crafted())
        (_, _, drawing), *_ = page.figures("peers")  # packed 100, limit 50, gloo 1700 (torn at 600), in_place 25
        self.assertEqual(bars_of(drawing), {HOSTILE: ["25.0 µs", "×0.25"], "limit": ["50.0 µs", "×0.50"],
                                            "packed": ["100 µs", "1"], "gloo": ["1.70 ms", "×17.0"]})
        rows = list(drawing.all("g"))
        wide = [float(row.first("rect").attributes["width"]) for row in rows]
        for us, found in zip((25, 50, 100, 600), wide):
            self.assertAlmostEqual(found / wide[2], us / 100, delta=0.02)
        self.assertEqual([len(list(row.all("path", class_="torn"))) for row in rows], [0, 0, 0, 2])

        head, _, drawing = page.figures("waiting")[0]
        self.assertEqual(head, "decode, 3 ranks")
        own, wait = (float(r.attributes["width"]) for r in list(drawing.all("g"))[0].all("rect"))
        self.assertAlmostEqual(own / wait, 80 / 20, delta=0.05)

    def test_waits_curves_bars_and_the_seed_table(self):
        page = self.page_of(crafted())
        maps = page.figures("pairs")
        self.assertEqual([(head, note) for head, note, _ in maps],
                         [("packed dispatch", "longest: rank 2 for rank 0, 40.0 µs a round"), ("packed combine", "nobody waited"),
                          ("packed dispatch", "longest: rank 11 for rank 10, 13.5 µs a round"),
                          ("packed dispatch", "longest: rank 16 for rank 3, 7.00 µs a round")])
        numbers = [t.text() for t in maps[0][2].all("text")]
        for wait in ("1.50", "2.00", "3.00", "12.2", "40.0", "0.50"):  # 12.25 rounds to even
            self.assertIn(wait, numbers)
        shades = [float(r.attributes.get("fill-opacity", 1)) for r in maps[0][2].all("rect", class_="heat")]
        self.assertEqual(max(shades), 1)
        self.assertEqual(shades.index(1), 4)  # [0][1], [0][2], [1][0], [1][2], [2][0]
        self.assertEqual(sorted(range(6), key=lambda i: shades[i]), [5, 0, 1, 2, 3, 4])  # 0.5, 1.5, 2, 3, 12.25, 40
        self.assertIn("rank 1 waited for rank 2: 12.2 µs a round", [t.text() for t in maps[0][2].all("title")])
        self.assertEqual(len(list(maps[2][2].all("rect", class_="heat"))), 12 * 11)
        seventeen = maps[3][2]
        self.assertNotIn("7.00", [t.text() for t in seventeen.all("text")])  # too many for numbers
        self.assertEqual(len(list(seventeen.all("rect", class_="heat"))), 1)

        curves = {head: (note, drawing) for head, note, drawing in page.figures("curves")}
        note, drawing = curves["dispatch against tokens, 2 ranks"]
        self.assertEqual(note, "1 step above ×1.3")
        self.assertEqual(len(list(drawing.all("path", class_="ring"))), 1)
        tips = [t.text() for t in drawing.all("title")]
        self.assertIn("packed: ×1.50 from the point before", tips)
        for tip in ("64 tokens, tokens 64: 2.00 µs (1.54 ms for 768 rows)", "256 tokens, tokens 256: 3.00 µs (2.30 ms for 768 rows)",
                    "1024 tokens, tokens 1024: 3.60 µs (2.76 ms for 768 rows)"):
            self.assertIn(tip, tips)
        note, drawing = curves["dispatch against skew, 2 ranks"]
        self.assertEqual(note, "1 step above ×1.3")
        texts = [t.text() for t in drawing.all("text")]
        self.assertLess(texts.index("even"), texts.index("one"))
        self.assertIn("×1.67", texts)
        self.assertEqual(curves["dispatch against hidden, 2 ranks"][0], "no steps above ×1.3")

        bars = page.rows("bars")
        self.assertIn("1 of 2 bars reached", page.section("bars").first("p").text())
        self.assertEqual(bars, [["✓ reached", "first", "decode/3", "≤ 1.15", "0.98", "0.97", ""],
                                ["✗ missed", HOSTILE, "decode/3", "≥ 10", "6.25", "0.97", ""],
                                ["absent", "third", "decode/3", "≤ 1.15", "–", "0.97", ""]])

        seed = page.section("seed")
        self.assertEqual(page.rows("seed"), [["dispatch", "prefill/8", "unquantised", "170.0", "", "500.0", "", "250.0", "", "–", ""],
                                             ["dispatch", "prefill/8", "quantised", "113.0", "×1.50", "400.0", "×1.25", "200.0",
                                              "×1.25", "–", ""]])
        self.assertIn("another machine’s", seed.first("p").text())
        for row in seed.first("tbody").all("tr"):
            self.assertEqual([d.attributes["value"] for td in row.all("td", class_="foreign") for d in td.all("data")][0],
                             row.first("data").attributes["value"])

    def test_a_section_stands_only_where_its_data_is(self):
        page = self.page_of([MACHINE, crafted()[-1]])
        self.assertEqual([s.attributes["id"] for s in page.root.all("section")], ["seed", "all"])
        page = self.page_of([MACHINE, result(of_limit=None, own_us=None, wait_us=None)])
        self.assertEqual([s.attributes["id"] for s in page.root.all("section")], ["all"])
        for section in page.root.all("section"):
            self.assertIn("#" + section.attributes["id"], [a.attributes["href"] for a in page.root.first("nav").all("a")])

    # ---- a page alone

    def test_the_page_reaches_for_nothing_outside_and_runs_nothing(self):
        for page in (self.measured()[2], self.page_of(crafted())):
            self.assertNotRegex(page.html, r"(?i)https?://")
            self.assertNotRegex(page.html, r"(?i)@import|url\(|javascript:")
            ids = [n.attributes["id"] for n in page.root.all() if "id" in n.attributes]
            self.assertEqual(len(ids), len(set(ids)))
            for node in page.root.all():
                self.assertNotIn(node.tag, ("script", "link", "img", "image", "iframe", "object", "embed", "base", "form"))
                for name, value in node.attributes.items():
                    self.assertNotIn(name, ("src", "srcset", "data", "action", "xlink:href"))
                    self.assertFalse(name.startswith("on"), name)
                    if name == "href":
                        self.assertEqual(value[0], "#")
                        self.assertIn(value[1:], ids)
            policy = next(m.attributes for m in page.root.all("meta") if "http-equiv" in m.attributes)
            self.assertEqual(policy["content"], "default-src 'none'; style-src 'unsafe-inline'")
            for drawing in page.root.all("svg"):  # what a plot shows is told to who cannot see it
                self.assertEqual(drawing.attributes["role"], "img")
                self.assertGreater(len(drawing.attributes["aria-label"]), 10)
                self.assertEqual(drawing.children[0].tag, "title")

    def test_what_lines_say_is_text_and_nothing_else(self):
        page = self.page_of(crafted())
        self.assertIn(HOSTILE, page.root.first("dl").text())
        self.assertIn(HOSTILE, page.root.first("p", class_="lead").text())
        self.assertIn("something_new", page.root.first("dl").text())
        self.assertTrue(any(HOSTILE in t.text() for t in page.section("all").all("td", class_="settings")))

    # ---- files

    def test_a_page_is_whole_or_not_there(self):
        lines = self.write(crafted())
        with open(self.at("old.html"), "w") as file:
            file.write("old")
        os.symlink("old.html", self.at("link.html"))
        self.right("--from", lines, "--report", self.at("link.html"))
        self.assertTrue(os.path.islink(self.at("link.html")))
        self.assertIn("</html>", self.read("old.html").html)
        before = self.read("old.html").html
        done = bench("--from", self.write([MACHINE, {"bar": 1}]), "--report", self.at("old.html"))
        self.assertEqual(done.returncode, 2)
        self.assertEqual(self.read("old.html").html, before)
        self.assertEqual(sorted(os.listdir(self.folder)), ["lines.json", "link.html", "old.html"])

    def test_a_run_with_tables_says_where_the_page_is(self):
        said = self.right("one", "--contestants", "packed", "--hidden", 64, "--rounds", 4, "--report", self.at("a b.html"))
        self.assertTrue(said.endswith(f"\npage: {self.at('a b.html')}\n"))
        page = self.read("a b.html")
        self.assertEqual(page.root.first("pre", class_="command").text(),
                         "switchyard bench one --contestants packed --hidden 64 --rounds 4")
        self.assertIsNone(page.section("limit"))

    def test_bars_and_the_seed_table_of_a_run(self):
        for flag, name in (("--bars", "bars"), ("--seed-table", "seed")):
            said = self.right(flag, "--hidden", 64, "--rounds", 4, "--json", "--report", self.at(name + ".html"))
            page = self.read(name + ".html")
            lines = [json.loads(line) for line in said.splitlines()]
            told = [line for line in lines if "bar" in line or "seed_table" in line]
            self.assertEqual(len(page.rows(name)), len(told))
            if name == "bars":
                self.assertEqual([row[1] for row in page.rows("bars")], [line["bar"] for line in told])
                self.assertEqual(sum(row[0] == "✓ reached" for row in page.rows("bars")), sum(line["reached"] for line in told))

    def test_mistakes_are_told_in_one_line_before_anything_is_measured(self):
        page, good = self.at("page.html"), self.write(crafted())
        bad = dict(result())
        del bad["p50_us"]
        lopsided = result(wait_by_rank_us=[[0, 1], [1, 0]])
        cases = [
            (("decode", "--report", self.at("missing/page.html")), "No such file or directory"),
            (("decode", "--report", self.folder), "is no ordinary file"),
            (("decode", "--report", "/dev/null"), "is no ordinary file"),
            (("--report", page, "--from", good, "decode"), "--from measures nothing; leave SCENARIO out"),
            (("--report", page, "--from", good, "--json"), "leave --json out"),
            (("--from", good), "--from needs --report"),
            (("--report", page, "--from", self.at("none.json")), "No such file"),
            (("--report", page, "--from", self.write([], "empty.json")), "is empty"),
            (("--report", good, "--from", good), "the lines themselves"),
            (("--report", page, "--from", self.write([MACHINE, "nonsense\n"], "a.json")), "line 2 is not JSON"),
            (("--report", page, "--from", self.write([MACHINE], "b.json")), "no result"),
            (("--report", page, "--from", self.write([result()], "c.json")), "line 1: expected the machine's"),
            (("--report", page, "--from", self.write([MACHINE, result(), MACHINE], "d.json")), "line 3: a second run"),
            (("--report", page, "--from", self.write([MACHINE, bad], "e.json")), 'line 2: "p50_us": expected a number, found null'),
            (("--report", page, "--from", self.write([MACHINE, lopsided], "f.json")), 'line 2: "wait_by_rank_us": expected rows of 3'),
            (("--report", page, "--from", self.write([MACHINE, result(tokens=[8])], "g.json")), '"tokens": expected 3 numbers'),
            (("--report", page, "--from", self.write([MACHINE, {"other": 1}], "h.json")), "line 2: neither"),
        ]
        for arguments, said in cases:
            done = bench(*arguments)
            self.assertEqual(done.returncode, 2, f"{arguments}: {done.stdout}{done.stderr}")
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
            self.assertIn(said, done.stderr)
            self.assertEqual(done.stdout, "")
        self.assertFalse([name for name in os.listdir(self.folder) if "html" in name])

    # ---- in a browser

    @unittest.skipIf(os.environ.get("SWITCHYARD_NO_BROWSER") == "1", "SWITCHYARD_NO_BROWSER=1: no browser looked at the pages")
    def test_a_browser_shows_the_page_on_a_desk_and_on_a_phone(self):
        self.measured()
        self.page_of(crafted())
        for name in ("page.html", "crafted.html"):
            for dark in (False, True):
                for seen in self.looked_at(name, dark):
                    told = f"{name}, dark {dark}, {seen['wide']} wide: "
                    self.assertEqual(seen["console"], [], told)
                    self.assertLessEqual(seen["scroll"], seen["wide"], told)
                    self.assertGreaterEqual(len(seen["plots"]), 8, told)
                    for wide, high in seen["plots"]:
                        self.assertGreater(min(wide, high), 40, told)
                    self.assertEqual(seen["outside"], [], told + "texts beyond the edge of their plot")
                    self.assertEqual(seen["covered"], [], told + "texts that cover each other")
                    self.assertEqual(seen["pale"], [], told + "texts with a contrast below 4.5")
                    self.assertEqual(seen["dark"], dark, told)

    @unittest.skipIf(os.environ.get("SWITCHYARD_NO_BROWSER") == "1", "SWITCHYARD_NO_BROWSER=1: no browser looked at the pages")
    def test_the_look_sees_what_is_wrong(self):
        with open(self.at("bad.html"), "w") as file:
            file.write("<!DOCTYPE html><html><head><meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
                       "style-src 'unsafe-inline'\"></head><body style=\"background:#fff;color:#000\"><img src=\"picture.png\"><div "
                       "style=\"width:600px\">wide</div><svg width=\"9\" height=\"9\" class=\"plot\"><text x=\"5\" y=\"9\">far "
                       "out</text><text x=\"6\" y=\"9\" fill=\"#ccc\">over it</text></svg></body></html>")
        for seen in self.looked_at("bad.html", False):
            self.assertEqual(seen["scroll"] > seen["wide"], seen["wide"] == 400)
            self.assertEqual(seen["plots"], [[9, 9]])
            self.assertEqual(seen["outside"], ["far out", "over it"])
            self.assertEqual(seen["covered"], [["far out", "over it"]])
            self.assertEqual(seen["pale"], ["over it"])
            self.assertIn("picture.png", "".join(seen["console"]))

    PROBE = """
addEventListener("load", () => {
  for (const d of document.querySelectorAll("details")) d.open = true;
  const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
                       return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const contrast = c => { const a = light(c); return (Math.max(a, paper) + .05) / (Math.min(a, paper) + .05); };
  const outside = [], covered = [], pale = [], plots = [];
  for (const plot of document.querySelectorAll("svg.plot")) {
    const edge = plot.getBoundingClientRect(), texts = [...plot.querySelectorAll("text")];
    plots.push([edge.width, edge.height]);
    const boxes = texts.map(t => t.getBoundingClientRect());
    texts.forEach((t, i) => {
      const b = boxes[i];
      if (b.left < edge.left - 1 || b.right > edge.right + 1 || b.top < edge.top - 2 || b.bottom > edge.bottom + 2) outside.push(t.textContent);
      if (!t.classList.contains("over") && contrast(getComputedStyle(t).fill) < 4.5) pale.push(t.textContent);
      for (let j = i + 1; j < boxes.length; ++j) {
        const o = boxes[j], in_x = Math.min(b.right, o.right) - Math.max(b.left, o.left), in_y = Math.min(b.bottom, o.bottom) - Math.max(b.top, o.top);
        if (in_x > 2 && in_y > b.height * .45) covered.push([t.textContent, texts[j].textContent]);
      }
    });
  }
  for (const e of document.querySelectorAll("p, th, td, h1, h2, h3, summary, figcaption, a, pre, dt, dd"))
    if (e.textContent.trim() && contrast(getComputedStyle(e).color) < 4.5) pale.push(e.textContent);
  parent.postMessage({wide: innerWidth, scroll: document.documentElement.scrollWidth, plots, outside, covered, pale,
                      dark: matchMedia("(prefers-color-scheme: dark)").matches}, "*");
});
"""

    def looked_at(self, name, dark):
        """What a browser sees of a page, shown 1280 and 400 pixels wide. Narrower windows than 500 it has only as frames."""
        browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        self.assertIsNotNone(browser, "there is no chromium to look at the pages: install it (./dev test does), "
                                      "or set SWITCHYARD_NO_BROWSER=1 to do without this half")
        with open(self.at(name), encoding="utf-8") as file:
            html = file.read()
        self.assertIn("default-src 'none';", html)
        html = html.replace("default-src 'none';", "default-src 'none'; script-src 'nonce-probe';", 1)
        with open(self.at("probed.html"), "w", encoding="utf-8") as file:
            file.write(html.replace("</body>", f"<script nonce=\"probe\">{self.PROBE}</script></body>"))
        with open(self.at("frames.html"), "w") as file:
            file.write("<!DOCTYPE html><html><body><script>const seen = []; addEventListener('message', e => { seen.push(e.data); "
                       "document.body.dataset.seen = JSON.stringify(seen); });</script>" +
                       "".join(f"<iframe src=\"probed.html\" style=\"border:0;width:{w}px;height:900px\"></iframe>" for w in (1280, 400)) +
                       "</body></html>")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1800,1000",
                   f"--user-data-dir={self.at('profile')}", "--no-first-run", "--virtual-time-budget=10000", "--dump-dom",
                   *(["--blink-settings=preferredColorScheme=0"] if dark else []), "file://" + self.at("frames.html")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S, env={**os.environ, "HOME": self.folder})
        shutil.rmtree(self.at("profile"), ignore_errors=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = Page(done.stdout).root.first("body").attributes.get("data-seen")
        self.assertIsNotNone(found, f"the browser told nothing: {done.stderr}")
        seen = json.loads(found)
        self.assertEqual(sorted(s["wide"] for s in seen), [400, 1280])
        console = re.findall(r"CONSOLE.*", done.stderr)
        return [{**s, "console": console} for s in seen]


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
