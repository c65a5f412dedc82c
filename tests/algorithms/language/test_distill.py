"""Distillation: four losses, each checked against the divergence that it stands for."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from foresight.algorithms.language import distill
from foresight.envs.text.make import make
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.ops import kl
from foresight.planning.generation.rollout import complete
from foresight.runtime import run
from foresight.training.options import build_config
from tests import tiny_conversations, tiny_language
from tests.algorithms.language.tiny_states import fresh
from tests.sabotage import change, flip_sign, returns, sabotaged_by, swap

PROMPTS = ["1+1?", "22+3?", "4?"]


def _rollout(**fields):
    base = {"model": tiny_language.folder(0), "teacher": tiny_language.folder(1), "precision": "float32"}
    state = fresh(distill, **{**base, "max_grad_norm": math.inf, "max_new_tokens": 6, **fields})
    writer = state.policy if state.config.on_policy else state.teacher
    writer.stop_ids = [0, 5, 9, 14, 20]
    return state, complete(writer, PROMPTS, 2, 6, 1.0, state.generator)


def _gradient(state, batch) -> tuple[list[torch.Tensor], dict[str, float]]:
    caught: list[torch.Tensor] = []
    parameters = list(state.policy.parameters())
    state.optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    metrics = distill.update(state, batch)
    return caught, metrics


def _tables(state, batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log π of student and teacher over the whole vocabulary, `[N, V]`, and the tokens that were sampled `[N]`."""
    student, teacher = (m.logits(m.contexts(batch)).log_softmax(-1) for m in (state.policy, state.teacher))
    return student, teacher.detach(), batch.completion[batch.mask]


@sabotaged_by("foresight.ops.kl.categorical", swap("logits", "ref_logits"))
@sabotaged_by("foresight.ops.kl.k1", flip_sign)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_each_loss_has_the_gradient_of_its_definition(on_policy, soft, request):
    twin = request.node.callspec.params["sabotage"]
    if (twin is not None and ("categorical" in twin[0]) != soft) or (twin is not None and not soft and not on_policy):
        pytest.skip("this loss does not use that function")
    state, batch = _rollout(on_policy=on_policy, soft=soft)
    before = copy.deepcopy(state)
    caught, metrics = _gradient(state, batch)
    student, teacher, tokens = _tables(before, batch)
    assert metrics["entropy"] == pytest.approx(-(student.exp() * student).sum(-1).mean().item(), rel=1e-4)
    chosen = student.gather(-1, tokens[:, None])[:, 0]
    if soft and on_policy:
        loss = (student.exp() * (student - teacher)).sum(-1).mean()
    elif soft:
        loss = (teacher.exp() * (teacher - student)).sum(-1).mean()
    elif on_policy:
        loss = ((chosen - teacher.gather(-1, tokens[:, None])[:, 0]).detach() * chosen).mean()
    else:
        loss = -chosen.mean()
    loss.backward()
    for mine, parameter in zip(caught, before.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-5, rtol=1e-3)


def k3(original):
    return kl.k3


