"""How dense code is: `python tests/density.py [FOLDER OR FILE ...]` prints it per file, the densest last.

A smoke detector, not an aim: the aim is that a newcomer reads a file once.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path


# Highest number per 1,000 lines of code, docstrings and comments not counted.
LIMITS = {"tuple": 5.0, "conditional": 20.0, "and/or value": 4.0, "merge": 2.0, "walrus": 1.5}
MIN_BLANK_LINES = 0.10  # per line of code, in functions of 15 lines and more
MAX_BRANCHES = 15  # of a function, those inside expressions counted

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
YES_OR_NO = {"isinstance", "issubclass", "hasattr", "callable", "any", "all", "bool"}
YES_OR_NO_PREFIXES = ("is_", "has_", "_is_", "_has_", "startswith", "endswith", "exists")


def docstring_lines(tree: ast.Module) -> set[int]:
    lines = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, Function)) or not node.body:
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code: neither blank, nor only a comment or a docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(tree)


def joins_unrelated_values(node: ast.AST) -> bool:
    """`a, b = x, y`, unless it is a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    return {ast.unparse(each) for each in target.elts} != {
        ast.unparse(each) for each in node.value.elts
    }


def is_yes_or_no(node: ast.expr) -> bool:
    """Whether an expression is a condition by its form or name, so that `and` and `or` give a condition, too."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Constant(value=bool()):
            return True
        case ast.BoolOp():
            return all(map(is_yes_or_no, node.values))
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name in YES_OR_NO or name.startswith(YES_OR_NO_PREFIXES)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.startswith(YES_OR_NO_PREFIXES)
    return False


def conditions(tree: ast.Module) -> set[int]:
    """Ids of the `and`/`or` expressions that are only asked for yes or no."""
    found = set()

    def add(node: ast.expr) -> None:
        if isinstance(node, ast.BoolOp):
            found.add(id(node))
            for value in node.values:
                add(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            add(node.operand)

    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            add(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                add(test)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            add(node.operand)
        elif isinstance(node, ast.match_case) and node.guard:
            add(node.guard)
        elif isinstance(node, ast.BoolOp) and is_yes_or_no(node):
            add(node)
    return found


def is_merge(node: ast.AST) -> bool:
    """`settings |= {...}`, `{...} | other` or `{**one, **other}`."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.BitOr):
        sides = (
            (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        )
        return any(isinstance(side, (ast.Dict, ast.DictComp)) for side in sides)
    if isinstance(node, ast.Dict):
        return node.keys.count(None) > 1
    return False


def branches(function: Function) -> int:
    """Places where a function takes one way or another, those inside expressions counted."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler)):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.Match):
            count += len(node.cases)
    return count


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, Function]]:
    """All functions with their dotted names; a nested one belongs to the function around it."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            found.append((prefix + node.name, node))
        elif isinstance(node, ast.ClassDef):
            found.extend(functions(node, f"{prefix}{node.name}."))
        else:
            found.extend(functions(node, prefix))
    return found


def measure(path: Path) -> Counter:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = code_lines(source, tree)
    asked = conditions(tree)
    counts = Counter({"code lines": len(lines)})
    for node in ast.walk(tree):
        counts["nodes"] += 1
        counts["tuple"] += joins_unrelated_values(node)
        counts["conditional"] += isinstance(node, ast.IfExp)
        counts["and/or value"] += isinstance(node, ast.BoolOp) and id(node) not in asked
        counts["merge"] += is_merge(node)
        counts["walrus"] += isinstance(node, ast.NamedExpr)
    blank = {number for number, line in enumerate(source.splitlines(), 1) if not line.strip()}
    for _, function in functions(tree):
        span = range(function.lineno, function.end_lineno + 1)
        if len(span) >= 15:
            counts["long functions' lines"] += len(lines.intersection(span))
            counts["long functions' blank lines"] += len(blank.intersection(span))
    return counts


def branchy(path: Path) -> dict[str, int]:
    """Functions above `MAX_BRANCHES` -> their branches."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    counted = {name: branches(function) for name, function in functions(tree)}
    return {name: count for name, count in counted.items() if count > MAX_BRANCHES}


def python_files(places: list[Path]) -> list[Path]:
    return [
        path
        for place in places
        for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
    ]


def rate(counts: Counter, kind: str) -> float:
    return 1000 * counts[kind] / max(counts["code lines"], 1)


def blank_share(counts: Counter) -> float:
    return counts["long functions' blank lines"] / max(counts["long functions' lines"], 1)


def row(name: str, counts: Counter) -> str:
    cells = [f"{counts[kind]:5}" for kind in LIMITS]
    return f"{counts['code lines']:7} {counts['nodes']:8} {' '.join(cells)}  {blank_share(counts):6.3f}  {name}"


def main(places: list[Path]) -> None:
    files = python_files(places)
    measured = {path: measure(path) for path in files}
    print("  lines    nodes " + " ".join(kind[:5].rjust(5) for kind in LIMITS) + "   blank  file")
    by_findings = sorted(files, key=lambda path: sum(measured[path][kind] for kind in LIMITS))
    for path in by_findings:
        print(row(str(path), measured[path]))
    print(row("together", sum(measured.values(), Counter())), "\n")
    print_limits(files)


def print_limits(files: list[Path]) -> None:
    """Print how dense the code of all `files` together is, and how dense it may be."""
    total = sum(map(measure, files), Counter())
    print("per 1,000 lines of code:")
    for kind, limit in LIMITS.items():
        print(f"  {kind}: {rate(total, kind):.1f} (at most {limit})")
    least = f"at least {MIN_BLANK_LINES}"
    print(f"blank lines per line in long functions: {blank_share(total):.3f} ({least})")
    too_many = [f"{path}:{name} {count}" for path in files for name, count in branchy(path).items()]
    print(f"functions of more than {MAX_BRANCHES} branches: {len(too_many)} (at most 0)")
    print(*(f"  {line}" for line in too_many), sep="\n", end="\n" if too_many else "")


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]] or [Path(__file__).parents[1] / "hf_descent"])
