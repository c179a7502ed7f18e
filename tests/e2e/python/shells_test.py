"""What `quantctl completion` and `quantctl man` print, in the shells and under
the checks of manual pages.

  shells_test.py --quantctl BINARY
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from live_server import PATIENCE_S

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

# Completes the words of "$@", the last one unfinished, and prints a candidate
# on each line.
BASH = r"""
source "$SCRIPT"
complete -p quantctl > /dev/null || exit 1
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_quantctl
[[ ${#COMPREPLY[@]} == 0 ]] || printf '%s\n' "${COMPREPLY[@]}"
"""

# Lets zsh find the script by itself, and prints the function that it found.
ZSH = r"""
fpath=($FOLDER $fpath)
autoload -U compinit
compinit -u -D
print -r -- "$_comps[quantctl]"
# The functions of the script; the first call would complete something.
source $FOLDER/_quantctl
_arguments() { print -rl -- "$@"; }
_quantctl_quantize
"""


def run(command, **keywords):
    return subprocess.run(command, check=False, encoding="utf-8",
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=PATIENCE_S, **keywords)


class ShellsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def written(self, name, *command):
        """Writes what a command prints to a file and returns its path."""
        result = run([options.quantctl, *command])
        self.assertEqual(result.returncode, 0, result.stderr)
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(result.stdout)
        return path

    def needs(self, program):
        if shutil.which(program) is None:
            self.skipTest(f"there is no {program}")

    def bash(self, script, *words):
        result = run(["bash", "-c", BASH, "bash", *words], cwd=self.folder,
                     env=dict(os.environ, SCRIPT=script))
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return result.stdout.split("\n")[:-1]

    def test_BashCompletesWhateverIsMeant(self):
        script = self.written("script", "completion", "bash")
        for name in ("a file.safetensors", "b.npy"):
            with open(os.path.join(self.folder, name), "wb"):
                pass
        for words, wanted in (
                (("quantctl", "quan"), ["quantize"]),
                (("quantctl", "--json", "encodings", "de"), ["delete"]),
                (("quantctl", "quantize", "--lay"), ["--layout"]),
                (("quantctl", "quantize", "--no-st"), ["--no-store"]),
                # Options of the program stand behind commands as well.
                (("quantctl", "models", "--bal"), ["--balance"]),
                (("quantctl", "models", "--lay"), []),
                (("quantctl", "quantize", "--layout", "p"),
                 ["pack-quantized"]),
                (("quantctl", "quantize", "--spec", "=", "mxfp4"),
                 ["mxfp4_e2m1"]),
                (("quantctl", "calibrate", "--granularity", "="),
                 ["default", "per-tensor", "per-channel", "group:32"]),
                (("quantctl", "help", "ser"), ["servers"]),
                (("quantctl", "bench", "--op", "e"), ["evaluate"]),
                (("quantctl", "completion", "z"), ["zsh"]),
                (("quantctl", "quantize", "a"), ["a file.safetensors"]),
                (("quantctl", "quantize", "x", "-o", "b"), ["b.npy"]),
                (("quantctl", "--tls-ca", "b"), ["b.npy"]),
                # A value is neither a command nor an option.
                (("quantctl", "quantize", "--model", "models", "--layo"),
                 ["--layout"]),
                (("quantctl", "quantize", "--model", ""), []),
                (("quantctl", "models", "b"), [])):
            with self.subTest(words=words):
                self.assertEqual(self.bash(script, *words), wanted)

    def test_BashKnowsWhatTheHelpKnows(self):
        script = self.written("script", "completion", "bash")

        def check(path):
            text = run([options.quantctl, *path, "--help"]).stdout
            listed = set(re.findall(r"^  (?:-\w, |    )(--[\w-]+)", text, re.M))
            self.assertGreater(len(listed), 10)
            self.assertLessEqual(
                listed, set(self.bash(script, "quantctl", *path, "-")))
            _, _, subcommands = text.partition("Commands:\n")
            names = re.findall(r"^  (\w+)  ",
                               subcommands.partition("\n\n")[0], re.M)
            if names:
                self.assertEqual(
                    self.bash(script, "quantctl", *path, ""), names)
            for name in names:
                check((*path, name))
            return len(names)

        self.assertGreater(check(()), 10)

    def test_ZshCompletes(self):
        self.needs("zsh")
        script = self.written("_quantctl", "completion", "zsh")
        result = run(["zsh", "-n", script])
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        result = run(["zsh", "-f", "-c", ZSH],
                     env=dict(os.environ, FOLDER=self.folder))
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        function, *specifications = result.stdout.splitlines()
        self.assertEqual(function, "_quantctl")
        self.assertIn("--restart[Do finished shards again as well]",
                      " ".join(specifications))
        for action in (":(quantd compressed-tensors pack-quantized)",
                       ":FILE:_files"):
            self.assertTrue(any(one.endswith(action)
                                for one in specifications), action)

    def test_FishCompletes(self):
        self.needs("fish")
        script = self.written("quantctl.fish", "completion", "fish")
        for line, wanted in (("quantctl quanti", {"quantize"}),
                             ("quantctl encodings de", {"delete"}),
                             ("quantctl quantize --layout pa",
                              {"pack-quantized"}),
                             ("quantctl models --balan", {"--balance"})):
            with self.subTest(line=line):
                result = run(["fish", "--no-config", "-c",
                              'source $argv[1]; complete -C"$argv[2]"',
                              script, line], env=dict(
                                  os.environ, HOME=self.folder))
                self.assertEqual(result.stderr, "")
                self.assertEqual({line.split("\t")[0] for line in
                                  result.stdout.splitlines()}, wanted)

    def test_TheManualPageIsSound(self):
        page = self.written("quantctl.1", "man")
        if shutil.which("mandoc") is not None:
            # The page has no date: one would be that of the build.
            found = run(["mandoc", "-T", "lint", "-W", "warning", page]).stdout
            self.assertEqual([line for line in found.splitlines()
                              if "missing date" not in line], [])
        self.needs("man")
        result = run(["man", "--warnings", "-l", page], env=dict(
            os.environ, MANWIDTH="80", LC_ALL="C.UTF-8"))
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        text = re.sub(r"\s+", " ", result.stdout)
        for part in ("NAME quantctl - Quantize tensors",
                     "-q, --quiet Print nothing but errors",
                     "Examples: quantctl quantize model.safetensors -o",
                     "--layout VALUE", "EXIT CODES 0 success",
                     "quantctl encodings delete [OPTION]... --model NAME "
                     "tensor"):
            self.assertIn(part, text)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
