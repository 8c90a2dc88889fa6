#!/bin/sh
# The timeline of a short run on a GPU, by Nsight Systems: kernels and copies below the trainer's ranges (layers/ranges.h).
#
#   sh dev/trace.sh TRAIN_GPT OUT [OPTION OF TRAIN_GPT ...]
#
# Runs GPT-2 124M in bf16, 4 x 1024 tokens a step, 20 steps with an evaluation in their midst; the options given come last
# and win. Writes OUT.nsys-rep, for nsys-ui, and prints what `nsys stats` says of the ranges. The corpus is made here.
# Exit status: 0 done, 1 a program failed, 2 no nsys.
cd "$(dirname "$0")/.." || exit 1
train=$1 out=$2
shift 2
command -v nsys > /dev/null || {
    echo "dev/trace.sh: needs nsys (Nsight Systems), and there is none on the PATH" >&2
    exit 2
}
data=$(mktemp -d) || exit 1
trap 'rm -rf "$data"' EXIT
"${PYTHON:-python3}" data/prepare.py --text builtin --builtin-bytes 400000 --out "$data/corpus" > /dev/null || exit 1
nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --force-overwrite=true --output "$out" \
    "$train" --data "$data/corpus" --model gpt2 --vocab 50257 --seq 1024 --batch 4 --dtype bf16 --steps 20 --warmup 2 \
    --eval-every 10 --eval-tokens 32768 --print-every 10 "$@" || exit 1
nsys stats --force-export=true --report nvtx_sum "$out.nsys-rep"
