"""Inside a real engine: what is taken over is what it should be, token by token and logit by logit (fp32).

Bounds: 1e-3 on logits of size 10 to 30, where the engine and the reference differ by 2e-5 to 6e-5 in dense prefill
(other order of sums); a wrong position or block moves logits by more than 0.5.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine, engine
from reference import Reference, joined, rows
from workflow import Roles, contexts

pytestmark = pytest.mark.engine
BOUND = 1e-3
FORCED = [260, 1735, 282, 253]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Engine]:
    # Rotation only: what a run's cache has to be can then be composed by hand.
    with engine(model, {"predictor": "none"}) as running:
        yield running


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


class Prompt:
    """[role][context][instruction] in tokens, the context at a known place."""

    def __init__(self, llm: Engine, agent: str, context: list[int]) -> None:
        self.front, self.back = Roles.read().around(llm.llm.get_tokenizer(), agent)
        self.context = context

    @property
    def tokens(self) -> list[int]:
        return [*self.front, *self.context, *self.back]


def context(llm: Engine, number: int) -> list[int]:
    text = [t for _, t in contexts("dev")][number]
    return list(llm.llm.get_tokenizer().encode(text, add_special_tokens=False))


def common_end(a: list[int], b: list[int]) -> int:
    """Tokens that two fronts share at their end: a run begins with those."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def common_start(a: list[int], b: list[int]) -> int:
    """Tokens that two backs share at their start: a run ends with those."""
    return common_end(a[::-1], b[::-1])


def test_the_same_prefix_from_the_store_is_what_the_model_computes(llm: Engine) -> None:
    """An agent that comes back gets its own cache, bit for bit, although vLLM has evicted it."""
    prompt = Prompt(llm, "reflector", context(llm, 3)).tokens
    dense = llm.ask(prompt, 5, FORCED)
    llm.forget_prefixes()
    again = llm.ask(prompt, 5, FORCED)
    assert again.report["exact_tokens"] == len(prompt) - 1
    assert (again.logits - dense.logits).abs().max() <= BOUND


def test_another_prefix_with_the_head_recomputed(llm: Engine, reference: Reference) -> None:
    """A run behind another role prompt: keys rotated, the first 32 tokens computed by the model in place."""
    text = context(llm, 0)
    source, destination = Prompt(llm, "solver", text), Prompt(llm, "critic", text)
    llm.ask(source.tokens, 1)
    llm.settle()
    got = llm.ask(destination.tokens, 5, FORCED)
    common = common_end(source.front, destination.front)
    run = common + len(text) + common_start(source.back, destination.back)
    start = len(destination.front) - common
    assert got.report["reused_tokens"] == run - 32
    assert got.report["recomputed_tokens"] == 32

    whole, _ = reference.extend(None, source.tokens)
    begin = len(source.front) - common
    taken = reference.moved(rows(whole, begin + 32, begin + run), start - begin)
    front, _ = reference.extend(None, destination.tokens[: start + 32])
    past = joined(front, taken)
    _, logits = reference.extend(past, [*destination.tokens[start + run :], *FORCED])
    assert (got.logits - logits[-5:]).abs().max() <= BOUND
    dense = reference.extend(None, [*destination.tokens, *FORCED])[1][-5:]
    assert (got.logits - dense).abs().max() > 10 * BOUND, "rotation alone is not dense: the comparison can fail"


def test_a_gap_between_two_runs_is_computed(llm: Engine, reference: Reference) -> None:
    """[role][run][gap][run][instruction]: what stands between two shared runs is computed over the first."""
    first, second = context(llm, 2), context(llm, 4)
    sources = [Prompt(llm, "planner", first), Prompt(llm, "planner", second)]
    for source in sources:
        llm.ask(source.tokens, 1)
    llm.settle()
    gap = llm.llm.get_tokenizer().encode(" Now another document, from somebody else:", add_special_tokens=False)
    front, back = Roles.read().around(llm.llm.get_tokenizer(), "critic")
    prompt = [*front, *first, *gap, *second, *back]
    got = llm.ask(prompt, 5, FORCED)
    common = common_end(sources[0].front, front)
    after = common_start(sources[1].back, back)
    assert got.report["reused_tokens"] == common + len(first) - 32 + len(second) + after - 32

    past, _ = reference.extend(None, prompt[: len(front) - common + 32])
    at = len(front) - common + 32
    for source, text, shared in ((sources[0], first, common), (sources[1], second, 0)):
        whole, _ = reference.extend(None, source.tokens)
        if not shared:  # the second run's head, behind the gap
            past = joined(past, reference.extend(past, prompt[at : at + len(gap) + 32])[0])
            at += len(gap) + 32
        begin = len(source.front) - shared + 32
        taken = rows(whole, begin, len(source.front) + len(text) + (0 if shared else after))
        past = joined(past, reference.moved(taken, at - begin))
        at += taken[0].shape[2]
    _, logits = reference.extend(past, [*prompt[at:], *FORCED])
    assert (got.logits - logits[-5:]).abs().max() <= BOUND


