"""The mind: every token that the completer counted is charged, budgets bind, and faults name what failed."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from foresight.envs.text.make import make
from foresight.errors import LostError, UserError
from foresight.nets.language import decoder
from foresight.planning.generation.decoding import generate
from foresight.planning.generation.scripted import Scripted
from foresight.planning.generation.server import Server
from foresight.planning.reasoning import methods
from foresight.planning.reasoning.mind import Charge, Mind
from tests import openai_server, tiny_language
from tests.planning.reasoning.players import TASK, player
from tests.sabotage import sabotaged_by

NAMES = [name for name in methods.METHODS if name != "graph_of_thoughts"]


class Counting:
    """A completer that counts for itself."""

    def __init__(self, inner):
        self.inner, self.prompt, self.sampled, self.rows, self.asked = inner, 0, 0, [], []

    def __call__(self, prompts, *args, **options):
        batch = self.inner(prompts, *args, **options)
        self.prompt += sum(map(len, prompts))
        self.asked += [(tuple(prompt), len(self.rows)) for prompt in prompts]  # and how many rows were known then
        self.sampled += int(batch.length.sum())
        for p, g in itertools.product(*map(range, batch.length.shape)):
            self.rows.append((*prompts[p], *batch.completion[p, g, : batch.length[p, g]].tolist()))
        return batch


def free_samples(original):
    return lambda self, other: original(self, Charge(other.prompt_tokens, 0))


@sabotaged_by("foresight.planning.reasoning.mind.Charge.__add__", free_samples)
@pytest.mark.parametrize("name", NAMES)
def test_budgets_add_up_to_what_the_completer_counted(name, request):
    policy = Scripted(player)
    policy.completer = counting = Counting(policy)
    mind = Mind(policy, 24, verifier=TASK.verifier)
    results = methods.run(name, mind, TASK, TASK.test[:4], 200, **methods.sized(name, 200, 16))
    assert len(results) == 4
    assert (mind.total.prompt_tokens, mind.total.sampled_tokens) == (counting.prompt, counting.sampled)
    assert sum(r.charge.sampled_tokens for r in results) == counting.sampled
    assert all(0 < r.charge.sampled_tokens <= 200 for r in results)


def with_every_token_new(original):
    return lambda tree, tokens: (original(tree, tokens)[0], len(tokens))


@sabotaged_by("foresight.planning.reasoning.mind.grow", with_every_token_new)
@pytest.mark.parametrize("name", ["beam", "puct"])
def test_a_prefix_that_thoughts_share_is_distinct_once(name):
    policy = Scripted(player)
    policy.completer = counting = Counting(policy)
    mind = Mind(policy, 24, verifier=TASK.verifier)
    results = methods.run(name, mind, TASK, TASK.test[:4], 200, **methods.sized(name, 200, 16))
    for example, result in zip(TASK.test, results, strict=False):
        prompt = tuple(policy.encode(example.prompt))
        own = [row for row in counting.rows if row[: len(prompt)] == prompt]
        assert result.charge.distinct_tokens == len({row[:n] for row in own for n in range(1, len(row) + 1)})
        assert 0 < result.charge.distinct_tokens < result.charge.prompt_tokens + result.charge.sampled_tokens


@sabotaged_by("foresight.planning.reasoning.mind._copies", lambda original: lambda prefixes: 1)
def test_searches_apart_that_start_from_one_prefix_read_it_once():
    policy, asked = Scripted(player), []
    mind = Mind(policy, 24, verifier=TASK.verifier)
    policy.completer = lambda prompts, group, *args, **options: (
        asked.append((len(prompts), group)) or policy(prompts, group, *args, **options)
    )
    methods.run("dvts", mind, TASK, TASK.test[:3], n=8, width=4, steps=1)
    assert asked == [(3, 8)] and mind.total.requests == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_method_thinks_the_same_with_the_same_seed(name):
    texts = []
    for _ in range(2):
        mind = Mind(Scripted(player), 24, verifier=TASK.verifier)
        results = methods.run(name, mind, TASK, TASK.test[:3], 150, **methods.sized(name, 150, 16))
        texts.append([(r.answer.text, r.answer.candidates, r.answer.tree.document()) for r in results])
    assert texts[0] == texts[1]


def encodes_again(original):
    return lambda self, *rest: [
        [dataclasses.replace(thought, tokens=self.continuation(thought.text)) for thought in row]
        for row in original(self, *rest)
    ]


@sabotaged_by("foresight.planning.reasoning.mind.Mind.sample", encodes_again)
def test_a_local_model_is_never_tokenized_again():
    """What is continued is a question or the beginning of a row that was sampled; only questions are encoded."""
    policy, encoded = tiny_language.model(), []
    policy.completer = counting = Counting(functools.partial(generate, policy))
    encode = policy.tokenizer.encode
    policy.tokenizer.encode = lambda text, **options: encoded.append(text) or encode(text, **options)
    mind = Mind(policy, 12, verifier=lambda e, t: [len(x) / 100 for x in t])
    task = make("addition", held_out=4)
    questions = [tuple(encode(example.prompt)) for example in task.test]
    for name, steps in (("beam", {"step_tokens": 4}), ("value_guided", {"block": 4}), ("puct", {"step_tokens": 4})):
        counting.asked.clear()
        for result in methods.run(name, mind, task, task.test, 200, **{**methods.sized(name, 200, 12), **steps}):
            assert result.charge.sampled_tokens <= 200 and result.answer.candidates
        continued = [(prompt, known) for prompt, known in counting.asked if prompt not in questions]
        assert len(continued) >= 4, name
        for prompt, known in continued:
            assert any(row[: len(prompt)] == prompt for row in counting.rows[:known])
    assert encoded == 3 * [example.prompt for example in task.test]


@pytest.mark.parametrize("name", ["beam", "puct"])
def test_no_keys_and_values_are_held_after_an_answer(name):
    mind = Mind(tiny_language.model(), 12, verifier=lambda e, t: [len(x) / 100 for x in t])
    held = []
    add = mind.kept.add
    mind.kept.add = lambda *args: (add(*args), held.append(mind.kept.used))  # type: ignore[method-assign]
    methods.run(name, mind, make("addition", held_out=2), make("addition", held_out=2).test, step_tokens=2)
    assert max(held) > 0 and mind.kept.used == 0 and not mind.kept.segments


def test_a_server_thinks_and_one_that_stops_is_reported():
    policy = tiny_language.model()
    task = make("addition", held_out=3)
    for form in ("token_ids", "text"):
        with openai_server.serve(openai_server.Stub(tiny_language.model(), form)) as stub:
            policy.completer = Server(stub.url, policy, tries=2, wait=0.01)
            mind = Mind(policy, 8, temperature=0.7)
            results = methods.run("self_consistency", mind, task, task.test, 40, n=4)
            assert all(r.charge.sampled_tokens > 0 and r.charge.requests for r in results)
            stub.always = 500
            with pytest.raises(LostError, match="does not answer"):
                methods.run("self_consistency", mind, task, task.test, 40, n=4)


@pytest.mark.parametrize("name", [name for name in methods.METHODS if name != "graph_of_thoughts"])
def test_every_method_thinks_with_a_server(name):
    """Graphs of thoughts are left out: their plan is for sorted lists."""
    policy, task = tiny_language.model(), make("countdown", traces="steps", held_out=2)
    with openai_server.serve(openai_server.Stub(tiny_language.model())) as stub:
        policy.completer = Server(stub.url, policy, tries=2, wait=0.01)
        mind = Mind(policy, 12, verifier=lambda _, texts: [len(text) / 100 for text in texts])
        for result in methods.run(name, mind, task, task.test, 48, **methods.sized(name, 48, 12)):
            assert 0 < result.charge.sampled_tokens <= 48
    assert stub.requests


def ends_every_step(original):
    return lambda self, found, stops: [dataclasses.replace(choice, stop="") for choice in found]


@sabotaged_by("foresight.planning.generation.server.Server._ended", ends_every_step)
def test_the_end_of_a_step_or_an_answer_is_what_a_server_reports_or_shows():
    policy = tiny_language.model()
    with openai_server.serve(openai_server.Stub(policy)) as stub:

        def thoughts(form, stop=("a", "b"), strips=False, reports=""):
            stub.form, stub.strips, stub.reports = form, strips, reports
            policy.completer = Server(stub.url, policy, tries=2, wait=0.01)
            found = Mind(policy).sample([[3, 4, 5]], 24, 12, 1.0, stop, ("b",))
            return [(thought.text, thought.ended) for thought in found[0]]

        known = thoughts("token_ids")
        ends = {text[-1:]: ended for text, ended in known}
        assert (ends["a"], ends["b"]) == (False, True) and any(ended and text[-1:] not in "ab" for text, ended in known)
        assert thoughts("text") == thoughts("text", strips=True, reports="stop_reason") == known
        assert thoughts("text", strips=True, reports="matched_stop") == known
        with pytest.raises(UserError, match="look alike: use a server that reports it"):
            thoughts("text", strips=True)
        assert all(ended for text, ended in thoughts("text", stop=("b",), strips=True) if text.endswith("b"))


def test_a_verifier_that_raises_is_named_with_its_text():
    def fragile(examples, texts):
        if any("*" in text for text in texts):
            raise ZeroDivisionError("no products")
        return [0.5] * len(texts)

    with pytest.raises(LostError, match=r"raised ZeroDivisionError: no products, on '!.*\*.*' for "):
        methods.run("best_of_n", Mind(Scripted(player), 24, verifier=fragile), TASK, TASK.test, n=4)
    with pytest.raises(LostError, match="returned 1 scores"):
        methods.run("best_of_n", Mind(Scripted(player), 24, verifier=lambda e, t: [1.0]), TASK, TASK.test, n=4)


def test_the_context_bounds_a_thought():
    mind = Mind(Scripted(player, context=14), 24, verifier=TASK.verifier)
    results = methods.run("best_of_n", mind, TASK, TASK.test[:2], n=2)
    assert [len(e.prompt) + len(r.answer.text) for e, r in zip(TASK.test[:2], results, strict=True)] == [14, 14]


@pytest.mark.parametrize("name", ["beam", "dvts", "tree_of_thoughts", "puct"])
def test_a_budget_of_one_answer_pays_for_steps_of_any_size(name):
    mind = Mind(Scripted(player), 16, verifier=TASK.verifier)
    for result in methods.run(name, mind, TASK, TASK.test[:2], 32, step_tokens=48):
        assert 0 < result.charge.sampled_tokens <= 32 and result.answer.text


def test_a_thought_that_the_budget_bounds_is_as_long_as_it_pays_for():
    mind = Mind(Scripted(lambda text, draw: "a" * 99), 10)
    result = methods.run("budget_forcing", mind, TASK, TASK.test[:1], 20, thought_tokens=50)[0]
    assert result.charge.sampled_tokens == 20 and result.answer.text == "a" * 20


@pytest.mark.parametrize("name", ["greedy", "puct"])
def test_a_prompt_that_fills_the_context_is_named(name):
    longest = max(TASK.test[:4], key=lambda example: len(example.question))
    mind = Mind(Scripted(player, context=len(longest.question)), 24, verifier=TASK.verifier)
    with pytest.raises(UserError, match=f"{longest.question[:5]}.*leaves no room for an answer in the context of"):
        methods.run(name, mind, TASK, [longest])


def test_number_tokens_round_trip():
    tokenizer = decoder.numbers()
    text = "3,17,100=24:!1000-05\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and len(ids) == 17
    assert len(tokenizer.encode("999")) == 3 and len(tokenizer) == 187
    with pytest.raises(UserError, match="Unknown kind of tokens"):
        from foresight.algorithms.language import pretrain

        pretrain.build(pretrain.Config(tokens="words"))
