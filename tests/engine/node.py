"""A node: one engine in a process of its own. Run as a script, with ``examples`` on the path and one argument:

{"model": DIR, "settings": {…}, "lmcache": {…}, "options": {…}, "answers": FD}. Then a line of JSON on standard input is
a request, and a line on that file descriptor its answer.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from engines import Engine, engine
from workflow import Roles


def answer(llm: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "settle":
        llm.settle()
        assert llm.connector.worker.store.flush(20)
        return {"shared": dict(llm.connector.worker.store.shared.counts), "counts": dict(llm.scheduler.counts)}
    tokens = Roles.read().prompt(llm.llm.get_tokenizer(), asked["agent"], asked["text"])
    got = llm.ask(tokens, asked.get("max_tokens", 4), asked.get("forced", ()), asked.get("hints"), asked.get("salt"))
    if asked.get("forget"):
        llm.forget_prefixes()
    return {
        "report": dict(got.report),
        "tokens": got.tokens,
        "logits": got.logits.tolist() if asked.get("logits") else None,
        "seconds": got.seconds,
        "counts": dict(llm.scheduler.counts),
    }


def main() -> None:
    setup = json.loads(sys.argv[1])
    with (
        os.fdopen(int(setup["answers"]), "w", encoding="utf-8") as replies,
        engine(
            Path(setup["model"]), setup["settings"], lmcache=setup["lmcache"], extra=setup["extra"], **setup["options"]
        ) as llm,
    ):
        print(json.dumps({"ready": True}), file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(llm, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
