"""Searches over thoughts: exhaustive with an exact value; beams hold no duplicates; a revision keeps what was right."""

from __future__ import annotations

import dataclasses
import random

import pytest

from foresight.envs.text import countdown
from foresight.envs.text.make import make
from foresight.envs.text.task import Example
from foresight.errors import UserError
from foresight.planning.generation.scripted import Scripted
from foresight.planning.reasoning import graph_of_thoughts as graphs
from foresight.planning.reasoning import methods, sorting
from foresight.planning.reasoning.beam import Path, identity
from foresight.planning.reasoning.mind import Mind
from tests.planning.reasoning.players import TASK, Pieces, player
from tests.sabotage import sabotaged_by

FEW = TASK.test[:8]


def _mind(verifier=TASK.verifier, reply=player):
    return Mind(Scripted(reply), 24, verifier=verifier)


def _solved(results):
    return TASK.grade(FEW, [result.answer.text for result in results])


@pytest.mark.parametrize("order", ["bfs", "dfs"])
@sabotaged_by("foresight.envs.text.countdown._promise", lambda f: lambda example, answer: 0.7)
def test_a_tree_of_thoughts_with_an_exact_value_is_exhaustive_search(order):
    """Every problem here has a solution, and enough proposals name every step: so all are solved, as by enumeration."""
    mind = _mind(lambda e, t: countdown.promise(e, t))
    results = methods.run("tree_of_thoughts", mind, TASK, FEW, order=order, samples=120, breadth=3)
    assert _solved(results) == [1.0] * len(FEW)


@sabotaged_by("foresight.envs.text.countdown._promise", lambda f: lambda example, answer: 1 - f(example, answer))
def test_puct_finds_what_the_exact_value_promises():
    mind = _mind(lambda e, t: countdown.promise(e, t))
    assert _solved(methods.run("puct", mind, TASK, FEW, actions=40, simulations=30)) == [1.0] * len(FEW)


@pytest.mark.parametrize(
    ("budget", "text"),
    [(64, "1+2=3\n3+3=6\n6+4=10\n#10"), (12, "1+2=3\n3+3=6\n"), (6, "1+2=3\n")],
)
def test_puct_continues_to_an_answer_with_the_rest_of_the_budget(budget, text):
    """A step has 6 tokens, and what follows it 17, where another answer of the greatest length may have `budget`."""
    task, steps = make("chains"), ("1+2=3", "3+3=6", "6+4=10", "#10")
    mind = Mind(
        Scripted(lambda text, draw: "\n".join(steps[text.count("\n") :])), budget, verifier=lambda e, t: [0.5] * len(t)
    )
    example = [Example("1+2+3+4:", "10", task.test[0].columns)]
    result = methods.run("puct", mind, task, example, budget, simulations=1, actions=1)[0]
    assert result.answer.text == text and result.charge.sampled_tokens <= budget
    assert task.grade(example, [text]) == [float(budget == 64)]


def test_a_depth_first_search_answers_with_its_last_states():
    """Algorithm 2 records a state of the last depth; a budget that ends the search leaves the deepest state."""
    steps = [step + "," for step in ("1+1=2", "1+1=2", "2+2=4", "2+2=4")]
    mind = Mind(Scripted(lambda text, draw: steps[text.count(",")]), 24, verifier=lambda e, texts: [0.9] * len(texts))
    example = [Example("1", stop=())]
    found = {
        (order, size): methods.run("tree_of_thoughts", mind, TASK, example, size, order=order, samples=1, steps=steps_)[
            0
        ]
        for order in ("bfs", "dfs")
        for size, steps_ in ((None, 2), (30, 9))
    }
    for size, text in ((None, "1+1=2,1+1=2,"), (30, "1+1=2,1+1=2,")):
        answers = [found[order, size].answer for order in ("bfs", "dfs")]
        assert [answer.text for answer in answers] == [text, text]
        assert answers[0].candidates == answers[1].candidates
        assert all(any(node.chosen for node in answer.tree.nodes[1:]) for answer in answers)


