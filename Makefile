# make run    the embedded default, from raw demo files to results/report/pages/index.html
# make test   the whole test suite
# make upgrade-test   what reruns when, and modules, tested with the newest Snakemake; says which one that is, and which one is pinned
# make slurm-profile   asks SLURM for its partitions and writes profiles/slurm/cluster.yaml, for snakemake --profile profiles/slurm
# make bench-data   the data path beside its peers, on one thread; wants a quiet machine and the files below data/
# make bench-sft    SFT beside TRL on one core, and the demo's time; wants a quiet machine and gsm8k below data/
# make bench-dpo    DPO beside TRL on one core; wants a quiet machine and the files below data/
# make bench-gpu    the engine on a CUDA GPU: its kernels checked, then shares of the peak, beside TRL; within 9 minutes
# make gpu-wheels   what the above needs where only torch and transformers are, to be carried there: build/gpu-wheels
# make bench-scale  what planning costs with 1,000 and with 10,000 jobs
# make docs   what is written from the code: tables of config/README.md, config/schema.json, docs/architecture.*; with graphviz docs/rulegraph.svg
# make bench-doctor   whether the doctor names the cause of five runs made bad on purpose
# make bench-vocabularies   ids and masks of real vocabularies beside the libraries that they come from; fetches 130 MB of packages
# make ab BASE=COMMIT   the same training on that commit and on the working tree, in turns, and a verdict
# make families   every causal language model of transformers through the packed engine; writes docs/models.md
# make torture   a small chain broken in every way there is (kills, full disks, flipped bits ...); hours, and docs/reliability.md
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test upgrade-test slurm-profile lint docs lock bench-data bench-sft bench-dpo bench-gpu gpu-wheels bench-scale bench-doctor bench-vocabularies ab families torture
.DEFAULT_GOAL := run

run: .venv/installed
	@echo 'snakemake'
	@PATH="$(CURDIR)/$(BIN):$$PATH" snakemake
	@echo 'The report: results/report/pages/index.html'
	@echo 'To go on without make: . .venv/bin/activate && snakemake'

# Several tests at once: a run of the workflow spends its time importing torch, job after job, on one core. One more than there are
# cores, as some wait for locks and leases. Whole runs come first, and a process that is done takes tests from another's queue.
PYTEST := pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 4 --dist worksteal
test: .venv/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTEST)

# The newest Snakemake and its plugin interfaces come before those of .venv; all else stays as it is pinned. SNAKEMAKE=snakemake==VERSION
# takes another one.
NEWEST := build/newest-snakemake
SNAKEMAKE ?= snakemake
upgrade-test: .venv/installed
	@rm -rf $(NEWEST) && mkdir -p $(NEWEST)
	@grep -v '^snakemake' requirements.lock > $(NEWEST)/others.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --target $(NEWEST) --constraint $(NEWEST)/others.txt '$(SNAKEMAKE)'
	@export PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/$(NEWEST):$(CURDIR)/workflow"; \
	  tested=$$(python -c 'import snakemake; print(snakemake.__version__)'); pinned=$$(sed -n 's/^snakemake==//p' requirements.lock); \
	  echo "Snakemake $$tested is tested; $$pinned is pinned: $$(test $$tested = $$pinned && echo the same || echo they differ)"; \
	  $(PYTEST) tests/workflow/test_staleness.py tests/workflow/test_by_hand.py tests/workflow/test_job_files.py tests/workflow/test_module.py

slurm-profile: .venv/installed
	@PYTHONPATH=workflow $(BIN)/python -m snaketune slurm-profile

bench-data: .venv/installed
	@PYTHONPATH=workflow:. OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	  $(BIN)/python -m benchmarks.data_path $(BENCH)

bench-sft: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.sft $(BENCH)

bench-dpo: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.dpo $(BENCH)

bench-gpu: .venv/installed
	@$(BIN)/python -m benchmarks.gpu $(BENCH)

# Of another Python, and without what a machine with a GPU has: torch, transformers, peft, accelerate. pyarrow in an older and
# smaller release, so that all of it is below 64 MB.
GPU_PYTHON ?= 3.12
GPU_WHEELS := pyarrow==25.0.0 $$(grep -E '^(pydantic|pydantic_core|annotated-types|typing-inspection|orjson|rensa|trl|datasets|dill|multiprocess)==' requirements.lock)
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

ab: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.ab --base "$(BASE)" $(AB)

families: .venv/installed
	@PYTHONPATH=workflow:. OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.families

torture: .venv/installed
	@PYTHONPATH=workflow:. $(BIN)/python -m benchmarks.torture $(TORTURE)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --lint

docs: .venv/installed
	PYTHONPATH=workflow $(BIN)/python docs/write_config.py
	$(BIN)/python docs/draw_architecture.py
	if command -v dot; then PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --rulegraph --forceall | dot -Tsvg > docs/rulegraph.svg; fi

# torch first: then nothing that needs it looks for another build of it.
.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "snaketune needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# After a change of the dependencies in pyproject.toml: install them, then pin what came.
lock:
	$(BIN)/pip install --upgrade --editable '.[dev]'
	(echo "# Everything that snaketune runs with, pinned. Written by: make lock"; \
	 $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//') > requirements.lock
