"""Writes trl_losses.json: TRL's own losses, and their gradients, on shared inputs. Needs `trl` (1.16 made the file).

python tests/golden/make_trl_losses.py

TRL's loss functions are called as they are, on a trainer that is only a stand-in: the model gives the log-probabilities
that it is given.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

ROWS, GROUP, WIDTH, VOCABULARY = 8, 4, 6, 5
FAMILY = {
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
}


def trainer(**settings) -> MagicMock:
    """A stand-in with TRL's defaults."""
    self = MagicMock()
    plain = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2,
        "use_vllm": False, "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "current_gradient_accumulation_steps": 1, "max_completion_length": WIDTH, "precompute_ref_logps": False,
        "ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }  # fmt: skip
    for name, value in {**plain, **settings}.items():
        setattr(self, name, value)
    self.args.delta, self.args.use_bias_correction_kl, self.args.steps_per_generation = None, False, 1
    self.model.training = True
    self.accelerator.num_processes = 1
    self.accelerator.device = torch.device("cpu")
    for name in ("gather", "gather_for_metrics", "reduce"):
        getattr(self.accelerator, name).side_effect = lambda x, *a, **k: x
    return self


def family(inputs: dict[str, torch.Tensor]) -> dict[str, dict]:
    """The losses of GRPO's family."""
    from trl import GRPOTrainer

    rewards = inputs["rewards"].view(-1, GROUP)
    centered = rewards - rewards.mean(1, keepdim=True)
    scaled = centered / (rewards.std(1, keepdim=True) + 1e-4)
    found = {}
    for name, settings in FAMILY.items():
        self = trainer(**settings)
        logprob = inputs["logprob"].clone().requires_grad_()
        self._get_per_token_logps_and_entropies.side_effect = lambda *a, x=logprob, **k: (x, torch.zeros_like(x), None)
        mask = inputs["mask"]
        batch = {
            "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64), "prompt_mask": torch.ones(ROWS, 1),
            "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64), "completion_mask": mask,
            "advantages": (centered if name == "dr_grpo" else scaled).flatten(),
            "old_per_token_logps": inputs["old"], "ref_per_token_logps": inputs["reference"],
            "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        loss = GRPOTrainer._compute_loss(self, None, batch)
        loss.backward()
        found[name] = {"loss": loss.item(), "grad": logprob.grad.tolist()}
    return found


def preferences(inputs: dict[str, torch.Tensor]) -> dict[str, dict]:
    """DPO's losses: of sequences whose tokens are those of the family, chosen in the first half."""
    from trl import DPOTrainer

    found, mask = {}, inputs["mask"]
    for name in ("sigmoid", "ipo", "hinge"):
        logprob = (inputs["logprob"] * mask).clone().requires_grad_()
        self = trainer(loss_types=[name], loss_weights=[1.0], beta=0.3)
        self.ref_model.side_effect = lambda **k: SimpleNamespace(log_probs=inputs["reference"] * mask)
        logits = torch.zeros(ROWS, WIDTH + 1, 2)
        none = torch.zeros(ROWS, WIDTH)
        # The other values are only recorded, not trained on.
        watched = dict.fromkeys(("entropy", "num_correct", "mean_logits"), none)
        watched |= {"is_top1": none.bool(), "is_top5": none.bool(), "aux_loss": None, "loss": None}
        output = SimpleNamespace(log_probs=logprob, logits=logits, **watched)
        whole = torch.cat([torch.zeros(ROWS, 1), mask], 1)
        tokens = torch.zeros(ROWS, WIDTH + 1, dtype=torch.int64)
        batch = {"input_ids": tokens, "attention_mask": torch.ones(ROWS, WIDTH + 1), "completion_mask": whole}
        loss = DPOTrainer._compute_loss(self, lambda o=output, **k: o, batch, False)
        loss.backward()
        found[name] = {"loss": loss.item(), "grad": logprob.grad.tolist()}
    return found


def scores(inputs: dict[str, torch.Tensor]) -> dict[str, dict]:
    """The reward model's loss with margin and centering."""
    from trl import RewardTrainer

    logits = inputs["rewards"][:, None].clone().requires_grad_()
    self = trainer(_total_train_tokens=0, _tp_size=1)
    self.args.center_rewards_coefficient = 0.1
    batch = {"attention_mask": torch.ones(ROWS, WIDTH), "margin": inputs["margin"]}
    loss = RewardTrainer.compute_loss(self, lambda **k: SimpleNamespace(logits=logits), batch)
    loss.backward()
    return {"bradley_terry": {"loss": loss.item(), "grad": logits.grad.tolist()}}


def leave_one_out(inputs: dict[str, torch.Tensor]) -> dict[str, dict]:
    """RLOO at the policy that sampled, where its ratio of sequences is 1."""
    from trl import RLOOTrainer

    rewards, mask = inputs["rewards"].view(-1, GROUP), inputs["mask"]
    others = (rewards.sum(1, keepdim=True) - rewards) / (GROUP - 1)
    logprob = inputs["logprob"].clone().requires_grad_()
    self = trainer()
    self._get_per_token_logps_and_entropies.side_effect = lambda *a, **k: (logprob, torch.zeros(ROWS, WIDTH), None)
    batch = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64), "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64), "completion_mask": mask,
        "advantages": (rewards - others).flatten(), "old_logps": (inputs["logprob"] * mask).sum(1),
    }  # fmt: skip
    loss = RLOOTrainer._compute_loss(self, None, batch)
    loss.backward()
    return {"rloo": {"loss": loss.item(), "grad": logprob.grad.tolist()}}


