#!/bin/sh
# Shakespeare on a laptop: downloads his plays (1.1 MB), and trains a model of 0.8 million parameters on their bytes.
#
#   sh dev/recipes/shakespeare.sh [OPTION OF TRAIN_GPT ...]
#
# What to expect: dev/recipes/README.md. The same command goes on with a run that was stopped. DATA and OUT name other
# directories than runs/shakespeare and runs/shakespeare-run; options given come last and win.
set -e
cd "$(dirname "$0")/../.."
train=${TRAIN:-./train_gpt} python=${PYTHON:-python3} data=${DATA:-runs/shakespeare} out=${OUT:-runs/shakespeare-run}
[ -x "$train" ] || make
[ -f "$data/corpus.json" ] || "$python" data/prepare.py shakespeare --out "$data"
[ ! -f "$out/config.json" ] || exec "$train" --out "$out" --resume "$@"
exec "$train" --data "$data" --out "$out" --layers 4 --heads 4 --dim 128 --seq 64 --batch 12 --steps 2000 \
    --lr 2e-3 --lr-final 1e-4 --warmup 100 --beta2 0.99 --weight-decay 0.1 --eval-every 250 --eval-tokens 111539 \
    --print-every 100 --sample-every 500 --sample-tokens 400 "$@"
