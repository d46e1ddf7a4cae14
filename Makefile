# Two commands do everything on a fresh machine with a C++ compiler and Python >= 3.10:
#   make demo        train a small model four ways and compare them
#   make test        every promise of the library, on the CPU at hand: Python's tests and the C++ ones (less than eight minutes on two cores)
# What takes longer:
#   make test PYTEST_ARGS=--every-case    each test with all of its cases, not with one in five
#   make test-all    these, and with them more types, tiles and architectures of the same, and make mutants
#   make mutants     plants each fault of tests/mutants and says which test noticed it; CUDA kernels' barriers, spills and instructions
# Each torch version has a virtual environment and a build folder of its own:
#   make test TORCH=2.11.0 PYTHON=python3.12
# What convert does with another transformers than that environment's, in one on top of it:
#   make test-transformers TRANSFORMERS=5.9.0
# On a machine with a GPU, with the Python at hand (its torch and triton; nothing is installed); benchmarks/GPU.md:
#   make gpu         build for the GPU, test and measure there, in nine minutes at most
#   make gpu PARTS="build smoke block" OUT=folder
#   make gpu PARTS="build tune" OUT=folder    which FFN kernels are faster there: folder/ffn_tuned.json
# Without one, for that day:
#   make gpu-extension    a CUDA build for another machine's Python and PyTorch, which make gpu uses there
#   make gpu-rehearsal    every measurement on the CPU in tiny sizes
TORCH  ?= 2.13.0
PYTHON ?= python3
VENV   ?= .venv-$(TORCH)
BIN    ?= $(VENV)/bin
READY  ?= $(VENV)/.ready
JOBS   ?= auto
# timm needs the torchvision of this very torch.
TIMM   ?= $(if $(filter 2.11.%,$(TORCH)),timm==1.0.31 torchvision==0.26.0)
TRANSFORMERS ?= 5.0.0
TRANSFORMERS_VENV = $(VENV)-transformers-$(TRANSFORMERS)
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.inl' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

GPU_TORCH  ?= 2.11.0
GPU_PYTHON ?= python3.12
GPU_VENV   ?= .venv-gpu

# Those of Python's tests that reach most of the C++ code in a few minutes.
SANITIZED_TESTS ?= $(addprefix tests/autograd/test_,absent_memory.py adapters.py gradcheck.py) tests/ops \
	$(addprefix tests/properties/test_,exact.py in_place.py second_derivatives.py enclosing_checkpoint.py) tests/modules tests/loss tests/cost tests/test_rng.py tests/ops/test_numerics.py tests/kernels/test_subnormals.py

# On two cores one worker idled for minutes at the end, when tests were handed out in portions.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -p no:benchmark --durations=25 --durations-min=3

# Test processes share the cores: waiting threads sleep instead of spinning.
export OMP_WAIT_POLICY ?= passive
# What processes start, a few hundred times, is compiled once: also where Python is asked to leave no files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all mutants pytest test-transformers ctest tsan sanitize gtest lint format bench gpu \
	gpu-extension gpu-rehearsal build wheel docs pictures spec-header clean

demo: build
	$(BIN)/python -m ckptfused demo $(DEMO_ARGS)

# The C++ tests are compiled and run in the time that processes of Python's wait for others; at the end they are reported.
test: build gtest
	@mkdir -p build
	@nice $(MAKE) -o build ctest MAX_JOBS=1 > build/ctest.log 2>&1 & trap "kill $$!" INT TERM; \
		$(MAKE) -o build pytest PYTEST_ARGS='$(PYTEST_ARGS)'; python=$$?; \
		wait $$!; cpp=$$?; tail -n $$((cpp ? 200 : 4)) build/ctest.log; exit $$((python || cpp))

test-all: override PYTEST_ARGS += --all
test-all: test tsan

pytest: build gtest
	$(PYTEST) $(PYTEST_ARGS)

mutants: build tsan
	$(PYTEST) -v --all -m extended tests/mutants $(addprefix tests/kernels/test_,host_cuda.py instructions.py ptxas.py)

test-transformers: build $(TRANSFORMERS_VENV)/.ready
	$(PYTEST:$(BIN)/%=$(TRANSFORMERS_VENV)/bin/%) --every-case $(PYTEST_ARGS) tests/models

