# Short names for what contributors run, with the tools of .venv: `just` lists them. https://just.systems, or
# `pip install rust-just`. README's command makes .venv.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

_list:
    @just --list --unsorted

# Everything, as CI does: README's test command, lint, types, manual
test:
    .ci/run

# Minutes instead of half an hour: lint, types, unit tests
fast: lint
    python -m pytest -q -x -n auto tests/unit tests/test_architecture.py tests/test_proto_drift.py

# Style, layout, types, spelling
lint:
    ruff check .
    ruff format --check .
    mypy
    git ls-files -z | xargs -0 codespell

# Renew the generated reference, and build the manual as a site in docs/_build; needs the extra `docs`
docs:
    python docs/generate.py
    python -m sphinx -q -W --keep-going -b html -c docs . docs/_build

# Is proto/swarmnet/v1/messages.proto what the dataclasses say?
proto:
    python proto/generate.py
    git diff --exit-code -- proto

# A benchmark by its name in benchmarks/, with its flags: just bench goodput --json
bench NAME *FLAGS:
    python benchmarks/{{ NAME }}.py {{ FLAGS }}