def test_a_depth_first_search_returns_from_a_last_state_below_the_threshold():
    values = {"a,": 0.9, "a,a,": 0.1, "a,b,": 0.2, "b,": 0.8, "b,a,": 0.3, "b,b,": 0.7}
    mind = Mind(
        Scripted(lambda text, draw: draw.choice(["a,", "b,"])), 24,
        verifier=lambda e, texts: [values[text] for text in texts],
    )  # fmt: skip
    answer = methods.run("tree_of_thoughts", mind, TASK, [Example("1")], order="dfs", samples=20, steps=2)[0].answer
    assert answer.text == "b,b,"


def test_first_listed_any_and_mean_are_read_from_the_candidates():
    results = methods.run("tree_of_thoughts", _mind(), TASK, FEW, samples=60, breadth=5)
    for example, result in zip(FEW, results, strict=True):
        texts = [text for text, _ in result.answer.candidates]
        assert 1 <= len(texts) <= 5 and texts[0] == result.answer.text and len(set(texts)) == len(texts)
        assert TASK.grade([example], texts[:1]) == [1.0]


def keeps_copies(original):
    def mutant(problem, tree, paths, count, step_tokens):
        groups = yield from methods.beam.__globals__["extend_each"](problem, tree, paths, count, step_tokens)
        return [path for group in groups for path in group for _ in range(2)]

    return mutant


@sabotaged_by("foresight.planning.reasoning.beam.extend", keeps_copies)
def test_beams_hold_no_duplicates():
    for read in ("best", "weighted", "majority"):
        for result in methods.run("beam", _mind(), TASK, FEW, n=16, read=read):
            texts = [node.text for node in result.answer.tree.nodes if node.kind == "answer"]
            below = [(node.parents, node.text) for node in result.answer.tree.nodes[1:]]
            assert len(set(below)) == len(below) and len(texts) <= 16
    results = methods.run("beam", _mind(), TASK, FEW, n=16)
    assert all(len({text for text, _ in r.answer.candidates}) == len(r.answer.candidates) for r in results)


def test_subtrees_of_dvts_stay_apart():
    for result in methods.run("dvts", _mind(), TASK, FEW, n=12, width=3):
        kept = [node for node in result.answer.tree.nodes[1:] if node.kept and node.parents == (0,)]
        assert len(kept) == 4


def test_a_path_is_scored_by_its_last_worst_or_all_steps():
    from foresight.planning.reasoning.beam import AGGREGATES

    scores = (0.5, 0.2, 0.9)
    assert [AGGREGATES[name](scores) for name in ("last", "min")] == [0.9, 0.2]
    assert AGGREGATES["prod"](scores) == pytest.approx(0.09)


def test_value_guided_decoding_follows_the_value_token_by_token():
    likes = {"a": 0.9, "b": 0.1}
    mind = Mind(
        Scripted(lambda text, draw: draw.choice("ab") + ("ab" if len(text) < 20 else "")), 6,
        verifier=lambda e, t: [sum(likes.get(c, 0) for c in x) / max(len(x), 1) for x in t],
    )  # fmt: skip
    results = methods.run("value_guided", mind, TASK, FEW, samples=12, block=1)
    assert {result.answer.text for result in results} == {"aaaaaa"}
    random_texts = methods.run("value_guided", mind, TASK, FEW, samples=1, block=1)
    assert any("b" in result.answer.text for result in random_texts)


@sabotaged_by("foresight.planning.reasoning.budget_forcing.cut", lambda f: lambda policy, tokens, text: ())
def test_deep_think_revises_from_before_the_first_wrong_step():
    results = methods.run("deep_think", _mind(), TASK, FEW, n=6, rounds=6)
    solved = _solved(results)
    assert sum(solved) >= 7
    assert sum(solved) > sum(_solved(methods.run("self_consistency", _mind(), TASK, FEW, n=6)))
    for result in results:
        for node in result.answer.tree.nodes:
            if node.kind == "revision":
                parent = result.answer.tree.nodes[node.parents[0]]
                assert not node.text.startswith("!!") and parent.kind in ("answer", "revision")
    continued = [n for r in results for n in r.answer.tree.nodes if n.kind == "revision" and not n.text.startswith("!")]
    assert continued  # some revisions kept the first step


