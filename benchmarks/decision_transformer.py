"""Decision Transformer: updates on 64 windows of 20 steps, 128 wide, 3 layers, in the spaces of Hopper.

The paper's sizes on Gym (1 head, dropout 0.1, AdamW, gradient norm 0.25, mean squared error of the actions). The peer
is Hugging Face's DecisionTransformerModel in a plain loop over windows cut with numpy; ours is `update` on windows of
episodes that were read from parquet files, in the precision that is faster on this processor ("auto"). `float32_rate`
is in the peer's precision. `loading` is the time of cutting a batch of windows relative to an update.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

UNIT = "updates/s"
PEER = "transformers"
TARGET = 1.5
BATCH, STEPS, DIM, LAYERS, OBS, ACTION, LENGTH, EPISODES = 64, 20, 128, 3, 11, 3, 200, 50
WARM, MEASURED = 3, 20


def _data() -> tuple[Any, Any, Any]:
    """Observations, actions and rewards of equally long random episodes, `[N, T, ...]`."""
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((EPISODES, LENGTH, OBS)).astype(np.float32)
    action = rng.uniform(-1, 1, (EPISODES, LENGTH, ACTION)).astype(np.float32)
    return obs, action, rng.uniform(0, 1, (EPISODES, LENGTH)).astype(np.float32)


def ours() -> dict[str, Any]:
    """This library's `decision_transformer.update`."""
    return {**_ours("auto"), "float32_rate": _ours("float32")["rate"]}


def _ours(precision: str) -> dict[str, Any]:
    """The rate in one precision."""
    import torch
    from gymnasium import spaces as gs
    from pyarrow import parquet

    from foresight.algorithms.sequence import decision_transformer as dt
    from foresight.data import episodes
    from foresight.envs.base import Spaces

    torch.set_num_threads(1)
    spaces = Spaces(gs.Box(-9, 9, (OBS,), np.float32), gs.Box(-1, 1, (ACTION,), np.float32))
    parts = []
    for obs, action, reward in zip(*_data(), strict=True):
        steps = [tuple(torch.as_tensor(x) for x in step) for step in zip(obs, action, reward, strict=True)]
        parts.append(episodes.episode(steps, torch.zeros(OBS), True))
    written = episodes.join(parts)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(EPISODES):
            (Path(folder) / str(number)).mkdir()
            parquet.write_table(episodes.table(written, number), Path(folder) / str(number) / "part-0.parquet")
        (Path(folder) / "metadata.json").write_text(f'{{"total_episodes": {EPISODES}, "data_format": "parquet"}}')
        began = time.perf_counter()
        data = episodes.read(folder, spaces.obs, spaces.action)
        read = time.perf_counter() - began
    config = dt.Config(context=STEPS, batch_size=BATCH, dim=DIM, layers=LAYERS, precision=precision)
    state = dt.build(config, spaces)
    state.net.fit(data)
    cutting = updating = 0.0
    for i in range(WARM + MEASURED):
        began = time.perf_counter()
        batch = data.windows(BATCH, STEPS, state.sampler)
        cut = time.perf_counter()
        dt.update(state, batch)
        if i >= WARM:
            cutting += cut - began
            updating += time.perf_counter() - cut
    rate = MEASURED / (cutting + updating)
    return {"rate": rate, "loading": cutting / updating, "read_seconds": read, "threads": torch.get_num_threads()}


def peer() -> dict[str, Any]:
    """A plain loop around `DecisionTransformerModel`."""
    import torch
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    torch.set_num_threads(1)
    config = DecisionTransformerConfig(
        state_dim=OBS, act_dim=ACTION, hidden_size=DIM, n_layer=LAYERS, n_head=1, n_inner=4 * DIM, max_ep_len=1_000,
        activation_function="gelu", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1,
    )  # fmt: skip
    model = DecisionTransformerModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    obs, action, reward = _data()
    to_go = reward[:, ::-1].cumsum(1)[:, ::-1]
    rng, begun = np.random.default_rng(0), 0.0
    for i in range(WARM + MEASURED):
        if i == WARM:
            begun = time.perf_counter()
        rows, starts = rng.integers(0, EPISODES, BATCH), rng.integers(0, LENGTH, BATCH)
        time_steps, index = np.zeros((BATCH, STEPS), np.int64), np.arange(STEPS)
        parts = [np.zeros((BATCH, STEPS, n), np.float32) for n in (OBS, ACTION, 1)]
        mask = np.zeros((BATCH, STEPS), np.float32)
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            n = min(STEPS, LENGTH - start)
            window = slice(start, start + n)
            parts[0][b, -n:], parts[1][b, -n:] = obs[row, window], action[row, window]
            parts[2][b, -n:, 0], mask[b, -n:] = to_go[row, window] / LENGTH, 1
            time_steps[b, -n:] = start + index[:n]
        states, actions, returns, real, when = (torch.as_tensor(x) for x in (*parts, mask, time_steps))
        output = model(states=states, actions=actions, rewards=None, returns_to_go=returns, timesteps=when,
                       attention_mask=real)  # fmt: skip
        loss = ((output.action_preds - actions) ** 2)[real > 0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return {"rate": MEASURED / (time.perf_counter() - begun), "threads": torch.get_num_threads()}
