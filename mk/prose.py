#!/usr/bin/python3
"""Counts what breaks the rules of docs/STYLE.md, and compares it with what is allowed.

    mk/prose.py             compare every file with its limits in mk/prose.json
    mk/prose.py FILE...     list all findings in these files
    mk/prose.py --figures   the two figures: lines with discouraged words, mean words per sentence
    mk/prose.py --record    record lower numbers; moves a file's limits along with the file
    mk/prose.py --accept    record the numbers as they are, higher ones too: a reviewer sees the difference
    mk/prose.py --wrap FILE...   wrap the paragraphs of these files that have too wide a line

Rules, and where they apply:

    words    a discouraged word in a document, a program or a script
    long     a sentence of more than 25 words, in a document or a comment
    endless  a sentence of more than 40 words
    wide     a comment line of more than 100 columns, a document line of more than 120
    mean     a document's mean words per sentence, above 16

The limits are a ratchet: a number may only shrink, and one that shrank must be recorded. A new file
has no allowance.

Left to others: spelling (codespell), layout of code (rustfmt), whether a text is true.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "mk/prose.json"

LONG_WORDS = 25
ENDLESS_WORDS = 40
MEAN_WORDS = 16.0
COMMENT_COLUMNS = 100
DOCUMENT_COLUMNS = 120

# Every discouraged word with what to write in its place.
WORDS = {
    r"nobody|no one": "name the actor: “no VM”, “no client”",
    r"whoever|whomever": "name the actor: “the caller”, “any client”",
    r"so many": "“at most N”, “this many”",
    r"(?:own|'s) affair": "“X decides”, “left to X”",
    r"had best": "“should”",
    r"in vain": "“failed”",
    r"anew|afresh": "“again”, “new”",
    r"whose turn": "“tick”, “next”",
    r"for ever": "“forever”, or the bound",
}
WORD = re.compile("|".join(rf"(?P<w{n}>\b(?:{word})\b)" for n, word in enumerate(WORDS)), re.IGNORECASE)
# The three whose lines the project counts as a figure.
FIGURE = re.compile(r"nobody|whoever|so many", re.IGNORECASE)

DOCUMENT = {".md"}
HASH = {".sh", ".toml", ".service", ".ini", ".packages", ".makefile"}
SLASHES = {".rs", ".c", ".h", ".S"}
# What quotes the discouraged words because it is about them.
EXEMPT = {"docs/STYLE.md", "mk/prose.py", "mk/test_prose.py", "docs/decisions/0024-prose-is-checked-by-a-script.md"}

REMEDIES = {
    "words": "see docs/STYLE.md, Words",
    "long": f"split it: at most {LONG_WORDS} words",
    "endless": f"split it: more than {ENDLESS_WORDS} words",
    "wide": f"wrap it: comments {COMMENT_COLUMNS} columns, documents {DOCUMENT_COLUMNS}",
    "mean": f"shorter sentences: a mean of at most {MEAN_WORDS:g} words",
}


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Sentence:
    line: int
    text: str
    # Whether it stands in a table: a cell is too short to count for a document's mean.
    cell: bool

    @functools.cached_property
    def words(self) -> int:
        return len(words_of(self.text))


# --- from text to sentences -------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """What a reader counts as words: a path, a figure with its unit or a `piece of code` is one."""
    text = re.sub(r"`[^`]*`", "code", text)
    return [word for word in text.split() if re.search(r"\w", word)]


def plain(text: str) -> str:
    """Inline Markdown without its marks: links by their text, code by one word."""
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"`[^`]*`", lambda code: "`" + re.sub(r"[^\w`]+", "_", code[0][1:-1]) + "`", text)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    return re.sub(r"[*]{1,2}", "", text)


# A full stop ends a sentence, unless it belongs to one of these.
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|approx|No|Fig|St)|\b[A-Z])\.$")
END = re.compile(r"[.!?][\"”’')\]]*(?=\s+[\"“‘'(\[]?[A-Z0-9`/_\-→≤])")


def sentences_of(text: str) -> list[str]:
    """The sentences of one paragraph."""
    text = re.sub(r"\s+", " ", plain(text)).strip()
    found: list[str] = []
    begin = 0
    for end in END.finditer(text):
        if ABBREVIATION.search(text[begin : end.start() + 1]):
            continue
        found.append(text[begin : end.end()].strip())
        begin = end.end()
    found.append(text[begin:].strip())
    return [sentence for sentence in found if words_of(sentence)]


def paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, bool]]:
    """Of Markdown's (number, line): each paragraph, list item and table cell; → (line, text, is a
    cell).

    Left out: code blocks, headings, rules, HTML comments, link definitions.
    """
    fence = ""
    comment = False
    begin, text = 0, ""
    for number, line in lines:
        stripped = line.strip()
        flush = False
        add = stripped
        if fence:
            if stripped.startswith(fence):
                fence = ""
            continue
        if comment:
            comment = "-->" not in stripped
            continue
        if opened := re.match(r"(?:`{3,}|~{3,})", stripped):
            fence, add, flush = opened[0], "", True
        elif not stripped or re.match(r"#{1,6} |-{3,}$|\[[^\]]+\]: ", stripped):
            add, flush = "", True
        elif stripped.startswith("<!--"):
            comment = "-->" not in stripped
            add, flush = "", True
        elif stripped.startswith("|"):
            if text:
                yield begin, text, False
                text = ""
            if not re.fullmatch(r"[|\s:-]+", stripped):
                for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                    if cell.strip():
                        yield number, cell, True
            continue
        elif item := re.match(r"(?:[-*+]|\d+[.)])\s+(.*)", stripped):
            add, flush = item[1], True
        elif quote := re.match(r">\s?(.*)", stripped):
            add = quote[1]
            flush = not add
        elif not text and (line.startswith("    ") or line.startswith("\t")):
            # Indented code: no paragraph goes before it.
            continue
        if flush and text:
            yield begin, text, False
            text = ""
        if add:
            if not text:
                begin = number
            text = f"{text} {add}"
    if text:
        yield begin, text, False


# --- from programs to comments ----------------------------------------------------------------


# A block of comment lines that stand together: (number, text without the comment's marks).
Block = list[tuple[int, str]]

SLASH_TOKENS = re.compile(
    r"""
      (?P<raw>\bb?r(?P<hashes>\#*)".*?"(?P=hashes))
    | (?P<string>b?"(?:\\.|[^"\\])*")
    | (?P<char>'(?:\\.[^']*|[^'\\\n])')
    | (?P<line>//[^\n]*)
    | (?P<block>/\*.*?\*/)
    """,
    re.VERBOSE | re.DOTALL,
)


def slash_comments(text: str) -> list[Block]:
    """Comments of Rust and C. A block goes on as long as each line is one, of the same kind."""
    blocks: list[Block] = []
    last: tuple[int, str, int] | None = None
    number, counted = 1, 0
    for token in SLASH_TOKENS.finditer(text):
        number += text.count("\n", counted, token.start())
        counted = token.start()
        if token["line"]:
            mark = re.match(r"//[/!]?", token[0])
            assert mark is not None
            column = token.start() - text.rfind("\n", 0, token.start())
            line = (number, token[0][mark.end() :].removeprefix(" "))
            if last == (number - 1, mark[0], column):
                blocks[-1].append(line)
            else:
                blocks.append([line])
            last = (number, mark[0], column)
        elif token["block"]:
            inner = token[0][2:-2].split("\n")
            blocks.append([(number + n, re.sub(r"^\s*\*+ ?", "", line).strip()) for n, line in enumerate(inner)])
            last = None
    return blocks


def hash_comments(text: str) -> list[Block]:
    """Comments that have lines of their own, of shell, TOML and the like."""
    blocks: list[Block] = []
    before = -1
    for number, line in enumerate(text.splitlines(), 1):
        if not (comment := re.match(r"\s*#(?!!)\s?(.*)", line)) or comment[1].startswith("shellcheck "):
            continue
        if before == number - 1:
            blocks[-1].append((number, comment[1]))
        else:
            blocks.append([(number, comment[1])])
        before = number
    return blocks


def python_comments(text: str) -> list[Block]:
    """Comments and docstrings of Python."""
    blocks: list[Block] = []
    last = (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
            number, column = token.start
            line = (number, re.sub(r"^#+:? ?", "", token.string))
            if last == (number - 1, column):
                blocks[-1].append(line)
            else:
                blocks.append([line])
            last = (number, column)
    for first, lines in docstrings(text):
        blocks.append([(first.lineno + n, line) for n, line in enumerate(lines.split("\n"))])
    return blocks


def docstrings(text: str) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if lines := ast.get_docstring(node, clean=True):
                yield node.body[0], lines


def kind_of(path: str) -> str:
    name = Path(path).name
    if name in ("Makefile", "packages", "run"):
        return ".sh"
    return Path(path).suffix


@functools.lru_cache(maxsize=4)
def blocks_of(path: str, text: str) -> list[Block]:
    """All prose of a file, in blocks of Markdown."""
    kind = kind_of(path)
    if kind in DOCUMENT:
        return [list(enumerate(text.splitlines(), 1))]
    if kind in SLASHES:
        return slash_comments(text)
    if kind == ".py":
        return python_comments(text)
    return hash_comments(text) if kind in HASH else []


def sentences_in(path: str, text: str) -> Iterator[Sentence]:
    for block in blocks_of(path, text):
        for line, paragraph, cell in paragraphs(block):
            for sentence in sentences_of(paragraph):
                yield Sentence(line, sentence, cell)


# --- the rules --------------------------------------------------------------------------------


def mean_of(sentences: Iterable[Sentence]) -> float:
    """Mean words per sentence outside tables; 0 without any."""
    counts = [sentence.words for sentence in sentences if not sentence.cell]
    return sum(counts) / len(counts) if counts else 0.0


def wide_lines(path: str, text: str) -> Iterator[tuple[int, int]]:
    """(line, columns) of what is wider than it may be."""
    lines = text.splitlines()
    if kind_of(path) in DOCUMENT:
        fenced = False
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith(("```", "~~~")):
                fenced = not fenced
            # A table's row cannot be wrapped; code is as it is.
            elif not fenced and not line.startswith("|") and len(line) > DOCUMENT_COLUMNS:
                yield number, len(line)
        return
    for block in blocks_of(path, text):
        for number, part in block:
            line = lines[number - 1] if number <= len(lines) else ""
            # A link cannot be wrapped, nor a row of a table.
            if len(line) > COMMENT_COLUMNS and not re.fullmatch(r"\S*|\|.*", part.strip()):
                yield number, len(line)


def findings_in(path: str, text: str) -> tuple[list[Finding], float]:
    """What breaks a rule, and the mean words per sentence."""
    found: list[Finding] = []
    if path not in EXEMPT:
        remedies = list(WORDS.values())
        for word in WORD.finditer(text):
            number = text.count("\n", 0, word.start()) + 1
            remedy = remedies[int(word.lastgroup[1:])] if word.lastgroup else ""
            found.append(Finding(path, number, "words", f"“{word[0]}”: write {remedy}"))
    sentences = list(sentences_in(path, text))
    for sentence in sentences:
        if sentence.words > LONG_WORDS and path not in EXEMPT:
            rule = "endless" if sentence.words > ENDLESS_WORDS else "long"
            begin = " ".join(sentence.text.split()[:6])
            found.append(Finding(path, sentence.line, rule, f"{sentence.words} words, “{begin} …”: {REMEDIES[rule]}"))
    for number, columns in wide_lines(path, text):
        found.append(Finding(path, number, "wide", f"{columns} columns: {REMEDIES['wide']}"))
    return found, mean_of(sentences)


def numbers_of(path: str, text: str) -> dict[str, float]:
    """What is counted of a file, by rule; what is in order is left out."""
    numbers: dict[str, float] = {}
    findings, mean = findings_in(path, text)
    for finding in findings:
        numbers[finding.rule] = numbers.get(finding.rule, 0) + 1
    if kind_of(path) in DOCUMENT and round(mean, 1) > MEAN_WORDS:
        numbers["mean"] = round(mean, 1)
    return numbers


# --- wrapping ---------------------------------------------------------------------------------


# Before the text of a line: where it stands, the comment's mark, an item's mark.
MARGIN = re.compile(r'(?P<mark>\s*(?://[/!]?|#(?!!):?|""")?\s*)(?P<item>(?:[-*+]|\d+[.)])\s+)?')
# A number stays with its unit, a piece of code in one line.
JOINED = re.compile(r"(?<=\d) (?=(?:[KMG]iB|[kMG]B|[mµn]?s|%)(?![\w]))|`[^`]{1,60}`")


