"""DreamerV3's gradient steps from state: the 1M-parameter model on 16 sequences of 64 rows, horizon 15.

Equal sizes on both sides: `dreamer.Config`'s defaults and the peer's `dreamer_v3_5_1M`, four numbers observed, two
actions, all losses (imagined and replayed values too), one LaProp step over all weights, the slow critic's average.
A step is one call of the training function on sequences in memory; ours also samples them from the replay and refreshes
the latents there. One thread on both sides, and seconds of its processor time, which other programs on the machine
disturb less than those of a clock. The first two steps are warm-up. The peer needs an environment of its own:
`--peer-python`.
"""

from __future__ import annotations

import time
from typing import Any

UNIT = "gradient steps/s of one core"
PEER = "sheeprl"
TARGET = 2.0
BATCH, LENGTH, OBS, ACTIONS = 16, 64, 4, 2
STEPS, WARM = 6, 2
THREADS = 1


def ours() -> dict[str, Any]:
    """`dreamer.update` on samples of a replay of random rows, with the memory pool of `foresight train`."""
    import gymnasium.spaces as gs
    import numpy as np
    import torch

    from foresight.algorithms.world import dreamer
    from foresight.envs.base import Spaces
    from foresight.runtime import machine

    torch.set_num_threads(THREADS)
    machine.configure_malloc(machine.POOL)
    spaces = Spaces(gs.Box(-1, 1, (OBS,), np.float32), gs.Discrete(ACTIONS))
    config = dreamer.Config(batch_size=BATCH, sequence_length=LENGTH, replay_size=1_000)
    state = dreamer.build(config, spaces)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1_000):
        cut = (torch.rand(1, generator=generator) < 0.02).float()
        action = torch.randint(ACTIONS, (1,), generator=generator)
        extras = {name: x for name, x in state.model.initial(1).items() if name in state.model.kept}
        rows = {
            "obs": torch.randn(1, OBS, generator=generator), "action": action,
            "reward": torch.randn(1, generator=generator), "discount": 1 - cut, "cut": cut, "mask": torch.ones(1),
            "extras": {**extras, "action": torch.eye(ACTIONS)[action]},
        }  # fmt: skip
        state.replay.add(rows, torch.randn(1, OBS, generator=generator))
    parameters = sum(p.numel() for part in (state.model, state.actor, state.critic) for p in part.parameters())
    return _timed(lambda: dreamer.update(state, *dreamer.sample(state)), parameters)


def peer() -> dict[str, Any]:
    """sheeprl's `dreamer_v3_5.train` on one batch of random rows."""
    import gymnasium.spaces as gs
    import hydra
    import numpy as np
    import torch
    from lightning.fabric import Fabric
    from omegaconf import OmegaConf
    from sheeprl.algos.dreamer_v3_5 import agent, dreamer_v3_5
    from sheeprl.utils.utils import dotdict

    torch.set_num_threads(THREADS)
    chosen = [
        "exp=dreamer_v3_5", "algo=dreamer_v3_5_1M", "env=gym", "algo.cnn_keys.encoder=[]",
        "algo.mlp_keys.encoder=[state]", f"algo.per_rank_batch_size={BATCH}",
        f"algo.per_rank_sequence_length={LENGTH}", "algo.compile.enabled=False",
    ]  # fmt: skip
    with hydra.initialize_config_module("sheeprl.configs", version_base="1.3"):
        config = hydra.compose("config", overrides=chosen)
    optimizer_config = config.algo.optimizer
    config = dotdict(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))
    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    space = gs.Dict({"state": gs.Box(-1, 1, (OBS,), np.float32)})
    world_model, actor, critic, slow, _ = agent.build_agent(fabric, (ACTIONS,), False, config, space)
    parameters = [p for part in (world_model, actor, critic) for p in part.parameters()]
    optimizer = fabric.setup_optimizers(hydra.utils.instantiate(optimizer_config, params=parameters))
    moments = dreamer_v3_5.Moments(
        config.algo.actor.moments.decay, config.algo.actor.moments.max, config.algo.actor.moments.percentile.low,
        config.algo.actor.moments.percentile.high,
    )  # fmt: skip
    rows = LENGTH + config.algo.replay_context
    generator = torch.Generator().manual_seed(0)
    ends = (torch.rand(rows, BATCH, 1, generator=generator) < 0.02).float()
    data = {
        "state": torch.randn(rows, BATCH, OBS, generator=generator),
        "actions": torch.eye(ACTIONS)[torch.randint(ACTIONS, (rows, BATCH), generator=generator)],
        "rewards": torch.randn(rows, BATCH, 1, generator=generator),
        "terminated": ends, "truncated": torch.zeros_like(ends),
        "is_first": torch.cat([torch.zeros_like(ends[:1]), ends[:-1]]),
        "deter": torch.zeros(rows, BATCH, config.algo.world_model.recurrent_model.recurrent_state_size),
        "stoch": torch.zeros(rows, BATCH, config.algo.world_model.stochastic_size, dtype=torch.uint8),
    }  # fmt: skip

    def step() -> None:
        dreamer_v3_5.train(
            fabric, config, world_model, actor, critic, slow, optimizer, moments, dict(data), None, (ACTIONS,)
        )
        dreamer_v3_5.update_target_critic(critic, slow, config.algo.critic.tau)

    return _timed(step, sum(p.numel() for p in parameters))


def _timed(step: Any, parameters: int) -> dict[str, Any]:
    for _ in range(WARM):
        step()
    began = time.process_time()
    for _ in range(STEPS):
        step()
    rate = STEPS / (time.process_time() - began)
    return {"rate": rate, "threads": THREADS, "parameters": parameters}
