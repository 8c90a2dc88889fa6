#!/bin/sh
# Finds out what this machine can build with and writes it as Makefile variables to the file $1. Each finding that changes
# the build is one line that make prints. Where nothing can be built, it prints the reason and leaves no file: the next make
# asks again.
#   sh dev/detect.sh OUT CC NVCC ARCH CUDA BLAS OPENMP CXX      (empty: find out; 0: without)
out=$1 cc=$2 nvcc=$3 arch=$4 cuda=$5 blas=$6 openmp=$7 cxx=$8
dir=$(dirname "$out") && mkdir -p "$dir" || exit 1
try=$dir/detect.$$
trap 'rm -f "$try" "$try.c" "$try.cpp" "$out.$$"' EXIT
found=
say() { found="$found\$(info $1)
"; }

# links CODE FLAGS...: does a C program with this body of includes and main link and run?
links() { printf '%s\n' "$1" > "$try.c"; shift; $cc "$try.c" -o "$try" "$@" > /dev/null 2>&1 && "$try" > /dev/null 2>&1; }

if ! links 'int main(void) { return 0; }'; then
    echo "the C compiler '$cc' cannot build and run a program; install one, or say make CC=..."; exit 1
fi

march=
links 'int main(void) { return 0; }' -march=native && march=-march=native

omp_flags= blas_libs= blas_flags=
if [ "$openmp" = 0 ]; then say "OpenMP: off by request, one CPU thread"
elif links '#include <omp.h>
int main(void) { return omp_get_max_threads() < 1; }' -fopenmp; then omp_flags=-fopenmp
else say "OpenMP: $cc cannot link it, one CPU thread (with clang: install libomp)"; fi

if [ "$blas" = 0 ]; then say "BLAS: off by request, own matrix products on the CPU"
else
    for libs in -lopenblas "-lblis" "-lcblas"; do
        if links '#include <cblas.h>
int main(void) { float a = 2, b = 3, c = 1;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1, &a, 1, &b, 1, 1, &c, 1); return c != 7; }' $libs
        then blas_libs=$libs blas_flags=-DHAVE_CBLAS; say "BLAS: $libs"; break; fi
    done
    [ -n "$blas_libs" ] ||
        say "BLAS: none found, own matrix products on the CPU (Debian: libopenblas-dev is faster; make clean, then make)"
fi

# The tests of CUDA kernels on the CPU need C++17 and the sanitizers; nothing else here is C++.
simt_cxx=
printf '#include <functional>\nint main() { return std::function<int()>([] { return 0; })(); }\n' > "$try.cpp"
if $cxx -std=c++17 -fsanitize=address,undefined "$try.cpp" -o "$try" > /dev/null 2>&1 && "$try" > /dev/null 2>&1
then simt_cxx=$cxx
else say "C++: '$cxx' cannot build C++17 with sanitizers, tests/simt is skipped (Debian: g++)"; fi

nvcc_path=
if [ "$cuda" = 0 ]; then say "CUDA: off by request, CPU only"
elif [ "$cuda" = emulated ]; then say "CUDA: emulated on the CPU (tests/simt): right, and slow"
elif ! nvcc_path=$(command -v "$nvcc"); then
    nvcc_path=
    if [ -n "$arch" ]; then
        echo "ARCH=$arch needs nvcc, and '$nvcc' is not on the PATH; say make ARCH=$arch NVCC=/path/to/nvcc"; exit 1
    fi
    say "CUDA: no nvcc on the PATH, CPU only"
elif [ -z "$arch" ]; then
    cap=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d '. ')
    case $cap in
        90) arch=sm_90a ;; [0-9]*) arch=sm_$cap ;;
        *) say "CUDA: nvcc but no visible GPU, CPU only (for a GPU elsewhere: make ARCH=sm_90a)" ;;
    esac
fi
cuda_arch=
if [ -n "$nvcc_path" ] && [ -n "$arch" ]; then
    cuda_arch=$arch; say "CUDA: $nvcc_path for $arch"
fi

{
    printf '%s' "$found"
    echo "MARCH_FLAGS := $march"
    echo "OPENMP_FLAGS := $omp_flags"
    echo "BLAS_FLAGS := $blas_flags"
    echo "BLAS_LIBS := $blas_libs"
    echo "CUDA_ARCH := $cuda_arch"
    echo "SIMT_CXX := $simt_cxx"
} > "$out.$$" && mv "$out.$$" "$out"
