# `make run` and `make test` do all the set-up. Everything they install goes into .venv, except Debian's packages.
PYTHON ?= python3
BIN := .venv/bin
# Jobs go to the site's Slurm, or to one on this machine for as long as the command runs.
SLURM := slurm/cluster with
# Python runs this line of .venv/…/sooner.pth when it starts: an import of torch makes half a million objects, and the
# garbage collector's looks through them take 0.5 of its 3.2 seconds. Many processes import torch here.
SOONER := import gc; gc.set_threshold(100_000, 50, 1000)
.DEFAULT_GOAL := help
.PHONY: help run test test-all lab notebooks site slides bench faults cluster system staged clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */: /'

run: .venv/installed system staged  ## execute the notebooks in order into build/, and say where the figures are
	@$(SLURM) $(BIN)/python -m ddp_helpers run

test: .venv/installed system staged  ## all tests: helpers, scripts, and every notebook
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(SLURM) $(BIN)/python -m pytest

LAB_IP ?= 127.0.0.1
lab: .venv/installed system staged  ## open the course in JupyterLab, on this machine only
	@$(SLURM) $(BIN)/jupyter lab --ip=$(LAB_IP) $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

notebooks: .venv/installed system staged  ## execute the notebooks in place: the outputs that are committed
	@$(SLURM) $(BIN)/python -m ddp_helpers run --in-place
	@$(BIN)/python -m ddp_helpers.upkeep.front_page
	@$(BIN)/python -m ddp_helpers.upkeep.architecture

site: .venv/installed  ## build the reading edition, pages to read without a network, from the notebooks as they are
	@rm -rf build/site
	@$(BIN)/python -m sphinx -q -E -W --keep-going -j auto -c docs -d build/doctrees . build/site
	@echo "The site is in build/site: open build/site/index.html"

slides: .venv/installed  ## write the notebooks' figures, a page for each, into build/slides.pdf
	@$(BIN)/python -m ddp_helpers.upkeep.slides

bench: .venv/installed system staged  ## measure, side by side: one device, DDP's cost, two ranks
	@$(SLURM) $(BIN)/python -m ddp_helpers bench

test-all: .venv/installed system staged  ## weekly: all faults three times, ten thousand fresh inputs a parser, all notebooks in a browser
	@TEST_ALL=1 $(MAKE) --no-print-directory test faults

faults: .venv/installed system  ## the fault matrix: harm a run in every way, and see that nothing is lost
	@$(SLURM) env TEST_ALL=1 PYTHONPATH=tests $(BIN)/python -m faults --times 3

cluster: system  ## start a real Slurm with two nodes on this machine, to stay; slurm/cluster down ends it
	@slurm/cluster up

clean:  ## remove what was made, but neither data nor runs
	rm -rf .venv build .hypothesis *.egg-info

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(APT) python3-venv
	@echo "Installing into .venv: torch with CUDA is 5 GB, a few minutes"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[notebook,test,site]'
	@echo '$(SOONER)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sooner.pth"
	@touch $@

staged: .venv/installed
	@$(BIN)/python -m ddp_helpers data data

# Debian's packages that the course uses where they are: mpirun, a compiler for torch.compile, tc to turn a network down,
# Slurm, and for the tests a checker of the job files and a browser; in CI Slurm's accounting too, whose database has no place on a laptop.
APT := sh -c 'SUDO=$$(test $$(id -u) = 0 || echo "sudo -n"); $$SUDO apt-get update -qq >/dev/null 2>&1; $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$$@" >/dev/null 2>&1 || { echo "install these yourself: apt-get install $$*"; false; }' apt
system:
	@command -v mpirun >/dev/null || $(APT) openmpi-bin || test -z "$$CI"
	@command -v g++ >/dev/null || $(APT) g++ python3-dev || test -z "$$CI"
	@command -v tc >/dev/null || test -x /usr/sbin/tc || $(APT) iproute2 || test -z "$$CI"
	@command -v sbatch >/dev/null || $(APT) slurmctld slurmd slurm-client munge || test -z "$$CI"
	@test -z "$$CI" || command -v slurmdbd >/dev/null || $(APT) slurmdbd mariadb-server
	@command -v shellcheck >/dev/null || $(APT) shellcheck || test -z "$$CI"
	@command -v chromium >/dev/null || $(APT) chromium || test -z "$$CI"