def test_deep_think_asks_a_chat_model_in_words():
    def chat(text, draw):
        if "Find the first mistake" in text:
            return "correct" if "answer:\n42" in text else "It is not 41."
        return "42" if "critique" in text else draw.choice(["41", "42", "40"])

    mind = Mind(Scripted(chat, chat=True), 8)
    for result in methods.run("deep_think", mind, make("addition", held_out=4), FEW, n=5, rounds=1):
        assert result.answer.text == "42"
        assert {node.kind for node in result.answer.tree.nodes} >= {"question", "answer", "critique"}


def test_deep_think_revises_unless_the_critique_begins_with_correct():
    critiques = {
        "This is not correct: 7+12 is 19.": True, "Incorrect.": True, "Correctness fails.": True,
        "**Correct.**": False, "correct: 18": False,
    }  # fmt: skip
    for critique, revised in critiques.items():

        def chat(text, draw, critique=critique):
            if "Find the first mistake" in text:
                return critique
            return "19" if "critique" in text else "18"

        mind = Mind(Scripted(chat, chat=True), 40)
        result = methods.run("deep_think", mind, make("addition", held_out=4), FEW[:1], n=1, rounds=1)[0]
        assert result.answer.text == ("19" if revised else "18"), critique


def test_deep_think_without_tokens_for_a_revision_votes():
    answers = iter(["41", "42", "42"])

    def chat(text, draw):
        return "wrong " * 10 if "Find the first mistake" in text else next(answers)

    mind = Mind(Scripted(chat, chat=True), 40)
    task = make("addition", held_out=4)
    answer = methods.run("deep_think", mind, task, FEW[:1], budget=130, n=3, rounds=1)[0].answer
    kinds = [node.kind for node in answer.tree.nodes]
    assert kinds.count("critique") == 3 and "revision" not in kinds
    assert answer.text == "42" and answer.candidates == (("42", 2.0), ("41", 1.0))


def test_deep_think_approves_nothing_that_was_not_read():
    """The budget pays for two answers, two critiques, one revision and its critique."""
    answers = iter(["41", "40", "42"])

    def chat(text, draw):
        return "wrong " * 5 if "Find the first mistake" in text else next(answers)

    mind = Mind(Scripted(chat, chat=True), 30)
    task = make("addition", held_out=4)
    answer = methods.run("deep_think", mind, task, FEW[:1], budget=101, n=2, rounds=2)[0].answer
    critiques = [node.text for node in answer.tree.nodes if node.kind == "critique"]
    assert len(critiques) == 3 and all(text.startswith("wrong") for text in critiques)
    assert answer.candidates == (("42", 1.0), ("40", 1.0))  # a plain vote: neither was found right


def test_a_model_values_its_own_thoughts_in_three_words():
    def chat(text, draw):
        return "sure" if "7" in text.partition("steps so far:")[2].partition("Can the")[0] else "impossible"

    from foresight.planning.reasoning.tree_of_thoughts import WORDS, own_values

    mind = Mind(Scripted(chat, chat=True), 8)
    found = []

    def method(problem):
        found.append((yield from own_values(problem, ["3+4=7", "3+4=8"], 3)))
        return methods.greedy(problem) and None

    mind.think(method, TASK, FEW[:1])
    assert found == [[3 * WORDS["sure"], 3 * WORDS["impossible"]]]


def test_budget_forcing_suppresses_the_end_and_closes_a_long_thought():
    def counting(text, draw):
        return " wait" if text.endswith("Wait") else " done"

    results = methods.run("budget_forcing", Mind(Scripted(counting), 10), TASK, FEW[:1], ignore=2)
    assert results[0].answer.text == " doneWait waitWait wait"
    traced = make("addition", held_out=2, trace=True)

    def thinker(text, draw):
        return "<think>" + "a" * 40 + "</think>" if "<think>" not in text.rpartition("?")[2] else " 7 </answer>"

    mind = Mind(Scripted(thinker), 20)
    text = methods.run("budget_forcing", mind, traced, traced.test[:1], ignore=1, thought_tokens=15)[0].answer.text
    assert text == "<think>" + "a" * 8 + "</think> <answer> 7 </answer>"


