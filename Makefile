# The commands of this repository. Each of them installs missing packages (scripts/setup.sh) and builds its targets
# first.
BUILD := build/release
BIN := $(BUILD)/bin

# Compiling a source that includes libtorch takes up to 2 GB, so free memory limits the number of jobs as well.
JOBS ?= $(shell awk -v cores=$$(nproc) '/MemAvailable/ {jobs = int($$2 / 2097152); \
  print jobs < 1 ? 1 : jobs < cores ? jobs : cores}' /proc/meminfo)
# Additional options for cmake (such as -DCMAKE_COMPILE_WARNING_AS_ERROR=ON) and for ctest (such as -R unit).
CMAKE_ARGS ?=
CTEST_ARGS ?=
# Three processes at a time also on two cores, because many tests mostly wait.
CTEST := ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j 3
NINJA := cmake --build $(BUILD) -j $(JOBS)

.PHONY: help demo build build-tests build-all check unit unit-python unit-module test test-tools test-all shards \
        wheel wheels test-wheels site bench gpu-proof bench-hosts chaos chaos-hosts lint format clean setup configure

help:
	@echo "make demo            train a small character-level GPT on two ranks and let it write"
	@echo "make build           release build; programs and examples are then in $(BIN)"
	@echo "make check           format, lint and the unit tests of the modules without torch: one minute"
	@echo "make unit MODULE=M   the unit tests and conformance tests of one module, such as ddp or comm/shm; CASE=NAME"
	@echo "                     some unit tests; with MODULE=python those of the package, TEST=test_ddp.py::NAME"
	@echo "make test            all that a change needs"
	@echo "make test-all        the rest, in shards; SHARD=NAME runs one: $(SHARDS)"
	@echo "make lint            check the project's rules, without building"
	@echo "make format          bring all files into the layout that lint asks for"
	@echo "make wheel           build the Python package for pip, and the C++ SDK, in build/wheel"
	@echo "make wheels          the same for each CPython and torch (72 minutes of one core), in build/wheels"
	@echo "make site            make the documentation site, with search, in build/site; it needs no network"
	@echo "make bench           measure Lockstep beside its baselines (20 minutes) and write docs/benchmarks.md"
	@echo "make gpu-proof       test and measure on a GPU; results in OUT; GPU_PROOF_ARGS='--device cpu --tiny' to try it"
	@echo "make bench-hosts     measure between hosts, and their start, on network namespaces (root)"
	@echo "make chaos           inject faults into trainings, 50 of each over every transport, and report (2 hours)"
	@echo "make chaos-hosts     the same between hosts on network namespaces (root): cuts, pauses (90 minutes)"
	@echo "make clean           remove build/ (what was installed stays in .deps/)"

setup:
	@scripts/setup.sh

configure: setup
	@cmake --preset release --log-level=WARNING $(CMAKE_ARGS) >/dev/null

build: configure
	@$(NINJA)

build-tests: configure
	@$(NINJA) --target all tests/all docs/all

build-all: configure
	@$(NINJA) --target all tests/all docs/all benchmarks

demo: configure
	@$(NINJA) --target lockstep_program 03_gpt
	@headers=$$(sed -n 's/^LOCKSTEP_TORCH_INCLUDE:INTERNAL=//p' $(BUILD)/CMakeCache.txt) && \
	  $(BIN)/lockstep run -n 2 $(BIN)/03_gpt --corpus "$$headers/torch/csrc/api"

lint: setup
	@python3 tests/lint/lint.py

# Formats all files with clang-format and ruff, and updates the code blocks in the docs from the programs they quote.
format: setup
	@git ls-files '*.h' '*.cc' '*.c' | xargs .deps/lint/bin/clang-format -i
	@.deps/lint/bin/ruff format -q .
	@python3 tests/lint/lint.py --fix

check: configure lint
	@$(NINJA) --target module_base module_job module_launch module_train_report module_bench_harness
	@$(CTEST) -R '^unit/(base|job|launch|train/report|bench/harness)$$'

# For example, MODULE=comm/shm runs the unit tests in tests/unit/comm/shm and the conformance tests of comm; with
# CASE=Filter, only the unit tests whose names contain it. MODULE=python runs the tests of the package, and
# TEST=test_ddp.py::test_name one of them.
unit: $(if $(filter python,$(MODULE)),unit-python,unit-module)

unit-python: configure
	@$(NINJA) --target lockstep_program lockstep_python python_state_exchange
	@python=$$(sed -n 's/^LOCKSTEP_PYTHON_INTERPRETER:[A-Z]*=//p' $(BUILD)/CMakeCache.txt) && cd python/tests && \
	  PYTHONPATH=$(CURDIR)/$(BUILD)/python PYTHONDONTWRITEBYTECODE=1 LOCKSTEP_PROGRAM=$(CURDIR)/$(BIN)/lockstep \
	  "$$python" -m pytest -q -p no:cacheprovider $(TEST) $(if $(CASE),-k "$(CASE)")

