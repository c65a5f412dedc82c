"""Thought trees as pages and pictures."""

from __future__ import annotations

from matplotlib.image import imread

from foresight.planning.reasoning.tree import ThoughtTree
from foresight.runtime.reasoning import pictures


def chain(length):
    """Thoughts each below the last, with a second thought below the question."""
    tree, node = ThoughtTree("<q>"), 0
    for i in range(length):
        node = tree.add(f"thought {i}", (node,))
    tree.add("apart")
    tree.choose(node)
    return tree


def test_the_page_nests_thoughts_in_their_order(tmp_path):
    text = pictures.page(chain(2), "small", tmp_path / "tree.html").read_text()
    body = text.partition("</h1>\n")[2]
    pieces = [
        '<details class="chosen" open><summary><span class="kind">0 question</span> <pre>&lt;q&gt;</pre></summary>',
        '<details class="chosen" open><summary><span class="kind">1 thought</span> <pre>thought 0</pre></summary>',
        '<details class="chosen" open><summary><span class="kind">2 thought</span> <pre>thought 1</pre></summary>',
        "</details>\n</details>\n",
        '<details class=""><summary><span class="kind">3 thought</span> <pre>apart</pre></summary></details>\n',
        "</details>\n",
    ]
    assert body == "".join(pieces)


def test_deep_trees_have_a_page_and_a_picture(tmp_path):
    tree = chain(1_500)
    text = pictures.page(tree, "deep", tmp_path / "tree.html").read_text()
    assert text.count("<details") == text.count("</details>") == 1_502
    height, width = imread(pictures.picture(tree, "deep", tmp_path / "tree.png")).shape[:2]
    assert height < width < 10_000
