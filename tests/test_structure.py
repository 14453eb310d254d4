"""The house's rules in numbers; `python tests/test_structure.py` prints them."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import density
import pytest


TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "hf_descent"


def modules() -> dict[str, ast.Module]:
    """Dotted name inside the package -> its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = (
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            .removesuffix("__init__")
            .removesuffix(".")
        )
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def classes(trees) -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def of_self(node: ast.ClassDef, kind: type) -> set[str]:
    """The attributes of `self` that a class stores (`ast.Store`) or reads (`ast.Load`)."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
        and isinstance(each.ctx, kind)
    }


def bases(name: str, known: dict[str, ast.ClassDef]) -> set[str]:
    """All classes of the package that a class is derived from."""
    direct = {
        base.id for base in known[name].bases if isinstance(base, ast.Name) and base.id in known
    }
    return direct.union(*(bases(base, known) for base in direct))


def shared_attributes(known) -> list[str]:
    """Attributes that one class stores and another one reads, in a sentence each.

    Three kinds: a class stores `self.x`, and a base or a derived class reads `self.x`; a class stores `self._x`, and
    any other class reads it of an object; a class stores `self.y.x`, and the class of `self.y` reads `self.x`.
    """
    stored = {name: of_self(node, ast.Store) for name, node in known.items()}
    fields = {
        name: stored[name]
        | {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        for name, node in known.items()
    }
    found = []
    for name, node in known.items():
        for base in bases(name, known):
            for writer, reader in ((name, base), (base, name)):
                names = (of_self(known[reader], ast.Load) & stored[writer]) - stored[reader]
                names -= {
                    item.name for item in known[reader].body if isinstance(item, ast.FunctionDef)
                }
                found += [
                    f"{writer} stores {attribute}, {reader} reads it" for attribute in sorted(names)
                ]
        own = stored[name] | {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        for each in ast.walk(node):
            if not isinstance(each, ast.Attribute):
                continue
            if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Attribute):
                kept = ast.unparse(each.value)
                readers = [
                    other
                    for other in known.keys() - {name}
                    if each.attr in fields[other] & of_self(known[other], ast.Load)
                ]
                found += [
                    f"{name} stores {each.attr} of {kept}, {reader} reads it" for reader in readers
                ]
            if each.attr.startswith("_") and not each.attr.startswith("__"):
                is_self = isinstance(each.value, ast.Name) and each.value.id in ("self", "cls")
                writers = [other for other in known if other != name and each.attr in stored[other]]
                if not is_self and writers and each.attr not in own:
                    found.append(f"{writers[0]} stores {each.attr}, {name} reads it")
    return sorted(set(found))


def imports(trees) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports when it is loaded."""
    found = defaultdict(set)
    for name, tree in trees.items():
        is_package = (PACKAGE / Path(*name.split("."))).is_dir()
        own = name.split(".") if name else []
        for node in tree.body:
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            up = own[: len(own) - node.level + is_package] if name else []
            target = ".".join([*up, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                inner = ".".join(filter(None, [target, alias.name]))
                found[name].add(inner if inner in trees else target)
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Circles of imports, each once."""
    found = set()

    def walk(path):
        for target in graph.get(path[-1], ()):
            if target in path:
                circle = path[path.index(target) :]
                start = circle.index(min(circle))
                found.add(tuple(circle[start:] + circle[:start]))
            elif len(path) < 12:
                walk([*path, target])

    for name in list(graph):
        walk([name])
    return sorted(map(list, found))


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between folders; modules at the root stand for themselves."""
    folders = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            one, other = name.split(".")[0], target.split(".")[0]
            if one != other:
                folders[one].add(other)
    return folders


@pytest.mark.parametrize(
    "reader",
    [
        "class Reader(Writer):\n  def read(self): return self._x",
        "class Reader:\n  def read(self, writer): return writer._x",
    ],
)
def test_an_attribute_that_another_class_reads_is_found(reader):
    writer = "class Writer:\n  def write(self): self._x = 1"
    known = classes({"module": ast.parse(f"{writer}\n{reader}")})
    assert "Writer stores _x, Reader reads it" in shared_attributes(known)


def test_an_attribute_stored_in_a_kept_object_is_found():
    kept = "class Kept:\n  x: int\n  def read(self): return self.x"
    writer = "class Writer:\n  def write(self): self.y.x = 1"
    known = classes({"module": ast.parse(f"{kept}\n{writer}")})
    assert shared_attributes(known) == ["Writer stores x of self.y, Kept reads it"]


def test_no_attribute_is_stored_by_one_class_and_read_by_another():
    assert shared_attributes(classes(modules())) == []


def test_the_trainers_have_one_mixin_of_ours():
    known = classes(modules())
    assert bases("DescentTrainer", known) == {"DescentMixin"} and not bases("DescentMixin", known)


def test_imports_run_in_no_circle():
    graph = imports(modules())
    assert circles(graph) == []
    assert circles(folder_graph(graph)) == []


def test_the_package_is_not_dense():
    files = density.python_files([PACKAGE])
    total = sum(map(density.measure, files), Counter())
    too_dense = {
        kind: density.rate(total, kind)
        for kind, limit in density.LIMITS.items()
        if density.rate(total, kind) > limit
    }
    assert too_dense == {}
    assert density.blank_share(total) >= density.MIN_BLANK_LINES
    assert {path.name: found for path in files if (found := density.branchy(path))} == {}


if __name__ == "__main__":
    graph, known = imports(modules()), classes(modules())
    for title, found in (
        ("attributes stored by one class and read by another", shared_attributes(known)),
        ("circles of modules", circles(graph)),
        ("circles of folders", circles(folder_graph(graph))),
    ):
        print(f"{title}: {len(found)} (at most 0)", *found, sep="\n  ")

    density.print_limits(density.python_files([PACKAGE]))

    # These train a tiny model, for which the tests above need not wait.
    import stops

    from hf_descent import compat

    print(f"overridden private methods of other trainers: {len(compat.OVERRIDDEN)} (at most 6)")
    for kind in stops.MODELS:
        count = len(stops.stops_of_a_batch(kind))
        print(f"functions that a batch passes, {kind}: {count} (at most {stops.MOST_STOPS})")
