"""SFT, DPO, KTO, ORPO and reward models: each loss as its paper writes it, row by row through the untouched model."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from foresight.algorithms.language import dpo, kto, orpo, reward_model, sft
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.training import corpus
from foresight.training.options import build_config
from tests import tiny_language
from tests.sabotage import change, flip_sign, sabotaged_by, scaled, swap

PAIRS = [
    Example(f"{i}+{i}?", columns={"prompt": f"{i}+{i}?", "chosen": str(2 * i), "rejected": "ab" * (i + 1)})
    for i in range(6)
]
SHOWN = [Example(f"{i}?", columns={"prompt": f"{i}?", "completion": "12" * (i + 1)}) for i in range(6)]
JUDGED = [
    Example(f"{i}+{i}?", columns={"prompt": f"{i}+{i}?", "completion": answer, "label": answer.isdigit()})
    for i in range(4)
    for answer in (str(2 * i), "ab" * (i + 1))
]
STEPS = [
    Example(f"{i}?", columns={"prompt": f"{i}?", "completions": ["1", "ab", "345"], "labels": [True, not i % 2, False]})
    for i in range(4)
]


def _build(module, **fields):
    base = {"model": tiny_language.folder(), "precision": "float32", "max_grad_norm": math.inf, "anneal_lr": False}
    return module.build(build_config(module.Config, **{**base, **fields}))


def _gradient(module, state, *batch) -> tuple[list[torch.Tensor], dict[str, float]]:
    caught: list[torch.Tensor] = []
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    state.optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    metrics = module.update(state, *batch)
    return caught, metrics


def _row(model: LanguageModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """log π of each token of one completion, alone."""
    tokens = torch.tensor([prompt + completion])
    hidden = model(tokens, torch.tensor([tokens.shape[1]]))[0]
    logits = model.logits(hidden)[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def _same(caught, parameters) -> None:
    for mine, parameter in zip(caught, parameters, strict=True):
        expected = torch.zeros_like(mine) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)


# ---- SFT


@sabotaged_by("foresight.ops.aggregate.per_token", scaled(0.5))
@sabotaged_by("foresight.nets.language.tokentree.TokenTree.attend", change("scale", lambda s: 0.5 * s))
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_sft_is_the_mean_over_the_tokens_of_completions(micro_tokens):
    state = _build(sft, micro_tokens=micro_tokens)
    rows = sft._corpus(state, SHOWN)
    model = copy.deepcopy(state.policy)
    caught, metrics = _gradient(sft, state, rows.batch(range(6)))
    logprob = torch.cat([_row(model, p, c[0]) for p, c in zip(rows.prompts, rows.completions, strict=True)])
    (-logprob.mean()).backward()
    assert math.isclose(metrics["loss"], -logprob.mean().item(), rel_tol=1e-5)
    _same(caught, model.parameters())


@sabotaged_by("foresight.nets.language.tokentree.TokenTree.attend", change("scale", lambda s: 0.5 * s))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_packed_rows_are_what_they_are_alone(precision):
    """Rows of different lengths laid end to end.

    Wrong: attention across rows, or positions that go on from one to the next (TRL 6800).
    Decides: log π(y_t | x, y_<t) of a packed row = that of the row alone.
    """
    state = _build(sft, precision=precision)
    rows = sft._corpus(state, SHOWN)
    batch = rows.batch([0, 3, 5, 1])
    packed, entropy = state.policy.logprob(batch)
    tolerance = 1e-5 if precision == "float32" else 0.2
    for k, i in enumerate((0, 3, 5, 1)):
        alone = _row(state.policy, rows.prompts[i], rows.completions[i][0])
        torch.testing.assert_close(packed[k, 0, : len(alone)], alone, atol=tolerance, rtol=0)
        assert (packed[k, 0, len(alone) :] == 0).all() and (entropy[k, 0, len(alone) :] == 0).all()


@sabotaged_by("foresight.training.corpus.corpus", change("max_tokens", lambda n: 64))
def test_rows_that_are_too_long_are_left_out_and_counted():
    model = tiny_language.model()
    kept = corpus.corpus(model, SHOWN, lambda e: [e.columns["completion"]], 9)
    assert len(kept) == 3 and kept.left_out == 3
    with pytest.raises(UserError, match="raise max_tokens"):
        corpus.corpus(model, SHOWN, lambda e: [e.columns["completion"]], 2)


@sabotaged_by("torch.randperm", lambda f: lambda n, **_: torch.arange(n))
def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    model = tiny_language.model()
    rows = corpus.corpus(model, SHOWN, lambda e: [e.columns["completion"]], 64)
    drawn = [i for step in range(3) for i in rows.draw(4, step, seed=0)]  # two epochs of six
    assert sorted(drawn[:6]) == sorted(drawn[6:]) == list(range(6))
    assert drawn[:6] != drawn[6:]
    assert rows.draw(4, 1, seed=0) == drawn[4:8]  # whatever was drawn before


# ---- DPO


@sabotaged_by("foresight.ops.preference.sigmoid", flip_sign, scaled(0.5))
@pytest.mark.parametrize("length_normalized", [False, True])
def test_dpo_is_the_papers_equation_7(length_normalized):
    state = _build(dpo, beta=0.3, length_normalized=length_normalized, micro_tokens=20)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in state.policy.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    rows, model = dpo._corpus(state, PAIRS), copy.deepcopy(state.policy)
    caught, metrics = _gradient(dpo, state, rows.batch(range(6)))
    total, right = torch.zeros(()), 0
    for prompt, answers in zip(rows.prompts, rows.completions, strict=True):
        odds = []
        for answer in answers:
            with torch.no_grad():
                reference = _row(state.reference, prompt, answer)
            difference = _row(model, prompt, answer) - reference
            odds.append(difference.mean() if length_normalized else difference.sum())
        total = total - torch.nn.functional.logsigmoid(0.3 * (odds[0] - odds[1])) / 6
        right += int(odds[0] > odds[1])
    total.backward()
    assert math.isclose(metrics["loss"], total.item(), rel_tol=1e-5)
    assert math.isclose(metrics["accuracy"], right / 6, rel_tol=1e-6)
    _same(caught, model.parameters())


@pytest.mark.parametrize(("loss", "smoothing"), [("ipo", 0.1), ("hinge", 0.1), ("sigmoid", 0.5), ("sigmoid", -0.1)])
def test_smoothing_is_of_dpo_and_less_than_a_half(loss, smoothing):
    with pytest.raises(UserError, match="label_smoothing"):
        _build(dpo, loss=loss, label_smoothing=smoothing)


def test_a_beta_of_nothing_is_refused():
    with pytest.raises(UserError, match="beta is 0"):
        _build(dpo, loss="ipo", beta=0.0)


def test_an_unknown_loss_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'sigmoid'"):
        _build(dpo, loss="sigmoidal")


# ---- KTO


def moved(state) -> LanguageModel:
    """Move the policy away from its reference; returns a copy."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in state.policy.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    return copy.deepcopy(state.policy)


