# Two commands: `make demo` takes a checkpoint to a served, measured, accepted service; `make test` proves the code.
PYTHON ?= python3
RELEASE ?= artifacts/releases/smollm2-135m-int8

.PHONY: demo test test-library test-build test-slow accept bench gpu-check dashboards check-deploy serve release lint \
	environment environment-build preflight clean

demo: environment environment-build
	.venv/bin/python scripts/demo.py

test: release lint
	$(MAKE) --jobs=2 --output-sync test-library test-build
	.venv/bin/python -m pytest --durations=10 -m "not slow" tests/golden tests/server tests/gateway
	.venv/bin/python -m pytest --durations=10 -m "not slow" --numprocesses=2 --dist=loadfile tests/slo

test-library: environment
	.venv/bin/python -m pytest tests/unit tests/property tests/simulation tests/repository

test-build: environment-build
	.venv-build/bin/python -m pytest --durations=10 -m "not slow" tests/build

test-slow: release
	.venv-build/bin/python build/release.py --recipe smollm2-135m-onnxruntime
	.venv/bin/python -m pytest -m slow -o faulthandler_timeout=1200 tests/golden tests/server tests/slo
	@$(PYTHON) scripts/environment.py .venv-gateway requirements/serve.txt --no-deps requirements/gateway-tests.txt
	.venv-gateway/bin/python -m pytest -m slow -o faulthandler_timeout=1200 tests/gateway
	.venv-build/bin/python -m pytest -s -m slow -o faulthandler_timeout=1200 tests/build

gpu-check: environment-build
	@.venv-build/bin/python scripts/gpu_check.py --driver
	@.venv-build/bin/python -m pip install -q -r requirements/gpu.txt
	.venv-build/bin/python scripts/gpu_check.py

accept: release
	.venv/bin/python loadtests/accept.py --release $(RELEASE)

bench: environment environment-build
	@$(PYTHON) scripts/environment.py .venv-bench requirements/bench.txt
	.venv-build/bin/python build/release.py --recipe smollm2-135m-bf16
	.venv-build/bin/python build/release.py --recipe smollm2-135m-int8
	.venv/bin/python -m benchmarks.side_by_side artifacts/releases/smollm2-135m-bf16 artifacts/releases/smollm2-135m-int8

dashboards: environment
	.venv/bin/python loadtests/export.py --contract loadtests/contracts/demo.toml --job tritonforge --out docker/generated

check-deploy:
	@$(PYTHON) scripts/environment.py .venv-deploy requirements/deploy.txt
	.venv-deploy/bin/python scripts/check_manifests.py

lint: environment
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

serve: release
	.venv/bin/tritonforge serve --release $(RELEASE)

release: environment environment-build
	.venv-build/bin/python build/release.py --recipe $(notdir $(RELEASE))

environment: preflight
	@$(PYTHON) scripts/environment.py .venv requirements/serve.txt

environment-build: preflight
	@$(PYTHON) scripts/environment.py .venv-build requirements/build.txt --no-deps requirements/build-nodeps.txt

preflight:
	@$(PYTHON) scripts/preflight.py

clean:
	rm -rf .venv .venv-build artifacts
