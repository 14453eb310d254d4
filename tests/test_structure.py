"""The house's rules in numbers; `python tests/test_structure.py` prints them."""

import ast
from collections import defaultdict
from pathlib import Path


TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "hf_descent"
MOST_LINES, MOST_ROOT_MODULES = 13_500, 18  # 13,500 lines with all that follows the rebuild
MOST_REBUILT = 12_500  # lines without what came after the rebuild, in modules of its own:
LATER = (
    "commands/export.py", "commands/plan.py", "commands/show.py", "early_exit/drafting.py",
    "training/holdout.py", "training/planning.py",
)  # fmt: skip
MOST_MIXIN_LINES, MOST_MIXIN_ATTRIBUTES = 450, 8
# Of the tests and `recipes/*.py` in version 0.1, without the tests of what came after the rebuild.
MOST_TEST_LINES = 20_505
LATER_TESTS = (
    "commands/test_export.py", "commands/test_plan.py", "commands/test_show.py", "distributed/shard_sizes.py",
    "distributed/test_planned_shards.py", "early_exit/test_drafting.py", "training/test_custom_loop.py",
    "training/test_holdout.py", "training/test_planning.py",
)  # fmt: skip
FOREIGN = {"self.cache"}  # objects of transformers that a class of ours keeps


def modules() -> dict[str, ast.Module]:
    """Dotted name inside the package -> its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def lines(without: tuple[str, ...] = (), folder: Path = PACKAGE) -> int:
    paths = [path for path in folder.rglob("*.py") if path.relative_to(folder).as_posix() not in without]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def lines_of_tests() -> int:
    """Of the tests and the scripts of the recipes, without `LATER_TESTS`."""
    return lines(LATER_TESTS, TESTS) + lines(folder=TESTS.parent / "recipes")


def classes(trees) -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


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
    direct = {base.id for base in known[name].bases if isinstance(base, ast.Name) and base.id in known}
    return direct.union(*(bases(base, known) for base in direct))


def shared_attributes(known) -> list[str]:
    """Attributes that one class stores and another one reads: of `self` and read by a relative, or, if private, by
    any class; or of an object that it keeps, whose class reads them."""
    stored = {name: of_self(node, ast.Store) for name, node in known.items()}
    fields = {
        name: stored[name] | {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        for name, node in known.items()
    }
    found = []
    for name, node in known.items():
        for base in bases(name, known):
            for writer, reader in ((name, base), (base, name)):
                names = (of_self(known[reader], ast.Load) & stored[writer]) - stored[reader]
                names -= {item.name for item in known[reader].body if isinstance(item, ast.FunctionDef)}
                found += [f"{writer} stores {attribute}, {reader} reads it" for attribute in sorted(names)]
        own = stored[name] | {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        for each in ast.walk(node):
            if not isinstance(each, ast.Attribute):
                continue
            if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Attribute):
                kept = ast.unparse(each.value)
                readers = [
                    other
                    for other in known.keys() - {name}
                    if each.attr in fields[other] & of_self(known[other], ast.Load) and kept not in FOREIGN
                ]
                found += [f"{name} stores {each.attr} of {kept}, {reader} reads it" for reader in readers]
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


def mixin() -> ast.ClassDef:
    return classes(modules())["DescentMixin"]


def test_the_package_keeps_its_size():
    assert lines() <= MOST_LINES
    assert lines(without=LATER) <= MOST_REBUILT
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES
    assert lines_of_tests() <= MOST_TEST_LINES


def test_no_attribute_is_stored_by_one_class_and_read_by_another():
    assert shared_attributes(classes(modules())) == []


def test_the_trainers_have_one_mixin_of_ours():
    known = classes(modules())
    assert bases("DescentTrainer", known) == {"DescentMixin"} and not bases("DescentMixin", known)
    node = mixin()
    assert node.end_lineno - node.lineno + 1 <= MOST_MIXIN_LINES
    assert len(own_attributes(node)) <= MOST_MIXIN_ATTRIBUTES


def own_attributes(node: ast.ClassDef) -> set[str]:
    """What the mixin stores on `self`, but for attributes that Trainer reads."""
    return of_self(node, ast.Store) - {"loss_is_scaled_for_ga", "_loss_shifts_labels"}


def test_imports_run_in_no_circle():
    graph = imports(modules())
    assert circles(graph) == []
    assert circles(folder_graph(graph)) == []


if __name__ == "__main__":
    graph, known = imports(modules()), classes(modules())
    print(f"{lines()} lines, {lines(without=LATER)} without {', '.join(LATER)}")
    print(f"{lines_of_tests()} lines of tests and scripts of recipes without {', '.join(LATER_TESTS)}")
    print(f"{len(list(PACKAGE.glob('*.py')))} modules at the root")
    print(f"DescentMixin: {mixin().end_lineno - mixin().lineno + 1} lines, stores {sorted(own_attributes(mixin()))}")
    for title, found in (
        ("attributes stored by one class and read by another", shared_attributes(known)),
        ("circles of modules", circles(graph)),
        ("circles of folders", circles(folder_graph(graph))),
    ):
        print(f"{title}: {len(found)}", *found, sep="\n  ")
