"""Write the notebooks of the course and of the examples from their pages.

python docs/notebooks.py                                      # writes the notebooks
python docs/notebooks.py docs/notebooks/grid_world.md ...     # also runs these pages, and draws their pictures

docs/learn/NAME.md becomes examples/learn/NAME.ipynb, and docs/notebooks/NAME.md becomes examples/NAME.ipynb. A block of
Python is a cell; a block of `text` right after it is what the cell prints, which the tests compare. Everything else is
text, with links that lead to the same place from the notebook. The figures of a page become
docs/media/notebooks/NAME-1.png and so on.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {ROOT / "docs" / "learn": ROOT / "examples" / "learn", ROOT / "docs" / "notebooks": ROOT / "examples"}
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
DETAILS = re.compile(r'^<details markdown="1"><summary>(.*?)</summary>\n|^</details>\n', re.MULTILINE)


def pages() -> dict[Path, Path]:
    """The notebook of each page with code."""
    found = {
        page: out / f"{page.stem}.ipynb" for folder, out in FOLDERS.items() for page in sorted(folder.glob("*.md"))
    }
    return {page: notebook for page, notebook in found.items() if page.stem != "index"}


def cells(text: str) -> list[tuple[str, str, str]]:
    """The cells of a page in order: ("markdown" or "code", source, what it prints)."""
    found, last = [], 0
    for block in BLOCK.finditer(text):
        found += [("markdown", text[last : block.start()].strip(), ""), ("code", block[1].rstrip(), block[2] or "")]
        last = block.end()
    found.append(("markdown", text[last:].strip(), ""))
    return [cell for cell in found if cell[1]]


def notebook(page: Path, place: Path) -> dict[str, Any]:
    """The notebook of a page, as a document of nbformat 4.5."""

    def moved(found: re.Match[str]) -> str:
        if "://" in found[1]:
            return found[0]
        target = os.path.relpath((page.parent / found[1]).resolve(), place.parent)
        return f"]({target}{found[2] or ''})"

    text = DETAILS.sub(lambda found: f"**{found[1]}**\n" if found[1] else "", page.read_text(encoding="utf-8"))
    document: dict[str, Any] = {"cells": [], "nbformat": 4, "nbformat_minor": 5}
    document["metadata"] = {"language_info": {"name": "python"}, "kernelspec": KERNEL}
    for number, (kind, source, printed) in enumerate(cells(text)):
        source = LINK.sub(moved, source) if kind == "markdown" else source
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if kind == "code":
            shown = {"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}
            cell |= {"execution_count": None, "outputs": [shown] if printed else []}
        document["cells"].append(cell)
    return document


KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def written(document: dict[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def draw(page: Path) -> int:
    """Run a page from the first cell to the last and save its figures; returns their number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for kind, source, _ in cells(page.read_text(encoding="utf-8")):
        if kind == "code":
            exec(compile(source, page.name, "exec"), names)
            last = names.get(source.rsplit("\n", 1)[-1])
            shown = [pyplot.figure(number) for number in pyplot.get_fignums()]
            for figure in [*shown, *([last] if isinstance(last, Figure) and last not in shown else [])]:
                count += 1
                figure.savefig(ROOT / "docs" / "media" / "notebooks" / f"{page.stem}-{count}.png", dpi=70)
            pyplot.close("all")
    return count


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{draw(Path(name))} pictures of {name}")
    for page, place in pages().items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(written(notebook(page, place)), encoding="utf-8")
