"""Conversations of several turns, ShareGPT's and with tools: what is learned of them, token by token."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.language import kto, sft
from foresight.data import forms
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.generation import rollout
from foresight.training import corpus
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.supervised_runs import gradient, row_logprob, same_gradients
from tests.sabotage import drop, sabotaged_by

CHAT = (
    "{% if tools %}f={% for t in tools %}{{ t.function.name }} {% endfor %}<eos>{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.n }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
# Of earlier answers it writes the first sign alone, as templates do that leave earlier thoughts out.
EARLIER = "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:1] }}{% else %}{{ m.content }}{% endif %}"
FORGETS = CHAT.replace("{{ m.content }}", EARLIER)
TALK = [
    {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"}, {"role": "assistant", "content": "4 or so"},
    {"role": "user", "content": "so?"}, {"role": "assistant", "content": "4"},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"n": 11}'}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "it is 2"},
]


def example(row: dict) -> Example:
    """A row of a file as an example."""
    _, (checked,) = forms.check([row], "f")
    return Example(checked["prompt"], columns=checked, place="f, row 1")


def build(module, template: str, **fields):
    base = {"model": tiny_language.folder(), "precision": "float32", "max_grad_norm": math.inf, "anneal_lr": False}
    state = module.build(build_config(module.Config, **{**base, **fields}))
    state.policy.tokenizer.chat_template = template
    return state


def trained_on(state, known: corpus.Corpus, i: int = 0) -> list[str]:
    """The segments of a row that are trained on, as text with their ends."""
    text, marks = known.completions[i][0], known.own[i][0]
    found, before = list[str](), False
    for token, mark in zip(text, marks, strict=True):
        if mark:
            found = found if before else [*found, ""]
            found[-1] += state.policy.tokenizer.decode([token])
        before = mark
    return found


def everything(original):
    return lambda self, indices: dataclasses.replace(original(self, indices), own=None)


@sabotaged_by("foresight.training.corpus._turns", lambda f: lambda row, all_turns: f(row, False))
@sabotaged_by("foresight.training.corpus.Corpus.batch", everything)
@pytest.mark.parametrize(("template", "rows"), [(CHAT, 1), (FORGETS, 2)])
def test_every_answer_of_a_conversation_is_learned_and_nothing_else(template, rows):
    """Each token of an answer weighs the same, and has before it what the sampler would be given."""
    state = build(sft, template)
    known = sft._corpus(state, [example({"messages": TALK})])
    assert len(known) == rows and known.left_out == 0
    model = copy.deepcopy(state.policy)
    caught, metrics = gradient(sft, state, known.batch(range(rows)))
    parts = []
    for i in (1, 3, 5):
        prompt, answer = corpus.encode(model, TALK[:i], TALK[i])
        assert model.tokenizer.decode(answer) == TALK[i]["content"] + "<eos>"
        parts.append(row_logprob(model, prompt, answer))
    loss = -torch.cat(parts).mean()
    loss.backward()
    assert math.isclose(metrics["loss"], loss.item(), rel_tol=1e-5)
    same_gradients(caught, model.parameters())


@sabotaged_by("foresight.training.corpus._turns", lambda f: lambda row, all_turns: f(row, True))
def test_only_the_last_answer_is_trained_on_if_set():
    state = build(sft, CHAT, all_turns=False)
    assert trained_on(state, sft._corpus(state, [example({"messages": TALK})])) == ["4<eos>"]
    plain = example({"prompt": TALK[:5], "completion": "4"})  # what a row calls its prompt is not learned
    state = build(sft, CHAT)
    assert trained_on(state, sft._corpus(state, [plain])) == ["4<eos>"]
    assert trained_on(state, sft._corpus(state, [example({"messages": TALK})])) == ["2<eos>", "4 or so<eos>", "4<eos>"]


def test_a_conversation_ends_where_there_is_no_room():
    state = build(sft, CHAT, max_tokens=36)
    known = sft._corpus(state, [example({"messages": TALK})])
    assert trained_on(state, known) == ["2<eos>", "4 or so<eos>"] and known.left_out == 0
    long = [{"role": "user", "content": "a" * 40}, TALK[1]]
    known = sft._corpus(state, [example({"messages": TALK}), example({"messages": long})])
    assert len(known) == 1 and known.left_out == 1
    with pytest.raises(UserError, match="raise max_tokens"):
        sft._corpus(state, [example({"messages": long})])


def test_conversations_train_and_are_measured():
    state = build(sft, CHAT)
    rows = [example({"messages": TALK}), example({"prompt": "3?", "completion": "3"})]
    steps = sft.train(
        build_config(sft.Config, state.config.model, steps=3, batch_size=2), TextTask("t", rows, rows, None), state
    )
    losses = [metrics["loss"] for _, metrics, _ in steps]
    assert losses[-1] < losses[0]
    name, values = sft.assess(state, rows)
    alone = [row_logprob(state.policy, *corpus.encode(state.policy, TALK[:i], TALK[i])) for i in (1, 3, 5)]
    assert name == "logprob" and math.isclose(values[0], torch.cat(alone).mean().item(), rel_tol=1e-4)


@sabotaged_by(
    "foresight.data.forms._sharegpt_message", lambda f: lambda message, place: {**f(message, place), "content": "?"}
)
def test_sharegpt_is_the_same_conversation():
    speakers = {"user": "human", "assistant": "gpt"}
    talk = [{"from": speakers[m["role"]], "value": m["content"]} for m in TALK]
    kind, (row,) = forms.check([{"id": "x", "conversations": talk}], "f")
    assert (
        kind == "demonstration" and row["messages"] == TALK and row["prompt"] == TALK[:-1] and row["completion"] == "4"
    )
    _, (row,) = forms.check([{"system": "be short", "conversations": talk}], "f")
    assert row["prompt"] == [{"role": "system", "content": "be short"}, *TALK[:-1]]
    pair = {"conversations": talk[:1], "chosen": talk[1], "rejected": {"from": "gpt", "value": "3"}}
    kind, (row,) = forms.check([pair], "f")
    assert (kind, row["prompt"], row["chosen"], row["rejected"]) == ("preference", TALK[:1], "2", "3")
    with pytest.raises(
        UserError, match=r"row 1: the column 'conversations': a message is from 'robot'. ShareGPT's speakers are"
    ):
        forms.check([{"conversations": [{"from": "robot", "value": "x"}]}], "f")


@sabotaged_by("foresight.data.forms._call", lambda f: lambda call, place: call)
def test_calls_of_tools_are_learned_and_what_tools_return_is_not():
    state = build(sft, CHAT)
    row = example({"messages": CALLS, "tools": json.dumps([TOOL])})
    known = sft._corpus(state, [row])
    assert trained_on(state, known) == ["add 11<eos>", "it is 2<eos>"]
    asked = state.policy.tokenizer.decode(known.prompts[0])
    assert asked == "f=add <eos>u=1+1?<eos>a="
    whole = state.policy.tokenizer.decode(known.completions[0][0])
    assert whole == "add 11<eos>t=2<eos>a=it is 2<eos>"
    alone = example({"prompt": CALLS[:1], "completion": CALLS[1:2], "tools": [TOOL]})
    assert trained_on(state, sft._corpus(state, [alone])) == ["add 11<eos>"]
    spoken = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"n": 11}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "it is 2"},
    ]  # fmt: skip
    assert sft._corpus(state, [example({"conversations": spoken, "tools": [TOOL]})]).completions == known.completions


@sabotaged_by("foresight.nets.language.model.LanguageModel.encode", drop("tools"))
def test_the_sampler_gets_the_tools_too():
    state = build(sft, CHAT)
    row = example({"prompt": "1+1?", "tools": [TOOL]})
    batch = rollout.complete(state.policy, [row], 2, 4)
    assert state.policy.decode(batch.prompts()[0]) == "f=add u=1+1?a="


def test_kto_learns_whether_a_call_was_good():
    state = build(kto, CHAT)
    row = example({"messages": CALLS[:2], "label": False})
    assert state.policy.tokenizer.decode(kto._corpus(state, [row]).completions[0][0]) == "add 11<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [CALLS[0], {"role": "assistant", "tool_calls": [{"name": 3}]}]}, "row 1: .* a tool call is"),
        (
            {"messages": [CALLS[0], {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{"}]}]},
            "the arguments of the tool call 'add' is not JSON",
        ),
        ({"prompt": "x", "completion": "y", "tools": "add"}, "row 1: the column 'tools' is not JSON"),
        ({"prompt": "x", "completion": "y", "tools": "9" * 5000}, "row 1: the column 'tools' cannot be read as JSON"),
        ({"prompt": "x", "completion": "y", "tools": {"add": 1}}, "'tools' must be a list of JSON schemas"),
        (
            {"prompt": "x", "chosen": [CALLS[1]], "rejected": "y"},
            "calls a tool: only demonstrations may",
        ),
    ],
)
def test_an_invalid_tool_call_is_reported_with_its_row(row, message):
    with pytest.raises(UserError, match=message):
        forms.check([row], "f")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHAT.partition("{% for c")[0] + "<eos>{% endfor %}{% if add_generation_prompt %}a={% endif %}",
            "the call of 'add'",
        ),
        (CHAT.partition("{% endif %}")[2], "ignores tools"),
        (None, "cannot be given tools"),
    ],
)
def test_a_template_that_leaves_tools_out_is_refused(template, message):
    state = build(sft, template)
    with pytest.raises(UserError, match=f"f, row 1: .*{message}"):
        sft._corpus(state, [example({"messages": CALLS, "tools": [TOOL]})])


def test_a_column_of_the_user_does_not_replace_the_completion():
    state = build(sft, CHAT)
    row = example({"prompt": "q", "completion": "a", "reply": "b"})
    assert trained_on(state, sft._corpus(state, [row])) == ["a<eos>"] and row.columns["reply"] == "b"
    assert corpus.last_answer(row) == "a"


def test_a_curriculum_is_refused_where_rows_are_drawn_in_an_order_of_their_own():
    example = Example("1?", None, {"completion": "1"})
    task = TextTask("mine", [example], [example], None, curriculum=0.5)
    with pytest.raises(UserError, match=r"sft trains on all .* a curriculum \(0\.5\) .*: leave it out"):
        corpus.examples("", task, "demonstration", "sft")


def test_a_label_that_is_not_true_or_false_is_named():
    rows = [example({"prompt": "q", "completion": "a", "label": -1})]
    with pytest.raises(UserError, match=r"'demonstration' \(its 'label' is -1, not true or false\): see docs/data.md"):
        corpus.of_form(rows, kto.FORMS, "kto")


def test_tools_count_in_the_length_of_a_prompt():
    state = build(sft, CHAT)
    tool = {"type": "function", "function": {**TOOL["function"], "name": "add" * 30}}
    config = SimpleNamespace(max_new_tokens=8)

    def check(tools):
        task = TextTask("t", [], [example({"prompt": "1+1?", "tools": tools})], lambda examples, answers: [])
        rollout.check_lengths(state.policy, task, config)

    check([TOOL])
    with pytest.raises(UserError, match=r"held-out prompt 1 of 't' .* does not fit into the model's context"):
        check([tool])
