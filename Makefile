# `make run` and `make test` do all the set-up. Everything they install goes into .venv, except Debian's packages.
PYTHON ?= python3
BIN := .venv/bin
# Jobs go to the site's Slurm, or to one on this machine for as long as the command runs.
SLURM := slurm/cluster with
# GPUS=2: so many simulated GPUs, here and on each node of the local Slurm. Real ones need no word.
SIMULATED := $(if $(GPUS),$(BIN)/ddp-course gpus $(GPUS) --)
.DEFAULT_GOAL := help
.PHONY: help run run-all test test-fast test-all lab gpu notebooks scripts site slides bench save-runs faults cluster system tested staged clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */: /'

run: .venv/installed system staged  ## execute the core, 01 to 09, into build/, and say where the figures are; or ONLY="03 10"
	@$(SIMULATED) $(SLURM) $(BIN)/python -m ddp_helpers.upkeep.course $(ONLY)

run-all: .venv/installed system staged  ## the same with every notebook
	@$(SIMULATED) $(SLURM) $(BIN)/python -m ddp_helpers.upkeep.course --all

test: .venv/installed tested staged  ## all tests: helpers, scripts, and every notebook
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-logo && $(BIN)/mypy
	@$(BIN)/python -m pytest

# What starts neither ranks nor a Slurm: explain, job files, plan, sites, records, the command line, pages.
FAST := $(addprefix tests/,tools/test_explain.py tools/test_explain_facts.py tools/test_explain_strangers.py \
	tools/test_jobfile.py tools/test_plan.py tools/test_statuses.py jobs/test_job.py jobs/test_site.py jobs/test_fuzz_jobs.py \
	records test_commands.py rank/test_same_text.py docs/test_pages.py lessons/test_notebooks.py)
test-fast: .venv/installed  ## the tests that start neither ranks nor a Slurm, in half a minute
	@$(BIN)/ruff check . && $(BIN)/python -m pytest -o addopts="-q -n2 --dist=loadgroup" -k "not real_launcher" $(FAST)

