"""Inside a real engine: whatever fails, or is odd, ends in the answer that dense prefill gives (fp32)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine, engine
from workflow import Roles, contexts

pytestmark = pytest.mark.engine
BOUND = 1e-3  # see test_takeover.py
FORCED = [260, 1735, 282]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Engine]:
    """Small chunks and few blocks: prefill is chunked, and long requests preempt one another."""
    options = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True, "num_gpu_blocks_override": 24}
    with engine(model, {"predictor": "none"}, max_model_len=2048, **options) as running:
        yield running


def prompts(llm: Engine, number: int, *agents: str) -> list[list[int]]:
    text = [t for _, t in contexts("dev")][number]
    return [Roles.read().prompt(llm.llm.get_tokenizer(), agent, text) for agent in agents]


def dense(llm: Engine, prompt: list[int], tokens: int = 4) -> "list[list[float]]":
    """Logits of an answer for which nobody left anything."""
    llm.forget_prefixes()
    answer = llm.ask(prompt, tokens, FORCED, hints={"share": False, "capture": False}, salt="nobody")
    assert answer.report["reused_tokens"] == answer.report["exact_tokens"] == answer.cached_tokens == 0
    return answer.logits


def test_an_entry_that_is_gone_is_prefilled(llm: Engine) -> None:
    source, prompt = prompts(llm, 0, "solver", "critic")
    llm.ask(source)
    llm.settle()
    records = list(llm.scheduler._library._index)
    chunks = {p.chunk for r in records for p in r.pieces}
    for key in chunks:
        llm.connector.worker.store.remove(key)
    answer = llm.ask(prompt, 4, FORCED)
    assert answer.report["reused_tokens"] == 0
    assert answer.report["decision"] == "missing_entry"
    assert (answer.logits - dense(llm, prompt)).abs().max() <= BOUND
    llm.settle()
    assert llm.scheduler.counts["records_lost"] > 0, "what has lost an entry serves nobody any more"


def test_a_damaged_entry_is_prefilled(llm: Engine) -> None:
    """One flipped bit in memory: the checksum finds it, and the model computes what it held."""
    source, prompt = prompts(llm, 2, "solver", "critic")
    llm.ask(source)
    llm.settle()
    (record,) = [r for r in llm.scheduler._library._index if list(r.tokens) == source[: len(r.tokens)]]
    from lmcache_kvcmas.entries import EntryKind

    with llm.connector.worker.store.get(record.pieces[0].chunk, EntryKind.BASE) as lease:
        lease.tensors["k"].view(-1)[1234] += 1.0
    answer = llm.ask(prompt, 4, FORCED)
    assert answer.report["reused_tokens"] == 0
    assert (answer.logits - dense(llm, prompt)).abs().max() <= BOUND


def test_a_nested_forward_that_fails_is_prefilled(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    source, prompt = prompts(llm, 5, "solver", "critic")
    llm.ask(source)
    llm.settle()

    def fail(ranges: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.connector.worker.nested, "run", fail)
        answer = llm.ask(prompt, 4, FORCED, hints={"capture": False})
    assert answer.report["decision"] == "nested_failed"
    assert answer.report["reused_tokens"] == 0
    assert (answer.logits - dense(llm, prompt)).abs().max() <= BOUND
    assert llm.ask(prompt, 4, FORCED, hints={"capture": False}).report["reused_tokens"] > 0, "the next one shares again"


def test_several_long_requests_preempt_one_another(llm: Engine) -> None:
    """24 blocks of 128 tokens hold two of four long requests: the others wait, are preempted and load again."""
    (source,) = prompts(llm, 8, "solver")
    hops = prompts(llm, 8, "critic", "reflector", "summariser", "planner")
    llm.ask(source)
    llm.settle()
    alone = [llm.ask(p, 3, FORCED[:2], hints={"capture": False}) for p in hops]
    llm.forget_prefixes()
    together = llm.ask_all(hops, 3, [FORCED[:2]] * 4, hints={"capture": False})
    for one, other in zip(alone, together, strict=True):
        assert one.report["reused_tokens"] > 600
        assert other.report["reused_tokens"] == one.report["reused_tokens"]
        assert (one.logits - other.logits).abs().max() <= BOUND


def test_an_aborted_request_leaves_nothing(llm: Engine) -> None:
    (source,) = prompts(llm, 9, "solver")
    before = len(llm.scheduler._library)
    from vllm import SamplingParams

    running = llm.llm.llm_engine
    running.add_request("gone", {"prompt_token_ids": source}, SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(2):
        running.step()
    running.abort_request(["gone"])
    llm.settle()
    assert len(llm.scheduler._library) <= before + 1  # settle() itself asks something
    assert "gone" not in llm.scheduler._requests
    answer = llm.ask(source, 3, FORCED[:2], hints={"capture": False})
    assert (answer.logits - dense(llm, source, 3)).abs().max() <= BOUND


@pytest.mark.parametrize("what", ["all shared", "one token", "shorter than a block"])
def test_odd_prompts_are_answered(llm: Engine, what: str) -> None:
    source, other = prompts(llm, 6, "solver", "critic")
    llm.ask(source)
    llm.settle()
    prompt = {"all shared": source[130:], "one token": [7], "shorter than a block": other[:60]}[what]
    answer = llm.ask(prompt, 4, FORCED)
    if what == "all shared":
        assert answer.report["reused_tokens"] > 0, "at least one token stays for the engine, the rest is taken over"
    else:
        assert (answer.logits - dense(llm, prompt)).abs().max() <= BOUND
    again = llm.ask(prompt, 4, FORCED, hints={"share": False}, salt=f"other {what}")
    assert len(again.tokens) == 4


def test_prompt_logprobs_are_computed(llm: Engine) -> None:
    """They need every token computed: nothing is taken over."""
    source, prompt = prompts(llm, 4, "solver", "critic")
    llm.ask(source)
    llm.settle()
    answer = llm.ask(prompt, 2, FORCED[:1], prompt_logprobs=1)
    assert not answer.report
    assert (answer.logits - dense(llm, prompt, 2)).abs().max() <= BOUND


def test_tenants_never_meet(llm: Engine) -> None:
    """Requests that differ only in their salt share nothing, neither context nor role prompt."""
    source, prompt = prompts(llm, 7, "solver", "critic")
    llm.ask(source, salt="one")
    llm.settle()
    other = llm.ask(prompt, 2, FORCED[:1], salt="two")
    assert other.cached_tokens == other.report["shared_tokens"] == other.report["exact_tokens"] == 0
    same = llm.ask(prompt, 2, FORCED[:1], salt="one")
    assert same.report["reused_tokens"] > 0


def test_lying_hints_cost_speed_only(llm: Engine) -> None:
    source, prompt = prompts(llm, 1, "solver", "critic")
    llm.ask(source)
    llm.settle()
    lie = llm.ask(prompt, 4, FORCED, hints={"source": "somebody-else", "capture": False})
    assert lie.report["reused_tokens"] == 0
    assert (lie.logits - dense(llm, prompt)).abs().max() <= BOUND
    claimed = llm.ask(prompt, 4, FORCED, hints={"agent": "solver", "capture": False})
    llm.forget_prefixes()
    honest = llm.ask(prompt, 4, FORCED, hints={"capture": False})
    assert claimed.report["reused_tokens"] == honest.report["reused_tokens"] > 0
    assert (claimed.logits - honest.logits).abs().max() <= BOUND, "a name does not make another's cache one's own"
