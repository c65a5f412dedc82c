"""Sabotage twins: a test that cannot fail proves nothing, so run it against broken code and see it fail.

    from foresight.ops import returns
    from tests.sabotage import drop, flip_sign, sabotaged_by, swap

    @sabotaged_by("foresight.ops.returns.gae", flip_sign, swap("discount", "cut"), drop("mask"))
    def test_gae_golden():
        advantage, target = returns.gae(...)
        torch.testing.assert_close(advantage, ...)

is collected as four tests: `sound` runs the body as it is; each of the others replaces the named function
by a mutant for the time of the test, and passes only if an assertion of the test then fails: an `assert` in a file
under `tests`, or one of `torch.testing` or `numpy.testing`. An `assert` inside the package does not count (it would
stop a user's run too, or be gone with `python -O`; it shows nothing about what the test looks at), any other exception
is an error of the test itself, and no exception means that the mutant survived.

The target is a dotted path to a function or a method (`package.module.Class.method`). Every module under
`foresight` or `tests` that had imported the function by name gets the mutant too, so it does not matter how
the code under test refers to it. Where a test calls several functions, stack the decorator, one for each.
It goes outside `@given` (all examples together must fail the test) and mixes with fixtures and
`pytest.mark.parametrize`.

A mutation is any callable that takes the original function and returns the mutant. Ready-made ones:

- `flip_sign`: what it returns, negated;       `off_by_one`: what it returns, shifted one step in time;
- `scaled(2.0)`: what it returns, times that;  `returns(f)`: f of what it returns;
- `swap("a", "b")`: two arguments exchanged;   `drop("mask")`: the argument becomes None;
- `shift("value")`: an argument shifted one step in time;
- `change("cut", torch.zeros_like)`: an argument passed through a function;
- `begins_anew`: of a `train`, which resets its generator where it resumes;
- `loses_generator`: of `copy.deepcopy`, by which a test stops a run: what the generator had drawn is forgotten.

`swap`, `drop`, `shift` and `change` find the argument by its name, however it was passed, also where its default is
used, and leave a call alone in which it is None. Tensors in tuples and dicts are reached too; integers and booleans
have no sign to flip.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

Mutation = Callable[[Callable[..., Any]], Callable[..., Any]]

TESTS = Path(__file__).parent

_SEEN: dict[str, Any] = {}  # the modules that were read, by path
_NAMES: dict[int, list[tuple[Any, str]]] = {}  # where an object was held then, by its id


def sabotaged_by(target: str, *mutations: Mutation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the test as it is, and once more for each mutation of `target`, which it must then fail."""
    if not mutations:
        raise ValueError("sabotaged_by needs at least one mutation.")

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        cases = getattr(test, "sabotages", None)
        if cases is None:
            cases = [pytest.param(None, id="sound")]
            test = _with_cases(test, cases)
        for mutation in mutations:
            label = f"{target.rsplit('.', 1)[-1]}-{_label(mutation)}"
            cases.append(pytest.param((target, mutation), id=label))
        return test

    return decorate


