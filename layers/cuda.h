/* cuda.h - what the CUDA twins of the layers share: the stream, error checks, 16-byte packs, reductions, launch sizes.
 *
 * Operations are templates over Real, the type of what products read and write: float or __nv_bfloat16. Arithmetic is fp32
 * throughout. Kernels are memory-bound but for the products, so they move 16 bytes a thread and access (Pack), and
 * touch each byte once; where rows do not divide into packs they fall back to single elements.
 */
#ifndef CUDA_H
#define CUDA_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "attention/device.h"
#include "layers/backend.h"

/* --- the machine ------------------------------------------------------------------------------------------------------- */

/* What cublasLt was asked before, and its answer: see linear.cu. */
struct ProductPlans;

enum { SIDE_EVENTS = 4 };

struct Stream {
    cudaStream_t stream;        /* where operations are queued: main_stream, or side_stream within side_begin and side_end */
    cudaStream_t main_stream, side_stream, upload_stream;
    cudaEvent_t uploaded;       /* recorded on upload_stream after each upload */
    cudaEvent_t begun;          /* recorded on main_stream where the side begins */
    cudaEvent_t side_done[SIDE_EVENTS];  /* recorded on side_stream by ticket, modulo their number */
    int64_t side_last, side_joined; /* the newest ticket; the newest that main_stream waits for */
    int recording;
    int device, sm, processors; /* compute capability as 90; number of multiprocessors */
    int deterministic, tf32;
    int measuring;              /* see Backend.measure */
    struct ProductPlans *plans;
};

/* Ends the process with file, line and the failing call: a fault of the machine, not of the user. */
static inline void cuda_check(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
    exit(1);
}
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

/* kernel_launch that ends the process where the launch is refused. An empty grid is no work, not an error. */
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                              \
    do {                                                                                                                    \
        dim3 launch_grid(grid);                                                                                             \
        if (launch_grid.x && launch_grid.y && launch_grid.z)                                                                \
            cuda_check(kernel_launch(kernel, launch_grid, dim3(block), (shared_bytes), (stream)->stream, __VA_ARGS__),      \
                       #kernel, __FILE__, __LINE__);                                                                        \
    } while (0)
/* For a kernel name with commas in its template arguments. */
#define KERNEL(...) __VA_ARGS__

/* Blocks of `per` items for n items, as a grid dimension. */
static inline unsigned blocks_for(int64_t n, int64_t per) { return (unsigned)((n + per - 1) / per); }

/* Blocks for a grid-stride loop: enough to fill the chip, no more than there is work. */
static inline unsigned blocks_resident(int64_t n, int64_t per, const Stream *stream, int per_processor)
{
    int64_t wanted = (n + per - 1) / per, most = (int64_t)stream->processors * per_processor;
    return (unsigned)(wanted < most ? wanted : most);
}

/* --- types ------------------------------------------------------------------------------------------------------------- */

__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__host__ __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename Real> __host__ __device__ __forceinline__ Real from_float(float x);
template <> __host__ __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* WIDTH neighbouring elements, read and written by one instruction. */
template <typename Real, int WIDTH>
struct alignas(sizeof(Real) * WIDTH) Pack {
    Real v[WIDTH];
};
template <typename Real> struct PackWidth { static const int value = 16 / (int)sizeof(Real); };

template <typename Real, int WIDTH>
__device__ __forceinline__ void pack_load(float *out, const Real *in)
{
    Pack<Real, WIDTH> pack = *(const Pack<Real, WIDTH> *)in;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) out[i] = to_float(pack.v[i]);
}

template <typename Real, int WIDTH>
__device__ __forceinline__ void pack_store(Real *out, const float *in)
{
    Pack<Real, WIDTH> pack;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) pack.v[i] = from_float<Real>(in[i]);
    *(Pack<Real, WIDTH> *)out = pack;
}

/* WIDTH neighbouring elements as they lie in memory, and each of them as fp32. Held in a Pack, a bf16 takes a register of
 * its own from the load on, and the warp waits there to take the pack apart; in words, two share one until they are used. */
template <typename Real, int WIDTH>
struct alignas(sizeof(Real) * WIDTH) Raw {
    unsigned words[sizeof(Real) * WIDTH / 4];
};

/* Zeros where not wanted. */
template <typename Real, int WIDTH>
__device__ __forceinline__ Raw<Real, WIDTH> raw_load(const Real *in, bool wanted)
{
    return wanted ? *(const Raw<Real, WIDTH> *)in : Raw<Real, WIDTH>();
}

template <typename Real, int WIDTH>
__device__ __forceinline__ float raw_at(const Raw<Real, WIDTH> &raw, int i)
{
    if (sizeof(Real) == 4) return __uint_as_float(raw.words[i % (WIDTH * (int)sizeof(Real) / 4)]);
    unsigned word = raw.words[i / 2];
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}