def demonstrations(inputs: dict[str, torch.Tensor]) -> dict[str, dict]:
    """SFT's loss, of completions alone."""
    from trl import SFTTrainer

    mask = inputs["mask"]
    logprob = inputs["logprob"].clone().requires_grad_()
    self = trainer(compute_loss_func=None, label_smoother=None, _total_train_tokens=0, _tp_size=1)
    self.args.loss_type, self.accelerator.parallelism_config = "nll", None
    output = SimpleNamespace(log_probs=logprob * mask, label_mask=mask, entropy=torch.zeros(1), is_top1=torch.zeros(1))
    loss = SFTTrainer.compute_loss(self, lambda **k: output, {"attention_mask": torch.ones(ROWS, WIDTH + 1)})
    loss.backward()
    return {"sft": {"loss": loss.item(), "grad": logprob.grad.tolist()}}


def teachers(inputs: dict[str, torch.Tensor]) -> dict[str, dict]:
    """Both ends of GKD's divergence: of the student from the teacher, and the other way."""
    from trl.experimental.gkd import GKDTrainer

    labels, found = torch.where(inputs["mask"] > 0, 0, -100), {}
    for name, beta in (("gkd_reverse", 1), ("gkd_forward", 0)):
        student = inputs["student"].clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(student, inputs["teacher"], labels, beta, temperature=0.7)
        loss.backward()
        found[name] = {"loss": loss.item(), "grad": student.grad.tolist()}
    return found


def main() -> None:
    """Draw the inputs, ask TRL, write the file."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([6, 2, 4, 1, 3, 6, 5, 2])
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator)
    inputs = {
        "old": old,
        "logprob": old + 0.4 * torch.randn(ROWS, WIDTH, generator=generator),
        "reference": old + 0.4 * torch.randn(ROWS, WIDTH, generator=generator),
        "rewards": torch.randint(0, 3, (ROWS,), generator=generator).float(),
        "margin": torch.rand(ROWS // 2, generator=generator),
        "mask": (torch.arange(WIDTH) < lengths[:, None]).float(),
        "student": 2 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator),
        "teacher": 2 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator),
    }
    import trl

    losses = {**family(inputs), **preferences(inputs), **scores(inputs)}
    losses |= {**leave_one_out(inputs), **demonstrations(inputs), **teachers(inputs)}
    document = {"trl": trl.__version__, "inputs": {k: v.tolist() for k, v in inputs.items()}, "losses": losses}
    Path(__file__).with_name("trl_losses.json").write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