def _with_cases(test: Callable[..., Any], cases: list[Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def run(*args: Any, sabotage: tuple[str, Mutation] | None, **kwargs: Any) -> None:
        __tracebackhide__ = True
        if sabotage is None:
            test(*args, **kwargs)
            return
        target, mutation = sabotage
        with _mutated(target, mutation):
            try:
                test(*args, **kwargs)
            except AssertionError as error:
                if where := _not_of_a_test(error):
                    pytest.fail(f"not the test but {where} noticed that {target} was mutated by {_label(mutation)}")
                return
        # Not an AssertionError, or a stacked twin would take it for the failure that it wants.
        pytest.fail(f"the test passed although {target} was mutated by {_label(mutation)}")

    signature = inspect.signature(test)
    extra = inspect.Parameter("sabotage", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    run.sabotages = cases  # type: ignore[attr-defined]
    # pytest reads the list when it collects, so decorators stacked above may still add to it.
    return pytest.mark.parametrize("sabotage", cases)(run)


def _not_of_a_test(error: AssertionError) -> str | None:
    """Where an assertion failed, if that was neither in a test nor in a library's comparison made for tests."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return "an error without a traceback"
    path, module = Path(frame.tb_frame.f_code.co_filename), frame.tb_frame.f_globals.get("__name__", "")
    if TESTS in path.parents or f"{module}.".startswith(("torch.testing.", "numpy.testing.")):
        return None
    return f"{path}:{frame.tb_lineno}"


@contextmanager
def _mutated(target: str, mutation: Mutation) -> Iterator[None]:
    owner, name = _resolve(target)
    original = inspect.getattr_static(owner, name)
    function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
    mutant = functools.wraps(function)(mutation(function))
    holders: list[tuple[Any, str]] = [(owner, name)]
    if inspect.ismodule(owner):
        holders += [(module, attribute) for module, attribute in _holders(original) if module is not owner]
    replacement = type(original)(mutant) if isinstance(original, (staticmethod, classmethod)) else mutant
    try:
        for holder, attribute in holders:
            setattr(holder, attribute, replacement)
        yield
    finally:
        for holder, attribute in holders:
            setattr(holder, attribute, original)


def _holders(original: Any) -> list[tuple[Any, str]]:
    """The modules of `foresight` and `tests` that hold it, and by which name.

    A module is read once, when it is first seen: walking them all took longer than many a test.
    """
    if sys.modules != _SEEN:
        for path, module in list(sys.modules.items()):
            if path.split(".")[0] in ("foresight", "tests") and module is not None and _SEEN.get(path) is not module:
                for attribute, held in list(vars(module).items()):
                    _NAMES.setdefault(id(held), []).append((module, attribute))
        _SEEN.clear()
        _SEEN.update(sys.modules)
    return [(module, name) for module, name in _NAMES.get(id(original), ()) if vars(module).get(name) is original]


def _resolve(target: str) -> tuple[Any, str]:
    """The module or class that holds the last name of a dotted path, and that name."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise
            continue
        for part in parts[split:-1]:
            owner = getattr(owner, part, None)
        if not hasattr(owner, parts[-1]):
            break
        return owner, parts[-1]
    raise ValueError(f"sabotaged_by: there is no {target}.")


def _label(mutation: Mutation) -> str:
    return getattr(mutation, "label", None) or getattr(mutation, "__name__", "mutation")


# --- mutations of what a function returns


def returns(change: Callable[[Any], Any], label: str = "returns") -> Mutation:
    """`change` is applied to every tensor or float that the function returns."""

    def mutate(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: _map(change, original(*args, **kwargs))

    mutate.label = label  # type: ignore[attr-defined]
    return mutate


def flip_sign(original: Callable[..., Any]) -> Callable[..., Any]:
    """Negate what it returns."""
    return returns(lambda x: -x)(original)


def off_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Shift what it returns by one step in time: row t holds what belongs to row t-1."""
    return returns(_shifted)(original)


def scaled(factor: float) -> Mutation:
    """Multiply what it returns."""
    return returns(lambda x: factor * x, label=f"times_{factor}")


# --- mutations of what a function is given


def change(argument: str, how: Callable[[Any], Any], label: str | None = None) -> Mutation:
    """Pass `argument` through `how` first."""

    def mutate(original: Callable[..., Any]) -> Callable[..., Any]:
        def edit(arguments: dict[str, Any]) -> None:
            if arguments.get(argument) is not None:
                arguments[argument] = how(arguments[argument])

        return _with_arguments(original, edit, (argument,))

    mutate.label = label or f"change_{argument}"  # type: ignore[attr-defined]
    return mutate


def drop(argument: str) -> Mutation:
    """Pass None for `argument`."""
    return change(argument, lambda _: None, label=f"drop_{argument}")


def shift(argument: str) -> Mutation:
    """Shift `argument` by one step in time: row t gets what belongs to row t-1."""
    return change(argument, lambda x: _map(_shifted, x), label=f"shift_{argument}")


def swap(first: str, second: str) -> Mutation:
    """Exchange two arguments."""

    def mutate(original: Callable[..., Any]) -> Callable[..., Any]:
        def edit(arguments: dict[str, Any]) -> None:
            if arguments.get(first) is not None and arguments.get(second) is not None:
                arguments[first], arguments[second] = arguments[second], arguments[first]

        return _with_arguments(original, edit, (first, second))

    mutate.label = f"swap_{first}_{second}"  # type: ignore[attr-defined]
    return mutate


# --- mutations of a `train`


def begins_anew(train: Callable[..., Any]) -> Callable[..., Any]:
    """A resumed run draws the numbers that it began with."""

    def mutant(config: Any, env: Any, state: Any = None, **kwargs: Any) -> Any:
        if state is not None:
            state.generator.manual_seed(config.seed)
        return train(config, env, state, **kwargs)

    return mutant


def loses_generator(deepcopy: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a State has a generator that is reset."""

    def mutant(x: Any, *memo: Any) -> Any:
        found = deepcopy(x, *memo)
        if isinstance(getattr(found, "generator", None), torch.Generator):
            found.generator.manual_seed(1)
        return found

    return mutant


def _with_arguments(
    original: Callable[..., Any], edit: Callable[[dict[str, Any]], None], names: tuple[str, ...]
) -> Callable[..., Any]:
    signature = inspect.signature(original)
    for name in names:
        if name not in signature.parameters:
            raise ValueError(f"sabotaged_by: {getattr(original, '__name__', original)} has no argument {name}.")

    def mutant(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        edit(bound.arguments)
        return original(*bound.args, **bound.kwargs)

    return mutant


def _shifted(x: Any) -> Any:
    """Rolled by one along dim 1 (dim 0 of a vector); numbers have no time and are returned as they are."""
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        return x
    return x.roll(1, dims=min(1, x.dim() - 1))


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return function(x) if x.is_floating_point() else x
    if isinstance(x, float):
        return function(x)
    if isinstance(x, tuple):
        parts = [_map(function, part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, list):
        return [_map(function, part) for part in x]
    if isinstance(x, dict):
        return {key: _map(function, part) for key, part in x.items()}
    return x