@sabotaged_by("foresight.ops.preference.kto", flip_sign, change("reference_point", lambda z: 0 * z))
@sabotaged_by("foresight.algorithms.language.kto.mismatched", scaled(0.5))
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_kto_is_the_papers_equation_8(micro_tokens):
    state = _build(kto, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7, micro_tokens=micro_tokens)
    rows, model = kto._corpus(state, JUDGED), moved(state)
    caught, metrics = _gradient(kto, state, rows.batch(range(8)), JUDGED)
    answers = [group[0] for group in rows.completions]

    def ratio(prompt, answer):
        with torch.no_grad():
            reference = _row(state.reference, prompt, answer).sum()
        return _row(model, prompt, answer).sum() - reference

    others = [ratio(prompt, answers[(i + 1) % 8]).item() for i, prompt in enumerate(rows.prompts)]
    point = max(0.0, sum(others) / 8)
    assert point > 0, "the case is trivial"
    total = torch.zeros(())
    for row, prompt, answer in zip(JUDGED, rows.prompts, answers, strict=True):
        gain = 0.3 * (ratio(prompt, answer) - point)
        value = 1.2 * torch.sigmoid(gain) if row.columns["label"] else 0.7 * torch.sigmoid(-gain)
        total = total + ((1.2 if row.columns["label"] else 0.7) - value) / 8
    total.backward()
    assert math.isclose(metrics["loss"], total.item(), rel_tol=1e-5)
    assert math.isclose(metrics["reference_point"], point, rel_tol=1e-4)
    _same(caught, model.parameters())