unit-module: configure
	@[ -n "$(MODULE)" ] || \
	  { echo "make unit: MODULE is not set; expected a folder of lockstep/, such as ddp" >&2; exit 2; }
	@[ -d "lockstep/$(MODULE)" ] || [ -d "$(MODULE)" ] || \
	  { echo "make unit: MODULE is '$(MODULE)'; expected a folder of lockstep/, such as ddp or comm/shm" >&2; exit 2; }
	@module=$$(scripts/test_module.sh "$(MODULE)") && \
	  $(NINJA) --target lockstep_program "module_$$(echo "$$module" | tr / _)" && \
	  $(if $(CASE),GTEST_FILTER="*$(CASE)*") LOCKSTEP_TEST_FOLDER="tests/unit/$(MODULE)" $(CTEST) -L "^module:$$module$$" \
	    -R '^unit/$(if $(CASE),,|^conformance/[^/]*/(shm/n2|fake))' $(CTEST_ARGS)

wheel: configure
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) scripts/wheel.sh $(BUILD) build/wheel

# MINORS: of torch, 11 to 15 by default; docs/how-to/wheel.md. 72 minutes of one core.
wheels: configure
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) scripts/wheels.sh build/wheels $(MINORS)

# The wheel of `make wheels` beside each torch, with each CPython of this machine. PAIRS: for example 3.13:2.15.
test-wheels: setup
	@.deps/python/bin/python3 tests/install/wheel_pairs.py --wheel build/wheels/lockstep_ddp-*.whl $(PAIRS)

# Warnings, such as a broken link, are errors. Without -E, the search lacks words of unchanged pages.
site:
	@scripts/setup.sh --site
	@mkdir -p build/site-source
	@.deps/site/bin/sphinx-build -q -W --keep-going -E -j auto -c docs/site -d build/site-doctrees \
	  build/site-source build/site
	@echo "make site: open build/site/index.html"

# At its end it names in one line the tests that need what this machine lacks, such as root or a GPU.
test: test-tools build-tests wheel
	@rm -rf $(BUILD)/test-results; rc=0; $(CTEST) -O $(BUILD)/ctest.log -LE '^shard:' $(CTEST_ARGS) || rc=$$?; \
	  python3 tests/skipped_tests.py --sentence $(BUILD)/ctest.log; exit $$rc

# Without root, tests whose tools are missing are skipped.
test-tools:
	@scripts/setup.sh --test-tools || { scripts/setup.sh && \
	  echo "make test: the tools of some tests cannot be installed here; these tests are skipped" >&2; }

# The tests that `make test` leaves out: 1, 4 and 7 ranks; more transports on 2 and 3 ranks; jobs on many hosts;
# SLURM; scripts of Lightning, transformers and Horovod; parts of the Python package and of the watch; the
# documentation site; short benchmarks; PyTorch's own tests of process groups; long fuzzing; many interleavings of the
# shared-memory core; installations; the oldest torch, a newer Python, and wheels for the versions of torch between the
# oldest and the newest; three builds without unity builds, which check that each source includes what it uses; and the
# tests of the modules with sanitizers.
SHARDS := ranks transports hosts slurm frameworks site bench python watch pytorch pages fuzz schedules install \
  pip_install portable includes_modules includes_unit_tests includes_other_tests oldest_torch newer_python \
  wheel_12 wheel_13 wheel_14 asan_core asan_ddp asan_optim asan_training tsan_core tsan_ddp tsan_optim tsan_training
SHARD ?=
shards:  # prints the names, for .ci/run
	@echo $(SHARDS)

test-all:
	@[ -z "$(filter-out $(SHARDS),$(SHARD))" ] || \
	  { echo "make test-all: SHARD is '$(SHARD)'; expected one of: $(SHARDS)" >&2; exit 2; }
	@for shard in $(or $(SHARD),$(SHARDS)); do \
	  echo "=== shard $$shard"; \
	  $(MAKE) --no-print-directory shard-$$shard || exit 1; \
	done

shard-includes_modules: setup
	@cmake --preset includes_modules --log-level=WARNING $(CMAKE_ARGS) >/dev/null
	@cmake --build build/includes_modules -j $(JOBS) --target all benchmarks

shard-includes_%_tests: setup
	@cmake --preset includes_tests --log-level=WARNING $(CMAKE_ARGS) >/dev/null
	@cmake --build build/includes_tests -j $(JOBS) --target $*_tests $(if $(filter other,$*),docs/all)