# Not again while nothing has changed: these tests know no torch, and the kernels are the extension's objects.
ctest: build/cmake/.passed

# Those of the CUDA kernels again, in which ThreadSanitizer looks for missing barriers.
tsan: build/tsan/.passed
build/tsan/.passed: override CMAKE_ARGS += -DCKPTFUSED_TSAN=ON

build/cmake/.passed build/tsan/.passed: $(CXX_FILES) CMakeLists.txt | build gtest
	$(BIN)/cmake -S . -B $(@D) -DCKPTFUSED_KERNEL_OBJECTS=$(abspath build/torch-$(TORCH)/csrc/kernels/cpu) $(CMAKE_ARGS)
	$(BIN)/cmake --build $(@D) --parallel $(or $(MAX_JOBS),$(shell nproc))
	$(BIN)/ctest --test-dir $(@D) --output-on-failure --parallel $(or $(MAX_JOBS),$(shell nproc))
	touch $@

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, then Python's on an extension built alike: PyTorch's
# own libraries are not instrumented, and Python's leaks are not looked for. 25 minutes on two cores, most to compile.
sanitize: $(READY) gtest
	$(BIN)/cmake -S . -B build/sanitize -DCKPTFUSED_SANITIZE=ON -DCKPTFUSED_WITH_TORCH=ON $(CMAKE_ARGS) \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build build/sanitize --parallel $(or $(MAX_JOBS),$(shell nproc))
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure
	tar -c --exclude='*.so' ckptfused tests pyproject.toml setup.py setup_cuda.py setup_platform.py setup_progress.py | tar -x -C build/sanitize
	cd build/sanitize && LD_PRELOAD="$(foreach library,asan stdc++,$$($${CXX:-c++} -print-file-name=lib$(library).so))" \
		ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 \
		$(abspath $(BIN))/python -m pytest -q --capture=sys -p no:benchmark --every-case -m "not slow" $(SANITIZED_TESTS)

gtest:
	@test -e /usr/include/gtest/gtest.h || { test "$$(id -u)" = 0 && apt-get install -y -qq libgtest-dev; } || true

bench: build
	$(BIN)/python -m ckptfused bench
	$(BIN)/python -m pytest benchmarks/test_kernels.py

gpu:
	$(PYTHON) -m benchmarks.gpu $(PARTS) $(if $(OUT),--out $(OUT)) $(if $(BUDGET),--budget $(BUDGET))

gpu-extension: $(GPU_VENV)/.ready
	$(GPU_VENV)/bin/python -m benchmarks.gpu.extension

gpu-rehearsal: build
	$(BIN)/python -m benchmarks.gpu --rehearse $(PARTS)

build: $(READY)
	$(BIN)/python setup.py --quiet build_ext --inplace --build-temp build/torch-$(TORCH)

# What C++ has of the table in ckptfused/spec/; it needs nothing but Python.
spec-header:
	cd ckptfused && $(PYTHON) -m spec.header

wheel: $(READY)
	$(BIN)/pip wheel --no-build-isolation --no-deps --wheel-dir dist .

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet --group test $(TIMM) torch==$(TORCH)
	touch $@

# Its own packages, with the versions that this transformers asks for, come before those of the environment below.
$(TRANSFORMERS_VENV)/.ready: $(READY)
	$(PYTHON) -m venv $(TRANSFORMERS_VENV)
	$(TRANSFORMERS_VENV)/bin/pip install --quiet transformers==$(TRANSFORMERS)
	cd $(TRANSFORMERS_VENV)/lib/python*/site-packages && ls -d $(abspath $(VENV))/lib/python*/site-packages > below.pth
	touch $@

# Of the machine that the extension is for.
$(GPU_VENV)/.ready:
	$(GPU_PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet torch==$(GPU_TORCH) numpy setuptools wheel ninja pybind11
	touch $@

$(VENV)/.lint: $(READY)
	$(BIN)/pip install --quiet --group lint
	touch $@

# The documentation, into build/site; a warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet --strict

# The documents' figures and picture, from benchmarks/results/.
pictures: $(READY)
	$(BIN)/python -m benchmarks draw

$(VENV)/.docs: $(READY)
	$(BIN)/pip install --quiet --group docs
	touch $@

clean:
	rm -rf build dist .venv-* ckptfused/*.so
