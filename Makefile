# make TARGET sets up what it needs in .venv, once: that takes make, Python 3.10 or newer, and a network.
# ARGS passes arguments on: make demo ARGS="--kills 0", make test ARGS="-m 'not slow'".
#
# demo          real flights through a pipeline that is killed seven times
# test          a sample of every promise: five minutes
# test-changed  the exhaustive cases that a change since the last merge (or SINCE=main) may break, and an eighth of all others
# test-all      every case but those of the next two: an hour; goes on where it was broken off
# test-matrix   stores beside Kafka, killed at every step, and the longest simulations: an hour
# other-engines what Kafka Streams and Flink answer to the same records
# crash-matrix  a crash, a stop or a lost request at every step of the protocol: some hours; goes on where it was
# changes-kills 300 kills of pipelines that read PostgreSQL's changes, and of its servers: an hour; goes on where it was
# histories     histories in the form of Jepsen's Kafka workload, of a pipeline that is killed: ten minutes; goes on where it was
# flaky         tests again and again, beside busy processes: ARGS="tests/state --times 20 --load 8"
# simulate      histories on a broker in memory: SEEDS=1000 [START=0] [JOBS=2] [SHAPE=diamond|stores|load] [LUCK=zombies]
#               [MUTANT="no alignment"]; SEED=123 replays one, with its trace
# soak          300,000 such histories, over as many runs as it takes; ARGS=real: one pipeline on real servers, through faults
#               of a seed every few seconds, until Ctrl-C: ARGS="real --seed 7 --minutes 20"
# bench         figures, as ratios against a hand-written loop
# lint          ruff, import-linter, mypy; pyright for the examples and for a user's code
# release       wheel and sdist in dist/, checked, tried in a fresh environment; ARGS=--upload also uploads them
# site          the documentation as a site, in site/index.html; ARGS="-b linkcheck" asks each link of another site
# image         the Kafka image of docker/kafka
# clean         removes .venv and all caches of the tools
# help          this

.PHONY: demo test test-changed test-all flaky test-matrix other-engines crash-matrix changes-kills histories simulate soak bench lint release site image clean kafka help
.DELETE_ON_ERROR:
SHELL := /bin/bash
# Tests, and pipelines, start processes by the hundred: each would compile all source anew where nothing may be kept.
export PYTHONDONTWRITEBYTECODE :=
.SHELLFLAGS := -eu -o pipefail -c

