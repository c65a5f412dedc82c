"""Lay out what `make docs` builds: the pages, a reference of all modules, and the files that pages link to.

The page of an algorithm ends with three sections from the repository: its functions and what they call, its
hyperparameters and presets with their sources, and its rows of the results.

python docs/site.py stage OUT    writes Markdown to OUT, which both mkdocs and Zensical build
python docs/site.py check SITE   fails if a built page loads anything from elsewhere, or links to a page that is missing

Pages link to files of the repository as they lie there (`../results/x.json`), so that they can be read without a
site. On the site a module leads to its page of the reference, and any other file to a copy.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
TOPS = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SHOWN = {".json", ".png", ".svg", ".gif", ".mp4", ".ipynb"}  # a browser shows them as they are; others end in .txt
FAMILIES = "foresight.algorithms."
UNPUBLISHED = "\n## Published results\n\nNone yet: this algorithm is tested, but no row of the results names it.\n"


def modules() -> dict[str, Path]:
    """The public modules of the package by dotted name."""
    files = sorted((ROOT / "foresight").rglob("*.py"))
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    names = {name.removesuffix(".__init__"): file for name, file in names.items()}
    return {name: file for name, file in names.items() if "._" not in name}


def reference(name: str, file: Path) -> str:
    """The page of a module in the reference: "ops.returns" -> "reference/ops/returns.md"; packages end in index.md."""
    path = Path("reference", *name.split(".")[1:])
    return (path / "index.md" if file.name == "__init__.py" else path.with_suffix(".md")).as_posix()


def linked(target: Path, known: dict[Path, str]) -> str | None:
    """Where a link to `target` (in the repository) leads, relative to the top of the site. None: nowhere."""
    if target in known:
        return known[target]
    if target.is_dir():
        return known.get(target / "__init__.py")
    inside = target.relative_to(ROOT).as_posix()
    if inside in TOPS:
        return TOPS[inside]
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"files/{inside}" + ("" if target.suffix in SHOWN else ".txt")


def rewritten(text: str, source: Path, page: str, known: dict[Path, str], copies: set[Path]) -> str:
    """The page with links for the site; the files that have to be copied are added to `copies`."""
    up = "../" * page.count("/")

    def one(found: re.Match[str]) -> str:
        head, target, part = found.group(1), found.group(2), found.group(3) or ""
        if "://" in target or target.startswith("mailto:"):
            return found.group(0)
        file = (source.parent / target).resolve()
        place = linked(file, known)
        if place is None:
            return head[1:-2].lstrip("[")  # a folder that has no page: its name alone
        if place.startswith("files/"):
            copies.add(file)
        return f"{head}{up}{place}{part if place.endswith('.md') else ''})"

    return LINK.sub(one, text)


def listing(name: str, file: Path, names: dict[str, Path]) -> str:
    """The page of one module: of a package its modules, of an algorithm the file itself, of others their docstrings."""
    source = file.read_text(encoding="utf-8")
    head = f"# `{name}`\n"
    if file.name == "__init__.py" and name != "foresight":
        inner = [n for n in names if n.startswith(name + ".") and "." not in n[len(name) + 1 :]]
        here = Path(reference(name, file)).parent
        rows = [f"| [`{n}`]({Path(reference(n, names[n])).relative_to(here)}) | {first(names[n])} |" for n in inner]
        text = (ast.get_docstring(ast.parse(source)) or "").strip()
        return "\n".join([head, text, "", "| module | what it is |", "|---|---|", *rows, ""])
    if name.startswith(FAMILIES):
        return f"---\nsearch:\n  exclude: true\n---\n{head}\n```python\n{source.rstrip()}\n```\n"
    return f"{head}\n::: {name}\n"


def first(file: Path) -> str:
    """The first sentence of a module's docstring, fit for a table."""
    return sentences(file)[""]


