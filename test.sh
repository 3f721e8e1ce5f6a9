#!/usr/bin/env bash
# Passes the tests: sets up what it needs in .venv-test*, then lint, types, sanitizers, and the tests against the built wheel.
#
#   ./test.sh                 everything but the long cases
#   ./test.sh ring training   these folders of tests/ only, no lint
#   ./test.sh --long          what it leaves out for its time: long cases, and the oldest TensorFlow (BUILD.md)
#   ./test.sh --newest        everything on the newest TensorFlow and Keras there are, tested or not; what it replaces of Keras first
#   PYTHON=python3.12 ./test.sh    another Python (3.11 to 3.13; default python3.11, else python3)
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if command -v python3.11 >/dev/null && python3.11 -c '' 2>/dev/null; then python=python3.11; fi
fi

wheel=

# A venv with TensorFlow $2, Keras $3 and the wheel, which the first builds from this folder.
environment() {
  local folder=$1 tensorflow=$2 keras=$3
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --upgrade pip
  if [ -z "$wheel" ]; then
    rm -rf build  # where files that are no longer part of the package would find their way into the wheel
    "$folder/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" .
    wheel=$(ls -t "$folder"/wheels/tfring-*.whl | head -n 1)
  fi
  "$folder/bin/python" -m pip install --quiet "$wheel[dev,docs,examples]" "$tensorflow" "$keras"
  # Again, for a wheel of the same version is not reinstalled by itself.
  "$folder/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
}

# Runs tests from their folder, so that the installed package is what is imported and not this folder's.
tests() {
  local folder=$1
  shift
  (cd tests && "../$folder/bin/pytest" -p no:cacheprovider --durations=12 --session-timeout=4800 "$@")
}

if [ "${1:-}" = --newest ]; then
  environment .venv-test-newest "tensorflow-cpu" "keras"
  .venv-test-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager tensorflow-cpu keras
  .venv-test-newest/bin/python -m pip list | grep -i -E '^(tensorflow|keras)'
  tests .venv-test-newest training/test_replaced.py
  tests .venv-test-newest
  exit
fi

environment .venv-test "tensorflow-cpu>=2.18,<2.22" "keras>=3.14"

if [ "${1:-}" = --long ]; then
  shift
  tests .venv-test -m long "$@"
  echo "== oldest TensorFlow"
  environment .venv-test-oldest "tensorflow-cpu==2.18.0" "keras==3.14.0"
  tests .venv-test-oldest -m 'oldest and not long' "$@"
  exit
fi

if [ $# -gt 0 ]; then
  tests .venv-test "$@"
  exit
fi

echo "== lint, types, formatting"
.venv-test/bin/ruff check .
.venv-test/bin/mypy tfring
.venv-test/bin/clang-format --dry-run --Werror tfring/ring/native/*.cc tfring/ring/native/*.h tests/ring/*.cc patches/kernel/*.cc

# Tests that compute, and beside them those that wait for processes, timeouts and networks, with which `strategy` goes so that
# both take as long.
computing=(training layers)

waiting() {
  echo "== the ring's core under sanitizers"
  .venv-test/bin/python tests/ring/sanitize.py || return
  echo "== newest TensorFlow, tests that wait"
  tests .venv-test "${computing[@]/#/--ignore=}"
}

set -m  # a group of its own, in which Ctrl-C is not ignored: tests send it
waiting > >(sed -u 's/^/beside | /') 2>&1 &
beside=$!
set +m
trap 'kill -- -$beside 2>/dev/null || true' EXIT
echo "== newest TensorFlow, tests that compute"
passed=true
tests .venv-test "${computing[@]}" || passed=false
wait "$beside" || passed=false
$passed
