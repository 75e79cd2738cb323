"""What mk/prose.py counts and what it leaves alone: `python3 -m unittest mk/test_prose.py`."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import prose


def rules(path: str, text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in prose.findings_in(path, text)[0]]


def lengths(path: str, text: str) -> list[int]:
    return [sentence.words for sentence in prose.sentences_in(path, text)]


LONG = "word " * 30


class Sentences(unittest.TestCase):
    def test_end_at_full_stops_that_are_followed_by_a_beginning(self) -> None:
        self.assertEqual(lengths("a.md", "One two. Three `vmfork a. B` four! Is it 0.5 s? Yes, e.g. Debian 12."), [2, 3, 4, 4])

    def test_lists_are_sentences_of_their_own_and_lines_are_joined(self) -> None:
        self.assertEqual(lengths("a.md", "One\ntwo:\n\n- three four\n  five\n- six\n1. seven\n"), [2, 3, 1, 1])

    def test_code_headings_and_comments_do_not_count(self) -> None:
        text = f"# {LONG}\n\n```sh\n{LONG}\n```\n<!-- {LONG} -->\n\n    {LONG}\n\nOne [two three](four).\n"
        self.assertEqual(lengths("a.md", text), [3])

    def test_cells_are_bounded_but_do_not_lower_the_mean(self) -> None:
        text = f"One two three four.\n\n| a | b |\n|---|---|\n| c | {LONG} |\n"
        self.assertEqual(rules("a.md", text), [(5, "long")])
        self.assertEqual(prose.findings_in("a.md", text)[1], 4)

    def test_bounds(self) -> None:
        for words, rule in [(25, []), (26, [(1, "long")]), (40, [(1, "long")]), (41, [(1, "endless")])]:
            self.assertEqual(rules("a.md", " ".join(["w"] * words)), rule)


class Comments(unittest.TestCase):
    def test_of_rust_are_told_from_strings_and_characters(self) -> None:
        text = f"""
