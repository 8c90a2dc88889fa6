/* loss.cu - softmax cross entropy on the GPU: loss and gradient of a chunk of rows, probabilities never stored.
 *
 * A block owns a row of Vp logits. It reads the row once for a running maximum and sum of exponentials (each thread its own,
 * joined at the end), and where the gradient is wanted a second time, now from L2, to overwrite it with
 * dscale * (softmax - onehot). Bytes from and to DRAM: the row in, the row out. Formulas: loss.c.
 */
#include "layers/cuda.h"

/* exp(x - base), 1 at x = base exactly, within 3 units in the last place where it matters: the difference first, then two instructions.
 * The library's expf would make this kernel bound by arithmetic, at less than half its speed. */
__device__ __forceinline__ float exp_from(float x, float base) { return __expf(x - base); }

template <typename Real, int WIDTH>
__global__ void __launch_bounds__(1024)
loss_kernel(float *losses, Real *logits, const int32_t *targets, float dscale, int64_t V, int64_t Vp)
{
    SHARED(float, room, 32);
    int64_t row = blockIdx.x;
    Real *x = logits + row * Vp;
    int32_t target = targets[row];
    float most = -INFINITY, sum = 0;
    for (int64_t v = (int64_t)threadIdx.x * WIDTH; v < V; v += (int64_t)blockDim.x * WIDTH) {
        float part[WIDTH], largest = most, exps = 0;
        pack_load<Real, WIDTH>(part, x + v);
        if (v + WIDTH > V) /* the last pack of the row: what lies beyond V counts nothing */
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                if (v + i >= V) part[i] = -INFINITY;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) largest = fmaxf(largest, part[i]);
        float base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) exps += exp_from(part[i], base);
        sum = sum * exp_from(most, base) + exps;
        most = largest;
    }
    float row_most = block_max(most, room);
    float base = row_most == -INFINITY ? 0.0f : row_most;
    float row_sum = block_sum(sum * exp_from(most, base), room);
    if (threadIdx.x == 0) losses[row] = target < 0 ? 0.0f : logf(row_sum) + base - to_float(x[target]);
    if (dscale == 0) return;
    __syncthreads(); /* the loss has read its logit before the row is overwritten */
    float scale = target < 0 ? 0.0f : dscale, inverse = 1.0f / row_sum;
    float factor = scale * inverse;
    for (int64_t v = (int64_t)threadIdx.x * WIDTH; v < Vp; v += (int64_t)blockDim.x * WIDTH) {
        float part[WIDTH];
        pack_load<Real, WIDTH>(part, x + v);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) part[i] = factor * exp_from(part[i], base);
        if (target >= v && target < v + WIDTH)
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                if (v + i == target) part[i] -= scale;
        if (v + WIDTH > V || target < 0)
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                if (v + i >= V || target < 0) part[i] = 0;
        pack_store<Real, WIDTH>(x + v, part);
    }
}

template <typename Real>
void loss_forward_backward_cuda(float *losses, void *logits, const int32_t *targets, float dscale, int64_t N, int64_t V, int64_t Vp,
                                Stream *stream)
{
    const int WIDTH = PackWidth<Real>::value;
    int64_t wanted = (V + WIDTH - 1) / WIDTH;
    unsigned threads = wanted >= 1024 ? 1024 : (unsigned)((wanted + 31) / 32 * 32);
    if (packs_fit<Real>(Vp, logits))
        LAUNCH(KERNEL(loss_kernel<Real, WIDTH>), (unsigned)N, threads, 0, stream, losses, (Real *)logits, targets, dscale, V, Vp);
    else
        LAUNCH(KERNEL(loss_kernel<Real, 1>), (unsigned)N, 256, 0, stream, losses, (Real *)logits, targets, dscale, V, Vp);
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

#define INSTANTIATE(Real)                                                                                                   \
    template void loss_forward_backward_cuda<Real>(float *, void *, const int32_t *, float, int64_t, int64_t, int64_t, Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
