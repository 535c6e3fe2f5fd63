# `make demo` and `make test` need Python >= 3.10 and Java >= 17; everything else is installed into .venv.
#
#   PYTHON=python3.12 make test       another interpreter
#   PYSPARK=4.0.4 make test           another Spark, in a virtual environment of its own
#   PG_CDC_TEST_BIN=/usr/lib/postgresql/15/bin make integration     another PostgreSQL's binaries
#   PG_CDC_TEST_URL=postgresql://... make integration               a server that runs already
#   MARKS= make test                  also what needs programs of Debian's, which .ci/run installs
#   EXAMPLES=1 make unit              all examples that Hypothesis is asked for, and not only 0.4 of them
#   SPARKS='4.0.4 4.3.0' make matrix  other Sparks than these; their virtual environments are made

PYTHON ?= python3
MARKS ?= not debian
PYSPARK ?=
SPARKS ?= 4.0.4 4.1.4 4.2.1 4.3.0

# Tests run in this many processes, each of integration's with a PostgreSQL and a Spark of its own; one after the other on
# a server that runs already. One more than there are cores, because tests wait for servers, too. With one more again,
# both cores of two were busy all the time, and a test took as long.
JOBS ?= $(if $(PG_CDC_TEST_URL),0,$(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)'))

VENV := .venv$(if $(PYSPARK),-$(PYSPARK))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
SOURCES := $(shell find pg_cdc_source pyspark_pgcdc pyspark_pgsnapshot -name '*.py' -o -name '*.c' -o -name '*.java' -o -name py.typed) pyproject.toml setup.py README.md LICENSE

.DELETE_ON_ERROR:
.PHONY: demo bench test unit sanitized integration shop matrix lint clean python java

demo: java $(VENV)/.demo
	@$(BIN)/pg-cdc demo

test: java unit integration

# By tests, not by files: one file has half of the work.
unit: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) --dist worksteal --max-worker-restart 0 tests

# The accelerator's tests with the address and undefined-behaviour sanitizers: a byte read or written outside of a
# buffer ends the run.
sanitized: $(VENV)/.dev
	@rm -rf $(VENV)/sanitized && mkdir $(VENV)/sanitized && cp -R pg_cdc_source $(VENV)/sanitized
	cc -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -shared -fPIC \
	  -o $(VENV)/sanitized/pg_cdc_source/values/_accelerator.abi3.so pg_cdc_source/values/_accelerator.c
	export LD_PRELOAD="$$(cc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	  PYTHONPATH=$(VENV)/sanitized; \
	  $(BIN)/python -c 'import sys; del sys.path[0]; from pg_cdc_source.values import native; assert "/sanitized/" in native.LIBRARY._name' && \
	  $(BIN)/pytest -p no:cacheprovider -n $(JOBS) --dist worksteal --max-worker-restart 0 \
	    tests/values/test_native.py tests/protocol/test_binary_copy.py

integration: java $(VENV)/.dev $(VENV)/spark-classes.jsa $(VENV)/lake-jars
	TMPDIR="$$($(BIN)/python integration/helpers/scratch.py)" \
	  $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 integration -m '$(MARKS)'

# With the oldest releases that pyproject.toml permits, which are what clusters have.
$(VENV)/.oldest: | $(VENV)/.dev
	$(PIP) install $$($(BIN)/python integration/helpers/oldest.py)
	@touch $@

# Both once in a virtual environment. Where a JVM cannot make the archives, tests run without them, and take longer.
$(VENV)/.pyspark-compiled: | $(VENV)/.dev
	$(BIN)/python integration/helpers/compile_pyspark.py
	@touch $@

$(VENV)/spark-classes.jsa: | java $(VENV)/.dev $(VENV)/.pyspark-compiled $(VENV)/lake-jars
	-$(BIN)/python integration/helpers/archive_classes.py

# Delta's and Iceberg's, from Maven Central; where they cannot be fetched, or are not made for the Spark, tests say so.
$(VENV)/lake-jars: | $(VENV)/.dev
	-$(BIN)/python integration/helpers/lake_jars.py

# A mirror of a whole shop, whose processes are killed, is PostgreSQL's at 100 points; half an hour for each of FORMAT='delta iceberg'.
# MODE=history, append or soft: so are the tables that keep more than present rows.
shop: java $(VENV)/.dev $(VENV)/lake-jars
	SHOP_FORMAT='$(or $(FORMAT),deltalake)' SHOP_MODE='$(or $(MODE),merge)' SHOP_POINTS='$(or $(POINTS),100)' SHOP_SEED='$(or $(SEED),1)' \
	  $(BIN)/pytest -p no:cacheprovider -s -o faulthandler_timeout=0 integration/lake/test_shop.py

# What .ci/run leaves out; then every PostgreSQL and every Spark in turn, some minutes each. Renews integration/matrix.json and the tables of docs/versions.md.
matrix: java
	for spark in $(SPARKS); do $(MAKE) PYSPARK=$$spark .venv-$$spark/.dev || exit; done
	EXAMPLES=1 $(MAKE) PYSPARK=$(lastword $(SPARKS)) unit
	$(MAKE) PYSPARK=$(firstword $(SPARKS)) MARKS=repeated integration
	.venv-$(lastword $(SPARKS))/bin/python integration/matrix.py $(SPARKS:%=.venv-%/bin/python); found=$$?; \
	  .venv-$(lastword $(SPARKS))/bin/python tests/helpers/readme_tables.py && exit $$found

# Takes about an hour and needs the machine for itself. ARGS='--quick', '--only snapshot', ...
bench: java $(VENV)/.bench
	@$(BIN)/pg-cdc bench $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv* build dist *.egg-info

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "Python >= 3.10 is needed, but '$(PYTHON)' is $$($(PYTHON) -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || echo not there). Set PYTHON=/path/to/python3." >&2; exit 1; }

# Like Spark, use JAVA_HOME if it is set, and nothing else.
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -n 1); \
	[ "$${version:-0}" -ge 17 ] || { \
	  echo "Java >= 17 is needed, but '$$java' is $${version:+version }$${version:-not there}. Install a JDK or set JAVA_HOME." >&2; exit 1; }

$(VENV)/.made: | python
	@$(PYTHON) -m venv $(VENV) || { echo "'$(PYTHON) -m venv' failed; on Debian: apt install python3-venv" >&2; exit 1; }
	@touch $@

# An old build/ would bring deleted modules into the wheel.
$(VENV)/wheel/.built: $(SOURCES) $(VENV)/.made
	@rm -rf build $(VENV)/wheel
	@mkdir -p $(VENV)/wheel
	$(PIP) wheel --no-deps --wheel-dir $(VENV)/wheel .
	@rm -rf build
	@touch $@

# --force-reinstall, because the version stays the same while the sources change. The extra is named, or pip would fetch
# every newer Spark before it comes to this one.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: $(VENV)/wheel/.built
	$(PIP) install --force-reinstall --no-deps $(VENV)/wheel/*.whl
	$(PIP) install "$$(echo $(VENV)/wheel/*.whl)[$*]" $(if $(PYSPARK),pyspark$(if $(filter dev,$*),[connect])==$(PYSPARK))
	@touch $@
