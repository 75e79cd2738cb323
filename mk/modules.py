#!/usr/bin/env python3
"""Looks for import cycles between the top-level modules of each crate.

    mk/modules.py                  every crate under crates/; fails on a cycle
    mk/modules.py --edges daemon   every edge of that crate, where it stands and what it names

An edge is a path from one top-level module to an item of another: `use crate::other::Item`,
`crate::other::item()`, or `super::` as far up. A name that the root re-exports counts as an edge to
the module that it comes from. Items that the root defines itself belong to a module `(root)`.

Code that only tests compile is left out: `#[cfg(test)]`, tests.rs, *_tests.rs, fake and testing.
Macros are not expanded.
"""

import re
import sys
from pathlib import Path

ROOT = "(root)"
TEST_FILE = re.compile(r"(^|.*_)(tests|fake|testing)$")
TEST_CFG = re.compile(r"cfg\((?:any\(|all\()*(?:test\b|feature=\"testing\")")
ITEM = {"mod", "fn", "struct", "enum", "union", "trait", "type", "const", "static", "macro_rules"}
QUALIFIER = {"pub", "async", "unsafe", "extern", "const", "default"}
KEYWORD = ITEM | QUALIFIER | {"impl", "use"}

TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*)
  | (?P<block>/\*)
  | (?P<raw>[bc]?r(?P<hashes>\#*)")
  | (?P<string>[bc]?"(?:[^"\\]|\\.)*")
  | (?P<char>b?'(?:[^'\\]|\\(?:u\{[^}]*\}|x..|.))')
  | (?P<lifetime>'\w+)
  | (?P<word>(?:r\#)?[A-Za-z_]\w*)
  | (?P<number>\d[\w.]*?(?=\.\.|[^\w.]|\Z))
  | (?P<punct>::|=>|->|.)
    """,
    re.VERBOSE | re.DOTALL,
)
COMMENT_EDGE = re.compile(r"/\*|\*/")


class Token(str):
    """A word or a sign, and the line it stands on."""

    line: int


def tokens(text):
    """The words and signs of a source file: without comments; strings keep only `feature="…"`."""
    found, at, line = [], 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        end = match.end()
        if match["block"]:
            depth = 1
            while depth and (edge := COMMENT_EDGE.search(text, end)):
                depth += 1 if edge[0] == "/*" else -1
                end = edge.end()
        elif match["raw"]:
            closing = '"' + match["hashes"]
            end = text.index(closing, end) + len(closing)
        elif not match["space"]:
            token = Token(match[0])
            token.line = line
            found.append(token)
        line += text.count("\n", at, end)
        at = end
    return found


def closing(toks, at):
    """The index behind the bracket that closes the one at `at`."""
    depth = 0
    for index in range(at, len(toks)):
        if toks[index] in "([{":
            depth += 1
        elif toks[index] in ")]}":
            depth -= 1
            if depth == 0:
                return index + 1
    return len(toks)


def behind_item(toks, at):
    """The index behind the item, field, arm or statement that begins at `at`, attributes
    included."""
    while at + 1 < len(toks) and toks[at] == "#" and toks[at + 1] == "[":
        at = closing(toks, at + 1)
    begins = at
    word = next((t for t in toks[at : at + 8] if t in KEYWORD - {"pub"}), None)
    is_item = at < len(toks) and toks[begins] in KEYWORD
    while at < len(toks):
        token = toks[at]
        if token == ";" or (token == "," and not is_item):
            return at + 1
        if token == "}":
            return at
        if token == "{":
            at = closing(toks, at)
            if not (is_item and word == "use"):
                return at + 1 if at < len(toks) and toks[at] in (",", ";") else at
        elif token in "([":
            at = closing(toks, at)
        else:
            at += 1
    return at


def without_tests(toks):
    """The tokens without what only tests compile."""
    kept, at = [], 0
    while at < len(toks):
        if toks[at] == "#" and toks[at + 1 : at + 2] == ["["]:
            end = closing(toks, at + 1)
            if TEST_CFG.match("".join(toks[at + 2 : end - 1])):
                at = behind_item(toks, end)
                continue
        kept.append(toks[at])
        at += 1
    return kept


def use_tree(toks, at, prefix=()):
    """The paths that the use tree at `at` names, each as (segments, name it gets), and the index
    behind it."""
    paths, segments, name = [], list(prefix), None
    while at < len(toks):
        token = toks[at]
        if token == "{":
            at += 1
            while toks[at] != "}":
                if toks[at] == ",":
                    at += 1
                    continue
                inner, at = use_tree(toks, at, segments)
                paths += inner
            return paths, at + 1
        if token in (",", "}", ";"):
            break
        if token == "as":
            name, at = toks[at + 1], at + 2
            continue
        if token != "::":
            segments.append(token)
        at += 1
    if segments and segments[-1] == "self" and len(segments) > 1:
        segments.pop()
    paths.append((segments, name or (segments[-1] if segments else "")))
    return paths, at


class Crate:
    """The modules of one root file (a library or a program), and what they name of each other."""

    def __init__(self, root):
        self.root = root
        self.modules = {}  # top-level module -> [(file, path of modules, tokens)]
        self.exports = {}  # name in the root -> top-level module
        self.defined = set()  # names that the root defines itself
        self.globs = []
        self.edges = {}  # (from, to) -> [(file, line, what is named)]
        self.read(root, ())
        self.find_names()
        for top, parts in self.modules.items():
            for file, path, toks in parts:
                self.find_edges(top, file, path, toks)

    def read(self, file, path, toks=None):
        """Reads a module's file and the files of the modules in it."""
        if toks is None:
            toks = without_tests(tokens(file.read_text()))
        self.modules.setdefault(path[0] if path else ROOT, []).append((file, path, toks))
        self.read_inner(file, path, toks)

    def read_inner(self, file, path, toks):
        named_mod = file.stem in ("mod", "lib", "main") or file == self.root
        folder = file.parent if named_mod else file.parent / file.stem
        at, inline, depth = 0, [], 0
        while at < len(toks):
            token = toks[at]
            if token == "mod" and at + 2 < len(toks) and toks[at + 2] in (";", "{"):
                name = toks[at + 1]
                if toks[at + 2] == "{":
                    inline.append((name, depth))
                elif not TEST_FILE.match(name):
                    inner = [n for n, _ in inline]
                    base = folder.joinpath(*inner)
                    told = self.told_path(toks, at)
                    places = [file.parent / told] if told else [base / f"{name}.rs", base / name / "mod.rs"]
                    for place in places:
                        if place.exists():
                            self.read(place, (*path, *inner, str(name)))
                at += 2
                continue
            if token == "{":
                depth += 1
            elif token == "}":
                depth -= 1
                if inline and inline[-1][1] == depth:
                    inline.pop()
            at += 1

    @staticmethod
    def told_path(toks, at):
        """The file of `#[path = "…"] mod name;`."""
        before = "".join(toks[max(0, at - 8) : at])
        match = re.search(r'\[path="([^"]*)"\](?:pub(?:\([^)]*\))?)?$', before)
        return match and match[1]

    def find_names(self):
        """What the root's names stand for."""
        for _, _, toks in self.modules[ROOT]:
            for segments, name in self.uses(toks):
                if segments and segments[0] in ("crate", "self"):
                    segments = segments[1:]
                if segments and segments[0] in self.modules:
                    self.exports[name] = str(segments[0])
            depth = 0
            for before, token in zip(toks, toks[1:]):
                depth += (before == "{") - (before == "}")
                if depth == 0 and before in ITEM - {"mod"} and re.match(r"\w", token):
                    self.defined.add(str(token))
        for top, parts in self.modules.items():
            for _, _, toks in parts:
                for at, token in enumerate(toks):
                    if token == "macro_rules" and toks[at + 1] == "!":
                        self.exports.setdefault(str(toks[at + 2]), top)

    @staticmethod
    def uses(toks):
        for at, token in enumerate(toks):
            if token == "use" and (at == 0 or toks[at - 1] not in ("::", "<", ",", "+")):
                yield from use_tree(toks, at + 1)[0]

    def target(self, segments):
        """The top-level module that a path from the root leads to."""
        if not segments:
            return None
        name = str(segments[0])
        if name in self.modules:
            return name
        if name == "*":
            return None
        if name in self.exports:
            return self.exports[name]
        return ROOT if name in self.defined else None

    def find_edges(self, top, file, path, toks):
        at, inline, depth = 0, [], 0
        while at < len(toks):
            token = toks[at]
            behind = toks[at + 1] if at + 1 < len(toks) else ""
            if token == "mod" and toks[at + 2 : at + 3] == ["{"]:
                inline.append(depth)
                at += 2
                continue
            if token == "{":
                depth += 1
            elif token == "}":
                depth -= 1
                if inline and inline[-1] == depth:
                    inline.pop()
            elif token == "use" and behind not in ("<",):
                paths, end = use_tree(toks, at + 1)
                is_export = top == ROOT and at > 0 and toks[at - 1] in ("pub", ")")
                for segments, _ in paths:
                    if not is_export:
                        self.note(top, file, path, len(inline), segments)
                at = end
                continue
            elif behind == "::" and (at == 0 or toks[at - 1] != "::"):
                if not (at > 1 and toks[at - 1] == "in" and toks[at - 2] == "("):
                    segments, index = [token], at + 2
                    while index < len(toks) and toks[index - 1] == "::" and re.match(r"\w", toks[index]):
                        segments.append(toks[index])
                        index += 2
                    self.note(top, file, path, len(inline), segments)
            at += 1

    def note(self, top, file, path, inline, segments):
        """Notes the edge that a path makes, if it leads into another top-level module."""
        if not segments:
            return
        line, level = segments[0].line, len(path) + inline
        if segments[0] in ("crate", "$crate"):
            rest = segments[1:]
        elif segments[0] == "super":
            ups = next((i for i, s in enumerate(segments) if s != "super"), len(segments))
            if ups != level:
                return
            rest = segments[ups:]
        elif top == ROOT and level == 0:
            rest = segments[1:] if segments[0] == "self" else segments
        else:
            return
        other = self.target(rest)
        if other and other != top:
            self.edges.setdefault((top, other), []).append((file, line, "::".join(rest)))

    def knots(self):
        """The sets of modules that reach each other, largest first."""
        after = {top: set() for top in self.modules}
        for source, target in self.edges:
            after[source].add(target)

        def reach(start):
            seen, waiting = set(), [start]
            while waiting:
                for target in after[waiting.pop()] - seen:
                    seen.add(target)
                    waiting.append(target)
            return seen

        reached = {top: reach(top) for top in after}
        groups = {
            frozenset(other for other in reached[top] if top in reached[other])
            for top in after
            if top in reached[top]
        }
        return sorted(groups, key=lambda group: (-len(group), sorted(group)))

    def cycle(self, knot):
        """The shortest way round in a knot: its edges, in order."""
        best = None
        for start in sorted(knot):
            ways, waiting = {start: []}, [start]
            while waiting and best is None or waiting and len(ways[waiting[0]]) < len(best):
                here = waiting.pop(0)
                for source, target in sorted(self.edges):
                    if source != here or target not in knot:
                        continue
                    way = [*ways[here], (source, target)]
                    if target == start and (best is None or len(way) < len(best)):
                        best = way
                    if target not in ways:
                        ways[target] = way
                        waiting.append(target)
        return best


def roots(crate):
    source = crate / "src"
    found = [source / "lib.rs", source / "main.rs", *sorted(source.glob("bin/*.rs"))]
    return [file for file in found if file.exists()]


def main(arguments):
    home = Path(__file__).resolve().parent.parent
    crates = sorted(path for path in (home / "crates").iterdir() if (path / "Cargo.toml").exists())
    if arguments[:1] == ["--edges"]:
        for root in roots(home / "crates" / arguments[1]):
            crate = Crate(root)
            for (source, target), places in sorted(crate.edges.items()):
                for file, line, named in places:
                    print(f"{source} -> {target}\t{file.relative_to(home)}:{line}\t{named}")
        return 0

    failed, sizes = [], []
    for path in crates:
        largest = 1
        for root in roots(path):
            crate = Crate(root)
            for knot in crate.knots():
                largest = max(largest, len(knot))
                failed.append(f"crates/{path.name}: {len(knot)} modules reach each other: {', '.join(sorted(knot))}")
                for source, target in crate.cycle(knot):
                    file, line, named = crate.edges[source, target][0]
                    failed.append(f"    {source} -> {target}: {file.relative_to(home)}:{line} ({named})")
        sizes.append(f"{path.name} {largest}")
    print(f"largest cycle of modules: {', '.join(sizes)}")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
