"""Which modules of the package stand on which."""

import ast
import os
import unittest

PACKAGE = os.path.join(os.path.dirname(os.path.realpath(__file__)),
                       "../../../client/python/src/quantd")


def imports(path, modules):
    """The modules of the package that a file names, for types or inside of
    functions too."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "quantd":
            names = [f"quantd.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        yield from modules.intersection(
            name.removeprefix("quantd.") for name in names
            if name.startswith("quantd."))


def circle(graph):
    """Modules that stand on each other, one after another; empty for none."""
    done = set()

    def visit(name, path):
        if name in path:
            return path[path.index(name):]
        if name not in done:
            for other in sorted(graph[name]):
                found = visit(other, [*path, name])
                if found:
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph)
                 if (found := visit(name, []))), [])


class ImportsTest(unittest.TestCase):

    def test_NoModulesStandOnEachOther(self):
        modules = {name[:-3] for name in os.listdir(PACKAGE)
                   if name.endswith(".py") and name != "__init__.py"}
        graph = {name: set(imports(os.path.join(PACKAGE, f"{name}.py"),
                                   modules)) for name in modules}
        self.assertIn("errors", graph["tensor"])
        self.assertEqual(circle(graph), [])

    def test_ACircleIsSeen(self):
        graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
        self.assertEqual(circle(graph), ["b", "c"])


if __name__ == "__main__":
    unittest.main()
