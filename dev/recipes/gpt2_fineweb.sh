#!/bin/sh
# GPT-2 124M from scratch on 10 billion tokens of FineWeb, as llm.c does it: half a million tokens an update, one epoch.
# Needs a GPU with bf16, 60 GB of disk, and for the data pyarrow and tiktoken.
#
#   sh dev/recipes/gpt2_fineweb.sh [OPTION OF TRAIN_GPT ...]
#
# What to expect: dev/recipes/README.md. The same command goes on with a run that was stopped. DATA and OUT name other
# directories than runs/fineweb and runs/gpt2-fineweb; shards that llm.c or modded-nanogpt made will do as DATA. HellaSwag's
# questions are fetched and made too, unless HELLASWAG names a file of them. Where 64 sequences do not fit, --batch 32 or
# less gives the same updates.
set -e
cd "$(dirname "$0")/../.."
train=${TRAIN:-./train_gpt} python=${PYTHON:-python3} data=${DATA:-runs/fineweb} out=${OUT:-runs/gpt2-fineweb}
questions=${HELLASWAG:-runs/downloads/hellaswag/hellaswag_val.bin}
[ -x "$train" ] || make
ls "$data"/*train*.bin > /dev/null 2>&1 || "$python" data/prepare.py fineweb --out "$data"
if [ ! -f "$questions" ]; then
    "$python" data/download.py --to "$(dirname "$questions")" \
        https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl
    "$python" dev/hellaswag.py --jsonl "$(dirname "$questions")/hellaswag_val.jsonl" --tokenizer gpt2 --out "$questions"
fi
[ ! -f "$out/config.json" ] || exec "$train" --out "$out" --resume "$@"
exec "$train" --data "$data" --out "$out" --model gpt2 --dtype bf16 --seq 1024 --batch 64 --batch-tokens 524288 \
    --steps 18865 --lr 6e-4 --lr-final 0 --warmup 700 --weight-decay 0.1 --eval-every 250 --eval-tokens 10485760 \
    --hellaswag "$questions" --save-every 1000 "$@"
