/* loss.cu - softmax cross entropy on the GPU: loss and gradient of a chunk of rows, probabilities never stored.
 *
 * A block owns a row of Vp logits. It reads the row once for a running maximum and sum of exponentials (each thread its own,
 * joined at the end), and where the gradient is wanted a second time, now from L2, to overwrite it with
 * dscale * (softmax - onehot). Bytes from and to DRAM: the row in, the row out. Formulas: loss.c.
 *
 * Two things decide the speed. The rows under way must stay in L2 until their second reading, together: 132 multiprocessors
 * with 100 KB of bf16 each, twice, are 27 MB of H200's 50; in fp32 two rows each would be 53 MB, and every second reading
 * would come from DRAM again (66% of a copy, as two parts in three are). So there is one block a multiprocessor in fp32, two
 * in bf16. And arithmetic must stay hidden: an exponential is one fused multiply-add and one instruction of the special
 * function unit, ex2, of which a multiprocessor does 16 a clock: 6300 clocks for both passes of a row of 50257, beside 11000
 * that its bf16 bytes take.
 *
 * Exponentials are 2^(x log2(e) - base), with base = the largest x times log2(e), rounded: an error of that base, which may
 * be large, is in every term alike and so not in their ratios; the loss takes it out again. Logits beyond 2.3e38 give NaN.
 */
#include "layers/cuda.h"

static const float LOG2_E = 1.44269504088896341f;

/* 2^x within 2 units in the last place, 0 for results below 2^-126: what exp2f spends on those would be half of this
 * kernel. */