def test_budget_forcing_keeps_the_end_where_nothing_can_follow():
    task = make("chains")

    def reply(text, draw):
        return "" if text.endswith("Wait") else "100+56=156\n#156"

    example, mind = [Example("100+56:", "156")], Mind(Scripted(reply), 64)
    tight = dataclasses.replace(mind, policy=Scripted(reply, context=len("100+56:100+56=156\n#156Wait")))
    for one, budget in ((mind, 64), (tight, None)):
        answer = methods.run("budget_forcing", one, task, example, budget, ignore=1)[0].answer
        assert answer.text == "100+56=156\n#156" and task.grade(example, [answer.text]) == [1.0]
        assert [node.text for node in answer.tree.nodes if node.kind == "answer" and node.chosen] == [answer.text]
    assert methods.run("budget_forcing", mind, task, example, 128, ignore=1)[0].answer.text.endswith("#156Wait")
    traced = make("addition", held_out=2, trace=True)

    def thinker(text, draw):
        return " 7 </answer>" if text.endswith("</think>") else "<think>3+4=7</think>"

    mind = Mind(Scripted(thinker), 20)  # after a thought of 20 tokens, 39 pay for an answer, but for no other thought
    answer = methods.run("budget_forcing", mind, traced, traced.test[:1], 59, ignore=1, thought_tokens=40)[0].answer
    assert answer.text == "<think>3+4=7</think> 7 </answer>"


def test_the_end_of_a_thought_is_seen_inside_a_token():
    traced = make("addition", held_out=2, trace=True)
    pieces = [b"<think>", b"ab", b"</think", b">\n", b" <answer>", b"7", b"</answer", b">\n", b"more"]
    policy = Pieces(pieces)
    text = methods.run("budget_forcing", Mind(policy, 20), traced, traced.test[:1], ignore=1)[0].answer.text
    assert text.startswith("<think>abWait") and text.count("</think>") == 1
    text = methods.run("budget_forcing", Mind(policy, 20), traced, traced.test[:1], ignore=0)[0].answer.text
    assert text == "<think>ab</think>\n <answer>7</answer>\n"
    thought = Mind(policy).sample([policy.encode("?")], 1, 20, 1.0, ("</answer>",), ("</answer>",))[0][0]
    assert thought.ended and thought.text.endswith("</answer>\n")


def test_the_end_of_an_answer_is_seen_across_steps():
    traced = make("addition", held_out=2, trace=True)
    mind = Mind(Pieces([b"7", b"</ans", b"wer>", b"more"]), 8, verifier=lambda e, t: [0.5] * len(t))
    for name, options in (("value_guided", {"block": 1}), ("beam", {"step_tokens": 1}), ("puct", {"step_tokens": 1})):
        result = methods.run(name, mind, traced, traced.test[:1], **options)[0]
        assert result.answer.text == "7</answer>", name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("value_guided", {"block": 1}),
        ("value_guided", {"block": 2}),
        ("beam", {"step_tokens": 2}),
        ("tree_of_thoughts", {"step_tokens": 2}),
        ("puct", {"step_tokens": 2}),
        ("puct", {"step_tokens": 2, "simulations": 1}),
        ("deep_think", {"rounds": 1}),
        ("budget_forcing", {"thought_tokens": 2}),
    ],
)
def test_a_text_is_that_of_all_its_tokens(name, options):
    """A character may be split over tokens and steps, and some tokenizers drop a space at the beginning of a text."""

    def verifier(examples, texts):
        return [0.1 if text.endswith("b") else 0.5 for text in texts]

    characters = [bytes([i]) for i in "né中".encode()]
    for pieces, text in (
        (characters, "né中"),
        ([b" a", b" b", b" c"], "a b c"),
        ([*characters[1:3], b",", b" b"], "é, b"),
    ):
        mind = Mind(Pieces(pieces, strips=True), 12, verifier=verifier)
        answer = methods.run(name, mind, TASK, FEW[:1], **options)[0].answer
        assert answer.text == text
        assert not any("\ufffd" in node.text for node in answer.tree.nodes if node.kind == "answer"), name


def test_thoughts_that_differ_within_a_character_are_two():
    policy = Pieces([b""])
    first, second = (Path(tuple(policy.encode(character)[:1]), "\ufffd") for character in "é中")
    assert identity(first) != identity(second)
    assert identity(Path((1, 2), "ab")) == identity(Path((3,), "ab"))


