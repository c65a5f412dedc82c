"""The rules of the house: functions from source text to complaints, so that each can be tried on a bad example."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "foresight"
FLOORS = {
    "errors": -1,
    "distributed": -1,
    "sandbox": -0.5,
    "ops": 0,
    "data": 1,
    "nets": 2,
    "envs": 2,
    "planning": 3,
    "training": 3.5,
    "algorithms": 4,
    "runtime": 5,
    "agents": 6,
    "cli": 7,
    "studio": 6.5,
}
RUNTIME = FLOORS["runtime"]


@functools.cache
def modules() -> dict[str, str]:
    """Source by path relative to the package, `ops/returns.py`."""
    return {str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py"))}


def algorithm_files() -> dict[str, str]:
    """Source of every algorithm file by path relative to the package."""
    return {p: s for p, s in modules().items() if p.startswith("algorithms/") and not Path(p).name.startswith("_")}


def room(path: str) -> str:
    """`nets/mlp.py` -> `nets`; `errors.py` -> `errors`; the roof, `__init__.py` and `__main__.py` -> ``."""
    first = path.split("/")[0].removesuffix(".py")
    return "" if first in ("__init__", "__main__") else first


def floor(path: str) -> float:
    """The floor that a file stands on."""
    return FLOORS[room(path)] if room(path) else 99


LARGEST_PACKAGE = 20  # modules side by side


def small_packages(paths: Iterable[str]) -> list[str]:
    """No package holds more than 20 modules side by side; `__init__.py` and subpackages are not counted."""
    count = Counter(str(Path(path).parent) for path in paths if Path(path).name != "__init__.py")
    return [
        f"{package}: holds {n} modules, more than {LARGEST_PACKAGE}: make a subpackage of those that belong together"
        for package, n in count.items()
        if n > LARGEST_PACKAGE
    ]


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree, which several rules read."""
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of the syntax tree."""
    return tuple(ast.walk(parsed(source)))


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, inside functions too."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module in ("foresight", "foresight.algorithms"):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def imports_down(path: str, source: str) -> list[str]:
    """Strictly down, or within the same room; nets and envs are two rooms of one floor; algorithms are all alone."""
    bad = []
    for line, name in imported(source):
        if name.startswith("."):
            bad.append(f"{path}:{line}: relative import of {name}: write foresight...")
        parts = name.split(".")
        if parts[0] != "foresight" or len(parts) == 1 or parts[1] == "__version__" or not room(path):
            continue
        if parts[1] not in FLOORS:
            bad.append(f"{path}:{line}: {name} is on no floor")
        elif parts[1] == "algorithms" and room(path) == "algorithms":
            bad.append(f"{path}:{line}: imports its sibling {name}")
        elif parts[1] != room(path) and FLOORS[parts[1]] >= floor(path):
            bad.append(f"{path}:{line}: imports {name} from floor {FLOORS[parts[1]]} on floor {floor(path)}")
    return bad


def loops_forward(path: str, source: str) -> list[str]:
    """No loop or flip backwards in time outside ops/returns.py. Flips of the last dim, the features, are no time."""
    if path == "ops/returns.py":
        return []
    return [f"{path}:{n.lineno}: backwards in time" for n in nodes(source) if _is_backward(n)]


def _is_backward(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if name == "reversed":
            return any(isinstance(a, ast.Call) and _name(a.func) == "range" for a in node.args)
        if name == "range":
            return len(node.args) == 3 and _constant(node.args[2]) in (-1,)
        if name in ("flip", "flipud"):
            dims = node.args[1:] if _owner(node.func) in ("torch", "np", "numpy") else node.args
            dims = [*dims, *(k.value for k in node.keywords)]
            whole = not dims and _owner(node.func) in ("np", "numpy")  # numpy flips all dims if none is named
            return whole or any(_constant(d) not in (-1, (-1,), [-1]) for d in dims)
    return False


WRITERS = {
    "write_text",
    "write_bytes",
    "savefig",
    "imwrite",
    "mimsave",
    "mimwrite",
    "save_pretrained",
    "save_file",
    "touch",
}
SAVERS = {("torch", "save"), ("np", "save"), ("np", "savez"), ("np", "savetxt"), ("numpy", "save")}


def quiet(path: str, source: str) -> list[str]:
    """Below the runtime nothing prints, logs or opens a file for output."""
    if floor(path) >= RUNTIME:
        return []
    bad = []
    for line, name in imported(source):
        if name.split(".")[0] in ("logging", "loguru", "rich", "tqdm"):
            bad.append(f"{path}:{line}: imports {name}")
    for node in nodes(source):
        if not isinstance(node, ast.Call):
            continue
        name, owner = _name(node.func), _owner(node.func)
        if name == "print" and not owner:
            bad.append(f"{path}:{node.lineno}: prints")
        if name in WRITERS or (owner, name) in SAVERS:
            bad.append(f"{path}:{node.lineno}: writes with {name}")
        if name == "open" and room(path) != "sandbox":  # which tells the kernel who it is, in /proc
            position = 0 if isinstance(node.func, ast.Attribute) and owner not in ("io", "os", "gzip") else 1
            modes = [k.value for k in node.keywords if k.arg == "mode"] or node.args[position : position + 1]
            if modes and not re.fullmatch("r[bt]*", str(_constant(modes[0]))):
                bad.append(f"{path}:{node.lineno}: opens a file for output")
    return bad


def nameless(path: str, source: str) -> list[str]:
    """Below the runtime nothing names a device: it is given one, or follows its tensors."""
    if floor(path) >= RUNTIME:
        return []
    bad = []
    for node in nodes(source):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"(cuda|mps|xpu)(:\d+)?", node.value)
        ):
            bad.append(f"{path}:{node.lineno}: names the device {node.value}")
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "mps", "xpu"):
            bad.append(f"{path}:{node.lineno}: names the device {node.attr}")
    return bad


def composes(path: str, source: str) -> list[str]:
    """No class inherits from one of ours, but errors (an `except` needs their family) and protocols (without code)."""
    ours = {node.name for node in nodes(source) if isinstance(node, ast.ClassDef)}
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "foresight":
            ours |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            ours |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "foresight"}
    bad = []
    for node in nodes(source):
        if isinstance(node, ast.ClassDef) and not any(ast.unparse(base).startswith("Protocol") for base in node.bases):
            for base in node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                root = ast.unparse(base).split(".")[0]
                if root in ours and not ast.unparse(base).endswith("Error"):
                    bad.append(f"{path}:{node.lineno}: {node.name} inherits from {ast.unparse(base)}")
    return bad


def documented(path: str, source: str) -> list[str]:
    """Every public module, class, function and method has a docstring (overloads aside)."""
    tree = parsed(source)
    bad = [] if ast.get_docstring(tree) or Path(path).name == "__init__.py" else [f"{path}: no module docstring"]

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                overload = any(_name(d) == "overload" for d in node.decorator_list)
                setter = any(
                    isinstance(d, ast.Attribute) and d.attr in ("setter", "deleter") for d in node.decorator_list
                )
                if not (ast.get_docstring(node) or overload or setter):
                    bad.append(f"{path}:{node.lineno}: {owner}{node.name} has no docstring")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{node.name}.")

    visit(tree.body, "")
    return bad


SECTIONS = ("docstring", "KIND", "UNIT", "METRICS", "Config", "State", "build", "act", "update", "train")


def in_order(path: str, source: str) -> list[str]:
    """An algorithm file has the sections of all algorithm files, in their order; helpers may stand between."""
    tree = parsed(source)
    docstring = ast.get_docstring(tree) or ""
    found: dict[str, int] = {"docstring": 0} if docstring else {}
    nodes: dict[str, ast.stmt] = {}
    for node in tree.body:
        names = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
        if isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        for name in names:
            name = "update" if name == "act_and_update" else name  # one compiled loop
            if name in SECTIONS:
                found[name], nodes[name] = node.lineno, node
    bad = [f"{path}: has no {name}" for name in SECTIONS if name not in found]
    if list(found) != [name for name in SECTIONS if name in found]:
        bad.append(f"{path}: has the order {', '.join(found)}, not {', '.join(SECTIONS)}")
    if not re.search(r"arXiv|\b(19|20)\d\d\b", docstring):
        bad.append(f"{path}: the docstring names no paper (arXiv number or year)")
    if docstring.isascii():
        bad.append(f"{path}: the docstring has no objective in unicode")
    for name in ("Config", "State"):
        node = nodes.get(name)
        if isinstance(node, ast.ClassDef):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            if not any("dataclass" in d for d in decorators) or (
                name == "Config" and "frozen=True" not in "".join(decorators)
            ):
                bad.append(f"{path}:{node.lineno}: {name} is not a {'frozen ' if name == 'Config' else ''}dataclass")
            if name == "Config":
                bad += [f"{path}:{line}: Config.{field} has no comment" for field, line in _silent_fields(node, source)]
    train = nodes.get("train")
    if train is not None and not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(train)):
        bad.append(f"{path}:{train.lineno}: train is no generator")
    return bad


def test_file(path: str) -> Path:
    """`algorithms/policy/ppo.py` -> `tests/algorithms/policy/test_ppo.py`."""
    return ROOT / "tests" / Path(path).with_name(f"test_{Path(path).name}")


def tested(path: str, tests: str | None) -> list[str]:
    """An algorithm file has a test file of the same name, in which a test asserts something. None: there is none."""
    if tests is None:
        return [f"{path}: has no {test_file(path).relative_to(ROOT)}"]
    found = [n for n in ast.parse(tests).body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    if not any(_asserts(node) for test in found for node in ast.walk(test)):
        return [f"{path}: no test of {test_file(path).relative_to(ROOT)} asserts anything"]
    return []


def _asserts(node: ast.AST) -> bool:
    """An `assert`, `pytest.raises`, or a comparison of torch.testing or numpy.testing."""
    if isinstance(node, ast.Call):
        return _name(node.func).startswith("assert_") or (_owner(node.func), _name(node.func)) == ("pytest", "raises")
    return isinstance(node, ast.Assert)


def _silent_fields(config: ast.ClassDef, source: str) -> Iterator[tuple[str, int]]:
    lines = source.splitlines()
    for i, node in enumerate(config.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        after = config.body[i + 1] if i + 1 < len(config.body) else None
        string = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        beside = any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
        above = lines[node.lineno - 2].lstrip().startswith("#")
        if not (string or beside or above) and node.target.id not in ("steps", "seed"):
            yield node.target.id, node.lineno


# Written so that no pattern matches itself: this file is read by its own rule.
UNWANTED = {
    r"/[w]ork/|/[t]mp/w|/[r]oot/|/[h]ome/[a-z]|/[o]pt/(wheels|pypi)": "a path of one machine",
    r"[p]ypi\.org|[p]ythonhosted|[d]ownload\.pytorch|--(extra-)?[i]ndex-url|[f]ind-links": "a package registry",
    r"(?i)\b[c]laude\b|[a]nthropic|[c]opilot|[c]hatgpt|[c]o-authored-by": "how it was made",
    r"(?i)[a]i-generated|[g]enerated (by|with) an? (ai|llm|agent)": "how it was made",
}


def anonymous(path: str, text: str) -> list[str]:
    """No file names a machine's paths, a package registry, or how it was made."""
    if not any(re.search(pattern, text) for pattern in UNWANTED):  # no pattern goes over the end of a line
        return []
    return [
        f"{path}:{n}: names {what}: {line.strip()[:80]}"
        for n, line in enumerate(text.splitlines(), 1)
        for pattern, what in UNWANTED.items()
        if re.search(pattern, line)
    ]