#ifdef SIMT_EMULATION
static inline float exp2_normal(float x) { return x < -126 ? 0.0f : exp2f(x); }
#else
static __device__ __forceinline__ float exp2_normal(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

/* Blocks of 1024 threads that a multiprocessor has room for: two on the chips below, which hold 2048 threads; others hold
 * 1024 or 1536, and ptxas takes no plan for more. Source: CUDA Programming Guide, compute capabilities. */
#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ < 750 || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || \
    __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
#define ROOM 2
#else
#define ROOM 1
#endif

/* Packs that a thread has under way in a turn, and blocks that a multiprocessor holds. */
template <typename Real> struct LossShape { enum { LOADS = 4, BLOCKS = 1 }; };
template <> struct LossShape<__nv_bfloat16> { enum { LOADS = 2, BLOCKS = ROOM }; };

/* What is subtracted in the exponent where the largest logit is `most`, which may be -infinity. Never fused into what
 * follows: the same rounding wherever it is used. */
static __device__ __forceinline__ float scaled(float most) { return __fmul_rn(most, LOG2_E); }
static __device__ __forceinline__ float base_of(float most) { return most == -INFINITY ? 0.0f : scaled(most); }

/* A row's loss and gradient. The first `packs` packs lie below V and are taken whole, what is left of V and Vp one by
 * one. */
template <typename Real>
__global__ void __launch_bounds__(1024, LossShape<Real>::BLOCKS)
loss_kernel(float *losses, Real *logits, const int32_t *targets, float dscale, int packs, int V, int Vp)
{
    constexpr int WIDTH = PackWidth<Real>::value, LOADS = LossShape<Real>::LOADS;
    SHARED(float, room, 32);
    const int rest = packs * WIDTH, step = blockDim.x, thread = threadIdx.x;
    Real *x = logits + (int64_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x];
    if (target < 0) { /* does not count */
        if (thread == 0) losses[blockIdx.x] = 0;
        for (int v = thread; v < Vp && dscale != 0; v += step) x[v] = from_float<Real>(0.0f);
        return;
    }
    /* The thread that will overwrite the target's logit keeps it. */
    const bool owner = (target < rest ? target / WIDTH : target - rest) % step == thread;
    const float chosen = owner ? to_float(x[target]) : 0.0f;

    float most = -INFINITY, sum = 0;
    for (int p = thread; p < packs; p += LOADS * step) {
        Raw<Real, WIDTH> raw[LOADS];
        float largest = most, exps = 0;
#pragma unroll
        for (int k = 0; k < LOADS; k++) raw[k] = raw_load<Real, WIDTH>(x + (p + k * step) * WIDTH, p + k * step < packs);
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (p + k * step < packs)
#pragma unroll
                for (int i = 0; i < WIDTH; i++) largest = fmaxf(largest, raw_at(raw[k], i));
        const float base = base_of(largest);
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (p + k * step < packs)
#pragma unroll
                for (int i = 0; i < WIDTH; i++) exps += exp2_normal(fmaf(raw_at(raw[k], i), LOG2_E, -base));
        sum = sum * exp2_normal(scaled(most) - base) + exps;
        most = largest;
    }
    for (int v = rest + thread; v < V; v += step) {
        const float value = to_float(x[v]), largest = fmaxf(most, value), base = base_of(largest);
        sum = sum * exp2_normal(scaled(most) - base) + exp2_normal(fmaf(value, LOG2_E, -base));
        most = largest;
    }

    const float row_most = block_max(most, room), base = base_of(row_most);
    const float row_sum = block_sum(sum * exp2_normal(scaled(most) - base), room);
    /* The term of the largest logit should be 1, and is what the rounding of base makes it: so is every other, and the
     * sum. */
    if (owner) losses[blockIdx.x] = logf(row_sum / exp2_normal(fmaf(row_most, LOG2_E, -base))) + (row_most - chosen);
    if (dscale == 0) return;

    const float factor = dscale / row_sum;
    for (int p = thread; p < packs; p += LOADS * step) {
        Raw<Real, WIDTH> raw[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) raw[k] = raw_load<Real, WIDTH>(x + (p + k * step) * WIDTH, p + k * step < packs);
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            if (p + k * step >= packs) continue;
            float gradient[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; i++) gradient[i] = factor * exp2_normal(fmaf(raw_at(raw[k], i), LOG2_E, -base));
            pack_store<Real, WIDTH>(x + (p + k * step) * WIDTH, gradient);
        }
    }
    for (int v = rest + thread; v < Vp; v += step)
        x[v] = from_float<Real>(v < V ? factor * exp2_normal(fmaf(to_float(x[v]), LOG2_E, -base)) : 0.0f);
    if (owner) x[target] = from_float<Real>(factor * exp2_normal(fmaf(chosen, LOG2_E, -base)) - dscale);
}

template <typename Real>
void loss_forward_backward_cuda(float *losses, void *logits, const int32_t *targets, float dscale, int64_t N, int64_t V,
                                int64_t Vp, Stream *stream)
{
    const int64_t packs = packs_fit<Real>(Vp, logits) ? V / PackWidth<Real>::value : 0, wanted = packs ? packs : V;
    const unsigned threads = wanted >= 1024 ? 1024 : blocks_for(wanted, 32) * 32;
    LAUNCH(loss_kernel<Real>, (unsigned)N, threads, 0, stream, losses, (Real *)logits, targets, dscale, (int)packs, (int)V,
           (int)Vp);
}

/* *total += sum of losses (N), in double, in one fixed order. One block. */
__global__ void losses_sum_kernel(double *total, const float *losses, int64_t N)
{
    SHARED(double, part, 1024);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < N; i += blockDim.x) sum += (double)losses[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] = part[threadIdx.x] + part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) *total += part[0];
}

void losses_sum_cuda(double *total, const float *losses, int64_t N, Stream *stream)
{
    LAUNCH(losses_sum_kernel, 1, 1024, 0, stream, total, losses, N);
}

#define INSTANTIATE(Real)                                                                                              \
    template void loss_forward_backward_cuda<Real>(float *, void *, const int32_t *, float, int64_t, int64_t, int64_t, \
                                                   Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
