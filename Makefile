# The verbs of this repository. Each installs what it misses (scripts/setup.sh) and builds what it needs.
BUILD := build/release
BIN := $(BUILD)/bin

# One compilation of a libtorch source takes up to 1.5 GB: as many jobs as cores and free memory allow.
JOBS ?= $(shell awk -v cores=$$(nproc) '/MemAvailable/ {jobs = int($$2 / 1572864); \
  print jobs < 1 ? 1 : jobs < cores ? jobs : cores}' /proc/meminfo)
# Further options for cmake, such as -DCMAKE_COMPILE_WARNING_AS_ERROR=ON, and for ctest, such as -R unit.
CMAKE_ARGS ?=
CTEST_ARGS ?=

.PHONY: help demo build test bench bench-gpu bench-hosts chaos chaos-hosts lint format clean setup configure build-all

help:
	@echo "make demo    train a small character-level GPT on two ranks and let it write"
	@echo "make build   release build; programs and examples are then in $(BIN)"
	@echo "make test    build and run every test"
	@echo "make bench   measure Lockstep beside its peers on this machine, 20 minutes, and write docs/benchmarks.md"
	@echo "make bench-gpu   measure steps on a GPU beside PyTorch; BENCH_GPU_ARGS='--device cpu --tiny' shows how it runs"
	@echo "make lint    check the rules of the house, without building"
	@echo "make format  bring the layout of all files into the form that lint asks for"
	@echo "make bench-hosts   measure between hosts, and their start, on network namespaces (root)"
	@echo "make chaos   let faults happen at random moments of trainings, 50 times each and over every transport, and print what became of them, 2 hours"
	@echo "make chaos-hosts   the same between hosts: silent and one-way cuts, on network namespaces (root), 90 minutes"
	@echo "make clean   remove build/ (what was installed stays in .deps/)"

setup:
	@scripts/setup.sh

configure: setup
	@cmake --preset release --log-level=WARNING $(CMAKE_ARGS) >/dev/null

build: configure
	@cmake --build $(BUILD) -j $(JOBS)

build-all: configure
	@cmake --build $(BUILD) -j $(JOBS) --target all tests/all docs/all

demo: configure
	@cmake --build $(BUILD) -j $(JOBS) --target lockstep_program 03_char_gpt
	@headers=$$(sed -n 's/^LOCKSTEP_TORCH_INCLUDE:INTERNAL=//p' $(BUILD)/CMakeCache.txt) && \
	  $(BIN)/lockstep run -n 2 $(BIN)/03_char_gpt --corpus "$$headers/torch/csrc/api"

test: build-all
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j 2 $(CTEST_ARGS)

# More MPIs take part after scripts/setup.sh --peers.
bench: configure
	@scripts/setup.sh --beds
	@cmake --build $(BUILD) -j $(JOBS) --target lockstep_program lockstep_bench_program
	@python3 bench/make_page.py --bin $(BIN)

# BENCH_GPU_ARGS: such as --parts step --models gpt --precisions bf16-mixed.
BENCH_GPU_ARGS ?=
bench-gpu: configure
	@cmake --build $(BUILD) -j $(JOBS) --target lockstep_program bench_gpu_step
	@python3 bench/gpu.py --bin $(BIN) $(BENCH_GPU_ARGS)

# clang-format and ruff over all of it, and the code in the docs from the programs that it is from.
format: setup
	@git ls-files '*.h' '*.cc' '*.c' | xargs .deps/lint/bin/clang-format -i
	@.deps/lint/bin/ruff format -q .
	@python3 tests/lint/lint.py --fix

lint: setup
	@python3 tests/lint/lint.py

# Needs root: it makes network namespaces, and skips loudly without.
bench-hosts: build-all
	@python3 bench/hosts.py --bin $(BIN) || [ $$? = 77 ]
	@python3 bench/launch_time.py --bin $(BIN) || [ $$? = 77 ]

# CHAOS_ARGS: such as --runs 5, --only kill,desync, --transport gloo,shm.
CHAOS_ARGS ?=
chaos: build-all
	@python3 tests/procs/faults/chaos.py --lockstep $(BIN)/lockstep --program $(BIN)/procs_train_probe $(CHAOS_ARGS)

# CHAOS_ARGS: such as --runs 5, --only cut, --mpi.
chaos-hosts: build-all
	@python3 tests/procs/hosts/chaos_hosts.py --program $(BIN)/procs_train_probe $(CHAOS_ARGS) || [ $$? = 77 ]

clean:
	rm -rf build