@sabotaged_by("foresight.algorithms.language.kto.judged", lambda f: lambda rows: f(rows)[::-1])
def test_kto_takes_pairs_for_two_answers_each():
    state = _build(kto)
    rows = kto._corpus(state, PAIRS)
    assert [row.columns["label"] for row in rows.examples] == [True, False] * 6
    assert [row.columns["completion"] for row in rows.examples[:4]] == ["0", "ab", "2", "abab"]
    assert len(kto.judged(JUDGED)) == len(JUDGED)


@pytest.mark.parametrize(("fields", "message"), [({"beta": 0.0}, "beta is 0"), ({"batch_size": 1}, "at least 2")])
def test_a_kto_without_a_reference_point_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        _build(kto, **fields)


# ---- ORPO


@sabotaged_by("foresight.ops.preference.odds_ratio", flip_sign, scaled(0.5))
@sabotaged_by("foresight.algorithms.language.orpo.mean_logprob", lambda f: lambda s, b: f(s, b) * b.length)
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_orpo_is_the_papers_equation_6(micro_tokens):
    state = _build(orpo, odds_ratio_coef=0.4, micro_tokens=micro_tokens)
    rows, model = orpo._corpus(state, PAIRS), copy.deepcopy(state.policy)
    caught, metrics = _gradient(orpo, state, rows.batch(range(6)))
    total = torch.zeros(())
    for prompt, answers in zip(rows.prompts, rows.completions, strict=True):
        p, q = (_row(model, prompt, answer).mean().exp() for answer in answers)
        ratio = (p / (1 - p)) / (q / (1 - q))
        total = total + (-torch.log(p) - 0.4 * torch.log(torch.sigmoid(torch.log(ratio)))) / 6
    total.backward()
    assert math.isclose(metrics["loss"], total.item(), rel_tol=1e-5)
    _same(caught, model.parameters())


def test_a_negative_weight_of_the_odds_is_refused():
    with pytest.raises(UserError, match="odds_ratio_coef is -1"):
        _build(orpo, odds_ratio_coef=-1.0)


# ---- reward models


@sabotaged_by("foresight.ops.preference.bradley_terry", swap("chosen", "rejected"), change("margin", lambda m: 0 * m))
@sabotaged_by("foresight.ops.preference.centering", scaled(3.0))
def test_a_reward_model_is_bradley_terry_with_margin_and_centering():
    state = _build(reward_model, centering=0.1, micro_tokens=20)
    pairs = [dataclasses.replace(e, columns={**e.columns, "margin": 0.5 * i}) for i, e in enumerate(PAIRS)]
    rows, scorer = reward_model._corpus(state, pairs), copy.deepcopy(state.scorer)
    caught, metrics = _gradient(reward_model, state, rows.batch(range(6)), pairs)
    chosen, rejected = scorer.scores(rows.batch(range(6))).unbind(1)
    margin = 0.5 * torch.arange(6)
    loss = -torch.log(torch.sigmoid(chosen - rejected - margin)).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    loss.backward()
    assert math.isclose(metrics["loss"], loss.item(), rel_tol=1e-5)
    assert math.isclose(metrics["accuracy"], (chosen > rejected).float().mean().item(), rel_tol=1e-6)
    _same(caught, scorer.parameters())


def one_early(original):
    return lambda *args: (original(*args)[0].roll(-1, 1), original(*args)[1].roll(-1, 1))


@sabotaged_by("foresight.training.corpus.step_ends", one_early)
def test_a_process_reward_model_judges_the_end_of_every_step():
    state = _build(reward_model, micro_tokens=10)
    rows, scorer = reward_model._corpus(state, STEPS), copy.deepcopy(state.scorer)
    batch = rows.batch(range(4))
    ends, labels = corpus.step_ends(state.scorer.trunk, batch, STEPS)
    caught, metrics = _gradient(reward_model, state, batch, STEPS)
    # "1 ab 345 <eos>": the tiny tokenizer writes a line break as its unknown sign, one token.
    places = [0, 3, 7]  # the last token of each
    assert ends.sum() == 12 and all(row.nonzero()[:, 0].tolist() == places for row in ends)
    assert [labels[i, places].tolist() for i in range(4)] == [[1.0, float(i % 2 == 0), 0.0] for i in range(4)]
    logits = scorer.steps(batch)[:, 0][:, places]
    right = torch.tensor([[1.0, float(i % 2 == 0), 0.0] for i in range(4)])
    loss = -(right * torch.log(torch.sigmoid(logits)) + (1 - right) * torch.log(torch.sigmoid(-logits))).mean()
    loss.backward()
    assert math.isclose(metrics["loss"], loss.item(), rel_tol=1e-5)
    _same(caught, scorer.parameters())