//! {LONG}
fn f<'a>(x: &'a str) {{ let _ = ("// {LONG}", r#"" // {LONG}"#, '"', '\\''); }} // {LONG}
/* {LONG} */
"""
        self.assertEqual([line for line, rule in rules("a.rs", text) if rule == "long"], [2, 3, 4])

    def test_of_rust_are_not_lost_behind_a_quotation_mark(self) -> None:
        self.assertEqual(lengths("a.rs", "let a = '\"'; // one\nlet b = b'\"'; // two three\n"), [1, 2])

    def test_that_follow_each_other_are_one_text(self) -> None:
        self.assertEqual(lengths("a.rs", "// one\n// two\n//\n// three\n/// four\n"), [2, 1, 1])
        self.assertEqual(lengths("a.sh", "#!/bin/sh\n# one\n# two\nx=1 # not looked at\n# three\n"), [2, 1])

    def test_of_python_and_its_docstrings(self) -> None:
        text = f'"""One two."""\n\n\ndef f():\n    """{LONG}"""\n    x = "{LONG}"  # three\n    # four\n    return x\n'
        self.assertEqual(sorted(lengths("a.py", text)), [1, 1, 2, 30])
        self.assertEqual([line for line, rule in rules("a.py", text) if rule == "long"], [5])

    def test_of_other_files_do_not_count(self) -> None:
        self.assertEqual(rules("a.json", f'{{"a": "{LONG} // nobody"}}'), [(1, "words")])


class Words(unittest.TestCase):
    def test_are_found_wherever_they_stand_with_a_remedy(self) -> None:
        (finding,) = prose.findings_in("a.rs", 'x\nlet a = "Whoever asks";\n')[0]
        self.assertEqual((finding.line, finding.rule), (2, "words"))
        self.assertIn("the caller", str(finding))

    def test_as_parts_of_others_are_not(self) -> None:
        self.assertEqual(rules("a.md", "canewas, nobodys_fault, so manyfold"), [])


class Width(unittest.TestCase):
    def test_of_documents_and_comments(self) -> None:
        self.assertEqual(rules("a.md", f"{'x ' * 61}\n"), [(1, "endless"), (1, "wide")])
        self.assertEqual(rules("a.rs", f"// {'x' * 50} {'y' * 50}\nlet {'x' * 100} = 1;\n"), [(1, "wide")])

    def test_of_what_cannot_be_wrapped_is_free(self) -> None:
        self.assertEqual(rules("a.md", f"| {'x' * 130} |\n\n```\n{'x' * 130}\n```\n"), [])
        self.assertEqual(rules("a.rs", f"// {'x' * 120}\n"), [])

    def test_wrapping_keeps_every_word_and_what_is_no_paragraph(self) -> None:
        text = (
            "    /// One {0}\n    /// two.\n    ///\n    /// - three {0}\n    ///   four\n    /// | {0} |\n"
            "    /// ```text\n    ///  a   {0}\n    /// ```\n    /// short\n    /// lines\n    let x = 1; // {0}\n"
        ).format("word " * 20 + "end")
        after = prose.wrapped("a.rs", text)
        self.assertEqual(after.replace("///", "").split(), text.replace("///", "").split())
        lines = after.split("\n")
        self.assertTrue(all(len(line) <= 100 for line in lines[:5]), after)
        self.assertIn("    ///   word", after)
        self.assertEqual(lines[-8:], text.split("\n")[-8:])
        self.assertEqual(prose.wrapped("a.rs", after), after)

    def test_wrapping_keeps_the_marks_of_comments(self) -> None:
        for path, mark in [("a.py", "#: "), ("a.py", "    # "), ("a.sh", "# "), ("a.rs", "//! "), ("a.md", "")]:
            lines = prose.wrapped(path, mark + "word " * 40 + "\n").rstrip("\n").split("\n")
            self.assertEqual(len(lines), 3 if path != "a.md" else 2, path)
            self.assertTrue(all(line.startswith(f"{mark}word") for line in lines), lines)

    def test_wrapping_keeps_together_what_belongs_together(self) -> None:
        for gap in range(80, 101):
            after = prose.wrapped("a.rs", f"// {'x' * (gap - 5)} 12 MiB, 3 s {'y' * 20}\n")
            self.assertIn("12 MiB,", after)
            self.assertIn("3 s", after)
            after = prose.wrapped("a.rs", f"// {'x' * (gap - 5)} `code of three` {'y' * 20}\n")
            self.assertIn("`code of three`", after)

    def test_wrapping_of_docstrings(self) -> None:
        long = "word " * 25 + "end"
        text = f'''def f():
    """One {long}
    two.

    - item {long}
      more

        example {long}
    last {long}."""
    return 1  # {long}
'''
        after = prose.wrapped("a.py", text)
        self.assertEqual(after.split(), text.split())
        self.assertEqual(compile(after, "a", "exec").co_names, compile(text, "a", "exec").co_names)
        wide = [line.split()[0] for line in after.split("\n") if len(line) > 100]
        self.assertEqual(wide, ["example", "return"])
        self.assertIn("\n    - item word", after)
        self.assertIn("\n      word", after)
        self.assertEqual(prose.wrapped("a.py", after), after)


class Ratchet(unittest.TestCase):
    def test_a_number_may_only_shrink(self) -> None:
        limits = {"a": {"long": 2.0}}
        self.assertEqual(prose.over(limits, {"a": {"long": 3.0}}), [("a", "long", 3.0, 2.0)])
        self.assertEqual(prose.over(limits, {"a": {"long": 2.0}}), [])
        self.assertEqual(prose.over(limits, {"b": {"words": 1.0}}), [("b", "words", 1.0, 0)])

    def test_a_file_may_be_moved_or_split_but_nothing_may_be_added(self) -> None:
        limits = {"a": {"long": 2.0}, "d.md": {"mean": 20.0}}
        self.assertEqual(prose.risen(limits, {"b": {"long": 1.0}, "c": {"long": 1.0}, "e.md": {"mean": 20.0}}), [])
        self.assertEqual(prose.risen(limits, {"a": {"long": 2.0}, "c": {"long": 1.0}}), ["long"])
        self.assertEqual(prose.risen(limits, {"d.md": {"mean": 20.5}}), ["mean"])
        self.assertEqual(prose.risen(limits, {"d.md": {"mean": 19.0}, "e.md": {"mean": 18.0}}), [])


if __name__ == "__main__":
    unittest.main()