# The sanitizers for addresses and undefined behaviour, or for threads, over the tests of these modules in `make test`.
SANITIZED_core := base job launch comm
SANITIZED_ddp := ddp
SANITIZED_optim := optim amp cuda
SANITIZED_training := data checkpoint nn train train/report
empty :=
either = ^module:($(subst $(empty) $(empty),|,$(SANITIZED_$(1))))$$
shard-asan_% shard-tsan_%: setup
	@preset=$(firstword $(subst _, ,$(@:shard-%=%))) && \
	  cmake --preset $$preset --log-level=WARNING $(CMAKE_ARGS) >/dev/null && \
	  cmake --build build/$$preset -j $(JOBS) --target lockstep_program \
	    $(addprefix module_,$(subst /,_,$(SANITIZED_$*))) && \
	  ctest --preset $$preset -j 3 -L '^(unit|conformance)$$' -L '$(call either,$*)' -LE '^shard:' $(CTEST_ARGS)

# The oldest torch that is supported, and a newer Python: the Python package and the watch of scripts with
# torch.distributed.
OLDEST_TORCH := 2.11.0
NEWER_PYTHON := 3.13
shard-oldest_torch: setup
	@scripts/setup.sh --torch $(OLDEST_TORCH)
	@$(MAKE) --no-print-directory pair-oldest_torch PAIR=$(OLDEST_TORCH)

shard-newer_python: setup
	@python=$$(ls "$$HOME"/.pyenv/versions/$(NEWER_PYTHON).*/bin/python$(NEWER_PYTHON) \
	    /usr/bin/python$(NEWER_PYTHON) 2>/dev/null | head -n 1); \
	  [ -n "$$python" ] || { \
	    echo "make test-all: there is no CPython $(NEWER_PYTHON), neither of pyenv nor in /usr/bin" >&2; exit 2; }; \
	  torch=$$(.deps/python/bin/python3 -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])') && \
	  scripts/setup.sh --torch $$torch $$python && \
	  $(MAKE) --no-print-directory pair-newer_python PAIR=$$torch-$(NEWER_PYTHON)

pair-%:
	@torch=$$(echo "$(CURDIR)"/.deps/python-$(PAIR)/lib/python3*/site-packages/torch) && \
	  cmake --preset $* --log-level=WARNING $(CMAKE_ARGS) -DTorch_DIR="$$torch/share/cmake/Torch" >/dev/null
	@cmake --build build/$* -j $(JOBS) --target lockstep_program lockstep_python python_state_exchange
	@ctest --test-dir build/$* --output-on-failure --no-tests=error -j 3 \
	  -R '^(python/|procs/watch)' -E '^python/wheel' -LE '^shard:' $(CTEST_ARGS)

# The wheel for a torch between the oldest and the newest, which `make test` takes, and one CPython: two ranks train.
shard-wheel_%: configure
	@CPYTHONS=13 CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) scripts/wheels.sh build/wheel_$* $*
	@.deps/python/bin/python3 tests/install/wheel_pairs.py --wheel build/wheel_$*/lockstep_ddp-*.whl 3.13:2.$*

shard-site: test-tools configure
	@$(CTEST) -L '^shard:site$$' $(CTEST_ARGS)

shard-bench: build-all

shard-install: wheel

shard-pip_install: configure
	@$(CTEST) -L '^shard:pip_install$$' $(CTEST_ARGS)

shard-%: build-tests
	@$(CTEST) -L '^shard:$*$$' $(CTEST_ARGS)

# Run scripts/setup.sh --baselines first to measure more MPIs.
bench: configure
	@scripts/setup.sh --test-tools
	@$(NINJA) --target lockstep_program lockstep_bench_program
	@python3 bench/make_page.py --bin $(BIN)

# Also for machines where nothing can be installed, so it calls neither scripts/setup.sh nor git. GPU_PROOF_ARGS: for
# example --stages step --limit 540, --resume, --carried FILE; docs/how-to/measure-on-a-gpu.md explains them.
OUT ?=
GPU_PROOF_ARGS ?=
gpu-proof:
	@[ -n "$(OUT)" ] || { echo "make gpu-proof: OUT is not set; expected a folder for the results" >&2; exit 2; }
	@python3 bench/gpu/proof.py --out "$(OUT)" $(GPU_PROOF_ARGS)

# Requires root to create network namespaces. Without root, each script prints that it is skipped.
bench-hosts: build-tests
	@python3 bench/hosts.py --bin $(BIN) || [ $$? = 77 ]
	@python3 bench/launch_time.py --bin $(BIN) || [ $$? = 77 ]

# CHAOS_ARGS: for example --runs 5, --only kill,desync, --transport tcp,shm.
CHAOS_ARGS ?=
chaos: build-tests
	@python3 tests/procs/faults/chaos.py --lockstep $(BIN)/lockstep --program $(BIN)/procs_train_probe $(CHAOS_ARGS)

# CHAOS_ARGS: for example --runs 5, --only cut, --mpi.
chaos-hosts: build-tests
	@python3 tests/procs/hosts/chaos_hosts.py --program $(BIN)/procs_train_probe $(CHAOS_ARGS) || [ $$? = 77 ]

clean:
	rm -rf build
