"""Exact arithmetic on text: what is evaluated, what is refused, and which answers are one."""

from __future__ import annotations

from fractions import Fraction

import pytest

from foresight.envs.text.exact import canonical, evaluate
from tests.sabotage import sabotaged_by


@sabotaged_by("foresight.envs.text.exact.evaluate", lambda f: lambda text: (Fraction(float(f(text)[0])), f(text)[1]))
def test_thirds_are_exact():
    assert evaluate("8/(3-8/3)") == (Fraction(24), [8, 3, 8, 3])
    assert evaluate("1/3+1/3")[0] == Fraction(2, 3)


@pytest.mark.parametrize(
    "text",
    ["2**9", "__import__('os')", "1/(2-2)", "(", "1.5", "a+1", "1" * 300, "1\n+1", "(" * 150 + "1", "1 if 1 else 2"],
)
def test_what_is_no_such_expression_is_refused(text):
    assert evaluate(text) is None


@sabotaged_by("foresight.envs.text.exact.canonical", lambda f: lambda text: text.strip())
def test_equal_answers_have_one_form():
    assert len({canonical(text) for text in ("1/2", "0.5", " 2/4 ", "0.50.", "+1/2", "3 / 6")}) == 1
    assert canonical("1,000") == canonical("1000") == canonical("1000.0") != canonical("100")
    assert canonical("1e-05") == canonical("0.00001") and canonical("2.5E3") == canonical("2,500") != canonical("2.5")
    assert canonical("1e+16") == "1" + "0" * 16
    assert canonical("1E999999999") == "1e999999999"  # a text: as a number it needs 400 MB
    assert canonical("-3") != canonical("3")
    assert canonical(" The  Answer. ") == canonical("the answer") != canonical("answer")
    assert canonical("1/0") == "1/0"
