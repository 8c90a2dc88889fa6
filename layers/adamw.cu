/* adamw.cu - the global norm of the gradient, and AdamW over all parameters in one launch, on the GPU.
 *
 * Both are memory-bound: the norm reads 4 bytes a parameter; the update reads gradient, moments and master weight and writes
 * the last three and the working weight: 28 to 30 bytes. The norm stays on the device, where the update reads it, so that
 * nothing waits for the host in between; learning rate and corrections come from device memory too, so that a recorded step
 * can be replayed.
 */
#include "layers/cuda.h"

enum { THREADS = 256, NORM_BLOCKS = 1024 };

/* Sum over a block of a power of two of threads, in a fixed order; thread 0 gets it. room: a double a thread. */
__device__ __forceinline__ double block_sum_double(double x, Shared<double> room)
{
    room[threadIdx.x] = x;
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step; step /= 2) {
        if (threadIdx.x < step) room[threadIdx.x] = room[threadIdx.x] + room[threadIdx.x + step];
        __syncthreads();
    }
    return room[0];
}

/* partial (gridDim.x) = sums of squares, in double: no fp32 gradient overflows it. Which thread adds what depends on n
 * alone. */
__global__ void norm_partial_kernel(double *partial, const float *grads, int64_t n)
{
    SHARED(double, room, THREADS);
    double sum = 0;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 4; i + 3 < n; i += (int64_t)gridDim.x * THREADS * 4) {
        float g[4];
        pack_load<float, 4>(g, grads + i);
#pragma unroll
        for (int j = 0; j < 4; j++) sum += (double)g[j] * (double)g[j];
    }
    if (blockIdx.x == 0 && threadIdx.x < n % 4) {
        float g = grads[n / 4 * 4 + threadIdx.x];
        sum += (double)g * (double)g;
    }
    sum = block_sum_double(sum, room);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void norm_finish_kernel(float *norm, const double *partial)
{
    SHARED(double, room, NORM_BLOCKS);
    double sum = block_sum_double(partial[threadIdx.x], room);
    if (threadIdx.x == 0) *norm = (float)sqrt(sum);
}

size_t norm_scratch_cuda(int64_t n)
{
    (void)n;
    return NORM_BLOCKS * sizeof(double);
}

void global_norm_cuda(float *norm, void *scratch, const float *grads, int64_t n, Stream *stream)
{
    unsigned blocks = 1; /* a power of two, for the sum of their sums */
    while (blocks < NORM_BLOCKS && (int64_t)blocks * THREADS * 4 < n) blocks *= 2;
    LAUNCH(norm_partial_kernel, blocks, THREADS, 0, stream, (double *)scratch, grads, n);
    LAUNCH(norm_finish_kernel, 1, blocks, 0, stream, norm, (const double *)scratch);
}

template <typename Real, int WIDTH>
__global__ void adamw_kernel(Real *params, float *master, float *m, float *v, const float *grads, const float *norm,
                             const AdamwStep *step, int64_t n, int64_t n_decay)
{
    AdamwStep s = *step;
    float total = *norm, scale = s.clip > 0 && total > s.clip ? s.clip / total : 1.0f;
    if (!isfinite(total)) return;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH; i < n;
         i += (int64_t)gridDim.x * blockDim.x * WIDTH) {
        float g[WIDTH], m_[WIDTH], v_[WIDTH], w[WIDTH];
        pack_load<float, WIDTH>(g, grads + i);
        pack_load<float, WIDTH>(m_, m + i);
        pack_load<float, WIDTH>(v_, v + i);
        pack_load<float, WIDTH>(w, master + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            float gradient = g[j] * scale, decay = i + j < n_decay ? s.weight_decay : 0.0f;
            m_[j] = s.beta1 * m_[j] + (1.0f - s.beta1) * gradient;
            v_[j] = s.beta2 * v_[j] + (1.0f - s.beta2) * gradient * gradient;
            float mean = m_[j] / s.bias_correction1, root = sqrtf(v_[j] / s.bias_correction2);
            w[j] -= s.lr * (mean / (root + s.eps) + decay * w[j]);
        }
        pack_store<float, WIDTH>(m + i, m_);
        pack_store<float, WIDTH>(v + i, v_);
        pack_store<float, WIDTH>(master + i, w);
        if ((const void *)params != (const void *)master) pack_store<Real, WIDTH>(params + i, w);
    }
}

template <typename Real>
void adamw_update_cuda(void *params, float *master, float *m, float *v, const float *grads, const float *norm,
                       const AdamwStep *step, int64_t n, int64_t n_decay, Stream *stream)
{
    bool packs = n % 4 == 0 && packs_fit<float>(4, master, m, v, grads) && (uintptr_t)params % (4 * sizeof(Real)) == 0;
    if (packs)
        LAUNCH(KERNEL(adamw_kernel<Real, 4>), blocks_for(n, 4 * THREADS), THREADS, 0, stream, (Real *)params, master, m, v,
               grads, norm, step, n, n_decay);
    else
        LAUNCH(KERNEL(adamw_kernel<Real, 1>), blocks_for(n, THREADS), THREADS, 0, stream, (Real *)params, master, m, v,
               grads, norm, step, n, n_decay);
}

#define INSTANTIATE(Real)                                                                                                   \
    template void adamw_update_cuda<Real>(void *, float *, float *, float *, const float *, const float *,                  \
                                          const AdamwStep *, int64_t, int64_t, Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
