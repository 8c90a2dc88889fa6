/* embedding.cu - token and position embedding on the GPU.
 *
 * Forward is a gather. Backward adds dout's rows up by token: many rows to one row of dwte, a race by nature. Instead of atomics,
 * whose order changes from run to run, it follows a plan that the host made while the step before was computing
 * (embedding_plan in embedding.c): the positions sorted by token, and where each token's run begins. A block owns a run and a
 * slice of channels, its warps take the run's rows in strides, and their sums meet in shared memory in a fixed order.
 * dwpe's rows are sums over the batch at fixed positions and need no plan.
 */
#include "layers/cuda.h"

enum { THREADS = 256, RUN_WARPS = 4, RUN_LOADS = 8 };

template <typename Real, int WIDTH>
__global__ void embedding_forward_kernel(float *out, const int32_t *tokens, const Real *wte, const Real *wpe, int64_t N, int64_t T, int64_t C)
{
    int64_t packs = C / WIDTH;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < N * packs; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t n = i / packs, c = i % packs * WIDTH;
        float a[WIDTH], b[WIDTH];
        pack_load<Real, WIDTH>(a, wte + (int64_t)tokens[n] * C + c);
        pack_load<Real, WIDTH>(b, wpe + n % T * C + c);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) a[j] += b[j];
        pack_store<float, WIDTH>(out + n * C + c, a);
    }
}

template <typename Real>
void embedding_forward_cuda(float *out, const int32_t *tokens, const void *wte, const void *wpe, int64_t B, int64_t T, int64_t C,
                            Stream *stream)
{
    int64_t N = B * T;
    const int WIDTH = PackWidth<float>::value;
    if (packs_fit<float>(C, out) && ((uintptr_t)wte | (uintptr_t)wpe) % (WIDTH * sizeof(Real)) == 0)
        LAUNCH(KERNEL(embedding_forward_kernel<Real, WIDTH>), blocks_resident(N * C / WIDTH, THREADS, stream, 16), THREADS, 0, stream,
               out, tokens, (const Real *)wte, (const Real *)wpe, N, T, C);
    else
        LAUNCH(KERNEL(embedding_forward_kernel<Real, 1>), blocks_resident(N * C, THREADS, stream, 16), THREADS, 0, stream, out, tokens,
               (const Real *)wte, (const Real *)wpe, N, T, C);
}

/* dwte[token] += sum of dout over the token's run. Threads (32, RUN_WARPS); blocks walk the runs, blockIdx.y picks 32 packs of channels. A
 * warp has RUN_LOADS rows under way at a time: the runs of frequent tokens are long, and one block walks each. */
template <int WIDTH>
__global__ void embedding_tokens_kernel(float *dwte, const float *dout, const int32_t *plan, int64_t N, int64_t C)
{
    SHARED(float, part, RUN_WARPS * 32 * WIDTH);
    const int32_t *order = plan, *begin = plan + N, *token = plan + 2 * N + 1;
    int32_t runs = plan[3 * N + 1];
    int64_t c = ((int64_t)blockIdx.y * 32 + threadIdx.x) * WIDTH;
    for (int64_t run = blockIdx.x; run < runs; run += gridDim.x) {
        int32_t end = begin[run + 1];
        float sum[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sum[j] = 0;
        for (int32_t i = begin[run] + (int32_t)threadIdx.y; c < C && i < end; i += RUN_WARPS * RUN_LOADS) {
            Pack<float, WIDTH> rows[RUN_LOADS];
#pragma unroll
            for (int k = 0; k < RUN_LOADS; k++)
                if (i + k * RUN_WARPS < end) rows[k] = *(const Pack<float, WIDTH> *)(dout + (int64_t)order[i + k * RUN_WARPS] * C + c);
#pragma unroll
            for (int k = 0; k < RUN_LOADS; k++)
                if (i + k * RUN_WARPS < end)
#pragma unroll
                    for (int j = 0; j < WIDTH; j++) sum[j] += rows[k].v[j];
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) part[(threadIdx.y * WIDTH + j) * 32 + threadIdx.x] = sum[j];
        __syncthreads();
        for (int j = threadIdx.y; j < WIDTH && c < C; j += RUN_WARPS) { /* each warp finishes some of the channels */
            float total = 0;
            for (int w = 0; w < RUN_WARPS; w++) total += part[(w * WIDTH + j) * 32 + threadIdx.x];
            dwte[(int64_t)token[run] * C + c + j] += total;
        }
        __syncthreads();
    }
}

/* dwpe[t] += sum over b of dout[b,t]. */
__global__ void embedding_positions_kernel(float *dwpe, const float *dout, int64_t B, int64_t T, int64_t C)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < T * C; i += (int64_t)gridDim.x * blockDim.x) {
        float sum = 0;
        for (int64_t b = 0; b < B; b++) sum += dout[b * T * C + i];
        dwpe[i] += sum;
    }
}

void embedding_backward_cuda(float *dwte, float *dwpe, const float *dout, const int32_t *plan, int64_t B, int64_t T, int64_t C,
                             Stream *stream)
{
    int64_t N = B * T;
    if (N < 1) return;
    const int WIDTH = PackWidth<float>::value;
    unsigned blocks = blocks_resident(N, 1, stream, 16);
    dim3 threads(32, RUN_WARPS);
    if (packs_fit<float>(C, dout))
        LAUNCH(embedding_tokens_kernel<WIDTH>, dim3(blocks, blocks_for(C, 32 * WIDTH)), threads, 0, stream, dwte, dout, plan, N, C);
    else
        LAUNCH(embedding_tokens_kernel<1>, dim3(blocks, blocks_for(C, 32)), threads, 0, stream, dwte, dout, plan, N, C);
    LAUNCH(embedding_positions_kernel, blocks_resident(T * C, THREADS, stream, 16), THREADS, 0, stream, dwpe, dout, B, T, C);
}

#define INSTANTIATE(Real)                                                                                                   \
    template void embedding_forward_cuda<Real>(float *, const int32_t *, const void *, const void *, int64_t, int64_t, int64_t, Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
