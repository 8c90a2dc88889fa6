#!/bin/sh
# Runs the tests on a machine with a GPU from a tree that was built elsewhere, and writes tests/gpu_report.txt: what they ran
# on, every line of every test, and a line for each tool of compute-sanitizer.
#
#   sh dev/gpu_test.sh [tests|sanitize|all] [COMMIT]
#
# tests: the programs in $BUILD/tests and tests/test_*.py, as `make test` runs them but for the emulation, building nothing.
# sanitize: memcheck, racecheck and initcheck, each over a few training steps and the CUDA tests; added to the report.
# all: both.
# COMMIT goes into the report where the tree has no git. Environment: BUILD (build), TRAIN (train_gpt), PYTHON (python3),
# FLASHGPT_TESTS (part of the name of the tests to run; then the report stays as it is), FLASHGPT_GPU_ONLY (1: the CPU's
# attention kernels are not tested again), TOOLS (memcheck racecheck initcheck), SANITIZER_SECONDS that a tool has for all it
# runs over (300): what it does not finish in them has failed. REPORT (tests/gpu_report.txt).
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
report=${REPORT:-tests/gpu_report.txt}
tools=${TOOLS:-memcheck racecheck initcheck}
seconds=${SANITIZER_SECONDS:-300}
case $seconds in
    '' | *[!0-9]*) echo "dev/gpu_test.sh: SANITIZER_SECONDS is '$seconds', expected a number" >&2; exit 2 ;;
esac
status=0

nvidia-smi > /dev/null 2>&1 || { echo "dev/gpu_test.sh: no GPU is visible: nvidia-smi failed" >&2; exit 1; }

if [ "$what" != sanitize ]; then
    programs=
    for source in tests/test_*.c; do programs="$programs $BUILD/tests/$(basename "$source" .c)"; done
    # Names of programs hold no blanks.
    # shellcheck disable=SC2086
    "$python" tests/run.py --gpu-report "$report" $programs tests/test_*.py || status=1
fi

# sanitized NAME COMMAND...: runs a command under $tool, until $deadline at most. Adds NAME to $finished, or to $faults with
# what went wrong; the end of what was printed then goes to the terminal.
sanitized() {
    name=$1
    shift
    left=$((deadline - $(date +%s)))
    if [ "$left" -le 0 ]; then
        faults="$faults; $name: not begun"
        return
    fi
    log=$(mktemp)
    timeout "$left" compute-sanitizer --tool "$tool" --error-exitcode 99 "$@" > "$log" 2>&1
    case $? in
        0) fault=$(grep -qE '(ERROR|RACECHECK) SUMMARY: 0 ' "$log" || echo "ended without a summary of 0 errors") ;;
        124) fault="did not finish" ;;
        99) fault=$(grep -E 'SUMMARY: ' "$log" | tail -n 1 | sed 's/^=* *//') ;;
        *) fault="failed: $(tail -n 1 "$log")" ;;
    esac
    if [ -z "$fault" ]; then
        finished="$finished, $name"
    else
        faults="$faults; $name: $fault"
        echo "--- $tool over $name"
        grep -E -A 3 '(Error|Warning): ' "$log" | head -n 40 # the first of what was found
        tail -n 40 "$log"
    fi
    rm -f "$log"
}

# All that a tool runs over, what matters most first; one line in $lines.
run_tool() {
    finished='' faults=''
    began=$(date +%s)
    deadline=$((began + seconds))
    for dtype in bf16 fp32; do
        width='--heads 2 --dim 32'
        # initcheck does not see the bulk stores of cuBLAS's sm_90 products in bf16: it calls what they wrote uninitialised,
        # even where nothing but one product and one reader runs. Rows of an odd number of elements keep cuBLAS from them.
        [ "$tool$dtype" != initcheckbf16 ] || width='--heads 1 --dim 17'
        # shellcheck disable=SC2086
        sanitized "train_gpt $dtype ($width)" "./$TRAIN" --data "$run/data" --device cuda --dtype "$dtype" --layers 2 \
            $width --seq 33 --batch 3 --steps 3 --eval-every 0 --save-every 0 --out "$run/$tool-$dtype"
    done
    sanitized test_attention "$BUILD/tests/test_attention" again
    case $tool in
        initcheck) ;; # for the same reason
        racecheck)
            # It takes minutes over cuBLAS's sm_90 products, and makes them fail where it is told to pass them over. So the
            # tests leave those products out (see tests/test.h), test_cuda_gpt, which has hardly anything else, is not run,
            # its kernels being those of the training steps above, and other products are passed over.
            sanitized test_cuda_layers --kernel-name-exclude kns=gemm --kernel-name-exclude kns=cutlass \
                "$BUILD/tests/test_cuda_layers"
            sanitized test_decode "$BUILD/tests/test_decode" ;;
        *)
            sanitized test_cuda_gpt "$BUILD/tests/test_cuda_gpt"
            sanitized test_cuda_layers "$BUILD/tests/test_cuda_layers"
            sanitized test_decode "$BUILD/tests/test_decode" ;;
    esac
    took="$(($(date +%s) - began)) s"
    clean=${finished#, }
    if [ -z "$faults" ]; then
        lines="${lines}ok   compute-sanitizer $tool: nothing found in $clean, $took
"
        passed=$((passed + 1))
    else
        lines="${lines}FAIL compute-sanitizer $tool: ${faults#; }; nothing found in ${clean:-any other}, $took
"
        failed=$((failed + 1))
    fi
}

sanitize_all() {
    # GOMP_SPINCOUNT: so that the trainer does not start itself anew under the tool to set it.
    export FLASHGPT_GPU_ONLY=1 GOMP_SPINCOUNT=1000
    lines='' passed=0 failed=0 skipped=0
    if command -v compute-sanitizer > /dev/null; then
        run=$(mktemp -d)
        if "$python" data/prepare.py --text builtin --builtin-bytes 100000 --out "$run/data" > /dev/null; then
            for tool in $tools; do
                export FLASHGPT_SANITIZE="$tool"
                run_tool
            done
        else
            lines='FAIL compute-sanitizer: data/prepare.py failed
' failed=1
        fi
        rm -rf "$run"
    else
        lines='skip compute-sanitizer: it is not on the PATH
' skipped=1
    fi
    lines="$lines   $passed passed, $failed failed, $skipped skipped"
    printf '%s\n' "$lines"
    printf '\n== compute-sanitizer\n%s\n' "$lines" >> "$report"
    [ "$failed" -eq 0 ]
}

if [ "$what" != tests ]; then
    sanitize_all || status=1
fi
exit $status
