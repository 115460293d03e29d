# make run    runs the embedded default config, from raw demo files to results/report/pages/index.html
# make rounds   the same model trains on its own right answers (93 MB to download, minutes on two cores)
# make real   fine-tunes a small pretrained model (93 MB to download, nine minutes on two cores) and shows its answers before and after
# make test   runs the test suite, as for each push
# make test-all   also runs the slow tests: several processes, races, all features in all launchers
# make upgrade-test   tests with the newest Snakemake, and with the newest torch, transformers, TRL and peft; names what fails
# make slurm-profile   writes the partitions that SLURM reports to profiles/slurm/cluster.yaml, for snakemake --profile profiles/slurm
# make bench-data   the data path compared with TRL and others, on one thread; needs an idle machine and the files below data/
# make bench-sft    SFT compared with TRL on one core; needs an idle machine and gsm8k below data/
# make bench-dpo    DPO compared with TRL on one core; needs an idle machine and the files below data/
# make bench-gpu    the engine on a CUDA GPU: kernels checked, share of the peak, compared with TRL; within 9 minutes
# make gpu-wheels   build/gpu-wheels: what make bench-gpu needs on a machine that has only torch and transformers
# make bench-scale  the cost of planning 1,000 and 10,000 jobs
# make docs   regenerates the tables of docs/config, config/schema.json, docs/architecture.*, and with graphviz docs/rulegraph.svg
# make bench-doctor   whether the doctor names the cause of five deliberately misconfigured runs
# make bench-vocabularies   ids and masks of real vocabularies compared with their own libraries; downloads 130 MB of packages
# make families   packed training of every causal language model of transformers; writes docs/models.md
# make torture   fault injection (kills, full disks, flipped bits ...) into a small workflow; takes hours, writes docs/reliability.md
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run real rounds test test-all upgrade-test upgrade-test-snakemake upgrade-test-libraries slurm-profile lint types docs lock bench-data bench-sft bench-dpo bench-gpu gpu-wheels bench-scale bench-doctor bench-vocabularies families torture
.DEFAULT_GOAL := run

run: .venv/installed
	@echo 'snakemake'
	@PATH="$(CURDIR)/$(BIN):$$PATH" snakemake
	@echo 'Without make: . .venv/bin/activate && snakemake'

REAL := config/recipes/smollm2-135m.yaml
real: .venv/installed
	@$(BIN)/python resources/real/fetch.py
	@$(BIN)/python resources/real/make_orders.py
	@echo 'snakemake --configfile $(REAL)'
	@PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --configfile $(REAL)
	@$(BIN)/python resources/real/show_answers.py orders reviews

ROUNDS := config/recipes/rounds-smollm2.yaml
rounds: .venv/installed
	@$(BIN)/python resources/real/fetch.py
	@$(BIN)/python resources/real/make_orders.py
	@echo 'snakemake --configfile $(ROUNDS)'
	@PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --configfile $(ROUNDS)
	@$(BIN)/python resources/real/show_answers.py orders

# Tests run in parallel, since a run of the workflow spends its time importing torch, job after job, on one core. One process more
# than cores, because some tests wait for locks and leases. Whole runs come first, and idle processes take tests from others.
PYTEST := pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 4 --dist worksteal
test: .venv/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTEST)

test-all: .venv/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTEST) -m 'slow or not slow'

# Both are tested, whatever fails of the first.
upgrade-test:
	@$(MAKE) --no-print-directory --keep-going upgrade-test-snakemake upgrade-test-libraries

# The newest Snakemake and its plugin interfaces precede those of .venv; everything else stays pinned. SNAKEMAKE=snakemake==VERSION
# selects another version.
NEWEST := build/newest-snakemake
SNAKEMAKE ?= snakemake
upgrade-test-snakemake: .venv/installed
	@rm -rf $(NEWEST) && mkdir -p $(NEWEST)
	@grep -v '^snakemake' requirements.lock > $(NEWEST)/others.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --target $(NEWEST) --constraint $(NEWEST)/others.txt '$(SNAKEMAKE)'
	@export PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/$(NEWEST):$(CURDIR)/workflow"; \
	  tested=$$(python -c 'import snakemake; print(snakemake.__version__)'); pinned=$$(sed -n 's/^snakemake==//p' requirements.lock); \
	  echo "Snakemake $$tested is tested; $$pinned is pinned: $$(test $$tested = $$pinned && echo the same || echo they differ)"; \
	  $(PYTEST) tests/test_foreign_internals.py tests/workflow/test_staleness.py tests/workflow/test_by_hand.py \
	    tests/workflow/test_job_files.py tests/workflow/test_module.py