# Words that are not the field's, and what to write instead. The glossary of a newcomer: nothing has to be translated.
RETIRED = {
    r"worlds?": "environment, env",
    r"heirs?": "variants",
    r"foresees?|foreseen|foretells?|foretold": "predict",
    r"heed(s|ed|ing)?": "respect, apply",
    r"dear(er|est)?": "expensive",
    r"told|heard|hears": "reported, passed, given",
    r"says|said": "gives, returns, reports, states",
    r"learnt|learn(s|ed)? from": "trained on",
    r"anew|afresh": "again, resets",
    r"go(es|ing)? on|went on": "continues, resumes",
    r"whoever|nobody|everybody|anybody": "the user, the caller, or nothing",
    r"opinions?": "predictions, estimates",
    r"mend(s|ed|ing)?": "fix",
    r"towers?": "trunk, MLP",
    r"stretch(es)?": "segment, sequence, chunk",
    r"judg(e|es|ed|ing|ments?)": "scored, reward model, evaluator",
    r"comes? along": "bundled, ships with",
    r"houses?|wings?|roofs?": "architecture, package, family",
    r"numbers to watch": "metrics",
    r"misfits?": "mismatch",
    r"owed": "due",
}
# Where they are the field's own.
FIELDS_OWN = (
    r"world models?",
    r'"world", "sequence"',  # the family of world models, in the catalog
    r"(windy )?grid ?worlds?",
    r"(open|real)[- ]worlds?",
    r"llm[- ](as[- ]a[- ])?judges?",
    r"house tests?|\*\*house\*\*",
    r"go(es|ing)? on[- ]policy",
)
# Source directories that are already in plain words; the others follow, and are added here.
PLAIN_SOURCE = (
    "algorithms/", "cli/", "data/", "distributed.py", "envs/", "errors.py", "nets/", "ops/", "planning/",
    "runtime/", "sandbox/", "training/",
)  # fmt: skip
OLD_NAMES = ("runtime/legacy.py",)  # which has to list them
_RETIRED = {re.compile(rf"(?i)(?<![\w-])(?:{pattern})(?![\w-])"): better for pattern, better in RETIRED.items()}
_ANY = re.compile(rf"(?i)\b(?:{'|'.join(RETIRED)})")  # quick, for the many lines without one
_FIELDS_OWN = re.compile("(?i)" + "|".join(FIELDS_OWN))
_CODE = re.compile(r"`[^`\n]*`|\]\([^)\s]*\)|https?://\S+")  # names, links: not prose


