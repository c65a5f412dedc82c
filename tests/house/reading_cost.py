"""What it takes to read an algorithm: the files and lines of our functions that its `train` reaches.

    python -m tests.house.reading_cost        # the table in CONTRIBUTING.md, written there

Static, from the source alone. A function is reached if a reached function names it; a class, if one names or annotates
it; a method, if its class is reached and a reached function reads an attribute of its name. So it counts rather too
much than too little. Compiled twins and the insides of convolutions and attention are left out: nobody reads them to
check an algorithm against its paper.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from tests.house import rules

SMALL = 20  # lines: a file of which no more is reached is a glance, and not counted among the files
APART = (
    "ops/fused.py", "training/twins.py", "nets/conv.py", "nets/sequence/", "nets/language/packed.py",
    "nets/language/checkpointing.py",
)  # fmt: skip
BEGIN, END = "<!-- reading cost -->", "<!-- /reading cost -->"


@dataclasses.dataclass(frozen=True)
class Definition:
    """A function, a method or a class: where it stands, how many lines it has, and what it names."""

    path: str
    name: str  # `f`, `Class` or `Class.method`
    lines: int  # a class has those of its fields and docstring; its methods count for themselves
    names: frozenset[str]  # dotted names that can be resolved: `targets.td`, `Replay`
    attributes: frozenset[str]  # names read off something


def _is_compiled(node: ast.FunctionDef) -> bool:
    return any("njit" in ast.unparse(d) or "vectorize" in ast.unparse(d) for d in node.decorator_list)


def _definition(path: str, name: str, node: ast.AST, lines: int) -> Definition:
    names, attributes = set(), set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            attributes.add(part.attr)
            names.add(ast.unparse(part))
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            names.add(part.value)  # an annotation in quotes
    return Definition(path, name, lines, frozenset(names), frozenset(attributes))


def _length(node: ast.stmt) -> int:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return (node.end_lineno or node.lineno) - first + 1


@functools.cache
def _read(path: str, source: str) -> tuple[dict[str, Definition], dict[str, str]]:
    """The definitions of a module by name, and what its imports mean: local name to dotted path."""
    found: dict[str, Definition] = {}
    imports: dict[str, str] = {}
    for node in rules.nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "foresight":
            for alias in node.names:
                imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in rules.parsed(source).body:
        if isinstance(node, ast.FunctionDef) and not _is_compiled(node):
            found[node.name] = _definition(path, node.name, node, _length(node))
        elif isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            own = _length(node) - sum(_length(m) for m in methods)
            shell = ast.ClassDef(node.name, node.bases, [], [n for n in node.body if n not in methods], [])
            found[node.name] = _definition(path, node.name, shell, own)
            for m in methods:
                found[f"{node.name}.{m.name}"] = _definition(path, f"{node.name}.{m.name}", m, _length(m))
    return found, imports


def reached(path: str, files: Mapping[str, str], root: str = "foresight") -> dict[str, int]:
    """Lines by file that `train` of the algorithm file `path` reaches; `files` are sources by path in the package."""

    def module(dotted: str) -> str | None:
        inside = "/".join(dotted.split(".")[1:])
        return next((p for p in (f"{inside}.py", f"{inside}/__init__.py") if p in files), None)

    def find(at: str, dotted: str) -> Definition | None:
        found, imports = _read(at, files[at])
        if dotted in found:
            return found[dotted]
        head, _, rest = dotted.partition(".")
        if head not in imports:
            return None
        whole = imports[head] + (f".{rest}" if rest else "")
        for cut in range(len(whole.split(".")), 1, -1):
            parts = whole.split(".")
            place = module(".".join(parts[:cut]))
            if place is not None and parts[cut:]:
                return _read(place, files[place])[0].get(parts[cut])
        return None

    start = _read(path, files[path])[0]
    todo = [start["train"]]
    seen: dict[tuple[str, str], Definition] = {}
    attributes: set[str] = set()
    classes: set[tuple[str, str]] = set()
    while todo:
        one = todo.pop()
        if (one.path, one.name) in seen or one.path.startswith(APART):
            continue
        seen[one.path, one.name] = one
        todo += [found for name in one.names if (found := find(one.path, name)) is not None]
        if one.name[0].isupper() and "." not in one.name:
            classes.add((one.path, one.name))
        attributes |= one.attributes
        for place, name in classes:
            members = _read(place, files[place])[0]
            for member, definition in members.items():
                owner, _, method = member.partition(".")
                if owner == name and (
                    method in attributes or method in ("__init__", "__post_init__", "forward", "__call__")
                ):
                    todo.append(definition)
    lines: dict[str, int] = {}
    for (place, _), one in seen.items():
        lines[place] = lines.get(place, 0) + one.lines
    return lines


def cost(path: str, files: Mapping[str, str]) -> tuple[int, int]:
    """(files of more than `SMALL` lines, lines in all files) that reading an algorithm takes."""
    lines = reached(path, files)
    return sum(n > SMALL for n in lines.values()), sum(lines.values())


def table(files: Mapping[str, str]) -> str:
    """The table of CONTRIBUTING.md: an algorithm a row."""
    rows = []
    for path in sorted(p for p in files if p.startswith("algorithms/") and not Path(p).name.startswith("_")):
        count, lines = cost(path, files)
        rows.append(f"| `{path.removeprefix('algorithms/').removesuffix('.py')}` | {count} | {lines:,} |")
    return "\n".join(["| algorithm | files | lines |", "|---|---|---|", *rows])


def main() -> None:
    """Write the table into CONTRIBUTING.md, between its two marks."""
    page = rules.ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(rules.modules())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
