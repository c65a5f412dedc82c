"""Reward models: Bradley-Terry with a margin, scores of steps, and saving."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from foresight.algorithms.language import pretrain, reward_model
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.planning.reasoning import verifiers
from foresight.runtime import export, run
from foresight.training import corpus
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.supervised_runs import PAIRS, build, gradient, row_logprob, same_gradients
from tests.sabotage import change, sabotaged_by, scaled, swap

STEPS = [
    Example(f"{i}?", columns={"prompt": f"{i}?", "completions": ["1", "ab", "345"], "labels": [True, not i % 2, False]})
    for i in range(4)
]


@sabotaged_by("foresight.ops.preference.bradley_terry", swap("chosen", "rejected"), change("margin", lambda m: 0 * m))
@sabotaged_by("foresight.ops.preference.centering", scaled(3.0))
def test_a_reward_model_is_bradley_terry_with_margin_and_centering():
    state = build(reward_model, centering=0.1, micro_tokens=20)
    pairs = [dataclasses.replace(e, columns={**e.columns, "margin": 0.5 * i}) for i, e in enumerate(PAIRS)]
    rows, scorer = reward_model._corpus(state, pairs), copy.deepcopy(state.scorer)
    caught, metrics = gradient(reward_model, state, rows.batch(range(6)), pairs)
    chosen, rejected = scorer.scores(rows.batch(range(6))).unbind(1)
    margin = 0.5 * torch.arange(6)
    loss = -torch.log(torch.sigmoid(chosen - rejected - margin)).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    loss.backward()
    assert math.isclose(metrics["loss"], loss.item(), rel_tol=1e-5)
    assert math.isclose(metrics["accuracy"], (chosen > rejected).float().mean().item(), rel_tol=1e-6)
    same_gradients(caught, scorer.parameters())


def one_early(original):
    return lambda *args: (original(*args)[0].roll(-1, 1), original(*args)[1].roll(-1, 1))


@sabotaged_by("foresight.training.corpus.step_ends", one_early)
def test_a_process_reward_model_scores_the_end_of_every_step():
    state = build(reward_model, micro_tokens=10)
    rows, scorer = reward_model._corpus(state, STEPS), copy.deepcopy(state.scorer)
    batch = rows.batch(range(4))
    ends, labels = corpus.step_ends(state.scorer.trunk, batch, STEPS)
    caught, metrics = gradient(reward_model, state, batch, STEPS)
    # "1 ab 345 <eos>": the tiny tokenizer writes a line break as its unknown sign, one token.
    places = [0, 3, 7]  # the last token of each
    assert ends.sum() == 12 and all(row.nonzero()[:, 0].tolist() == places for row in ends)
    assert [labels[i, places].tolist() for i in range(4)] == [[1.0, float(i % 2 == 0), 0.0] for i in range(4)]
    logits = scorer.steps(batch)[:, 0][:, places]
    right = torch.tensor([[1.0, float(i % 2 == 0), 0.0] for i in range(4)])
    loss = -(right * torch.log(torch.sigmoid(logits)) + (1 - right) * torch.log(torch.sigmoid(-logits))).mean()
    loss.backward()
    assert math.isclose(metrics["loss"], loss.item(), rel_tol=1e-5)
    same_gradients(caught, scorer.parameters())


@sabotaged_by("foresight.planning.reasoning.verifiers.ends", lambda f: lambda text, *rest: f(text, *rest)[-1:])
def test_a_process_reward_model_scores_an_answer_by_its_least_step():
    state = build(reward_model)
    state.scorer.of_steps = True
    batch = reward_model._corpus(state, STEPS).batch(range(4))
    ends, _ = corpus.step_ends(state.scorer.trunk, batch, STEPS)
    with torch.no_grad():
        logits = state.scorer.steps(batch)[:, 0]
    expected = [torch.sigmoid(row[end]).min().item() for row, end in zip(logits, ends, strict=True)]
    pairs = [(row.prompt, "\n".join(row.columns["completions"])) for row in STEPS]
    assert reward_model.act(state, pairs)[0] == pytest.approx(expected, rel=1e-5)


def test_steps_end_where_they_do_whatever_stands_before_the_first():
    state = build(reward_model)
    scorer = state.scorer.trunk
    rows = [Example("1?", columns={"prompt": "1?", "completions": ["   1", "ab"], "labels": [True, False]})]
    batch = reward_model._corpus(state, rows).batch(range(1))
    known, shift = batch.completion[0, 0].tolist(), 3
    bare = dataclasses.replace(batch, completion=batch.completion[..., shift:], length=batch.length - shift)
    assert scorer.decode(known).startswith("   1")
    for tokens, places in ((batch, [shift, shift + 3]), (bare, [0, 3])):  # a template may strip an answer
        assert corpus.step_ends(scorer, tokens, rows)[0][0].nonzero()[:, 0].tolist() == places


def test_what_a_template_writes_before_an_answer_is_no_step():
    state = build(reward_model)
    batch = reward_model._corpus(state, STEPS).batch(range(4))
    plain, _ = corpus.step_ends(state.scorer.trunk, batch, STEPS)
    prefix = torch.full_like(batch.completion[..., :2], state.scorer.trunk.encode("x")[0])
    completion = torch.cat([prefix, batch.completion], -1)
    opened = dataclasses.replace(batch, completion=completion, length=batch.length + 2)
    ends, _ = corpus.step_ends(state.scorer.trunk, opened, STEPS)
    assert torch.equal(ends[:, 2:], plain) and not ends[:, :2].any()


def with_a_new_head(original):
    def mutant(*args, **kwargs):
        scorer = original(*args, **kwargs)
        scorer.reset(0.5)
        return scorer

    return mutant


@sabotaged_by("foresight.nets.language.pretrained.load_scorer", with_a_new_head)
def test_a_reward_model_is_saved_with_its_head_and_gives_no_answers(tmp_path):
    state = build(reward_model)
    reward_model.export(state, tmp_path / "rm")
    again = build(reward_model, model=str(tmp_path / "rm"))
    assert not again.scorer.of_steps
    pairs = [("1+1?", "2"), ("1+1?", "ab")]
    assert reward_model.act(state, pairs)[0] == reward_model.act(again, pairs)[0]
    with pytest.raises(UserError, match="generates none"):
        reward_model.act(state, PAIRS)


TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={% endif %}{{ m.content }}W {% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def no_generation_config(original):
    return lambda source, config: None


@sabotaged_by("foresight.nets.language.pretrained._generation", no_generation_config)
def test_an_answer_ends_in_a_reward_model_as_in_the_policy(tmp_path):
    """Turns end with W, the tokenizer's end is another token, and the template writes a space after a turn."""
    folder = Path(shutil.copytree(tiny_language.folder(), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TURNS)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 41]}')
    policy, state = pretrained.load(str(folder), precision="float32"), build(reward_model, model=str(folder))
    exported = str(reward_model.export(state, tmp_path / "rm"))
    scorer = pretrained.load_scorer(exported, precision="float32", trained=True)
    expected = corpus.encode(policy, "1?", "2")
    assert expected[1][-1] == 41
    assert corpus.encode(state.scorer.trunk, "1?", "2") == corpus.encode(scorer.trunk, "1?", "2") == expected
    (score,), _, _ = reward_model.act(state, [("1?", "2")])
    (read,) = verifiers.reward_model(scorer)([Example("1?")], ["2"])
    assert math.isclose(read, 1 / (1 + math.exp(-score)), rel_tol=1e-5)