# An environment of its own, in which only these libraries and what they bring along aren't pinned. LIBRARIES='trl==1.17.0' selects
# others, and TESTS a part of the tests.
NEWEST_LIBRARIES := build/newest-libraries
LIBRARIES ?= torch transformers trl peft
NOT_PINNED := torch|triton|nvidia|cuda|transformers|tokenizers|huggingface|hf[-_]xet|safetensors|trl|peft|accelerate
upgrade-test-libraries:
	@rm -rf $(NEWEST_LIBRARIES) && $(PYTHON) -m venv $(NEWEST_LIBRARIES)
	@grep -Ev '^($(NOT_PINNED))' requirements.lock > $(NEWEST_LIBRARIES)/others.txt
	@$(NEWEST_LIBRARIES)/bin/pip install --quiet --disable-pip-version-check --constraint $(NEWEST_LIBRARIES)/others.txt \
	  $(LIBRARIES) --editable '.[dev]'
	@export PATH="$(CURDIR)/$(NEWEST_LIBRARIES)/bin:$$PATH" PYTHONPATH="$(CURDIR)/workflow"; \
	  for name in torch transformers trl peft; do \
	    tested=$$(python -c "from importlib.metadata import version; print(version('$$name'))"); pinned=$$(sed -n "s/^$$name==//p" requirements.lock); \
	    echo "$$name $$tested is tested; $$pinned is pinned"; \
	  done; \
	  $(PYTEST) $(TESTS)

# Without the environment, the executor plugin alone is enough.
DESCRIBES := $(if $(wildcard .venv/installed),.venv,build/slurm-profile)
CLUSTER := profiles/slurm/cluster.yaml
slurm-profile:
	@test ! -e $(CLUSTER) || { echo '$(CLUSTER) exists, and may hold your edits; remove it first' >&2; exit 1; }
	@test -x $(DESCRIBES)/bin/python || { $(PYTHON) -m venv $(DESCRIBES) && \
	  $(DESCRIBES)/bin/pip install --quiet --disable-pip-version-check --constraint requirements.lock snakemake-executor-plugin-slurm; }
	@$(DESCRIBES)/bin/generate-slurm-partition-config -o $(CLUSTER)
	@echo 'Now add account, memory and GPUs per node, and remove partitions that your jobs should not use: docs/clusters.md'

bench-data: .venv/installed
	@PYTHONPATH=workflow:. OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	  $(BIN)/python -m benchmarks.data_path $(BENCH)

bench-sft: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.sft $(BENCH)

bench-dpo: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.dpo $(BENCH)

bench-gpu: .venv/installed
	@$(BIN)/python -m benchmarks.gpu $(BENCH)

# Wheels for the other machine's Python, without torch, transformers, peft and accelerate, which it has. pyarrow in an older and
# smaller release, so that all wheels together are below 64 MB.
GPU_PYTHON ?= 3.12
GPU_WHEELS := pyarrow==25.0.0 $$(grep -E '^(pydantic|pydantic_core|annotated-types|typing-inspection|rensa|tenacity|trl|datasets|dill|multiprocess)==' requirements.lock)
gpu-wheels: .venv/installed
	rm -rf build/gpu-wheels
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 \
	  --platform manylinux2014_x86_64 --platform any --dest build/gpu-wheels $(GPU_WHEELS)
	@du -sh build/gpu-wheels

bench-scale: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.scale $(BENCH)

bench-doctor: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.doctored

bench-vocabularies: .venv/installed
	@PYTHONPATH=workflow:. OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.vocabularies

families: .venv/installed
	@PYTHONPATH=workflow:. OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.families

torture: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.torture $(TORTURE)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(MAKE) --no-print-directory types
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --lint

# Strict where it is decided which jobs run. pyproject.toml has the settings, which are basic.
STRICT := config artifacts stages cluster snakemake_adapter
types: .venv/installed
	$(BIN)/pyrefly check --summary=none
	cd workflow/snaketune && $(CURDIR)/$(BIN)/pyrefly check --summary=none --preset strict $(STRICT)

docs: .venv/installed
	PYTHONPATH=workflow $(BIN)/python docs/write_config.py
	$(BIN)/python docs/draw_architecture.py
	if command -v dot; then PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --rulegraph --forceall | dot -Tsvg > docs/rulegraph.svg; fi

# torch first, so that packages that need it don't pull in another build.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "snaketune needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# After a change of the dependencies in pyproject.toml: install them, then pin the installed versions.
lock:
	$(BIN)/pip install --upgrade --editable '.[dev]'
	(echo "# Everything that snaketune runs with, pinned. Written by: make lock"; \
	 $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//') > requirements.lock
