# Every target makes .venv and installs what is missing first; when setup.cfg and pyproject.toml
# have not changed since, that costs nothing.

PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all corpus fuzz fuzz-inputs kills packages mutations bench lint ruff format-check mypy imports proto-check proto docs docs-check sentences house house-table horovod lab-deps clean

demo: $(INSTALLED)
	$(BIN)/autodist run --local 2 examples/digits.py --compare

# Two modules at a time, as most tests wait for other processes; then what bears nothing beside it. Fails if either does.
RUN_TESTS = $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone$(1)"; together=$$?; \
	$(BIN)/pytest -m "alone$(1)" && exit $$together

test: $(INSTALLED)
	$(call RUN_TESTS, and not slow)

test-all: $(INSTALLED)
	$(call RUN_TESTS)

# All programs of tests/corpus/programs on all clusters, in about two hours on two cores; some: CORPUS="--programs lenet_digits".
corpus: $(INSTALLED)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m tests.corpus.report --write $(CORPUS)

# 20,000 random programs, 15,400 of them on one worker, 1,540 on each other cluster: some three hours on two cores.
fuzz: $(INSTALLED)
	FUZZ_EXAMPLES=15400 $(BIN)/pytest -s tests/oracle/test_random_programs.py

# 100,000 hostile inputs of every kind (files, settings, arguments, messages), each within 50 ms of the processor and
# 50 MB; a graph item that is compiled may take a second. Less than half an hour on two cores. Others: FUZZ_SEED=2.
fuzz-inputs: $(INSTALLED)
	FUZZ_INPUTS=100000 FUZZ_SECONDS=0.05 TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/pytest -s tests/system/test_fuzz_inputs.py

# A hundred kills and cuts of local runs and of runs over SSH, drawn by a seed, in some twenty minutes; it needs the lab,
# and a machine that does nothing else. Others: KILLS_SEED=2.
kills: $(INSTALLED)
	KILLS=100 KILLS_SEED=$${KILLS_SEED:-1} TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/pytest -s tests/lab/test_kills.py

# Models that others ship, and TensorFlow's own tests, in an environment of their own: one of them has NumPy 1, and the
# other tests keep theirs. Some 500 MB beside TensorFlow; without it these tests are skipped.
VERSION = $$(.venv-packages/bin/python -c 'from importlib.metadata import version; print(version("tensorflow"))')
packages:
	test -x .venv-packages/bin/python || $(PYTHON) -m venv .venv-packages
	.venv-packages/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,packages]'
	tools/fetch_tensorflow.sh $(VERSION) || echo "TensorFlow's repository was not fetched, so its tests are skipped"
	.venv-packages/bin/pytest tests/packages -m "not slow"
	.venv-packages/bin/pytest tests/packages/test_keras_applications.py

# On two hosts made of this machine, as root: `make lab-deps` installs what that needs. Its options: BENCH="--rounds 9".
bench: $(INSTALLED)
	TF_CPP_MIN_LOG_LEVEL=1 $(BIN)/python -m benchmarks.step_time $(BENCH)

mutations: $(INSTALLED)
	$(BIN)/python tools/mutate.py

# The optional engine of all-reduces; the wheel is built once for each TensorFlow, in minutes, and kept in a cache.
horovod: $(INSTALLED)
	wheel=$$(bash tools/build_horovod.sh $(BIN)/python) && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$wheel"

lint: ruff format-check mypy imports proto-check docs-check sentences

ruff: $(INSTALLED)
	$(BIN)/ruff check .

format-check: $(INSTALLED)
	$(BIN)/ruff format --check .

mypy: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

proto-check: $(INSTALLED)
	$(BIN)/python tools/generate_proto.py --check

proto: $(INSTALLED)
	$(BIN)/python tools/generate_proto.py

docs-check: $(INSTALLED)
	$(BIN)/python tools/generate_docs.py --check

sentences: $(INSTALLED)
	$(BIN)/python tools/check_sentences.py

# The figures of the house: how far a gradient, a first call and a failure go through the code, and how large things are.
house: $(INSTALLED)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python tools/house.py

house-table: $(INSTALLED)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python tools/house.py --write

docs: $(INSTALLED)
	$(BIN)/python tools/generate_docs.py

# What the tests in tests/lab need of Debian, as root; they are skipped without it.
lab-deps:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for tool in ip tc nsenter setpriv ssh sshd; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	test -z "$$missing" || { echo "installing what has$$missing"; apt-get update --quiet=2 && \
	    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends \
	        iproute2 util-linux openssh-client openssh-server; }

clean:
	rm -rf .venv .venv-packages build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@