@sabotaged_by("foresight.ops.kl.k1", flip_sign, k3)
def test_the_sampled_reverse_kl_has_the_exact_gradient_on_average():
    """Over an enumerable vocabulary: Σ_v π(v) · (log π(v) − log π_T(v)) ∇log π(v) = ∇KL(π ‖ π_T)."""
    logits, teacher = torch.randn(1, 7, dtype=torch.float64, requires_grad=True), torch.randn(1, 7).double()
    logprob, reference = logits.log_softmax(-1), teacher.log_softmax(-1)
    gain = -kl.k1(logprob, reference).detach()
    surrogate = -(logprob.exp().detach() * gain * logprob).sum()
    (mine,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((logprob.exp() * (logprob - reference)).sum(), logits)
    torch.testing.assert_close(mine, exact)


@sabotaged_by("foresight.ops.kl.k1", returns(lambda x: x + 0.1))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("soft", [True, False])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(precision, soft):
    state, batch = _rollout(teacher=tiny_language.folder(0), soft=soft, precision=precision)
    caught, metrics = _gradient(state, batch)
    tolerance = 1e-5 if precision == "float32" else 0.05
    assert abs(metrics["teacher_kl"]) < tolerance
    if precision == "float32":
        assert all(grad.abs().max() < 1e-4 for grad in caught)


@sabotaged_by("foresight.ops.policy.reinforce", flip_sign)
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_student_comes_nearer_to_its_teacher(on_policy):
    task = TextTask("t", [Example(f"{i}?") for i in range(8)], [Example("9?")], lambda e, c: [0.0] * len(c))
    config = build_config(distill.Config,
        tiny_language.folder(0), tiny_language.folder(1), on_policy, steps=40, prompts=8, group=4, max_new_tokens=2,
        learning_rate=1e-2, precision="float32",
    )  # fmt: skip
    key = "teacher_kl" if on_policy else "student_kl"
    seen = []
    for step, metrics, _ in distill.train(config, task):
        seen.append(metrics[key])
        assert step != 10 or sum(seen[-3:]) < 1.25 * sum(seen[:3])  # it does not go away, at least
    assert sum(seen[-5:]) < 0.6 * sum(seen[:3]) * 5 / 3


@sabotaged_by("foresight.envs.text.task.TextTask.pool", change("progress", lambda p: 1.0))
def test_a_curriculum_begins_with_the_easiest_prompts():
    task, models = (
        make("addition", curriculum=0.1),
        {"model": tiny_language.folder(0), "teacher": tiny_language.folder(1)},
    )
    config = build_config(distill.Config, **models, precision="float32", max_new_tokens=2, steps=9)
    _, metrics, _ = next(distill.train(config, task))
    assert metrics["difficulty"] <= max(e.columns["difficulty"] for e in task.pool(0.0)) == 8


def test_a_teacher_is_needed_and_must_have_the_students_tokenizer(tmp_path):
    with pytest.raises(UserError, match="needs a teacher"):
        distill.build(build_config(distill.Config, tiny_language.folder()))
    folder = tiny_language.write(tmp_path / "other")
    table = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(table.replace('"W"', '"X"'))
    with pytest.raises(UserError, match="different tokenizers"):
        distill.build(build_config(distill.Config, tiny_language.folder(), str(folder), precision="float32"))


def test_a_teacher_that_writes_its_own_kind_of_prompts_is_refused(tmp_path):
    folder = tiny_language.write(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tiny_language.OPENED
    tokenizer.save_pretrained(folder)
    names = {"model": tiny_language.folder(), "teacher": str(folder), "precision": "float32"}
    distill.build(build_config(distill.Config, **names))
    with pytest.raises(UserError, match="write prompts differently"):
        distill.build(build_config(distill.Config, **names, on_policy=False))


def test_a_teacher_that_begins_its_prompts_with_a_token_is_refused(tmp_path):
    folder = tiny_language.write(tmp_path / "other")
    table = json.loads((folder / "tokenizer.json").read_text())
    name, number = next(iter(table["model"]["vocab"].items()))
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    table["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(table))
    names = {"model": tiny_language.folder(), "teacher": str(folder), "precision": "float32"}
    with pytest.raises(UserError, match="write prompts differently"):
        distill.build(build_config(distill.Config, **names, on_policy=False))


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_student_ends_its_answers_where_the_teacher_does(tmp_path, on_policy):
    teacher, ends = tiny_language.write(tmp_path / "teacher"), [0, 5, 9]
    (teacher / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    names = {"model": tiny_language.folder(), "teacher": str(teacher), "precision": "float32"}
    state = distill.build(build_config(distill.Config, **names, on_policy=on_policy))
    assert state.policy.stop_ids == ends
    distill.export(state, tmp_path / "export")
    assert pretrained.load(str(tmp_path / "export")).stop_ids == ends


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_teacher_with_a_shorter_context_is_named_before_it_reads(on_policy):
    state, _ = _rollout(on_policy=on_policy)
    state.teacher.context = 8
    task = TextTask("t", [Example("22+3?")], [Example("9?")], None)
    with pytest.raises(UserError, match=r"training prompt 1 of 't' .*into the teacher's context of 8"):
        next(distill.train(state.config, task, state))
    reader = state.teacher if on_policy else state.policy
    state.teacher.context, state.policy.context = 64, 64
    distill.check_context(state, tiny_conversations.task())
    reader.context = 32
    with pytest.raises(UserError, match=r"may have 64 tokens, and the (teacher|student) has a context of 32"):
        distill.check_context(state, tiny_conversations.task())


@sabotaged_by("foresight.algorithms.language.distill._distance", flip_sign)
def test_rows_of_prompts_only_are_enough(tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}+{i}?"}) for i in range(20)))
    fields = {"model": tiny_language.folder(0), "teacher": tiny_language.folder(1), "precision": "float32"}
    fields |= {"steps": 30, "prompts": 4, "max_new_tokens": 6, "learning_rate": 1e-2}
    done = run.train("distill", task=str(rows), out=tmp_path / "run", show=False, **fields)
    assert done.evaluation.metric == "reverse KL per token" and done.evaluation.n == 4
    assert 0 < done.evaluation.mean < done.summary["baseline"]["mean"]
    assert "reward" not in done.metrics()[0] and done.metrics()[0]["teacher_kl"] > 0


def test_the_evaluation_does_not_depend_on_the_temperature_of_training():
    """Hot distributions are close to each other: a search for hyperparameters would find the highest temperature."""
    scores = [distill.assess(_rollout(temperature=heat)[0], [Example(one) for one in PROMPTS]) for heat in (0.5, 8.0)]
    assert scores[0] == scores[1] and any(scores[0][1])