def is_fixed(path: str, line: str, docstring: bool) -> bool:
    """Whether a line is no part of a paragraph: code, a row of a table, a picture, a heading."""
    if docstring:
        return line.strip() in ("", '"""') or bool(re.match(r"\s*(?:[|>]|\S+  )", line))
    mark = {".md": r"", ".py": r"#:?", ".rs": r"//[/!]?", ".c": r"//", ".h": r"//", ".S": r"//"}.get(kind_of(path), "#")
    comment = re.match(rf"\s*{mark}(?P<text>.*)", line)
    if not comment:
        return True
    text = comment["text"]
    return not text.strip() or bool(re.match(r"\s*(?:[|>]|#+ |<!--|\[[^\]]+\]: |shellcheck )|\s{5,}|!", text))


def wrapped(path: str, text: str) -> str:
    """The text with each paragraph wrapped that has too wide a line; comments after code stay as
    they are."""
    columns = DOCUMENT_COLUMNS if kind_of(path) in DOCUMENT else COMMENT_COLUMNS
    lines = text.split("\n")
    wide = {number for number, _ in wide_lines(path, text)}
    comments = {number for block in blocks_of(path, text) for number, _ in block}
    strings: dict[int, int] = {}
    if kind_of(path) == ".py":
        for first, _ in docstrings(text):
            strings |= dict.fromkeys(range(first.lineno, (first.end_lineno or 0) + 1), first.col_offset)
    out: list[str] = []
    fenced = False
    at = 0
    while at < len(lines):
        line = lines[at]
        body = re.sub(r"^\s*(?://[/!]?|#:?)?\s*", "", line)
        if body.startswith(("```", "~~~")):
            fenced = not fenced
        if fenced or body.startswith(("```", "~~~")) or at + 1 not in comments or is_fixed(path, line, at + 1 in strings):
            out.append(line)
            at += 1
            continue
        margin = MARGIN.match(line)
        assert margin is not None
        mark, item = margin["mark"], margin["item"] or ""
        rest = mark.replace('"""', "") + " " * len(item)
        if at + 1 in strings and len(mark.replace('"""', "")) > strings[at + 1]:
            # Indented in a docstring: an example, or a table of terms.
            out.append(line)
            at += 1
            continue
        paragraph = [line]
        while at + len(paragraph) < len(lines):
            number = at + len(paragraph)
            after = lines[number]
            found = MARGIN.match(after)
            assert found is not None
            body = after[found.end() :]
            fixed = is_fixed(path, after, number + 1 in strings)
            if number + 1 not in comments or fixed or found["item"] or body.startswith(("```", "~~~")):
                break
            if found["mark"].rstrip() != rest.rstrip() or len(found["mark"]) != len(rest):
                break
            paragraph.append(after)
        if wide.isdisjoint(range(at + 1, at + len(paragraph) + 1)):
            out += paragraph
        else:
            words = " ".join([paragraph[0][margin.end() :]] + [one[len(rest) :] for one in paragraph[1:]])
            folded = textwrap.wrap(
                JOINED.sub(lambda part: part[0].replace(" ", "\N{NO-BREAK SPACE}"), words),
                columns,
                initial_indent=mark + item,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
            out += [line.replace("\N{NO-BREAK SPACE}", " ") for line in folded]
        at += len(paragraph)
    result = "\n".join(out)
    # Only marks of comments may come or go.
    marks = {"//", "///", "//!", "#", "#:"}
    kept, wanted = ([word for word in it.split() if word not in marks] for it in (result, text))
    assert kept == wanted, path
    return result


# --- the ratchet ------------------------------------------------------------------------------


Numbers = dict[str, dict[str, float]]


def over(limits: Numbers, numbers: Numbers) -> list[tuple[str, str, float, float]]:
    """Every (file, rule, number, limit) whose number is higher than its limit."""
    return [
        (path, rule, number, limits.get(path, {}).get(rule, 0))
        for path, rules in sorted(numbers.items())
        for rule, number in sorted(rules.items())
        if number > limits.get(path, {}).get(rule, 0)
    ]


def total(numbers: Numbers, rule: str) -> float:
    """Of all files: the sum, or the highest mean."""
    of = [rules.get(rule, 0) for rules in numbers.values()]
    return max(of, default=0) if rule == "mean" else sum(of)


def risen(limits: Numbers, numbers: Numbers) -> list[str]:
    """Rules whose total is higher than before: a moved or split file leaves them as they are."""
    return [rule for rule in REMEDIES if total(numbers, rule) > total(limits, rule)]


def as_json(numbers: Numbers) -> str:
    """One line per file, so that two branches conflict only where both changed a file."""
    lines = [f"  {json.dumps(path)}: {json.dumps(rules, sort_keys=True)}" for path, rules in sorted(numbers.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def tracked() -> list[str]:
    """Files with prose that git knows or would add; a file that is being deleted is not among
    them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    kinds = DOCUMENT | HASH | SLASHES | {".py"}
    return [path for path in sorted(set(listed.split("\0")) - {""}) if kind_of(path) in kinds and (ROOT / path).is_file()]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def all_numbers() -> Numbers:
    every = {path: numbers_of(path, read(path)) for path in tracked()}
    return {path: rules for path, rules in every.items() if rules}


def figures() -> None:
    paths = tracked()
    lines: dict[str, int] = {}
    for path in paths:
        if path not in EXEMPT:
            if count := sum(bool(FIGURE.search(line)) for line in read(path).splitlines()):
                top = "/".join(path.split("/")[:2])
                lines[top] = lines.get(top, 0) + count
    for top, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{count:6}  {top}")
    print(f"{sum(lines.values()):6}  lines with “nobody”, “whoever” or “so many”; to reach: at most 30\n")
    every: list[Sentence] = []
    for path in (path for path in paths if path.startswith("docs/") and kind_of(path) in DOCUMENT):
        sentences = list(sentences_in(path, read(path)))
        every += sentences
        if mean := mean_of(sentences):
            print(f"{mean:6.1f}  {path}")
    print(f"{mean_of(every):6.1f}  mean words per sentence in docs/; to reach: at most {MEAN_WORDS:g}")


def record(limits: Numbers, accept: bool) -> int:
    numbers = all_numbers()
    if not accept and (rules := risen(limits, numbers)):
        for path, rule, number, limit in over(limits, numbers):
            if rule in rules:
                print(f"{path}: {rule}: {number:g}, recorded are {limit:g}", file=sys.stderr)
        print(f"error: more than before in all files together: {', '.join(rules)}", file=sys.stderr)
        print("hint: rewrite by docs/STYLE.md; `mk/prose.py FILE` lists the findings of a file", file=sys.stderr)
        return 1
    LIMITS.write_text(as_json(numbers), encoding="utf-8")
    return 0


def check(limits: Numbers) -> int:
    numbers = all_numbers()
    failed = over(limits, numbers)
    for path, rule, number, limit in failed:
        for finding in findings_in(path, read(path))[0]:
            if finding.rule == rule:
                print(finding, file=sys.stderr)
        print(f"{path}: {rule}: {number:g}, at most {limit:g} allowed: {REMEDIES[rule]}\n", file=sys.stderr)
    if failed:
        print("error: prose breaks docs/STYLE.md where it did not before", file=sys.stderr)
        print("hint: rewrite what is listed; for a file that was moved or split: mk/prose.py --record", file=sys.stderr)
        return 1
    if over(numbers, limits):
        print("error: prose is better than mk/prose.json says", file=sys.stderr)
        print("hint: record it, so that it stays: mk/prose.py --record", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    limits: Numbers = json.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}
    match arguments:
        case []:
            return check(limits)
        case ["--figures"]:
            figures()
            return 0
        case ["--record"]:
            return record(limits, accept=False)
        case ["--accept"]:
            return record(limits, accept=True)
        case [option, *_] if option.startswith("-") and option != "--wrap":
            print(__doc__, file=sys.stderr)
            return 2
    wrap = arguments[0] == "--wrap"
    for argument in arguments[wrap:]:
        path = Path(argument).resolve().relative_to(ROOT).as_posix()
        text = read(path)
        if wrap:
            (ROOT / path).write_text(wrapped(path, text), encoding="utf-8")
            continue
        findings, mean = findings_in(path, text)
        for finding in findings:
            print(finding)
        if kind_of(path) in DOCUMENT:
            print(f"{path}: mean {mean:.1f} words per sentence")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
