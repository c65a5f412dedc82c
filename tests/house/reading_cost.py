"""What it takes to read an algorithm: the files and lines of our functions that its `train` reaches.

    python -m tests.house.reading_cost        # the table in CONTRIBUTING.md, written there

Static, from the source alone. A function is reached if a reached function names it; a class, if one names or annotates
it; its `__init__`, if one does more than annotate it; a method, if a reached function reads it off a value of its
class. The class of a value comes from annotations and from what is assigned to it. Of a Protocol or a base class the
methods of the reached classes that implement it count too. Where nothing tells the class (`Any`), a method of that name
counts in every reached class. So the count is rather too much than too little. Compiled twins and the insides of
convolutions and attention are left out: nobody reads them to check an algorithm against its paper.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.house import rules

SMALL = 20  # lines: a file of which no more is reached is a glance, and not counted among the files
APART = (
    "ops/fused/", "training/twins.py", "nets/conv.py", "nets/sequence/",
    "nets/language/packed.py", "nets/language/checkpointing.py", "nets/language/tree_attention.py",
    "nets/language/cache.py",
)  # fmt: skip
FILES, LINES = 10, 1_200  # the aim: at most so many
BEGIN, END = "<!-- reading cost -->", "<!-- /reading cost -->"
IMPLICIT = ("forward", "__call__")  # of an instance: called without being named
CONTAINERS = (
    "list", "dict", "set", "frozenset", "deque", "defaultdict", "Sequence", "Mapping", "MutableMapping", "Collection",
    "Iterator", "Iterable", "Generator",
)  # fmt: skip


class Class(NamedTuple):
    """A class of ours."""

    path: str
    name: str


class Many(NamedTuple):
    """A container: of one kind of element, or (`fixed`) a tuple with a kind for each."""

    parts: tuple[frozenset[Any], ...]
    fixed: bool = False


Kind = frozenset[Any]  # what a value may be: classes of ours, containers, or "?", where nothing tells
FOREIGN: Kind = frozenset()  # nothing of ours: a number, a tensor
UNKNOWN: Kind = frozenset({"?"})


def _is_compiled(node: ast.FunctionDef) -> bool:
    return any("njit" in ast.unparse(d) or "vectorize" in ast.unparse(d) for d in node.decorator_list)


def _length(node: ast.stmt) -> int:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return (node.end_lineno or node.lineno) - first + 1


def _union(kinds: Iterable[Kind]) -> Kind:
    return FOREIGN.union(*kinds)


def _many(*parts: Kind, fixed: bool = False) -> Kind:
    return frozenset({Many(parts, fixed)})


class Module:
    """The definitions of a module by name, and what its imports mean."""

    def __init__(self, source: str) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.constants: dict[str, ast.expr] = {}
        self.ours: dict[str, str] = {}  # local name to dotted path
        self.foreign = set(dir(builtins))
        for node in rules.nodes(source):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "foresight":
                self.ours |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        for node in rules.parsed(source).body:
            if isinstance(node, ast.FunctionDef):
                if _is_compiled(node):
                    self.foreign.add(node.name)
                else:
                    self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.constants[node.target.id] = node.value


@dataclasses.dataclass(frozen=True)
class Found:
    """A name of ours: a "function", a "class" or a "constant" of a module, or the "module" itself (without a name)."""

    what: str
    path: str
    name: str = ""


@dataclasses.dataclass
class Uses:
    """What a function names, builds and reads off values."""

    names: set[Found] = dataclasses.field(default_factory=set)
    built: set[Class] = dataclasses.field(default_factory=set)
    read: set[tuple[Kind, str]] = dataclasses.field(default_factory=set)


class Package:
    """The modules of a package, and the classes of the values in them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.modules = {path: Module(source) for path, source in files.items() if path.endswith(".py")}
        self._fields: dict[tuple[Class, str], Kind] = {}
        self._scopes: dict[tuple[str, ast.AST], dict[str, Kind]] = {}

    # --- names

    def resolve(self, path: str, name: str) -> Found | None:
        """What `name` means in the module `path`, where it is ours."""
        module = self.modules[path]
        if name in module.functions:
            return Found("function", path, name)
        if name in module.classes:
            return Found("class", path, name)
        if name in module.constants:
            value = module.constants[name]
            alias = self.named(path, value) if isinstance(value, ast.Name | ast.Attribute) else None
            return alias or Found("constant", path, name)
        return self._imported(module.ours[name]) if name in module.ours else None

    def _imported(self, dotted: str) -> Found | None:
        inside = "/".join(dotted.split(".")[1:])
        for place in (f"{inside}.py", f"{inside}/__init__.py"):
            if place in self.modules:
                return Found("module", place)
        before, _, name = dotted.rpartition(".")
        owner = self._imported(before) if before else None
        return self.resolve(owner.path, name) if owner is not None and owner.what == "module" else None

    def named(self, path: str, node: ast.expr, scope: Mapping[str, Kind] | None = None) -> Found | None:
        """What `name` or `module.name` means; None for a local name, and for what is not ours."""
        if isinstance(node, ast.Name):
            return None if scope is not None and node.id in scope else self.resolve(path, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.named(path, node.value, scope)
            if owner is not None and owner.what == "module":
                return self.resolve(owner.path, node.attr)
        return None

    # --- classes of values

    def annotated(self, path: str, node: ast.expr | None) -> Kind:
        """The classes of an annotation."""
        if node is None:
            return UNKNOWN
        if isinstance(node, ast.Constant):  # in quotes, or None
            quoted = isinstance(node.value, str)
            return self.annotated(path, ast.parse(node.value, mode="eval").body) if quoted else FOREIGN
        if isinstance(node, ast.BinOp):
            return self.annotated(path, node.left) | self.annotated(path, node.right)
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value).rpartition(".")[2]
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if outer == "Callable":
                return UNKNOWN
            if outer in ("type", "Annotated"):
                return self.annotated(path, inner[0])
            if outer == "tuple":
                open_ended = isinstance(inner[-1], ast.Constant) and inner[-1].value is ...
                parts = [self.annotated(path, part) for part in (inner[:1] if open_ended else inner)]
                return _many(*parts, fixed=not open_ended)
            if outer in CONTAINERS:
                return _many(self.annotated(path, inner[0 if outer == "Generator" else -1]))
            return self.annotated(path, node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            found = self.named(path, node)
            if found is not None and found.what == "class":
                return frozenset({Class(found.path, found.name)})
            if found is not None and found.what == "constant":
                value = self.modules[found.path].constants[found.name]
                return UNKNOWN if "TypeVar" in ast.unparse(value) else self.annotated(found.path, value)
            last = ast.unparse(node).rpartition(".")[2]
            return UNKNOWN if last in ("Any", "object", "Self") else _many(UNKNOWN) if last in CONTAINERS else FOREIGN
        return FOREIGN

    def bases(self, cls: Class) -> list[Class]:
        """The class and its bases of ours."""
        path, name = cls
        found = [cls]
        for base in self.modules[path].classes[name].bases:
            one = self.named(path, base.value if isinstance(base, ast.Subscript) else base)
            if one is not None and one.what == "class":
                found += self.bases(Class(one.path, one.name))
        return found

    def methods(self, cls: Class) -> dict[str, ast.FunctionDef]:
        """The methods that the class itself defines."""
        body = self.modules[cls[0]].classes[cls[1]].body
        return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}

    def method(self, cls: Class, name: str) -> tuple[Class, ast.FunctionDef] | None:
        """The method of that name, and the class that defines it."""
        return next(((c, self.methods(c)[name]) for c in self.bases(cls) if name in self.methods(c)), None)

    def implements(self, cls: Class, other: Class) -> bool:
        """Whether `cls` is a `other`: by inheritance, or with every method of a Protocol."""
        if other in self.bases(cls):
            return True
        protocol = any(ast.unparse(b).startswith("Protocol") for b in self.modules[other[0]].classes[other[1]].bases)
        public = [name for name in self.methods(other) if not name.startswith("_")]
        return protocol and bool(public) and all(self.method(cls, name) for name in public)

    def field(self, cls: Class, name: str) -> Kind:
        """The classes of the attribute `name`: its annotation, or what the methods of the class assign to it."""
        if (cls, name) not in self._fields:
            self._fields[cls, name] = FOREIGN  # while it is looked for: a field that is made of itself
            self._fields[cls, name] = self._field(cls, name)
        return self._fields[cls, name]

    def _field(self, cls: Class, name: str) -> Kind:
        for owner in self.bases(cls):
            path, body = owner[0], self.modules[owner[0]].classes[owner[1]].body
            for node in body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                    return self.annotated(path, node.annotation)
            if name in self.methods(owner):  # a property, or a method, which is called where it is read
                return self.annotated(path, self.methods(owner)[name].returns)
            kinds = [
                self.annotated(path, node.annotation)
                if isinstance(node, ast.AnnAssign)
                else self.kind(path, value, self.scope(path, method, owner))
                for method in self.methods(owner).values()
                for node, target, value in _assigned(method)
                if isinstance(target, ast.Attribute) and ast.unparse(target) == f"self.{name}"
            ]
            if kinds:
                return _union(kinds)
        return UNKNOWN

    def scope(self, path: str, node: ast.AST, owner: Class | None = None) -> dict[str, Kind]:
        """The local names of a function and their classes."""
        if (path, node) in self._scopes:
            return self._scopes[path, node]
        found: dict[str, Kind] = {}
        self._scopes[path, node] = found
        outer = [*node.args.posonlyargs, *node.args.args] if isinstance(node, ast.FunctionDef) else []
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef | ast.Lambda):
                a = part.args
                for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]:
                    found[arg.arg] = self.annotated(path, arg.annotation)
                if isinstance(part, ast.FunctionDef) and part is not node:
                    found[part.name] = UNKNOWN
        if owner is not None and outer and outer[0].arg in ("self", "cls"):
            found[outer[0].arg] = frozenset({owner})
        arguments, assigned = set(found), list(_assigned(node))
        for _, target, _ in assigned:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, FOREIGN)
        for _ in range(2):  # twice, for a name that is used above its assignment in a loop
            fresh: dict[str, list[Kind]] = {}
            for statement, target, value in assigned:
                if isinstance(target, ast.Name) and target.id not in arguments:
                    told = isinstance(statement, ast.AnnAssign)
                    kind = self.annotated(path, statement.annotation) if told else self.kind(path, value, found)
                    fresh.setdefault(target.id, []).append(kind)
            found |= {name: _union(kinds) for name, kinds in fresh.items()}
        return found

    def kind(self, path: str, node: ast.expr | None, scope: Mapping[str, Kind]) -> Kind:
        """The classes of an expression's value."""
        if node is None:
            return UNKNOWN
        if isinstance(node, Part):
            whole = self.kind(path, node.whole, scope)
            return self.elements(whole, node.index, node.count)
        if isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node, ast.Name) and node.id in scope:
                return scope[node.id]
            found = self.named(path, node, scope)
            if found is not None and found.what == "class":
                return frozenset({Class(found.path, found.name)})
            if found is not None and found.what == "constant":
                return self.kind(found.path, self.modules[found.path].constants[found.name], {})
            if found is not None or isinstance(node, ast.Name):
                return FOREIGN
            return self._each(self.kind(path, node.value, scope), node.attr)
        if isinstance(node, ast.Call):
            return self._called(path, node, scope)
        if isinstance(node, ast.Subscript):
            whole = self.kind(path, node.value, scope)
            if isinstance(node.slice, ast.Slice):
                return whole
            index = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return self.elements(whole, index if isinstance(index, int) else None)
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self.kind(path, node.value, scope)
        if isinstance(node, ast.IfExp):
            return self.kind(path, node.body, scope) | self.kind(path, node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return _union(self.kind(path, value, scope) for value in node.values)
        if isinstance(node, ast.BinOp):
            return self.kind(path, node.left, scope) | self.kind(path, node.right, scope)
        if isinstance(node, ast.UnaryOp):
            return self.kind(path, node.operand, scope)
        if isinstance(node, ast.Tuple):
            return _many(*(self.kind(path, part, scope) for part in node.elts), fixed=True)
        if isinstance(node, ast.List | ast.Set):
            return _many(_union(self.kind(path, part, scope) for part in node.elts))
        if isinstance(node, ast.Dict):
            return _many(_union(self.kind(path, part, scope) for part in node.values))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return _many(self.kind(path, node.elt, scope))
        if isinstance(node, ast.DictComp):
            return _many(self.kind(path, node.value, scope))
        return FOREIGN  # constants, comparisons, strings

    def elements(self, kind: Kind, index: int | None = None, count: int | None = None) -> Kind:
        """What a value of this kind holds: at `index`, where it is a tuple (of `count`, if given)."""
        found = FOREIGN
        for one in kind:
            if isinstance(one, Many):
                exact = one.fixed and index is not None and index < len(one.parts) and count in (None, len(one.parts))
                found |= one.parts[index] if exact else _union(one.parts)  # type: ignore[index]
            elif isinstance(one, Class):
                body = self.modules[one.path].classes[one.name].body
                fields = [self.annotated(one.path, node.annotation) for node in body if isinstance(node, ast.AnnAssign)]
                if "NamedTuple" in map(ast.unparse, self.modules[one.path].classes[one.name].bases):
                    found |= fields[index] if index is not None and index < len(fields) else _union(fields)
                else:
                    found |= UNKNOWN
            else:
                found |= UNKNOWN
        return found

    def _called(self, path: str, node: ast.Call, scope: Mapping[str, Kind]) -> Kind:
        function = node.func
        found = self.named(path, function, scope)
        if found is not None and found.what == "function":
            return self.annotated(found.path, self.modules[found.path].functions[found.name].returns)
        if found is not None and found.what == "class":
            return frozenset({Class(found.path, found.name)})
        if isinstance(function, ast.Attribute):
            owner = self.kind(path, function.value, scope)
            if owner:
                return _union(self._method_called(one, function.attr) for one in owner)
            return self._passed_on(path, node, function.attr, scope)
        if isinstance(function, ast.Name) and function.id not in scope:
            return self._passed_on(path, node, function.id, scope)
        called = self.kind(path, function, scope)  # an instance
        return _union(
            _union(self.field(one, name) for name in IMPLICIT if self.method(one, name))
            if isinstance(one, Class)
            else UNKNOWN
            for one in called
        )

    def _method_called(self, owner: Any, name: str) -> Kind:
        if isinstance(owner, Class):
            return self.field(owner, name)
        if isinstance(owner, Many):
            if name in ("values", "copy"):
                return frozenset({owner})
            if name == "items":
                return _many(_many(FOREIGN, _union(owner.parts), fixed=True))
            return _union(owner.parts) if name in ("get", "pop", "popleft", "setdefault", "popitem") else FOREIGN
        return UNKNOWN

    def _passed_on(self, path: str, node: ast.Call, name: str, scope: Mapping[str, Kind]) -> Kind:
        """What a function that is not ours returns: something of its arguments, or nothing of ours."""
        arguments = [self.kind(path, arg, scope) for arg in node.args]
        if name in ("replace", "deepcopy", "copy", "iter", "list", "tuple", "sorted", "reversed", "set") and arguments:
            return arguments[0]
        if name == "next" and arguments:
            return self.elements(arguments[0])
        if name in ("max", "min") and arguments:
            return self.elements(arguments[0]) if len(arguments) == 1 else _union(arguments)
        if name == "cast" and len(arguments) > 1:
            return self.annotated(path, node.args[0])
        if name == "zip":
            return _many(_many(*(self.elements(kind) for kind in arguments), fixed=True))
        if name == "enumerate" and arguments:
            return _many(_many(FOREIGN, self.elements(arguments[0]), fixed=True))
        return FOREIGN

    def _each(self, owner: Kind, attribute: str) -> Kind:
        return _union(
            self.field(one, attribute) if isinstance(one, Class) else FOREIGN if isinstance(one, Many) else UNKNOWN
            for one in owner
        )

    # --- what is reached

    def uses(self, path: str, node: ast.AST, owner: Class | None = None) -> Uses:
        """What the function, or the body of the class, uses."""
        found, scope = Uses(), self.scope(path, node, owner)
        annotations = {id(part) for whole in _annotations(node) for part in ast.walk(whole)}
        tested = {id(part) for call in ast.walk(node) if _is_test(call) for part in ast.walk(call.args[1])}
        for whole in _annotations(node):
            found.names |= {one for part in _unquoted(whole) if (one := self._name(path, part, None))}
        for part in ast.walk(node):
            if id(part) in annotations:
                continue
            if (one := self._name(path, part, scope)) is not None:
                found.names.add(one)
                if one.what == "class" and id(part) not in tested:
                    found.built.add(Class(one.path, one.name))
            if isinstance(part, ast.Attribute) and self.named(path, part, scope) is None:
                found.read.add((self.kind(path, part.value, scope), part.attr))
            elif isinstance(part, ast.Call):
                is_super = isinstance(part.func, ast.Name) and part.func.id == "super"
                found.built |= set(self.bases(owner)[1:]) if is_super and owner is not None else set()
        return found

    def _name(self, path: str, node: ast.AST, scope: Mapping[str, Kind] | None) -> Found | None:
        return self.named(path, node, scope) if isinstance(node, ast.Name | ast.Attribute) else None

    def reached(self, path: str) -> dict[str, int]:
        """Lines by file that `train` of the algorithm file `path` reaches."""
        seen: dict[tuple[str, str], int] = {}  # lines by definition
        read: set[tuple[Kind, str]] = set()
        built: set[Class] = set()
        classes: set[Class] = set()
        todo: list[tuple[Found, Class | None]] = [(Found("function", path, "train"), None)]
        while True:
            if not todo:
                todo += [
                    (Found("method", cls.path, f"{cls.name}.{name}"), cls)
                    for cls, name in self._methods_read(classes, built, read)
                    if (cls.path, f"{cls.name}.{name}") not in seen and not cls.path.startswith(APART)
                ]
            if not todo:
                break
            one, owner = todo.pop()
            if (one.path, one.name) in seen or one.path.startswith(APART) or one.what == "module":
                continue
            module = self.modules[one.path]
            if one.what == "class":
                whole = module.classes[one.name]
                methods = [n for n in whole.body if isinstance(n, ast.FunctionDef)]
                node: ast.AST = ast.ClassDef(one.name, whole.bases, [], [n for n in whole.body if n not in methods], [])
                seen[one.path, one.name] = _length(whole) - sum(_length(m) for m in methods)
                classes.add(Class(one.path, one.name))
            elif one.what == "constant":
                node = module.constants[one.name]
                seen[one.path, one.name] = 0
            else:
                place = self.methods(owner) if owner is not None else module.functions
                node = place[one.name.rpartition(".")[2]]
                seen[one.path, one.name] = _length(node)
            uses = self.uses(one.path, node, owner)
            todo += [(name, None) for name in uses.names]
            read, built = read | uses.read, built | uses.built
        lines: dict[str, int] = {}
        for (place_, _), count in seen.items():
            if count:
                lines[place_] = lines.get(place_, 0) + count
        return lines

    def _methods_read(
        self, classes: set[Class], built: set[Class], read: set[tuple[Kind, str]]
    ) -> Iterator[tuple[Class, str]]:
        """The methods of reached classes that are read off a value which may be of that class."""
        wanted: dict[Class, set[str]] = {cls: set() for cls in classes}
        for cls in built & classes:
            wanted[cls] |= {"__init__", "__post_init__", *IMPLICIT}
        for kind, name in read:
            for cls in classes:
                if "?" in kind or any(isinstance(one, Class) and self.implements(cls, one) for one in kind):
                    wanted[cls].add(name)
        for cls, names in wanted.items():
            for name in names:
                found = self.method(cls, name)
                if found is not None:
                    yield found[0], name


class Part(ast.expr):
    """What a loop or an unpacking takes out of `whole`."""

    def __init__(self, whole: ast.expr | None, index: int | None = None, count: int | None = None) -> None:
        super().__init__()
        self.whole, self.index, self.count = whole, index, count


def _is_test(node: ast.AST) -> bool:
    """`isinstance(x, Class)`, which makes no instance."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass") and len(node.args) > 1


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    for part in ast.walk(node):
        for name in ("annotation", "returns"):
            found = getattr(part, name, None)
            if isinstance(found, ast.expr):
                yield found


def _unquoted(annotation: ast.expr) -> Iterator[ast.AST]:
    """The parts of an annotation, also of what stands in quotes there."""
    for part in ast.walk(annotation):
        yield part
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            yield ast.Name(part.value, ast.Load())


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, ast.expr | None]]:
    """`(statement, target, value)` of everything that a function assigns to a name or an attribute."""
    for part in ast.walk(node):
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(part, ast.Assign):
            pairs = [(target, part.value) for target in part.targets]
        elif isinstance(part, ast.AnnAssign | ast.NamedExpr):
            pairs = [(part.target, part.value)]
        elif isinstance(part, ast.For | ast.comprehension):
            pairs = [(part.target, Part(part.iter))]
        elif isinstance(part, ast.withitem) and part.optional_vars is not None:
            pairs = [(part.optional_vars, part.context_expr)]
        elif isinstance(part, ast.ExceptHandler) and part.name:
            pairs = [(ast.Name(part.name, ast.Store()), ast.Constant(None))]
        while pairs:
            target, value = pairs.pop()
            if isinstance(target, ast.Tuple | ast.List):
                starred = any(isinstance(part, ast.Starred) for part in target.elts)
                count = None if starred else len(target.elts)
                pairs += [(x, Part(value, None if starred else i, count)) for i, x in enumerate(target.elts)]
            elif isinstance(target, ast.Starred):
                pairs.append((target.value, value))
            else:
                yield part, target, value


def cost(path: str, package: Package) -> tuple[int, int]:
    """(files of more than `SMALL` lines, lines in all files) that reading an algorithm takes."""
    lines = package.reached(path)
    return sum(n > SMALL for n in lines.values()), sum(lines.values())


def table(files: Mapping[str, str]) -> str:
    """The table of CONTRIBUTING.md: an algorithm a row."""
    package, rows = Package(files), []
    for path in sorted(p for p in files if p.startswith("algorithms/") and not Path(p).name.startswith("_")):
        count, lines = cost(path, package)
        rows.append(f"| `{path.removeprefix('algorithms/').removesuffix('.py')}` | {count} | {lines:,} |")
    return "\n".join(["| algorithm | files | lines |", "|---|---|---|", *rows])


def missed(files: Mapping[str, str]) -> str:
    """How many algorithms meet the aim, and by how much the others miss it."""
    package = Package(files)
    costs = {p: cost(p, package) for p in files if p.startswith("algorithms/") and not Path(p).name.startswith("_")}
    over = {p: (count - FILES, lines - LINES) for p, (count, lines) in costs.items() if count > FILES or lines > LINES}
    if not over:
        return f"All {len(costs)} algorithms meet the aim."
    files_over, lines_over = (sorted(max(x, 0) for x in part) for part in zip(*over.values(), strict=True))
    middle = len(over) // 2
    return (
        f"{len(costs) - len(over)} of {len(costs)} algorithms meet the aim. The others miss it by {files_over[middle]} "
        f"files and {lines_over[middle]:,} lines at the median, and by {files_over[-1]} files and {lines_over[-1]:,} "
        "lines at most."
    )


def main() -> None:
    """Write the table into CONTRIBUTING.md, between its two marks."""
    page = rules.ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    files = rules.modules()
    text = f"{table(files)}\n\n{textwrap.fill(missed(files), 120)}"
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