def test_a_small_decoder_of_our_own_becomes_a_reward_model(tmp_path):
    small = {"layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "mlp_size": 16, "context": 32, "precision": "float32"}
    folder = pretrain.export(pretrain.build(pretrain.Config(**small, tokens="numbers")), tmp_path / "decoder")
    state = reward_model.build(build_config(reward_model.Config, model=str(folder), precision="float32", steps=1))
    steps = [
        Example(e.prompt, columns={**e.columns, "completions": ["1", "345"], "labels": [True, False]}) for e in STEPS
    ]
    list(reward_model.train(state.config, TextTask("steps", steps, steps, None), state))
    pairs = [("3+4:", "3+4=7\n#7"), ("3+4:", "#12")]
    scores, _, _ = reward_model.act(state, pairs)
    again = pretrained.load_scorer(
        str(reward_model.export(state, tmp_path / "scorer")), trained=True, precision="float32"
    )
    loaded = reward_model.State(state.config, again, state.optimizer)
    assert again.of_steps  # so that a verifier reads it at the end of each
    assert reward_model.act(loaded, pairs)[0] == pytest.approx(scores, abs=1e-6)
    assert scores[0] != scores[1]


@sabotaged_by("foresight.training.corpus.delimiter", lambda f: lambda row: "\n")
def test_steps_are_joined_and_read_by_their_delimiter(tmp_path):
    columns = {"prompt": "1?", "completions": ["1", "ab", "345"], "labels": [True, True, False], "delimiter": " +"}
    rows, state = [Example("1?", columns=columns)] * 2, build(reward_model, steps=1)
    list(reward_model.train(state.config, TextTask("steps", rows, rows, None), state))
    batch = reward_model._corpus(state, rows).batch([0])
    ends, _ = corpus.step_ends(state.scorer.trunk, batch, rows[:1])
    assert state.scorer.trunk.decode(batch.completion[0, 0].tolist()) == "1 +ab +345"
    assert ends[0].nonzero()[:, 0].tolist() == [0, 4, 9]
    again = pretrained.load_scorer(str(reward_model.export(state, tmp_path)), trained=True, precision="float32")
    least = again.steps(batch)[:, 0][ends].sigmoid().min().item()
    assert verifiers.reward_model(again)(rows[:1], ["1 +ab +345"]) == pytest.approx([least], abs=1e-6)
    mixed = [rows[0], Example("2?", columns={**columns, "delimiter": ","})]
    with pytest.raises(UserError, match="separated by ' \\+', and of others by ','"):
        list(reward_model.train(state.config, TextTask("steps", mixed, mixed, None), state))


def test_labeled_steps_beside_empty_columns_of_pairs_are_steps():
    rows = [dataclasses.replace(e, columns={**e.columns, "chosen": None, "rejected": None}) for e in STEPS]
    config = build_config(reward_model.Config, tiny_language.folder(), steps=1, batch_size=2, precision="float32")
    *_, (_, _, state) = reward_model.train(config, TextTask("t", rows, rows, None))
    assert state.scorer.of_steps and reward_model.assess(state, rows)[0] == "step accuracy"


def test_a_run_that_is_loaded_knows_whether_it_scores_steps(tmp_path):
    rows, answers = tmp_path / "rows.jsonl", [("1?", "1 +ab +345"), ("2?", "1 +ab")]
    columns = {"completions": ["1", "ab", "345"], "labels": [True, True, False], "delimiter": " +"}
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", **columns}) + "\n" for i in range(9)))
    done = run.train(
        "reward_model", task=str(rows), model=tiny_language.folder(), out=tmp_path / "run", show=False, steps=2,
        batch_size=4, precision="float32",
    )  # fmt: skip
    agent, trained = done.load(), pretrained.load_scorer(str(done.path / "export"), precision="float32", trained=True)
    expected = verifiers.reward_model(trained)([Example(prompt) for prompt, _ in answers], [x for _, x in answers])
    assert trained.of_steps and agent.act(answers) == pytest.approx(expected, abs=1e-6)
    exported = export.export(done.path, "merged")
    again = pretrained.load_scorer(str(exported), precision="float32", trained=True)
    assert again.of_steps and again.delimiter == " +"


def also_the_rejected(original):
    return lambda mask, *rest: original(torch.ones_like(mask), *rest)


@sabotaged_by("foresight.algorithms.language.reward_model.per_sequence", scaled(0.5), also_the_rejected)
@pytest.mark.parametrize("micro_tokens", [1, 20, 10_000])
def test_a_language_modeling_loss_on_the_chosen_answers_is_added(micro_tokens):
    """The gradient is that of the plain loss and λ times that of the chosen answers' NLL, however it is split."""
    state, plain = (build(reward_model, lm_coef=c, micro_tokens=micro_tokens) for c in (0.7, 0.0))
    rows, policy = reward_model._corpus(state, PAIRS), tiny_language.model()
    batch = rows.batch(range(6))
    both, metrics = gradient(reward_model, state, batch, PAIRS)
    without, before = gradient(reward_model, plain, batch, PAIRS)
    answers = zip(rows.prompts, rows.completions, strict=True)
    nll = -sum(row_logprob(policy, prompt, chosen).mean() for prompt, (chosen, _) in answers) / 6
    nll.backward()
    assert math.isclose(metrics["lm_loss"], nll.item(), rel_tol=1e-5) and "lm_loss" not in before
    assert math.isclose(metrics["loss"], before["loss"] + 0.7 * nll.item(), rel_tol=1e-5)
    added = dict(policy.module.model.named_parameters())
    names = [name for name, weight in state.scorer.trunk.module.named_parameters() if weight.requires_grad]
    assert len(names) == len(added) + 1  # the scalar head
    for name, mine, theirs in zip(names, both, without, strict=True):
        known = added.get(name.removeprefix("model."))
        expected = torch.zeros_like(mine) if known is None else 0.7 * known.grad
        torch.testing.assert_close(mine - theirs, expected, atol=3e-6, rtol=1e-4)


def every_token(original):
    return lambda ends, labels: torch.ones_like(ends)


@sabotaged_by("foresight.algorithms.language.reward_model.right_tokens", every_token)
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_of_labeled_steps_the_tokens_of_right_ones_are_modeled(micro_tokens):
    """ "1 ab 345 <eos>": 1 is right in all rows, " ab" in two, and 345 with the end token in none."""
    wrong = dataclasses.replace(STEPS[1], columns={**STEPS[1].columns, "labels": [False] * 3})
    steps, state = [*STEPS, wrong], build(reward_model, lm_coef=0.5, micro_tokens=micro_tokens)
    plain, rows, policy = build(reward_model), reward_model._corpus(state, steps), tiny_language.model()
    both, metrics = gradient(reward_model, state, rows.batch(range(5)), steps)
    without, before = gradient(reward_model, plain, rows.batch(range(5)), steps)
    answers = zip(rows.prompts, rows.completions, (4, 1, 4, 1), strict=False)
    nll = -sum(row_logprob(policy, prompt, answer)[:n].mean() for prompt, (answer,), n in answers) / 4
    nll.backward()
    assert math.isclose(metrics["lm_loss"], nll.item(), rel_tol=1e-5)
    assert math.isclose(metrics["loss"], before["loss"] + 0.5 * nll.item(), rel_tol=1e-5)
    first = next(p for p in policy.module.model.layers.parameters())
    torch.testing.assert_close(both[1] - without[1], 0.5 * first.grad, atol=3e-6, rtol=1e-4)


@sabotaged_by("foresight.nets.language.pretrained.unembedding", lambda f: lambda *args: None)
def test_the_head_of_a_model_without_tied_embeddings_is_kept_as_it_is(tmp_path):
    folder = str(tiny_language.byte_level(tmp_path / "model", tied=False))
    state, policy = build(reward_model, model=folder, lm_coef=1.0), pretrained.load(folder, precision="float32")
    rows = reward_model._corpus(state, PAIRS)
    answers = zip(rows.prompts, rows.completions, strict=True)
    nll = -sum(row_logprob(policy, prompt, chosen).mean().item() for prompt, (chosen, _) in answers) / 6
    metrics = reward_model.update(state, rows.batch(range(6)), PAIRS)
    assert math.isclose(metrics["lm_loss"], nll, rel_tol=1e-5)
    assert torch.equal(state.scorer.unembedding.weight, policy.module.lm_head.weight)
    exported = str(reward_model.export(state, tmp_path / "rm"))
    with pytest.raises(UserError, match=r"needs a language model: .*leave --lm-coef out"):
        build(reward_model, model=exported, lm_coef=1.0)
    assert build(reward_model, model=exported).scorer.unembedding is None


@pytest.mark.parametrize("lm_coef", [-0.1, math.nan, math.inf])
def test_a_weight_of_language_modeling_below_0_is_refused(lm_coef):
    with pytest.raises(UserError, match=r"lm_coef is .* at least 0"):
        build(reward_model, lm_coef=lm_coef)


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_with_a_language_modeling_loss_is_resumed_as_if_never_stopped(tmp_path, tied):
    folder, rows = str(tiny_language.byte_level(tmp_path / "model", tied)), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row.columns) + "\n" for row in PAIRS))
    fields = {"task": str(rows), "model": folder, "show": False, "batch_size": 3, "lm_coef": 1.0}
    fields |= {"precision": "float32", "learning_rate": 1e-3, "anneal_lr": False}
    whole = run.train("reward_model", out=tmp_path / "whole", steps=4, **fields)
    run.train("reward_model", out=tmp_path / "part", steps=2, keep_optimizer=True, **fields)
    again = run.resume(tmp_path / "part", steps=4, show=False)
    weights = [one.load().state.scorer.state_dict() for one in (whole, again)]
    assert ("unembedding.weight" in weights[0]) != tied
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