def test_a_dense_request_after_an_approximate_one_is_dense(llm: Engine, reference: Reference) -> None:
    """Approximate blocks never answer for exact ones in vLLM's prefix cache; the exact ones in front still do.

    The fresh engine is a tenant that has seen the same role prompt and nothing approximate: it computes the same tokens
    on top of the same blocks, so the comparison is free of the 6e-5 by which differently split prefills differ.
    """
    text = context(llm, 6)
    source, destination = Prompt(llm, "solver", text), Prompt(llm, "reflector", text)
    before = Prompt(llm, "reflector", context(llm, 1)).tokens
    dense_only = {"share": False, "capture": False}
    answers = []
    for salt in ("has seen approximate blocks", "fresh"):
        llm.ask(before, 1, hints={"share": False}, salt=salt)
        llm.settle()
        if salt != "fresh":
            llm.ask(source.tokens, 1, salt=salt)
            llm.settle()
            approximate = llm.ask(destination.tokens, 5, hints={"capture": False}, salt=salt)
            assert approximate.report["reused_tokens"] > 0
        answers.append(llm.ask(destination.tokens, 5, hints=dense_only, salt=salt))
    dense, fresh = answers
    assert dense.report["reused_tokens"] == fresh.report["reused_tokens"] == 0
    block = 128
    assert dense.cached_tokens >= len(destination.front) // block * block > 0
    assert fresh.cached_tokens == dense.cached_tokens
    assert dense.tokens == fresh.tokens
    assert (dense.logits - fresh.logits).abs().max() <= 1e-5
    logits = reference.extend(None, [*destination.tokens, *dense.tokens])[1]
    assert (dense.logits - logits[-6:-1]).abs().max() <= BOUND


def test_the_same_hop_again_uses_vllms_own_blocks(llm: Engine) -> None:
    """Approximate blocks do serve the next request that would get them from the same sources."""
    text = context(llm, 7)
    llm.ask(Prompt(llm, "solver", text).tokens, 1)
    llm.settle()
    prompt = Prompt(llm, "critic", text).tokens
    first = llm.ask(prompt, 3, FORCED[:2], hints={"capture": False})
    loads = llm.connector.worker.counts["loads"]
    again = llm.ask(prompt, 3, FORCED[:2], hints={"capture": False})
    assert again.cached_tokens >= len(prompt) // 128 * 128
    assert llm.connector.worker.counts["loads"] <= loads + 1
    assert (again.logits - first.logits).abs().max() <= 1e-4


def test_other_requests_of_the_step_are_not_touched(llm: Engine) -> None:
    text = context(llm, 5)
    bystander = Prompt(llm, "summariser", context(llm, 3)[::-1]).tokens
    alone = llm.ask(bystander, 3, FORCED[:2], hints={"share": False, "capture": False})
    llm.ask(Prompt(llm, "solver", text).tokens, 1)
    llm.forget_prefixes()
    hops = [Prompt(llm, agent, text).tokens for agent in ("critic", "reflector")]
    together = llm.ask_all([hops[0], bystander, hops[1]], 3, [FORCED[:2]] * 3)
    assert [a.report["reused_tokens"] > 0 for a in together] == [True, False, True]
    assert together[1].report["exact_tokens"] == 0
    assert (together[1].logits - alone.logits).abs().max() <= BOUND


def test_fan_out_and_loop(llm: Engine) -> None:
    """One source and many readers; and an agent that comes back to a longer context with its own cache in front."""
    tokenizer, roles = llm.llm.get_tokenizer(), Roles.read()
    text = [t for _, t in contexts("dev")][9]
    said = "The plan is to look at each problem in turn, to write down what is given, and to check the units."
    planner = roles.prompt(tokenizer, "planner", text)
    llm.ask(planner, 8)
    llm.settle()
    for reader in ("solver", "critic", "reflector"):
        answer = llm.ask(roles.prompt(tokenizer, reader, text), 8)
        assert answer.report["reused_tokens"] > 200, reader
    llm.forget_prefixes()
    back = llm.ask([*planner[:-20], *tokenizer.encode(said), *planner[-20:]], 4)
    assert back.report["exact_tokens"] == len(planner) - 20
