"""What the .md files say is there: links, anchors, paths, flags, variables.

  documentation_test.py --quantd BINARY [unittest arguments]
"""

import argparse
import os
import re
import sys
import tempfile
import unittest

import configuration

ROOT = configuration.ROOT
README_LINES = 250
# Folders that are made, not kept.
MADE = {"build", "node_modules", "__pycache__"}
TOP_FOLDERS = ("proto", "core", "server", "client", "deploy", "tests")

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def markdown_files(folder):
    """Paths of all of them, relative to the folder."""
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in MADE
                      and (not name.startswith(".") or name == ".github")]
        found += [os.path.relpath(os.path.join(base, name), folder)
                  for name in names if name.endswith(".md")]
    return sorted(found)


def prose(text):
    """A file without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)


def anchors(text):
    """Those of a file's headings, as code hosts make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose(text), re.M):
        heading = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        unique = slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found


def broken_links(folder):
    """What is wrong, a line each."""
    wrong = []
    for name in markdown_files(folder):
        text = prose(read(os.path.join(folder, name)))
        text = re.sub(r"`[^`\n]*`", "", text)
        links = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
        links += re.findall(r"^\[[^\]]+\]: +(\S+)", text, re.M)
        for link in links:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(
                folder, os.path.dirname(name), path) if path else
                os.path.join(folder, name))
            if not os.path.exists(target):
                wrong.append(f"{name}: there is no {link}")
            elif anchor and anchor not in anchors(read(target)):
                wrong.append(f"{name}: no heading makes {link}")
    return wrong


class LinksTest(unittest.TestCase):

    def test_EveryLinkLeadsSomewhere(self):
        self.assertGreater(len(markdown_files(ROOT)), 10)
        self.assertEqual(broken_links(ROOT), [])

    def test_BrokenLinksAreSeen(self):
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "sub"))
            with open(os.path.join(folder, "sub/README.md"), "w",
                      encoding="utf-8") as file:
                file.write("# One `two`\n## Same\n## Same\n"
                           "```\n# Code\n[no](link.md)\n```\n"
                           "[a](#one-two) [b](#same-1) [c](#code)\n"
                           "[d](../sub/README.md#same) [e](gone.md)\n"
                           "[f](https://example.com/gone.md) `[g](gone.md)`\n"
                           "![h](../gone.svg)\n")
            self.assertEqual(broken_links(folder), [
                "sub/README.md: no heading makes #code",
                "sub/README.md: there is no gone.md",
                "sub/README.md: there is no ../gone.svg"])

    def test_EveryPathExists(self):
        count = 0
        for name in markdown_files(ROOT):
            for path in re.findall(
                    rf"`((?:{'|'.join(TOP_FOLDERS)})/[\w./-]*)`",
                    read(os.path.join(ROOT, name))):
                # What the reader makes.
                if path.startswith(("deploy/secrets",
                                    "deploy/kubernetes/overlays/mine")):
                    continue
                count += 1
                # Tests have the names of their files.
                tried = [path] + [f"tests/{path}{end}" for end in (
                    ".cc", ".py")]
                self.assertTrue(any(
                    os.path.exists(os.path.join(ROOT, one)) for one in tried),
                    f"{name}: {path}")
        self.assertGreater(count, 50)

    def test_EveryFolderHasAManualThatTheReadmeNames(self):
        text = read(os.path.join(ROOT, "README.md"))
        for folder in TOP_FOLDERS:
            self.assertIn(f"({folder}/README.md", text)
        self.assertLessEqual(len(text.splitlines()), README_LINES)


class FlagsTest(unittest.TestCase):

    def test_TheServersManualHasEveryFlagAndItsDefault(self):
        quantd = configuration.Quantd(options.quantd)
        effective = quantd.effective({"HOME": "/root"})
        rows = {}
        for names, default in re.findall(
                r"^\| (`--[^|]*) \| ([^|]*) \|",
                read(os.path.join(ROOT, "server/README.md")), re.M):
            for flag in re.findall(r"`--([a-z-]+)`", names):
                self.assertNotIn(flag, rows)
                rows[flag] = default
        self.assertEqual(set(rows),
                         quantd.flags - {"help", "version", "print-config",
                                         "check-store"})
        for flag, default in rows.items():
            # Those that are another thing on every machine.
            if flag in ("config", "store", "threads"):
                continue
            value = effective[flag]
            if isinstance(value, list):
                value = ",".join(value)
            self.assertEqual(
                {"": "none", "False": "false"}.get(str(value), str(value)),
                default, flag)

    def test_TheTestsManualHasEveryVariable(self):
        listed = set(re.findall(r"`(QUANTD_[A-Z_]+)`",
                                read(os.path.join(ROOT, "tests/README.md"))))
        used = set()
        for base, _, names in os.walk(os.path.join(ROOT, "tests")):
            for name in names:
                if name.endswith(("_test.cc", "_test.py")):
                    used |= set(re.findall(
                        r'(?:getenv|environ\.get|Count|FromEnvironment)\(\s*'
                        r'"(QUANTD_[A-Z_]+)"|'
                        r'"(QUANTD_DIVISION_[A-Z]+)"',
                        read(os.path.join(base, name))))
        used = {name for pair in used for name in pair if name}
        # How tests run themselves.
        used -= {name for name in used if name.startswith("QUANTD_TEST_")}
        self.assertGreater(len(used), 10)
        self.assertEqual(listed, used)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