def plain_words(path: str, text: str) -> list[str]:
    """No retired word, but where it is the field's own, in a name in backticks, or in a block of code."""
    bad, fenced = [], False
    for n, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced and path.endswith(".md"):
            continue
        if not _ANY.search(line):
            continue
        prose = _FIELDS_OWN.sub("", _CODE.sub("", line))
        for pattern, better in _RETIRED.items():
            if found := pattern.search(prose):
                bad.append(f"{path}:{n}: {found.group(0)!r}: write {better}: {line.strip()[:80]}")
    return bad


def suspicious(source: str) -> bool:
    """Whether a retired word begins anywhere in a Python file: a quick look, which spares most files the next one."""
    return _ANY.search(source.replace("_", " ")) is not None


def prose(source: str) -> str:
    """Comments, docstrings and the words of test names of a Python file, each in its line; other lines are empty."""
    lines = source.splitlines()
    found = [""] * len(lines)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0] - 1] = token.string
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found[node.lineno - 1] = node.name.replace("_", " ")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            for n in range(node.body[0].lineno - 1, node.body[0].end_lineno or 0):
                found[n] = lines[n]
    return "\n".join(found)


@functools.cache
def texts() -> dict[str, str]:
    """Every text file that belongs to the repository, by path."""
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cff", ".cfg", ".sh", ""}
    shown = (".ci", ".gitignore", ".pre-commit-config.yaml")
    tops = [p for p in ROOT.iterdir() if p.name in shown or not p.name.startswith(".")]
    tops = [p for p in tops if p.name not in ("runs", "build", "dist", "wandb") and not p.name.endswith(".egg-info")]
    paths = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.is_file() and path.suffix in kinds and not {"__pycache__", "node_modules"} & set(path.parts)
    }


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def links(path: str, text: str, root: Path = ROOT) -> list[str]:
    """Every relative link of a page leads to a file."""
    bad = []
    for target in LINK.findall(text):
        target = target.split("#")[0]
        if target and "://" not in target and not (root / path).parent.joinpath(target).exists():
            bad.append(f"{path}: the link {target} leads nowhere")
    return bad


def indexed(index: str, algorithms: list[str], pages: list[str]) -> list[str]:
    """The paper index names every algorithm file, and links every page about one."""
    bad = [f"docs/paper_index.md does not name {path}" for path in algorithms if f"foresight/{path}" not in index]
    return bad + [f"docs/paper_index.md does not link {page}" for page in pages if f"({page})" not in index]


def commands(text: str) -> list[str]:
    """The lines of a page's shell and indented blocks that start with `make` or `foresight`, without their comments."""
    found, text = [], text.replace("\\\n", " ")
    blocks = re.findall(r"```(?:bash|sh|console|shell)\n(.*?)```", text, re.DOTALL)
    blocks += re.findall(r"^ {4}(.*)", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    for block in blocks:
        for line in block.splitlines():
            line = line.strip().removeprefix("$ ").split("  #")[0].strip()
            if line.split(" ")[0] in ("make", "foresight"):
                found.append(line)
    return found


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _owner(node: ast.expr) -> str:
    return node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""


def _constant(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
