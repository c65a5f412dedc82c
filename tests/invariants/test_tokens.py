"""Tokens: where a row begins, where it ends, and that the sampled ids are trained on."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foresight.algorithms.language import grpo, reward_model, rlhf_ppo, sft
from foresight.data.text import TokenBatch
from foresight.envs.text import make as text
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.nets.language.cache import Cache
from foresight.planning.generation import rollout
from foresight.training import corpus
from tests import tiny_language
from tests.invariants import subjects
from tests.invariants.subjects import ALL, SAMPLED, both, of
from tests.sabotage import change, sabotaged_by, shift

# ---- where a row ends


def without_the_end(original):
    return lambda *args: (original(*args)[0], original(*args)[1][:-1])


@sabotaged_by("foresight.training.corpus.encode", without_the_end)
def test_the_token_that_ends_an_answer_is_trained_although_it_is_the_padding():
    """pad = eos, as in most models without a pad token.

    Wrong: a mask made from `token == pad` also masks the end token, so the model never learns to stop (TRL 4970, 3091,
    1623).
    Invariant: mask_t = [t < length], and the token at length − 1 is the one that ends the answer.
    """
    state = subjects.build(sft)
    assert state.policy.tokenizer.pad_token_id == state.policy.tokenizer.eos_token_id == 0
    batch = subjects.sample(sft, state)
    last = batch.completion.gather(-1, batch.length[..., None] - 1)
    assert (last == 0).all()
    assert batch.mask.sum() == batch.length.sum() == sum(2 * (i + 1) + 1 for i in range(4))


@sabotaged_by("foresight.data.text.length_mask", change("lengths", lambda n: n - 1))
@of(*SAMPLED)
def test_the_token_that_stopped_an_answer_has_a_gradient(module):
    """The same for sampled answers: the decision to stop is an action like any other.

    Wrong: stopping is neither rewarded nor penalized, so answers grow to the limit (TRL 1623).
    Invariant: ∂L/∂log π(o_t) ≠ 0 at t = length − 1 of an answer that stopped.
    """
    state = subjects.build(module, overlong_penalty=0.0)
    batch, caught = subjects.sample(module, state), []
    original = state.policy.logprob

    def watched(few, *rest):
        logprob, entropy = original(few, *rest)
        if logprob.requires_grad:
            ends = logprob.new_zeros(logprob.shape).scatter(-1, few.length[..., None] - 1, 1.0) * few.stopped[..., None]
            logprob.register_hook(lambda grad: caught.append(grad[ends > 0]))
        return logprob, entropy

    state.policy.logprob = watched
    subjects.update(module, state, batch, torch.randn(4, 4))
    grads = torch.cat(caught)
    assert len(grads) == batch.stopped.sum() and (grads != 0).all()


def at_the_first_pad(original):
    return lambda self, batch: original(self, batch).roll(1, -1)


@sabotaged_by("foresight.nets.language.scorer.Scorer.steps", at_the_first_pad)
@both
def test_a_score_is_read_at_the_last_token_whatever_the_padding(precision):
    """A reward model scores rows of different lengths.

    Wrong: the last token is located by its id, which finds the first pad or is off by one (transformers 35352; TRL 937;
    gpt-neox 1285; OpenRLHF 238).
    Invariant: s(x, y) = w · h at position |x| + |y| − 1, the same alone and in a batch.
    """
    state = subjects.build(reward_model, precision=precision)
    batch = subjects.sample(reward_model, state)
    together, trunk = state.scorer.scores(batch), state.scorer.trunk
    for i, prompt in enumerate(batch.prompts()):
        for g in range(2):
            row = torch.tensor([prompt + batch.completion[i, g, : batch.length[i, g]].tolist()])
            alone = trunk.module.score(trunk(row, torch.tensor([row.shape[1]]))[0].float())[0, -1, 0]
            torch.testing.assert_close(together[i, g], alone, atol=1e-5 if precision == "float32" else 0.2, rtol=0)


@sabotaged_by("foresight.ops.returns.gae", shift("reward"))
def test_the_score_is_added_at_the_last_token():
    """PPO adds the score of an answer to the reward of one token.

    Wrong: it is added at the first pad after the end, where the mask drops it (TRL 3750, 5338), or one token too early.
    Invariant: r_t = score · [t = length − 1], with no KL.
    """
    state = subjects.build(rlhf_ppo, kl_coef=0.0, gae_lambda=0.0, whiten=False)
    batch = subjects.sample(rlhf_ppo, state)
    rewards = 1 + torch.rand(4, 4)
    targets, _ = rlhf_ppo.prepare(state, batch, rewards)  # the critic is 0, so with λ = 0 the advantage is r_t
    expected = torch.zeros(batch.mask.shape).scatter(-1, batch.length[..., None] - 1, rewards[..., None])
    torch.testing.assert_close(targets.advantage, expected)


# ---- padding


def with_the_padding(original):
    return lambda self: self.prompt.tolist()


@sabotaged_by("foresight.data.text.TokenBatch.prompts", with_the_padding)
@both
@of(*ALL)
def test_padding_is_never_attended_to(module, precision):
    """Rows are padded to the longest, with arbitrary ids.

    Wrong: an attention mask is missing, so the gradient depends on the other rows of the batch (TRL 2708).
    Invariant: ∇L of a batch = ∇L of the same batch with wider padding and other ids in it, bit for bit.
    """
    batch = subjects.sample(module, subjects.build(module))

    def garbage(rows: torch.Tensor, lengths: torch.Tensor, by: int) -> torch.Tensor:
        wide = torch.nn.functional.pad(rows, (0, by))
        pad = torch.arange(wide.shape[-1]) >= lengths[..., None]
        return torch.where(pad, torch.randint(1, 40, wide.shape), wide)

    padded = dataclasses.replace(
        batch,
        prompt=garbage(batch.prompt, batch.prompt_length, 3),
        completion=garbage(batch.completion, batch.length, 2),
        logprob=torch.nn.functional.pad(batch.logprob, (0, 2), value=-7.0),
    )
    narrow = subjects.gradient(module, subjects.build(module, precision=precision), batch)
    wide = subjects.gradient(module, subjects.build(module, precision=precision), padded)
    subjects.same(narrow, wide, atol=0, rtol=0)


def left_padded(batch: TokenBatch) -> torch.Tensor:
    """log π of the first answer to each prompt by transformers' own model: left padding, positions from the mask."""
    module = AutoModelForCausalLM.from_pretrained(tiny_language.folder(0), dtype=torch.float32)
    rows = [p + batch.completion[i, 0, : batch.length[i, 0]].tolist() for i, p in enumerate(batch.prompts())]
    width = max(map(len, rows))
    tokens = torch.tensor([[7] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        table = module(tokens, attention_mask=mask, position_ids=positions).logits[:, :-1].log_softmax(-1)
    logprob = table.gather(-1, tokens[:, 1:, None])[..., 0]
    result = torch.zeros(batch.completion[:, 0].shape)
    for i, n in enumerate(batch.length[:, 0].tolist()):
        result[i, :n] = logprob[i, -n:]
    return result


def from_the_padded_width(cache):
    """The sampler continues at the width of the batch, not at the end of each prompt."""
    return Cache(cache.levels, cache.positions.max().expand_as(cache.positions))


def from_the_place_in_the_tree(original):
    """The learner takes the place in the packed batch for the place in the row."""

    def mutant(self, texts):
        original(self, texts)
        self.positions = torch.arange(len(self.tokens))

    return mutant


@sabotaged_by(
    "foresight.nets.language.model.LanguageModel.step", change("cache", from_the_padded_width, "padded_width")
)
@sabotaged_by("foresight.nets.language.tokentree.TokenTree.__init__", from_the_place_in_the_tree)
def test_positions_begin_at_the_first_token_of_each_row():
    """Prompts of different lengths, in the sampler and in the learner.

    Wrong: positions are counted over padding, or across the rows of a packed batch (TRL 6800; transformers 18388).
    Invariant: the position of a token is the number of tokens before it in its own row, as under left padding with
    position_ids = cumsum(mask) − 1.
    """
    state = subjects.build(grpo)
    batch = subjects.sample(grpo, state)
    assert len(batch.prompt_length.unique()) > 1
    oracle = left_padded(batch)
    torch.testing.assert_close(batch.logprob[:, 0], oracle, atol=2e-5, rtol=0)
    torch.testing.assert_close(state.policy.logprob(batch)[0][:, 0].detach(), oracle, atol=2e-5, rtol=0)


# ---- the very tokens


def two_spellings(folder) -> str:
    """A model with a token "12" beside "1" and "2": it is sampled, but the tokenizer never writes it."""
    tiny_language.write(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"W"', '"12"'))
    return str(folder)


def tokenized_again(original):
    def mutant(policy, *args, **kwargs):
        batch = original(policy, *args, **kwargs)
        texts, group = rollout.texts(policy, batch), batch.length.shape[1]
        ids = [policy.tokenizer.encode(text) or [0] for text in texts]
        again = [ids[i : i + group] for i in range(0, len(ids), group)]
        fresh = corpus.token_batch(batch.prompts(), again)
        return dataclasses.replace(fresh, logprob=policy.logprob(fresh)[0].detach())

    return mutant


@sabotaged_by("foresight.planning.generation.rollout.complete", tokenized_again)
@of(*SAMPLED)
def test_the_ids_trained_on_are_the_sampled_ids(module, tmp_path, monkeypatch):
    """An answer is a row of ids; its text is for the grader only.

    Wrong: the text is tokenized again, into ids that were not sampled, and their log-probabilities are cut or padded to
    fit (TRL 5224; verl 6854; ART 726; verifiers 37; OpenClaw-RL).
    Invariant: the ids whose log-probability is differentiated are the sampled ids.
    """
    folder = two_spellings(tmp_path / "model")
    state = subjects.build(module, model=folder, teacher=folder, overlong_filter=False, overlong_penalty=0.0)
    drawn, learned = list[list[int]](), list[list[int]]()
    generate, logprob = rollout.generate, state.policy.logprob

    def rows(batch: TokenBatch) -> list[list[int]]:
        completions = zip(batch.completion.flatten(0, 1).tolist(), batch.length.flatten().tolist(), strict=True)
        return [row[:n] for row, n in completions]

    def watched(*args, **options):
        batch = generate(*args, **options)
        drawn.extend(rows(batch))
        return batch

    def noted(few, *rest):
        if torch.is_grad_enabled():
            learned.extend(rows(few))
        return logprob(few, *rest)

    monkeypatch.setattr(rollout, "generate", watched)
    state.policy.logprob = noted
    task = TextTask("t", [Example(f"{i}?") for i in range(4)], [], lambda e, c: torch.rand(len(c)).tolist())
    next(module.train(state.config, task, state))
    assert any(state.policy.tokenizer.encode(state.policy.decode(row)) != row for row in drawn)  # not trivial
    assert sorted(learned) == sorted(drawn)


@sabotaged_by("foresight.training.microbatch.step", change("count", lambda n: 2 * n))
@of(grpo, rlhf_ppo)
def test_metrics_per_token_are_over_the_models_own_tokens(module):
    """A conversation, in which others write tokens too.

    Wrong: the sums over the model's tokens are divided by the number of all, so entropy and KL are too small.
    Invariant: the entropy of an update is the mean of H(π(· | o_<t)) over the sampled tokens.
    """
    state = subjects.build(module)
    batch = subjects.sample(module, state)
    batch = dataclasses.replace(batch, own=(torch.arange(batch.completion.shape[-1]) % 2 == 0).expand_as(batch.mask))
    rewards = torch.arange(16.0).view(4, 4)
    with torch.no_grad():
        expected = state.policy.logprob(batch)[1].sum() / batch.mask.sum()
    assert subjects.update(module, state, batch, rewards)["entropy"] == pytest.approx(expected.item(), rel=1e-4)


# ---- prompts


def without_the_generation_prompt(original):
    return lambda *args: (original(*args)[0][:-1], original(*args)[1])


@sabotaged_by("foresight.training.corpus.encode", without_the_generation_prompt)
def test_prompts_are_tokenized_as_in_the_sampler():
    """The prompt of a demonstration or a preference has the tokens that it has in sampling.

    Wrong: another template, a second end token, or a missing generation prompt: training and sampling differ (TRL
    5224).
    Invariant: ids(prompt + answer) = ids(prompt) + ids(answer), and ids(prompt) are the sampler's.
    """
    model = tiny_language.model()
    for prompt in ("1+1?", [{"role": "user", "content": "2?"}]):
        head, tail = corpus.encode(model, prompt, "34")
        assert head == model.encode(prompt)
        assert model.decode(tail) == "34"


TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}{% if add_generation_prompt %}W{% endif %}"


def unchecked(original):
    def mutant(policy, prompt, completion):
        try:
            return original(policy, prompt, completion)
        except UserError:
            return policy.encode(prompt), policy.encode(completion)

    return mutant


@sabotaged_by("foresight.training.corpus.encode", unchecked)
def test_a_chat_template_that_rewrites_the_prompt_is_refused():
    """A template that renders the prompt differently once an answer follows.

    Wrong: it drops the generation prompt, or strips earlier thinking (verl 6719, 6854; NeMo 2821).
    Invariant: ids(prompt) is a prefix of ids(prompt, answer); otherwise there is an error.
    """
    model = tiny_language.model()
    model.tokenizer.chat_template = TEMPLATE
    reported = ""
    try:
        corpus.encode(model, "1?", "2")
    except UserError as error:
        reported = str(error)
    assert "drops the generation prompt" in reported
    model.tokenizer.chat_template = TEMPLATE.replace("{{ m.c", "{% if m.role == 'assistant' %}W{% endif %}{{ m.c")
    head, tail = corpus.encode(model, "1?", "2")
    assert model.decode(head) == "1?=W" and model.decode(tail) == "2="


def merging(blank: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer that knows ==, === and 12 as one token each; with `blank` it puts one before every text."""
    pieces = ["<eos>", *"123?=W_", "==", "===", "12"]
    table = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("=", "="), ("==", "="), ("1", "2")]))
    if blank:
        table.pre_tokenizer = pre_tokenizers.Metaspace("_", prepend_scheme="first", split=False)
        table.decoder = decoders.Metaspace("_", prepend_scheme="first", split=False)
    else:
        table.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=table, eos_token="<eos>")


OPENS = "{% for m in messages %}{% if m.role == 'assistant' %}W={% endif %}{{ m.content }}{% endfor %}"
OPENS += "{% if add_generation_prompt %}W={% endif %}"


def merged(original):
    """What follows the prompt is cut out of the tokens of the whole."""

    def mutant(policy, prompt, completion):
        head, tail = original(policy, prompt, completion)
        both = policy.tokenizer.encode(policy.decode(head) + policy.decode(tail), add_special_tokens=False)
        return head, [*both[len(head) :], tail[-1]]

    return mutant


@sabotaged_by("foresight.training.corpus.encode", merged)
def test_an_answer_that_would_merge_with_the_end_of_the_prompt():
    """An answer that begins with what the template ends with, most often code after a newline.

    Wrong: a template that only appends is refused, or the answer loses its beginning (the newline after "assistant").
    Invariant: ids(prompt) are the sampler's, and ids(prompt) + ids(answer) decode to what the template renders.
    """
    model = tiny_language.model()
    for template in (None, OPENS):
        for blank in (False, True):
            model.tokenizer = merging(blank)
            model.tokenizer.chat_template = template
            for prompt, answer in itertools.product(("1?=", "12="), ("=", "==12", "12", "1", "3=")):
                head, tail = corpus.encode(model, prompt, answer)
                assert head == model.encode(prompt)
                assert model.decode(head + tail) == model.decode(head) + answer and tail[-1] == 0
                assert tail[:-1] == merging().encode(answer, add_special_tokens=False)


def unnamed(original):
    def mutant(policy, rows, *rest):
        return original(policy, [dataclasses.replace(row, place="") for row in rows], *rest)

    return mutant


@sabotaged_by("foresight.training.corpus.corpus", unnamed)
def test_a_row_that_the_template_refuses_is_named(tmp_path):
    """The template rejects one row of many.

    Wrong: the error does not name the row.
    Invariant: the error names the file and the row, counted as in an editor.
    """
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": "12"[: 1 + i % 2]}) + "\n" for i in range(9)))
    task = text.make(str(file))
    model, last = tiny_language.model(), task.train[-1]
    model.tokenizer.chat_template = OPENS.replace(
        "W={% endif %}", "{% if '" + last.prompt + "' == messages[0].content %}3{% endif %}W={% endif %}", 1
    )
    reported = ""
    try:
        corpus.corpus(model, task.train, lambda row: [row.columns["completion"]], 64)
    except UserError as error:
        reported = str(error)
    assert f"{file}, row {int(last.prompt[:-1]) + 1}: The chat template renders the prompt differently" in reported


def encoded_twice(original):
    """The template writes a text, and the tokenizer adds its own beginning to it."""

    def mutant(self, prompt, tools=None):
        if self.tokenizer.chat_template is None:
            return original(self, prompt)
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer.encode(text))

    return mutant


@sabotaged_by("foresight.nets.language.model.LanguageModel.encode", encoded_twice)
def test_a_prompt_has_one_beginning_token():
    """A tokenizer that adds a token for the beginning, and a template that adds it too.

    Wrong: the prompt begins with two of them, which no model was trained on (OpenRLHF 393).
    Invariant: ids(prompt) contain the beginning exactly once.
    """
    model = tiny_language.model()
    model.tokenizer.bos_token = "W"
    begin = model.tokenizer.bos_token_id
    model.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="W $A", pair=None, special_tokens=[("W", begin)]
    )
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}={% endfor %}"
    for chat_template in (None, template):
        model.tokenizer.chat_template = chat_template
        ids = model.encode("1?")
        assert ids[0] == begin and ids.count(begin) == 1
        head, tail = corpus.encode(model, "1?", "2")
        assert (head + tail).count(begin) == 1
