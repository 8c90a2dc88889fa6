#!/bin/sh
# Runs the tests on a machine with a GPU from a tree that was built elsewhere, and writes tests/gpu_report.txt: what they ran
# on, every line of every test, and what compute-sanitizer says.
#
#   sh dev/gpu_test.sh [tests|sanitize|all] [COMMIT]
#
# tests: the programs in $BUILD/tests and tests/test_*.py, as `make test` runs them but for the emulation, building nothing.
# sanitize: memcheck, racecheck and initcheck over the CUDA tests and a few training steps; added to the report. all: both.
# COMMIT goes into the report where the tree has no git. Environment: BUILD (build), TRAIN (train_gpt), PYTHON (python3),
# FLASHGPT_TESTS (part of the name of the tests to run; then the report stays as it is), SANITIZER_SECONDS for each run
# (300).
# Exit status: 0 all passed, 1 something failed, 2 wrong arguments.
cd "$(dirname "$0")/.." || exit 1
what=${1:-all}
case $what in
    tests | sanitize | all) ;;
    *) echo "dev/gpu_test.sh: '$what': expected tests, sanitize or all" >&2; exit 2 ;;
esac
[ -z "$2" ] || export FLASHGPT_COMMIT="$2"
export BUILD="${BUILD:-build}" TRAIN="${TRAIN:-train_gpt}"
python=${PYTHON:-python3}
report=tests/gpu_report.txt
status=0

nvidia-smi > /dev/null 2>&1 || { echo "dev/gpu_test.sh: no GPU is visible: nvidia-smi failed" >&2; exit 1; }

if [ "$what" != sanitize ]; then
    programs=
    for source in tests/test_*.c; do programs="$programs $BUILD/tests/$(basename "$source" .c)"; done
    # shellcheck disable=SC2086 -- names of programs hold no blanks
    "$python" tests/run.py --gpu-report "$report" $programs tests/test_*.py || status=1
fi

# sanitized TOOL COMMAND...: one line, "ok" or "FAIL" with the end of what was printed. Counted.
passed=0 failed=0
sanitized() {
    tool=$1
    shift
    log=$(mktemp)
    if FLASHGPT_SANITIZE=1 timeout "${SANITIZER_SECONDS:-300}" compute-sanitizer --tool "$tool" --error-exitcode 99 \
        "$@" > "$log" 2>&1 && grep -qE "(ERROR|RACECHECK) SUMMARY: 0 " "$log"; then
        echo "ok   $tool: $*: $(grep -E 'SUMMARY: ' "$log" | tail -n 1 | sed 's/^=* *//')"
        passed=$((passed + 1))
    else
        echo "FAIL $tool: $*"
        tail -n 40 "$log"
        failed=$((failed + 1))
    fi
    rm -f "$log"
}

sanitize_all() {
    echo "== compute-sanitizer"
    if ! command -v compute-sanitizer > /dev/null; then
        echo "skip compute-sanitizer: it is not on the PATH"
        echo "   0 passed, 0 failed, 1 skipped"
        return 0
    fi
    run=$(mktemp -d)
    "$python" data/prepare.py --text builtin --builtin-bytes 100000 --out "$run/data" > /dev/null || return 1
    for tool in memcheck racecheck initcheck; do
        sanitized "$tool" "$BUILD/tests/test_attention" again
        sanitized "$tool" "$BUILD/tests/test_cuda_layers"
        for dtype in fp32 bf16; do
            sanitized "$tool" "./$TRAIN" --data "$run/data" --device cuda --dtype "$dtype" --layers 2 --heads 2 --dim 32 \
                --seq 33 --batch 3 --steps 3 --eval-every 0 --save-every 0 --sample-every 0 --out "$run/$tool-$dtype"
        done
    done
    rm -rf "$run"
    echo "   $passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}

if [ "$what" != tests ]; then
    part=$(mktemp)
    { sanitize_all || echo "FAIL compute-sanitizer"; } | tee "$part"
    grep -q '^FAIL' "$part" && status=1
    { echo; cat "$part"; } >> "$report"
    rm -f "$part"
fi
exit $status