/* Does a row of n elements at every one of these addresses divide into packs? */
template <typename Real>
static inline bool packs_fit(int64_t n, const void *a, const void *b = NULL, const void *c = NULL, const void *d = NULL)
{
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d;
    return n % PackWidth<Real>::value == 0 && bits % 16 == 0;
}

/* --- reductions: every lane (thread) gets the result, summed in a fixed order ------------------------------------------ */

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* Over a block of a multiple of 32 threads, at most 1024. `room`: 32 floats of shared memory, free again on return. */
__device__ __forceinline__ float block_sum(float x, Shared<float> room)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? (float)room[lane] : 0.0f);
    __syncthreads();
    return x;
}

__device__ __forceinline__ float block_max(float x, Shared<float> room)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = warp_max(lane < warps ? (float)room[lane] : -INFINITY);
    __syncthreads();
    return x;
}

/* --- the operations, for the table in cuda.cu; contracts in backend.h -------------------------------------------------- */

template <typename Real> void from_fp32_cuda(void *out, const float *in, int64_t n, Stream *stream);
template <typename Real> void to_fp32_cuda(float *out, const void *in, int64_t n, Stream *stream);
void embedding_forward_cuda(float *out, const int32_t *tokens, const float *wte, const float *wpe, int64_t B, int64_t T,
                            int64_t C, Stream *stream);
void embedding_backward_cuda(float *dwte, float *dwpe, void *scratch, const float *dout, const int32_t *plan, int64_t B,
                             int64_t T, int64_t C, Stream *stream);
size_t embedding_scratch_cuda(int64_t N, int64_t C);
template <typename Real>
void layernorm_forward_cuda(void *out, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                            int64_t N, int64_t C, Stream *stream);
template <typename Real>
void residual_layernorm_forward_cuda(float *sum, void *out, float *mean, float *rstd, const float *x, const void *y,
                                     const float *weight, const float *bias, int64_t N, int64_t C, Stream *stream);
template <typename Real>
void layernorm_backward_cuda(float *dx, void *rounded, float *dweight, float *dbias, void *scratch, const float *dresid,
                             const void *dout, const float *x, const float *weight, const float *mean, const float *rstd,
                             int64_t N, int64_t C, Stream *stream);
size_t layernorm_scratch_cuda(int64_t N, int64_t C);
template <typename Real>
void linear_forward_cuda(void *out, const void *x, const void *weight, const void *bias, int64_t N, int64_t C, int64_t OC,
                         Stream *stream);
template <typename Real>
void linear_gelu_forward_cuda(void *out, void *pre, const void *x, const void *weight, const void *bias, int64_t N,
                              int64_t C, int64_t OC, Stream *stream);
template <typename Real>
void linear_backward_input_cuda(void *dx, const void *dout, const void *weight, const void *pre, int64_t N, int64_t C,
                                int64_t OC, Stream *stream);
template <typename Real>
void linear_backward_weight_cuda(float *dweight, float *dbias, void *scratch, const void *dout, const void *x, int64_t N,
                                 int64_t C, int64_t OC, Stream *stream);
size_t linear_scratch_cuda(int64_t N, int64_t C, int64_t OC);
template <typename Real> void gelu_forward_cuda(void *out, const void *pre, int64_t n, Stream *stream);
/* dx (n) *= gelu'(pre (n)): for products whose epilogue cannot. */
template <typename Real> void gelu_backward_cuda(void *dx, const void *pre, int64_t n, Stream *stream);
template <typename Real>
void cache_fill_cuda(void *cache, const void *qkv, int64_t first, int64_t count, int64_t n, int64_t T, int64_t NH,
                     int64_t HS, Stream *stream);
template <typename Real>
void cache_attend_cuda(void *out, void *cache, const void *qkv, float scale, int64_t B, int64_t t, int64_t T, int64_t NH,
                       int64_t HS, Stream *stream);
template <typename Real>
void loss_forward_backward_cuda(float *losses, void *logits, const int32_t *targets, float dscale, int64_t N, int64_t V,
                                int64_t Vp, Stream *stream);
void losses_sum_cuda(double *total, const float *losses, int64_t N, Stream *stream);
void global_norm_cuda(float *norm, void *scratch, const float *grads, int64_t n, Stream *stream);
size_t norm_scratch_cuda(int64_t n);
template <typename Real>
void adamw_update_cuda(void *params, float *master, float *m, float *v, const float *grads, const float *norm,
                       const AdamwStep *step, int64_t n, int64_t n_decay, Stream *stream);

/* a (n) fp32 += column sums of src (rows, stride) from its column 0 on, b (n) likewise from column n on where b is not NULL.
 * Rows are added in a fixed order. */
void columns_add_cuda(float *a, float *b, const float *src, int64_t rows, int64_t n, int64_t stride, Stream *stream);

struct ProductPlans *product_plans_open(char *error, size_t error_size);
void product_plans_close(struct ProductPlans *plans);

#endif