@sabotaged_by("foresight.envs.text.sorting.error", lambda f: lambda given, found: 0)
def test_a_graph_of_thoughts_errs_less_than_a_tree_that_costs_more():
    task, rate, plan = make("sorting", size=10, held_out=16), 0.004, sorting.plan()
    errors, costs = {}, {}
    for name, method, options in (
        ("direct", graphs.direct, {}),
        ("tree", graphs.tree, {"solve": 10, "improve": 10}),
        ("graph", graphs.graph_of_thoughts, {}),
    ):
        mind = Mind(Scripted(sorting.noisy_sorter(rate)), 200)
        results = mind.think(method, task, task.test, plan=plan, **options)
        texts = [result.answer.text for result in results]
        given = [plan.split(example, 1)[0] for example in task.test]
        errors[name] = sum(map(plan.error, given, texts))
        costs[name] = mind.total.prompt_tokens + mind.total.sampled_tokens
    assert errors["graph"] < errors["tree"] < errors["direct"]
    assert costs["graph"] < costs["tree"]


def test_a_sorter_without_errors_sorts_and_its_graph_merges():
    task = make("sorting", size=10, held_out=2)
    result = methods.run("graph_of_thoughts", Mind(Scripted(sorting.noisy_sorter(0.0)), 200), task, task.test)[0]
    assert task.grade(task.test[:1], [result.answer.text]) == [1.0]
    depth = result.answer.tree.depth()
    assert max(depth) == 5 and any(len(node.parents) == 2 for node in result.answer.tree.nodes)
    reply = sorting.noisy_sorter(0.01)
    lost = [64 - len(reply("Sort: " + "5 " * 64, random.Random(i)).split()) for i in range(60)]
    assert any(lost) and max(map(abs, lost)) > 5


@pytest.mark.parametrize("length", [5, 9, 10])
def test_a_graph_merges_every_part_of_an_odd_number(length):
    """9 digits in parts of 3 are 3 parts; 10 in 8 parts of 2 are 5."""
    task = make("sorting", size=2, held_out=4, length=length)
    mind = Mind(Scripted(sorting.noisy_sorter(0.0)), 200)
    for parts in (4, 8):
        results = methods.run("graph_of_thoughts", mind, task, task.test, parts=parts)
        assert task.grade(task.test, [result.answer.text for result in results]) == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("beam", {"aggregate": "mean"}, "Unknown aggregate 'mean'"),
        ("beam", {"read": "first"}, "Unknown reading 'first'"),
        ("beam", {"n": 0}, "must be at least 1"),
        ("beam", {"steps": 0}, "steps 0: all must be at least 1"),
        ("dvts", {"steps": -1}, "steps -1: all must be at least 1"),
        *(
            (name, {"step_tokens": 0}, "'step_tokens' of .* must be at least 1")
            for name in ("beam", "dvts", "tree_of_thoughts", "puct")
        ),
        ("self_consistency", {"temperature": "hot"}, "'temperature' of self_consistency must be float, not 'hot'"),
        ("best_of_n", {"temperature": -1.0}, "'temperature' of best_of_n must be at least 0"),
        ("self_consistency", {"n": 0}, "n is 0: it must be at least 1"),
        ("best_of_n", {"n": -1}, "n is -1: it must be at least 1"),
        ("self_consistency", {"early": 95.0}, "early is 95.0: it must be a probability"),
        ("self_consistency", {"early": -0.5}, "early is -0.5: it must be a probability"),
        ("tree_of_thoughts", {"order": "a"}, "Unknown order 'a'"),
        ("tree_of_thoughts", {"samples": 0}, "at least 1 each"),
        ("puct", {"actions": 0}, "must be at least 1"),
        ("value_guided", {"tau": -1.0}, "tau -1.0"),
        ("deep_think", {"n": 0}, "at least 1 and 0"),
        ("budget_forcing", {"ignore": -1}, "at least 0"),
    ],
)
def test_bad_options(name, options, match):
    with pytest.raises(UserError, match=match):
        methods.run(name, _mind(), TASK, FEW[:1], **options)
