#!/bin/sh
# Trains the same run once with each attention kernel and lays the curves over each other.
#
#   sh dev/swap.sh KERNEL... [-- training options]
#
# A KERNEL is a name of the table (./train_gpt --list-attention), the path of a .so, or the name of a variant in
# dev/attention, .c or .cu, which is built first. Paths are those of the directory you stand in. Kernels for the GPU need a
# train_gpt that was built for it; kernels for the CPU then need --device cpu among the options, so the two kinds do not mix in one comparison. All runs share seed and
# options; without --data or --train among them the corpus is a small one made here. Options given after -- win over these:
# 4 layers, 4 heads, 128 wide, T 64, batch 12, 100 steps, 10 of them warmup (with --steps and no --warmup: as the trainer
# would have it). --attention and --out are refused there: the kernels are the arguments before --, the folder is SWAP_OUT.
# The first kernel is the one that the others are compared with.
#
# Writes SWAP_OUT (default: runs/swap-DATE-TIME beside dev): one run directory a kernel, and curves.png where matplotlib is
# installed.
# Exit status: 0 done, 1 a run or the comparison failed, 2 wrong arguments.
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1

fail() { echo "dev/swap.sh: $1" >&2; exit "$2"; }

# Kernels before --, options after it.
kernels=
while [ $# -gt 0 ]; do
    case $1 in
        --) shift; break ;;
        -h | --help) sed -n '2,/^cd/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) fail "'$1' before '--': training options come after it" 2 ;;
        *[!A-Za-z0-9_./+-]*) fail "kernel '$1': expected letters, digits and _ . / + - only" 2 ;;
    esac
    kernels="$kernels $1"
    shift
done
[ -n "$kernels" ] || fail "no kernel named; sh dev/swap.sh reference tiled, for example" 2
for option in "$@"; do
    case $option in
        --attention | --attention=*) fail "$option after '--': the kernels are the arguments before it" 2 ;;
        --out | --out=*) fail "$option after '--': SWAP_OUT names the folder, the kernels the runs in it" 2 ;;
    esac
done

train=${TRAIN:-train_gpt}
case $train in /*) ;; *) train=$root/$train ;; esac
python=${PYTHON:-python3}
out=${SWAP_OUT:-$root/runs/swap-$(date +%Y%m%d-%H%M%S)}
[ ! -e "$out" ] || fail "$out is there already; name another in SWAP_OUT" 2
[ -x "$train" ] || make -C "$root" ARCH="$ARCH" || exit 1

# Options before those of the caller, who may say otherwise. A warmup of 10 would not fit every --steps.
options="--layers 4 --heads 4 --dim 128 --seq 64 --batch 12 --steps 100 --lr 1e-3 --eval-every 50 --save-every 0"
options="$options --sample-every 0 --seed 1337"
has_data= warmup="--warmup 10"
for option in "$@"; do
    case $option in
        --data | --data=* | --train | --train=*) has_data=1 ;;
        --steps | --steps=*) warmup= ;;
    esac
done
options="$options $warmup"

# What --attention takes for a kernel.
choice_of() {
    case $1 in
        */* | *.so) echo "$1" ;;
        *) if [ -e "$root/dev/attention/$1.c" ] || [ -e "$root/dev/attention/$1.cu" ]; then
               echo "$root/build/attention/$1.so"
           else echo "$1"; fi ;;
    esac
}

# Every kernel is built and opened, by a run of no steps, before the first is trained with.
for kernel in $kernels; do
    choice=$(choice_of "$kernel")
    case $choice in
        "$kernel") case $kernel in */* | *.so) [ -r "$kernel" ] || fail "cannot read $kernel" 2 ;; esac ;;
        *) make -C "$root" --no-print-directory ARCH="$ARCH" "build/attention/$kernel.so" ||
               fail "cannot build $kernel (a .cu needs nvcc, and a GPU or ARCH=sm_90a)" 1 ;;
    esac
    # shellcheck disable=SC2086 -- words
    "$train" $options "$@" --steps 0 --warmup 0 --eval-every 0 --sample-every 0 --attention "$choice" > /dev/null ||
        fail "$kernel cannot run with these options" 2
done
mkdir -p "$out" || exit 1

if [ -z "$has_data" ]; then
    "$python" "$root/data/prepare.py" --text builtin --builtin-bytes 400000 --out "$out/data" || exit 1
    set -- --data "$out/data" "$@"
fi

names=
for kernel in $kernels; do
    choice=$(choice_of "$kernel")
    name=$(basename "$kernel" .so)
    while [ -e "$out/$name" ]; do name=$name+; done
    echo "== $choice"
    # shellcheck disable=SC2086 -- words
    "$train" $options "$@" --attention "$choice" --out "$out/$name" || exit 1
    names="$names $name"
done

set --
for name in $names; do set -- "$@" "$out/$name"; done
if [ $# -lt 2 ]; then
    echo "one run only, nothing to compare: $1/log.jsonl"
elif "$python" -c 'import matplotlib' 2> /dev/null; then
    "$python" "$root/dev/compare.py" "$@" --png "$out/curves.png" || exit 1
else
    "$python" "$root/dev/compare.py" "$@" || exit 1
    echo "no curves.png: $python has no matplotlib"
fi
