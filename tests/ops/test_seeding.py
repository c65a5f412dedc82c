"""The global generator is seeded as torch itself does."""

from __future__ import annotations

import torch

from foresight.ops.seeding import seed_global
from tests.sabotage import change, sabotaged_by


@sabotaged_by("foresight.ops.seeding.seed_global", change("seed", lambda seed: seed + 1))
def test_the_global_generator_is_seeded_as_torch_does() -> None:
    for seed in (0, 7, 2**40):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        seed_global(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(3), expected)