# A local name for the first Python that is new enough, and for "is there a Java 17 or newer on the PATH?"
PYTHON ?= $(shell for p in python3 python3.{14,13,12,11,10}; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
JAVA_17 := java -version 2>&1 | grep -qE 'version "(1[7-9]|[2-9][0-9])'
# What pip is doing, without what it skips: Spark alone is half a gigabyte.
install = @echo 'Installing what is needed into .venv, once; Spark is large.'; \
	.venv/bin/pip install --disable-pip-version-check --progress-bar off -e '$(1)' 2>&1 | \
	sed -unE 's/^(.{117})....*/\1.../; /^ *(Collecting|Downloading .*MB|Building|Installing coll|Successfully|WARNING|ERROR)|rror:/p'
AS_ROOT_WITH_APT := [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends

RUN_EXTRAS := broker,demo,mysql,postgres,redis,spark

demo: .venv/run.stamp .venv/java.stamp
	.venv/bin/python examples/demo.py $(ARGS)

bench: .venv/run.stamp .venv/java.stamp .venv/stores.stamp
	.venv/bin/python benchmarks/run.py $(ARGS)

# Most tests wait more than they compute: four processes; what uses a Spark session shares one, in one of them.
PYTEST := .venv/bin/pytest -n 4 --dist loadfile --no-loadscope-reorder

test: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	$(PYTEST) --sample $(ARGS)

# What make test leaves out, as far as the change may break it; and an eighth of the rest, which goes round with the merges.
test-changed: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	$(PYTEST) --changed="$(SINCE)" $(ARGS)

# A run that was broken off goes on where it was, as long as no file changes.
test-all: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	$(PYTEST) --resume --durations=25 $(ARGS)

flaky: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	.venv/bin/python tests/selection/flaky.py $(ARGS)

# The crash matrix of stores beside Kafka, an hour or so: servers and processes killed at every step, a million rows.
test-matrix: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	$(PYTEST) --matrix --durations=25 tests/stores tests/spark/test_declarative_pipelines.py tests/spark/test_handed_over.py \
		tests/engines/test_flink.py tests/simulation/test_simulation.py::test_no_fault_breaks_an_invariant \
		tests/simulation/test_ledgers.py::test_no_fault_breaks_an_invariant_of_stores $(ARGS)

# The answers of Kafka Streams and Flink, which are downloaded, to the same records.
other-engines: .venv/dev.stamp .venv/java.stamp kafka
	$(PYTEST) tests/engines/test_kafka_streams.py tests/engines/test_flink.py $(ARGS) --matrix

# A crash or a lost request at every step of the protocol, on real servers: some hours. One that was broken off goes on.
# make crash-matrix ARGS="--only 12/ --jobs 1", ARGS=--write for tests/README.md.
crash-matrix: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	.venv/bin/python tests/campaign.py crash-matrix $(ARGS)

# Pipelines of captured changes: their processes, PostgreSQL and its standby are killed, and a judge compares all there is.
changes-kills: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	.venv/bin/python tests/campaign.py changes-kills $(ARGS)

# Operations of clients and of a killed pipeline as EDN, which any checker can read, and the verdict of ours.
histories: .venv/dev.stamp .venv/java.stamp kafka
	.venv/bin/python tests/campaign.py histories $(ARGS)

SEEDS ?= 1000
simulate: .venv/dev.stamp
	.venv/bin/python tests/simulation/simulate.py $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(if $(START),--start $(START)) \
		$(if $(JOBS),--jobs $(JOBS)) $(if $(SHAPE),--shape $(SHAPE)) \
		$(if $(LUCK),--luck "$(LUCK)") $(if $(MUTANT),--mutant "$(MUTANT)") $(ARGS)

# Several processes cannot show how far a download is, and start some dozens of brokers, and of Spark's drivers.
kafka: .venv/dev.stamp .venv/java.stamp
	@.venv/bin/python tests/connectors/embedded/rig/broker_classes.py & broker=$$!; \
		.venv/bin/python tests/spark/rig/spark_classes.py; wait $$broker

# Hundreds of thousands of seeds, hours of both processors: one that was broken off goes on; see tests/README.md.
ifneq ($(filter real,$(ARGS)),)
soak: .venv/dev.stamp .venv/java.stamp .venv/stores.stamp kafka
	.venv/bin/python tests/campaign.py soak $(filter-out real,$(ARGS))
else
soak: .venv/dev.stamp
	.venv/bin/python tests/simulation/soak.py $(if $(filter file,$(origin SEEDS)),,--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS)) $(ARGS)
endif

lint: .venv/dev.stamp
	.venv/bin/ruff check .
	.venv/bin/lint-imports --no-cache
	.venv/bin/mypy
	.venv/bin/pyright

site: .venv/dev.stamp
	.venv/bin/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --nitpicky --conf-dir docs . site $(ARGS)

release: .venv/dev.stamp
	.ci/release $(ARGS)

image: .venv/dev.stamp
	.venv/bin/python docker/build.py kafka $(ARGS)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

clean:
	rm -rf .venv dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/run.stamp: pyproject.toml | .venv/bin/python
	$(call install,.[$(RUN_EXTRAS)])
	touch $@

.venv/dev.stamp: pyproject.toml | .venv/bin/python
	$(call install,.[dev])
	touch $@

# Spark, unlike the broker, needs a whole Java 17 or 21 of the system.
.venv/java.stamp: | .venv/bin/python
	@if $(JAVA_17); then :; \
	elif $(AS_ROOT_WITH_APT); then echo 'Installing Java 17 or 21 with apt-get, once.'; apt-get update -qq; \
		$(APT_INSTALL) openjdk-17-jre-headless || $(APT_INSTALL) openjdk-21-jre-headless; \
	elif [ "$$(id -u)" = 0 ] && command -v dnf >/dev/null; then dnf install -y -q java-21-openjdk-headless; \
	else echo 'What runs on Spark needs Java 17 or 21: install it (Debian, Ubuntu: openjdk-17-jre-headless).'; fi
	touch $@

# The servers of other stores, which tests start on their own folders and ports, and promtool: none is to run as a service.
STORE_SERVERS := postgres:postgresql mariadbd:mariadb-server redis-server:redis-server promtool:prometheus
.venv/stores.stamp: | .venv/bin/python
	@missing=; for each in $(STORE_SERVERS); do \
		PATH="$$PATH:/usr/sbin:$$(echo /usr/lib/postgresql/*/bin)" command -v $${each%%:*} >/dev/null || missing+=" $${each#*:}"; \
	done; \
	if [ -z "$$missing" ]; then :; \
	elif $(AS_ROOT_WITH_APT); then echo "Installing$$missing with apt-get, once."; apt-get update -qq; \
		RUNLEVEL=1 $(APT_INSTALL) $$missing; \
	else echo "Tests of other stores need their servers; what is not there is left out:$$missing"; fi
	touch $@

.venv/bin/python:
	@if [ -z '$(PYTHON)' ]; then echo 'exactlyonce needs Python 3.10 or newer: install it, or set PYTHON=.'; exit 1; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if $(AS_ROOT_WITH_APT); then echo 'Installing python3-venv with apt-get, once.'; \
			apt-get update -qq; $(APT_INSTALL) python3-venv; \
		else echo 'This Python cannot make a virtual environment: install it (Debian, Ubuntu: python3-venv).'; exit 1; fi; \
	fi
	$(PYTHON) -m venv .venv