def test_steps_end_where_they_do_whatever_stands_before_the_first():
    state = _build(reward_model)
    scorer = state.scorer.trunk
    rows = [Example("1?", columns={"prompt": "1?", "completions": ["   1", "ab"], "labels": [True, False]})]
    batch = reward_model._corpus(state, rows).batch(range(1))
    known, shift = batch.completion[0, 0].tolist(), 3
    bare = dataclasses.replace(batch, completion=batch.completion[..., shift:], length=batch.length - shift)
    assert scorer.decode(known).startswith("   1")
    for tokens, places in ((batch, [shift, shift + 3]), (bare, [0, 3])):  # a template may strip an answer
        assert corpus.step_ends(scorer, tokens, rows)[0][0].nonzero()[:, 0].tolist() == places


def test_what_a_template_writes_before_an_answer_is_no_step():
    state = _build(reward_model)
    batch = reward_model._corpus(state, STEPS).batch(range(4))
    plain, _ = corpus.step_ends(state.scorer.trunk, batch, STEPS)
    said = torch.full_like(batch.completion[..., :2], state.scorer.trunk.encode("x")[0])
    completion = torch.cat([said, batch.completion], -1)
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
    state = _build(reward_model)
    reward_model.export(state, tmp_path / "rm")
    again = _build(reward_model, model=str(tmp_path / "rm"))
    pairs = [("1+1?", "2"), ("1+1?", "ab")]
    assert reward_model.act(state, pairs)[0] == reward_model.act(again, pairs)[0]
    with pytest.raises(UserError, match="writes none"):
        reward_model.act(state, PAIRS)


# ---- what they share


CASES = [(sft, SHOWN), (dpo, PAIRS), (kto, JUDGED[:5] * 2), (orpo, PAIRS), (reward_model, PAIRS)]
supervised = pytest.mark.parametrize(("module", "rows"), CASES, ids=["sft", "dpo", "kto", "orpo", "reward_model"])


@supervised
def test_a_mid_run_state_continues_bit_for_bit(module, rows):
    task = TextTask("t", rows[:5], rows[5:], None)
    config = build_config(
        module.Config, tiny_language.folder(), steps=4, batch_size=4, learning_rate=1e-3, precision="float32"
    )
    *_, (_, _, whole) = module.train(config, task)
    halfway = next(state for step, _, state in module.train(config, task) if step == 2)
    *_, (_, _, resumed) = module.train(config, task, copy.deepcopy(halfway))
    weights = [
        (state.scorer if module is reward_model else state.policy).state_dict().values() for state in (whole, resumed)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@sabotaged_by("foresight.training.microbatch.step", lambda f: lambda o, p, rate, *a: f(o, p, -rate, *a))
@supervised
def test_it_learns_what_it_is_shown(module, rows):
    """Held-out rows: right answers are digits, wrong ones are letters. Those of KTO are the ones that it learned."""
    task = TextTask("t", rows[:5], rows[5:], None)
    config = build_config(
        module.Config,
        tiny_language.folder(),
        steps=25,
        batch_size=5,
        learning_rate=3e-3,
        precision="float32",
        anneal_lr=False,
    )
    state = module.build(config)
    metric, before = module.assess(state, task.test)
    with torch.random.fork_rng():
        *_, (_, _, state) = module.train(config, task, state)
    after = module.assess(state, task.test)[1]
    assert after[0] > before[0] + (0.5 if metric == "logprob" else -0.01)
    assert metric == "logprob" or set(after) == {1.0}


@supervised
def test_data_of_another_form_is_refused(module, rows):
    task = TextTask("t", [Example("1?", columns={"prompt": "1?"})], [], None)
    with pytest.raises(UserError, match="needs rows of the form"):
        next(module.train(build_config(module.Config, tiny_language.folder(), precision="float32"), task))
    graded = TextTask("t", rows, [], lambda e, c: [0.0] * len(c))
    with pytest.raises(UserError, match="give --data FILE"):
        next(module.train(build_config(module.Config, tiny_language.folder(), precision="float32"), graded))
