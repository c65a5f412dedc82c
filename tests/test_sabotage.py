"""`sabotaged_by` itself: it must mutate its target, restore it, and catch a test that cannot fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from foresight.ops import aggregate, returns
from foresight.ops.aggregate import per_token
from tests import sabotage
from tests.sabotage import change, drop, flip_sign, off_by_one, sabotaged_by, scaled, shift, swap

TARGET = "foresight.ops.aggregate.per_token"
MASK = torch.tensor([[1.0, 0.0], [1.0, 1.0]])


def twins(test: Callable[..., Any]) -> list[Any]:
    return [case.values[0] for case in test.sabotages]  # type: ignore[attr-defined]


def test_a_good_test_passes_and_all_its_twins_too() -> None:
    @sabotaged_by(TARGET, flip_sign, off_by_one, scaled(2.0), change("mask", torch.ones_like), shift("mask"))
    def good() -> None:
        assert aggregate.per_token(MASK).tolist() == (MASK / 3).tolist()

    cases = twins(good)
    assert len(cases) == 6 and cases[0] is None
    for case in cases:
        good(sabotage=case)
    assert aggregate.per_token is per_token  # restored
    assert (aggregate.per_token(MASK) >= 0).all()


def test_a_test_that_cannot_fail_is_caught() -> None:
    @sabotaged_by(TARGET, scaled(1 + 1e-3))
    def too_tolerant() -> None:
        torch.testing.assert_close(aggregate.per_token(MASK), MASK / 3, rtol=1e6, atol=1e6)

    too_tolerant(sabotage=None)
    with pytest.raises(pytest.fail.Exception, match="although"):
        too_tolerant(sabotage=twins(too_tolerant)[1])


def test_another_exception_is_not_taken_for_a_failed_assertion() -> None:
    @sabotaged_by(TARGET, flip_sign)
    def broken() -> None:
        raise KeyError("the test itself is wrong")

    with pytest.raises(KeyError):
        broken(sabotage=twins(broken)[1])


def elsewhere(source: str) -> Callable[..., Any]:
    """The function `check` of a module that is no test: its code and its globals belong to another file."""
    module: dict[str, Any] = {"__name__": "foresight.ops.pretended"}
    exec(compile(source, str(sabotage.TESTS.parent / "foresight" / "ops" / "pretended.py"), "exec"), module)
    return module["check"]


def test_an_assertion_of_the_package_is_not_taken_for_one_of_the_test() -> None:
    """The test looks at nothing: what notices the mutant is an `assert` below it, which a run would not survive."""
    check = elsewhere("def check(x):\n    assert bool((x >= 0).all())\n")

    @sabotaged_by(TARGET, flip_sign)
    def looks_at_nothing() -> None:
        check(aggregate.per_token(MASK))

    looks_at_nothing(sabotage=None)
    with pytest.raises(pytest.fail.Exception, match=r"pretended\.py:2 noticed that foresight\.ops\.aggregate"):
        looks_at_nothing(sabotage=twins(looks_at_nothing)[1])


def test_what_counts_as_an_assertion_of_a_test() -> None:
    """An `assert` here, also where the package called it, and the comparisons that libraries make for tests."""
    calls_back = elsewhere("def check(looks):\n    looks()\n")
    expected = MASK / 3

    def looks() -> None:
        assert torch.equal(aggregate.per_token(MASK), expected)

    for compare in (
        looks,
        lambda: calls_back(looks),
        lambda: torch.testing.assert_close(aggregate.per_token(MASK), expected),
        lambda: np.testing.assert_allclose(aggregate.per_token(MASK).numpy(), expected.numpy()),
        lambda: np.testing.assert_array_equal(aggregate.per_token(MASK).numpy(), expected.numpy()),
    ):

        @sabotaged_by(TARGET, flip_sign)
        def good(compare: Callable[[], None]) -> None:
            compare()

        for case in twins(good):
            good(compare, sabotage=case)


def test_a_function_imported_by_name_is_mutated_too() -> None:
    @sabotaged_by(TARGET, flip_sign)
    def by_name() -> None:
        assert (per_token(MASK) >= 0).all()

    by_name(sabotage=twins(by_name)[1])
    assert (per_token(MASK) >= 0).all()


def test_decorators_stack() -> None:
    @sabotaged_by("foresight.ops.returns.backward", flip_sign)
    @sabotaged_by("foresight.ops.returns.gae", drop("mask"), swap("value", "next_value"))
    def stacked() -> None: ...

    labels = [case.id for case in stacked.sabotages]  # type: ignore[attr-defined]
    assert labels == ["sound", "gae-drop_mask", "gae-swap_value_next_value", "backward-flip_sign"]


def test_methods_and_defaults() -> None:
    class Thing:
        def method(self, x: float = 2.0) -> float:
            return x

        @staticmethod
        def static(x: float) -> float:
            return x

    sabotage.Thing = Thing  # type: ignore[attr-defined]
    try:
        for name, mutation, expected in (
            ("method", flip_sign, -2.0),
            ("method", change("x", lambda x: 3 * x), 6.0),
            ("static", scaled(2.0), 4.0),
        ):
            with sabotage._mutated(f"tests.sabotage.Thing.{name}", mutation):
                thing = Thing()
                assert (thing.method() if name == "method" else thing.static(2.0)) == expected
        assert Thing().method() == 2.0 and Thing.static(2.0) == 2.0
    finally:
        del sabotage.Thing  # type: ignore[attr-defined]


def test_a_wrong_target_or_argument_is_an_error() -> None:
    for target in ("foresight.ops.returns.no_such_function", "foresight.no_such_module.f", "nowhere.at.all"):
        with pytest.raises(ValueError, match="there is no"), sabotage._mutated(target, flip_sign):
            pass
    with (
        pytest.raises(ValueError, match="has no argument"),
        sabotage._mutated("foresight.ops.returns.gae", drop("no_such_argument")),
    ):
        pass
    with pytest.raises(ValueError, match="at least one"):
        sabotaged_by("foresight.ops.returns.gae")
    assert returns.gae.__name__ == "gae"