@functools.cache
def sentences(file: Path) -> dict[str, str]:
    """What a module is, named "", and what each of its functions and classes does, fit for a table."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name: described(node) for name, node in {"": tree, **named}.items()}


def reached() -> dict[str, str]:
    """A section for the page of each algorithm with results: its rows, from the files in results/."""
    from foresight.runtime.results.results import band, figure, gather

    found: dict[str, list[str]] = {}
    for row in gather():
        if row.value is not None:
            verdict = {None: "–", True: row.aim, False: f"{row.aim} (**missed**)"}[row.met]
            line = (
                f"| [{row.name}](../{row.file}) | {row.task} | {figure(row.value)}{band(row.interval)} | {verdict} | "
            )
            seeds = figure(row.done_seeds, 7) if row.done_seeds else "–"
            seeds += f", by `{row.made}`" if row.made else ""
            found.setdefault(row.algorithm, []).append(f"{line}{seeds} | `{row.command}` |")
    head = ["", "## Published results", "", "| row | task | reached [95% interval] | target | seeds | again |"]
    head.append("|---|---|---|---|---|---|")
    return {name: "\n".join([*head, *dict.fromkeys(lines), ""]) for name, lines in found.items()}


def described(node: ast.AST) -> str:
    """The first paragraph of a docstring, fit for a table."""
    assert isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).replace("|", "\\|")


def imports(tree: ast.Module) -> dict[str, str]:
    """The names of this package that a module imports, with their dotted paths."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("foresight."):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def uses(tree: ast.Module, names: dict[str, Path]) -> dict[str, str]:
    """The functions of this package that a module calls, by dotted path, with what they do; in order."""
    known, found = imports(tree), {}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        parts = ast.unparse(call).split(".")
        path = ".".join([known.get(parts[0], ""), *parts[1:]])
        module, _, function = path.rpartition(".")
        if module in names and path not in found:
            does = sentences(names[module])
            if function in does:
                found[path] = does[function]
    return found


