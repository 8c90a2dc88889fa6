#!/bin/sh
# OpenAI's GPT-2 124M, trained on with Shakespeare or with a text of one's own: 20 updates of 32768 tokens.
#
#   sh dev/recipes/finetune_gpt2.sh [OPTION OF TRAIN_GPT ...]
#   TEXT=book.txt sh dev/recipes/finetune_gpt2.sh
#
# What to expect: dev/recipes/README.md. The same command goes on with a run that was stopped. MODEL names another directory
# with a GPT-2 than runs/downloads/gpt2, into which the published one is downloaded (0.55 GB); DATA and OUT others than
# runs/finetune and runs/finetune-run. The data need tiktoken or tokenizers. On a GPU add --dtype bf16 --batch 16.
set -e
cd "$(dirname "$0")/../.."
train=${TRAIN:-./train_gpt} python=${PYTHON:-python3} model=${MODEL:-runs/downloads/gpt2}
data=${DATA:-runs/finetune} out=${OUT:-runs/finetune-run}
files=${HF_ENDPOINT:-https://huggingface.co}/openai-community/gpt2/resolve/main
[ -x "$train" ] || make
if [ ! -f "$model/model.safetensors" ]; then
    "$python" data/download.py --to "$model" "$files/config.json" "$files/vocab.json" "$files/merges.txt" \
        "$files/model.safetensors"
fi
if [ ! -f "$data/corpus.json" ]; then
    if [ -n "$TEXT" ]; then "$python" data/prepare.py --text "$TEXT" --tokenizer "$model" --out "$data"
    else "$python" data/prepare.py shakespeare --tokenizer "$model" --out "$data"; fi
fi
[ ! -f "$out/config.json" ] || exec "$train" --out "$out" --resume "$@"
exec "$train" --init "$model" --data "$data" --out "$out" --seq 1024 --batch 1 --batch-tokens 32768 --steps 20 \
    --lr 3e-5 --schedule constant --warmup 0 --weight-decay 0.1 --eval-every 5 --eval-tokens 32768 --print-every 1 \
    --sample-every 5 --sample-tokens 200 --save-every 10 "$@"
