"""The conditions of all tests: no network, one thread for small tensors, the same examples in every run."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

# Before anything imports them: no test may reach for a hub, and many small tensors are faster on one thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits leaves its core to the other worker
if "PYTEST_XDIST_WORKER" in os.environ:  # one core each, also for the processes that tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from foresight.nets.language import architecture

LANGUAGE = Path(__file__).parent / "nets" / "language"
READING = ("foresight.nets.language.architecture.", "foresight.nets.language.pretrained.")

# What collecting 8,000 tests makes is there to stay: the collector would walk over it again and again.
gc.disable()
torch.set_num_threads(1)  # here too: what a module's fixtures make comes before `_same_conditions`

# A sabotaged test fails by design, so shrinking its examples would be most of the work.
# To see a small counterexample: pytest --hypothesis-profile=explain.
hypothesis.settings.register_profile(
    "fast",
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.register_profile("explain", deadline=None, max_examples=300)
hypothesis.settings.load_profile("fast")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The first process to read a file of a fresh clone compiles it for the others: one begins with the last file."""
    report = yield
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left with one while the others have nothing to do."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], item.path))


def pytest_collection_finish() -> None:
    """From here on the collector looks at what tests make, not at the tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _mutants_are_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sabotaged language model is computed all the same: its check at load would notice the mutation and avoid it."""
    mutation = _mutation(request)
    if mutation is None or mutation[0].startswith("foresight.nets.language.architecture."):
        return

    def believed(compute: Callable[[], object]) -> bool:
        with contextlib.suppress(Exception):
            compute()
        return True

    monkeypatch.setattr(architecture, "_exact", believed)
    monkeypatch.setattr(architecture, "_close", lambda pairs: True)


def _mutation(request: pytest.FixtureRequest) -> tuple[str, Callable[..., object]] | None:
    return request.node.callspec.params.get("sabotage") if hasattr(request.node, "callspec") else None


@pytest.fixture(autouse=True)
def _small_models_are_read_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and trying the model of `tiny_language` would be most of a test's work: tests get copies of it.

    Not those that may be about reading or trying it.
    """
    small = sys.modules.get("tests.tiny_language")
    if small is None or request.path.is_relative_to(LANGUAGE):
        return
    mutation = _mutation(request)
    if mutation is not None and mutation[0].startswith(READING):
        return
    from foresight.nets.language import pretrained

    monkeypatch.setattr(pretrained, "_read", small.read_once(pretrained._read, mutation is None))


@pytest.fixture(autouse=True)
def _same_conditions() -> None:
    """Every test begins with the same global generator and thread count, whichever ran before it."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` also writes down the stack of calls
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    torch.set_num_threads(1)