def anatomy(file: Path, names: dict[str, Path]) -> str:
    """A section for the page of an algorithm: the functions of its file in order, and the functions that they call."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    top = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    lines = [
        "",
        "## In the code",
        "",
        f"The functions of [`{file.stem}.py`](../{file.relative_to(ROOT)}), in order:",
        "",
    ]
    lines += ["| function | what it does |", "|---|---|"]
    lines += [f"| `{name}` | {described(node)} |" for name, node in top.items()]
    aside = ("foresight.errors", "foresight.training.options")
    called = {path: text for path, text in uses(tree, names).items() if text and not path.startswith(aside)}
    lines += ["", "They call:", "", "| function | what it does |", "|---|---|"]
    for path, text in called.items():
        module = names[path.rpartition(".")[0]].relative_to(ROOT)
        lines.append(f"| [`{'.'.join(path.split('.')[-2:])}`](../{module}) | {text} |")
    for name in ("update", "act_and_update", "train"):
        if name in top:
            code = ast.get_source_segment(source, top[name])
            lines += ["", f'<details markdown="1"><summary>{name}</summary>', "", "```python", str(code), "```", ""]
            lines += ["</details>"]
    return "\n".join([*lines, ""])


def hyperparameters(name: str) -> str:
    """A section for the page of an algorithm: the fields of its Config and its presets, with their sources."""
    from foresight.cli import fields
    from foresight.runtime import catalog

    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|")

    lines = ["", "## Hyperparameters", "", "| field | default | meaning, unit, source |", "|---|---|---|"]
    for field in fields.describe(catalog.config_class(name), catalog.entry(name).path):
        lines.append(f"| `{field.name}` | `{field.default!r}` | {cell(field.help)} |")
    presets = catalog.presets(name)
    if presets:
        lines += ["", f"Presets (`foresight train {name} --preset NAME`), which hold what differs:", ""]
        lines += ["| preset | differs | source |", "|---|---|---|"]
        for key, preset in presets.items():
            given = ", ".join(f"{part}: {value}" for part, value in preset.items() if part != "source")
            lines.append(f"| `{key}` | {cell(f'`{given}`')} | {cell(str(preset.get('source', '')))} |")
    return "\n".join([*lines, ""])


def layers(names: dict[str, Path]) -> str:
    """The first page of the reference."""
    lines = ["# Reference", "", "Every public module, from its docstrings. `foresight show NAME` prints an algorithm's"]
    lines += ["objective, its hyperparameters with their sources, and its presets.", ""]
    for name in ("foresight", *(n for n, f in names.items() if f.name == "__init__.py" and n.count(".") == 1)):
        inner = [n for n in names if n.startswith(name + ".") and n.count(".") == name.count(".") + 1]
        shown = [f"[`{n.split('.')[-1]}`]({reference(n, names[n]).removeprefix('reference/')})" for n in inner]
        place = "python.md" if name == "foresight" else reference(name, names[name]).removeprefix("reference/")
        lines += [f"## [`{name}`]({place})", "", ", ".join(shown), ""]
    return "\n".join(lines)


def stage(out: Path) -> int:
    """Write everything that the builder reads to the new folder `out`; returns the number of pages."""
    names = modules()
    known = {file: reference(name, file) for name, file in names.items()}
    known[ROOT / "foresight" / "__init__.py"] = "reference/python.md"
    copies: set[Path] = set()
    pages = {file.relative_to(DOCS).as_posix(): file for file in sorted(DOCS.rglob("*.md"))}
    pages |= {place: ROOT / name for name, place in TOPS.items()}
    shutil.rmtree(out, ignore_errors=True)
    results = reached()
    papers = {name.split(".")[-1]: file for name, file in names.items() if name.startswith(FAMILIES)}
    for page, source in pages.items():
        text, name = source.read_text(encoding="utf-8"), page.removesuffix(".md")
        if name in papers and papers[name].name != "__init__.py":
            text += anatomy(papers[name], names) + hyperparameters(name) + results.get(name, UNPUBLISHED)
        write(out / page, rewritten(text, source, page, known, copies))
    for name, file in names.items():
        write(out / known[file], listing(name, file, names))
    write(out / "reference" / "index.md", layers(names))
    for folder in ("assets", "media"):
        shutil.copytree(DOCS / folder, out / folder)
    for file in copies:
        place = out / str(linked(file, known))
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return len(pages) + len(names) + 1


def write(file: Path, text: str) -> None:
    """Write a file, and the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


class Loads(HTMLParser):
    """What a built page loads (`loads`) and where it leads (`leads`)."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort the addresses of a tag."""
        given = dict(attrs)
        if tag == "a":
            self.leads.append(given.get("href") or "")
        elif tag == "link" and given.get("rel") in ("canonical", "next", "prev", "alternate"):
            pass
        else:
            self.loads += [value for key in ("src", "href", "poster") if (value := given.get(key))]


def faults(site: Path) -> list[str]:
    """What is wrong with a built site: what is loaded from elsewhere, and links that lead nowhere."""
    bad = []
    for file in sorted(site.rglob("*.html")):
        page = Loads()
        page.feed(file.read_text(encoding="utf-8"))
        name = file.relative_to(site).as_posix()
        bad += [f"{name}: loads {url}" for url in page.loads if url.startswith(("http:", "https:", "//"))]
        for url in {*page.loads, *page.leads}:
            path = unquote(url.split("#")[0].split("?")[0])
            if path and not re.match(r"[a-z]+:|//|/", path):
                there = file.parent / path
                if not (there.is_file() or (there / "index.html").is_file()):
                    bad.append(f"{name}: {url} leads nowhere")
    for file in sorted(site.rglob("*.css")):
        found = re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*", file.read_text(encoding="utf-8"))
        bad += [f"{file.relative_to(site)}: loads {url}" for url in found]
    return bad


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    if command == "stage":
        print(f"{stage(Path(folder))} pages in {folder}")
    else:
        found = faults(Path(folder))
        sys.exit("\n".join(found) if found else 0)