LAB_IP ?= 127.0.0.1
lab: .venv/installed system staged  ## open the course in JupyterLab, on this machine only
	@$(BIN)/jupyter trust notebooks/*.ipynb notebooks/solutions/*.ipynb slurm/*.ipynb >/dev/null || true
	@$(SIMULATED) $(SLURM) $(BIN)/python -m ddp_helpers.launch.lab --ip=$(LAB_IP) $(if $(filter 0,$(shell id -u)),--allow-root) \
		--ServerApp.root_dir=. --LabApp.default_url=/lab/tree/README.md

# GPU_FLAGS="-k overlap" takes that step alone. One that hangs fails at its limit; the record is kept in any case.
gpu: .venv/installed staged  ## try on a GPU what only a GPU can show, in ten minutes; writes a record to commit
	@$(BIN)/python -m pytest -o addopts= -v --strict-markers --timeout=120 --session-timeout=600 \
		--real-gpus=build/gpu tests/on_gpus $(GPU_FLAGS); status=$$?; \
		$(BIN)/python -m ddp_helpers.upkeep.gpu_record; exit $$status

notebooks: .venv/installed system staged  ## execute the notebooks in place: the outputs that are committed; or ONLY="03 10"
	@$(SLURM) $(BIN)/python -m ddp_helpers.upkeep.course $(or $(ONLY),--all) --in-place
	@$(BIN)/python -m ddp_helpers.upkeep.front_page

scripts:  ## write all scripts into slurm/scripts, to copy them; nothing is installed for it
	@mkdir -p slurm/scripts
	@for script in ddp_helpers/rank/scripts/[a-z]*.py; do name=$$(basename $$script .py); \
		$(PYTHON) -m ddp_helpers script $$name slurm/scripts/$$name.py || exit; done

site: .venv/installed  ## build the reading edition, pages to read without a network, from the notebooks as they are
	@rm -rf build/site
	@$(BIN)/python -m sphinx -q -E -W --keep-going -j auto -c docs -d build/doctrees . build/site
	@echo "The site is in build/site: open build/site/index.html"

slides: .venv/installed  ## write slides and figures of the notebooks, as they are, into build/slides; no network needed
	@$(BIN)/python -m ddp_helpers.upkeep.slides

bench: .venv/installed  ## measure, side by side: one device, DDP's cost, two ranks
	@$(BIN)/python -m ddp_helpers.upkeep.bench

save-runs: .venv/installed  ## copy finished runs to notebooks/results: make save-runs FOLDER=runs/mine NAME=mine
	@$(BIN)/python -m ddp_helpers.upkeep.make_records $(FOLDER) $(NAME)

test-all: .venv/installed tested staged  ## weekly: all faults three times, ten thousand fresh inputs a parser, all notebooks in a browser, and on simulated GPUs
	@TEST_ALL=1 $(MAKE) --no-print-directory --keep-going test faults; status=$$?; \
		$(MAKE) --no-print-directory run-all GPUS=2 && exit $$status

faults: .venv/installed tested  ## the fault matrix: harm a run in every way, and see that nothing is lost
	@$(SLURM) env TEST_ALL=1 PYTHONPATH=tests $(BIN)/python -m faults --times 3

cluster: system  ## start a real Slurm with two nodes on this machine, to stay; slurm/cluster down ends it
	@slurm/cluster up

clean:  ## remove what was made, but neither data nor runs
	rm -rf .venv build .hypothesis *.egg-info

# JupyterLab shows a page as it is read, not as it is written, and does not ask for news in a dialog.
LAB_SETTINGS := {"@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}}, \
	"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}

# TORCH=cpu takes PyTorch without CUDA. It is not the default, since a login node has no GPU either, while the jobs
# that it sends have; and without CUDA's libraries no GPU can be simulated, on which 10 shows NCCL's failures.
CPU_WHEELS := https://download.pytorch.org/whl/cpu
SIZE_cuda := PyTorch with CUDA is 5 GB; TORCH=cpu, for a machine without a GPU, takes 1 GB
SIZE_cpu := PyTorch without CUDA is 1 GB
# By uv where it is on the PATH, else by pip: the same packages, pip among them.
PACKAGES := .[notebook,test,site]
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 …"; exit 1; }
	@echo "Installing into .venv, a few minutes: $(or $(SIZE_$(TORCH)),$(SIZE_cuda))"
	@if command -v uv >/dev/null; then \
		uv venv --quiet --seed --allow-existing --python '$(PYTHON)' .venv && \
		uv pip install --quiet --python $(BIN)/python $(if $(filter cpu,$(TORCH)),--torch-backend cpu) \
			--editable '$(PACKAGES)'; \
	else \
		{ $(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/packages ensurepip:python3-venv; } && \
		$(PYTHON) -m venv .venv && \
		$(BIN)/pip install --quiet --disable-pip-version-check $(if $(filter cpu,$(TORCH)),--extra-index-url $(CPU_WHEELS)) \
			--editable '$(PACKAGES)'; \
	fi
	@mkdir -p .venv/share/jupyter/lab/settings
	@echo '$(LAB_SETTINGS)' >.venv/share/jupyter/lab/settings/overrides.json
	@touch $@

staged: .venv/installed
	@$(BIN)/ddp-course data data

# A command that the course uses where it is, and the Debian packages that bring it. What only tests use is a second
# list, and what they use in CI alone a third: Slurm's accounting, for one, has no place on a laptop.
USED := mpirun:openmpi-bin tc:iproute2 ps:procps sbatch:slurmctld,slurmd,slurm-client,munge
TESTED := shellcheck:shellcheck chromium:chromium g++:g++
TESTED_IN_CI := slurmdbd:slurmdbd,mariadb-server ch-run:charliecloud-runtime modulecmd:environment-modules \
	buildah:buildah mmdebstrap:mmdebstrap
system:
	@.ci/packages $(USED)
tested:
	@.ci/packages $(USED) $(TESTED) $(if $(CI),$(TESTED_IN_CI))
