"""Pretraining: its loss by the definition, what padding and experts may not change, and the entropy that it reaches."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from foresight.algorithms.language import mtp_critic, pretrain
from foresight.data.text import pad
from foresight.envs.text.make import make
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language import pretrained
from foresight.training.options import build_config
from tests.sabotage import begins_anew, change, drop, flip_sign, sabotaged_by, scaled

SMALL = {
    "layers": 2, "dim": 32, "heads": 2, "kv_heads": 1, "mlp_size": 32, "batch_size": 8, "steps": 4, "lr_warmup": 0,
    "context": 24, "max_new_tokens": 8, "precision": "float32", "max_grad_norm": math.inf,
}  # fmt: skip
WORDS = ("one.", "two or three.", "no", "four five", "six and seven and eight")


def _state(**fields) -> pretrain.State:
    return pretrain.build(pretrain.Config(**{**SMALL, **fields}))


def _task(texts=WORDS) -> TextTask:
    return TextTask("t", [Example(text[:1], text[1:]) for text in texts], [Example(texts[0][:1], texts[0][1:])], None)


def _literal(state, row: list[int]) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """-log p of each character of one text and, head by head, of those that the head can predict."""
    trunk, unembed = state.policy.module.model, state.policy.module.lm_head.weight
    tokens = torch.tensor(row)
    features = [trunk(tokens[None, :-1]).last_hidden_state[0]]
    plain = [-(unembed @ x).log_softmax(0)[t] for x, t in zip(features[0], row[1:], strict=True)]
    ahead = []
    for head in range(2, state.config.predict_tokens + 1):
        chain = [torch.zeros(32)]
        for n in range(1, len(row) - 1):
            before, token = features[-1][n - 1 : n], trunk.embed_tokens.weight[row[n]][None]
            chain.append(state.heads.extend(head, before, token)[0])
        features.append(torch.stack(chain))
        logits = features[-1] @ unembed.T
        ahead.append([-logits[n].log_softmax(0)[row[n + 1]] for n in range(head - 1, len(row) - 1)])
    return plain, ahead


@sabotaged_by("foresight.ops.tokens.token_logprob", scaled(1.01))
@sabotaged_by(
    "foresight.nets.language.mtp.MultiTokenHeads.forward", lambda f: lambda s, h, e, p: f(s, h.detach(), e, p)
)
def test_the_loss_and_its_gradient_are_the_definitions():
    state = _state(predict_tokens=3, predict_coef=0.7)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in (state.policy, state.heads):
            for weight in module.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    rows = pretrain.documents(state, _task().train)
    total, _, _ = pretrain.loss(state, *pad(rows))
    total.backward()
    parts = [p for p in (*state.policy.parameters(), *state.heads.parameters()) if p.grad is not None]
    mine = [p.grad.clone() for p in parts]
    for part in parts:
        part.grad = None
    every = [_literal(state, row) for row in rows]
    expected = torch.stack([x for plain, _ in every for x in plain]).mean()
    for head in range(2):
        expected = expected + 0.7 * torch.stack([x for _, ahead in every for x in ahead[head]]).mean()
    torch.testing.assert_close(total, expected)
    expected.backward()
    for one, part in zip(mine, parts, strict=True):
        torch.testing.assert_close(one, part.grad, atol=1e-5, rtol=1e-3)


@sabotaged_by("foresight.algorithms.language.pretrain.loss", change("lengths", lambda n: torch.full_like(n, n.max())))
@pytest.mark.parametrize("fields", [{}, {"experts": 4}, {"predict_tokens": 2}], ids=["dense", "experts", "heads"])
def test_padding_and_neighbors_change_nothing(fields):
    state = _state(**fields)
    rows = pretrain.documents(state, _task().train)
    tokens, lengths = pad(rows)
    whole, _, routing = pretrain.loss(state, tokens, lengths)
    wider, _, _ = pretrain.loss(state, functional.pad(tokens, (0, 3), value=7), lengths)
    torch.testing.assert_close(whole, wider)
    assert all(len(r.chosen) == sum(len(row) - 1 for row in rows) for r in routing)  # padding went nowhere
    assert len(routing) == (2 if fields.get("experts") else 0)
    nats = [pretrain.loss(state, *pad([row]))[1]["next"].item() * (len(row) - 1) for row in rows]
    assert pretrain.loss(state, tokens, lengths)[1]["next"].item() == pytest.approx(
        sum(nats) / sum(len(row) - 1 for row in rows), abs=1e-5
    )


@sabotaged_by("foresight.ops.routing.balanced_bias", change("rate", lambda u: -u))
def test_each_rule_of_balance_works_where_it_is_set():
    task = _task()
    for fields, moves in (({"balance_coef": 0.0}, False), ({"balance_coef": 0.0, "bias_rate": 0.01}, True)):
        state = _state(experts=4, **fields)
        rows = pad(pretrain.documents(state, task.train))
        routing = pretrain.loss(state, *rows)[2]
        pretrain.update(state, *rows)
        for layer, went in zip(state.policy.module.model.layers, routing, strict=True):
            bias = layer.feed.bias
            assert torch.equal(bias, 0.01 * (0.25 - went.load).sign()) if moves else not bias.any()
    gradients = []
    for coefficient in (0.0, 1.0):
        state = _state(experts=4, balance_coef=coefficient)
        total, terms, _ = pretrain.loss(state, *pad(pretrain.documents(state, task.train)))
        assert total.item() == pytest.approx((terms["next"] + coefficient * terms["balance"]).item())
        total.backward()
        gradients.append(state.policy.module.model.layers[0].feed.router.grad)
    assert not torch.allclose(*gradients, atol=1e-6)


@sabotaged_by("foresight.algorithms.language.pretrain.train", begins_anew)
@pytest.mark.parametrize("fields", [{"experts": 4, "bias_rate": 0.01}, {"predict_tokens": 2}], ids=["experts", "heads"])
def test_a_mid_run_state_continues_bit_for_bit(fields):
    task, config = _task(), pretrain.Config(**{**SMALL, **fields})
    for step, metrics, whole in pretrain.train(config, task):
        assert all(math.isfinite(x) for x in metrics.values())
        if step == 2:
            halfway = copy.deepcopy(whole)
    *_, (_, _, resumed) = pretrain.train(config, task, halfway)
    for a, b in zip(whole.policy.state_dict().values(), resumed.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def _even(texts: int = 4) -> TextTask:
    """A few texts, each of which its first character tells: log 4 nats a text, and nothing else, cannot be known."""
    rows = [Example(f"{i}", f"{i}{i}ab") for i in range(texts)]

    def exact(examples, found):
        return [float(text == example.answer) for example, text in zip(examples, found, strict=True)]

    return TextTask("even", rows, rows, exact)


@sabotaged_by("foresight.ops.tokens.token_logprob", flip_sign)
@sabotaged_by("foresight.nets.sequence.attention.attend", lambda f: _peeking)
@pytest.mark.parametrize("fields", [{}, {"experts": 4}, {"predict_tokens": 3}], ids=["dense", "experts", "heads"])
def test_it_reaches_the_entropy_of_its_texts(fields):
    task = _even()
    config = pretrain.Config(
        **{**SMALL, "steps": 60, "batch_size": 32, "learning_rate": 1e-2, "max_grad_norm": 1.0, **fields}
    )
    name, before, _ = pretrain.measure(pretrain.build(config), task)
    for _, metrics, state in pretrain.train(config, task):  # noqa: B007
        assert metrics["loss"] > 0  # as of any probabilities
    _, after, also = pretrain.measure(state, task)
    floor = math.log(4) / 6  # of five characters and the end
    assert name == "nats per character" and before > 4
    assert floor - 1e-3 < after < 1.2 * floor
    assert also["bits per character"] == pytest.approx(after / math.log(2))
    assert also["accuracy"] == 1.0


def _peeking(query, key, value, allowed, dropout=0.0):
    """Attention to what comes, too: the loss is then below what can be known."""
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@sabotaged_by("foresight.nets.language.pretrained.save_folder", drop("heads"))
def test_its_export_is_where_the_others_begin(tmp_path):
    state = _state(predict_tokens=2)
    pretrain.export(state, tmp_path / "export")
    again = mtp_critic.build(
        build_config(mtp_critic.Config, str(tmp_path / "export"), predict_tokens=2, precision="float32")
    )
    pairs = ((state.policy, again.policy), (state.heads, again.heads))
    for one, other in pairs:
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert pretrained.load(str(tmp_path / "export")).context == 24


def test_the_picture_shows_texts_and_answers():
    state, task = _state(), _even()
    drawn = pretrain.picture(state, task)
    assert all(f"\n{i}|" in drawn for i in range(4))
    assert drawn == pretrain.picture(state, task)


def test_an_accounting_names_what_was_left():
    task = make("stories", size=500, held_out=50)
    assert len(task.train) == 450 and len(task.test) == 50
    state = _state(context=80)
    for example in task.train:
        words = example.prompt.split()
        has, moved = int(words[2]), int(next(w for w in words[4:] if w.strip(".").isdigit()).strip("."))
        left = has + moved if "gives" in words else has - moved
        assert example.answer == f" {left}."
        assert words[-2] == ("he" if words[0] in ("Tom", "Ben", "Max", "Sam") else "she")
    rows = pretrain.documents(state, task.train)
    assert state.policy.decode(rows[0]) == task.train[0].prompt + task.train[0].answer
    assert max(map(len, rows)) < 80 and all(row[0] == row[-1] == 0 for row in rows)


def test_a_completion_that_is_null_is_none():
    state = _state()
    rows = [Example("3+4=", "7", columns={"completion": given}) for given in (None, "8")]
    assert [state.policy.decode(row) for row in pretrain.documents(state, rows)] == ["3+4=7", "3+4=8"]


@pytest.mark.parametrize("tokens", ["characters", "numbers"])
def test_a_prompt_is_trained_on_as_it_is_asked(tokens):
    """Also where digits of prompt and answer meet."""
    state = _state(tokens=tokens)
    for prompt in ("ab8", [{"role": "user", "content": "ab8"}]):
        asked = state.policy.encode(prompt)
        row = pretrain.documents(state, [Example(prompt, "12")])[0]
        answer = row[len(asked) : -1]
        assert row[: len(asked)] == asked and state.policy.decode(answer) == "12"
        assert len(answer) == (2 if tokens == "characters" else 1) and row[-1] == 0


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"chosen": "yes", "rejected": "no"}, "has 'preference'"),
        ({"completions": ["1", "2"], "labels": [True, False]}, "has 'stepwise'"),
        ({"completion": "no", "label": False}, "labeled bad"),
        ({"label": False}, "labeled bad"),
    ],
)
def test_answers_that_are_not_to_be_learned_are_refused(columns, said):
    task = TextTask("t", [Example("ab", columns=columns)], [Example("ab", "c")], None)
    config = pretrain.Config(layers=1, dim=16, heads=2, kv_heads=1, context=40)
    with pytest.raises(UserError, match=said):
        next(pretrain.train(config, task))


def test_what_it_cannot_write_is_refused():
    with pytest.raises(UserError, match="no character 'é'"):
        pretrain.documents(_state(), [Example("caf", "é")])
    with pytest.raises(UserError, match="predict_tokens must be at least 1"):
        _state(predict_tokens=0)
    with pytest.raises(UserError, match="context must be at least 2, not 0"):
        _state(context=0)
    with pytest.raises(UserError, match=r"pretrain trains on all .* a curriculum \(0\.5\) .*: leave it out"):
        next(pretrain.train(pretrain.Config(), make("addition", curriculum=0.5)))


def _conversation(**columns):
    asked = [{"role": "system", "content": "add"}, {"role": "user", "content": "3+4="}]
    return Example(asked, columns.pop("answer", None), columns=columns)


def test_a_conversation_is_trained_on_as_it_is_asked():
    """The prompt of training is that of evaluation: with a chat template, and joined without one."""
    plain, chat = _state(), _state(conversations=True)
    for columns in ({"completion": "7"}, {"answer": "7"}):
        example = _conversation(**columns)
        assert plain.policy.decode(pretrain.documents(plain, [example])[0]) == "add\n3+4=7"
        assert chat.policy.decode(pretrain.documents(chat, [example])[0]) == "add3+4=7"
        for state in (plain, chat):
            row, prompt = pretrain.documents(state, [example])[0], state.policy.encode(example.prompt)
            assert row[: len(prompt)] == prompt and len(row) == len(prompt) + 2 and row[-1] == 0
    whole = [*example.prompt, {"role": "assistant", "content": "7"}]
    assert pretrain.documents(chat, [_conversation(messages=whole, completion="7")])[0] == row
    changed = Example([{"role": "user", "content": "2"}], columns={"messages": whole, "completion": "7"})
    assert chat.policy.decode(pretrain.documents(chat, [changed])[0]) == "27"  # a task may have changed the prompt
    with pytest.raises(UserError, match=r"row 3 has 'messages'.*--conversations"):
        pretrain.documents(plain, [dataclasses.replace(changed, place="row 3")])


@pytest.mark.parametrize("conversations", [False, True])
def test_every_character_of_a_conversation_is_checked(conversations):
    state = _state(conversations=conversations)
    for system, question, reply in (("é", "a", "b"), ("a", "é", "b"), ("a", "b", "é")):
        asked = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        with pytest.raises(UserError, match="no character 'é'"):
            pretrain.documents(state, [Example(asked, reply)])


def test_what_cannot_be_scored_does_not_count_in_a_measure(monkeypatch):
    state, task = _state(), _task()
    scores = [1.0, math.nan]
    graded = dataclasses.replace(task, test=task.train[:2], grader=lambda examples, texts: scores)
    monkeypatch.setattr(pretrain.multi_turn, "converse", lambda *args: SimpleNamespace(parts={"outcome": scores}))
    monkeypatch.setattr(pretrain, "written", lambda state, env, examples: examples)
    held = dataclasses.replace(graded, episode=lambda example: None, metric="outcome")
    assert pretrain.measure(state, graded)[2]["accuracy"] == pretrain.measure(state, held)[2]["outcome"] == 1.0
    scores[0] = math.nan
    assert "accuracy" not in pretrain.measure(state, graded)[2] and "outcome" not in pretrain.measure(state, held)[2]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bias_rate": 0.001}, "bias_rate balances experts"),
        ({"experts": 2, "mlp_size": 0}, "mlp_size 0 leaves these out"),
    ],
)
def test_experts_need_a_feed_forward_layer_and_their_balance_needs_experts(fields, said):
    with pytest.raises(UserError, match=said):
        _state(**fields)


@sabotaged_by("foresight.algorithms.language.pretrain.buckets", lambda f: lambda lengths: f(lengths)[:-1])
def test_texts_of_similar_lengths_are_computed_together_with_the_same_gradient():
    state, whole = _state(), _state()
    rows = pretrain.documents(state, _task(["a" * n for n in (2, 3, 3, 4, 5, 6, 12, 22)]).train)
    tokens, lengths = pad(rows)
    metrics = pretrain.update(state, tokens, lengths)
    total, _, _ = pretrain.loss(whole, tokens, lengths)
    total.backward()
    norm = torch.stack([p.grad.norm() for p in whole.policy.parameters() if p.grad is not None]).norm()
    assert metrics["objective"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["tokens"] == float((lengths - 1).sum())
