/* layernorm.cu - layer normalisation on the GPU, alone or fused with the residual sum before it.
 *
 * Memory-bound, so the aim is to touch each byte once. A warp owns a row and keeps it in registers, as packs of 16 bytes:
 *
 *     row (C)   | lane 0 | lane 1 | ... | lane 31 | lane 0 | lane 1 | ...        PACKS packs a lane
 *
 * Forward: read x (and y), write their sum, mean, variance from registers (two passes there: no cancellation), write out.
 * Bytes a row: 2 C for the plain form, 4 C for the residual one.
 *
 * Backward: with n = (x - mean) * rstd and g = dout * weight, dx += rstd * (g - mean(g) - n * mean(g n)): the row in
 * registers again. dweight += sum over rows of dout * n and dbias += sum of dout: each warp keeps its share of both in registers
 * over all the rows it walks, the warps of a block are added through shared memory, the blocks through `scratch`, always
 * in the same order: the same bits on every run, and no atomics. Source of the formulas: layernorm.c.
 *
 * Rows that are wider than the registers, or that do not divide into packs, take the general kernels: a block a row, single
 * elements, the row read once more for each pass (from L2, mostly).
 */
#include "layers/cuda.h"

#define EPSILON 1e-5f

enum { WARPS = 4, GENERAL_THREADS = 256, PARTIAL_BLOCKS = 1024, COLUMN_WARPS = 16 };

/* Widest row, in packs a lane, that the register kernels take. Backward holds two fp32 sums for each element of it. */
enum { PACKS_MOST_FORWARD = 8, PACKS_MOST_BACKWARD = 4 };

/* --- forward --------------------------------------------------------------------------------------------------------------- */

/* sum = x + y (where RESIDUAL, else x is the row), out = layernorm(sum). A warp a row. */
template <typename Real, int PACKS, bool RESIDUAL>
__global__ void layernorm_forward_kernel(Real *sum, Real *out, float *mean, float *rstd, const Real *x, const Real *y,
                                         const Real *weight, const Real *bias, int64_t N, int C)
{
    constexpr int WIDTH = PackWidth<Real>::value;
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= N) return;
    float value[PACKS][WIDTH], total = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        int c = (p * 32 + lane) * WIDTH;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) value[p][i] = 0;
        if (c >= C) continue;
        pack_load<Real, WIDTH>(value[p], x + row * C + c);
        if (RESIDUAL) {
            float other[WIDTH];
            pack_load<Real, WIDTH>(other, y + row * C + c);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) value[p][i] = to_float(from_float<Real>(value[p][i] + other[i]));
            pack_store<Real, WIDTH>(sum + row * C + c, value[p]);
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i++) total += value[p][i];
    }
    float m = warp_sum(total) / (float)C, square = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if ((p * 32 + lane) * WIDTH >= C) continue;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) square += (value[p][i] - m) * (value[p][i] - m);
    }
    float s = 1.0f / sqrtf(warp_sum(square) / (float)C + EPSILON);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        int c = (p * 32 + lane) * WIDTH;
        if (c >= C) continue;
        float w[WIDTH], b[WIDTH];
        pack_load<Real, WIDTH>(w, weight + c);
        pack_load<Real, WIDTH>(b, bias + c);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) value[p][i] = (value[p][i] - m) * s * w[i] + b[i];
        pack_store<Real, WIDTH>(out + row * C + c, value[p]);
    }
    if (lane == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

/* The same for any C and alignment: a block a row. */
template <typename Real, bool RESIDUAL>
__global__ void layernorm_forward_general_kernel(Real *sum, Real *out, float *mean, float *rstd, const Real *x, const Real *y,
                                                 const Real *weight, const Real *bias, int64_t C)
{
    SHARED(float, room, 32);
    int64_t row = blockIdx.x;
    const Real *in = RESIDUAL ? sum + row * C : x + row * C;
    float total = 0, square = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float value = to_float(x[row * C + c]);
        if (RESIDUAL) {
            Real rounded = from_float<Real>(value + to_float(y[row * C + c]));
            sum[row * C + c] = rounded;
            value = to_float(rounded);
        }
        total += value;
    }
    float m = block_sum(total, room) / (float)C;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float centred = to_float(in[c]) - m;
        square += centred * centred;
    }
    float s = 1.0f / sqrtf(block_sum(square, room) / (float)C + EPSILON);
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        out[row * C + c] = from_float<Real>((to_float(in[c]) - m) * s * to_float(weight[c]) + to_float(bias[c]));
    if (threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

/* Packs a lane for rows of C: 1, 2, 3, 4, 6 or 8, or 0 where the registers do not hold them. */
template <typename Real>
static int packs_for(int64_t C, int most)
{
    int64_t packs = (C + 32 * PackWidth<Real>::value - 1) / (32 * PackWidth<Real>::value);
    if (packs > most) return 0;
    return packs <= 4 ? (int)packs : packs <= 6 ? 6 : 8;
}

template <typename Real, bool RESIDUAL>
static void forward(Real *sum, Real *out, float *mean, float *rstd, const Real *x, const Real *y, const Real *weight,
                    const Real *bias, int64_t N, int64_t C, Stream *stream)
{
    bool fits = packs_fit<Real>(C, x, out, weight, bias) && packs_fit<Real>(C, sum, y);
    unsigned grid = blocks_for(N, WARPS);
#define FORWARD(P)                                                                                                          \
    case P:                                                                                                                 \
        LAUNCH(KERNEL(layernorm_forward_kernel<Real, P, RESIDUAL>), grid, 32 * WARPS, 0, stream, sum, out, mean, rstd, x, y, weight, \
               bias, N, (int)C);                                                                                            \
        break
    switch (fits ? packs_for<Real>(C, PACKS_MOST_FORWARD) : 0) {
        FORWARD(1);
        FORWARD(2);
        FORWARD(3);
        FORWARD(4);
        FORWARD(6);
        FORWARD(8);
    default:
        LAUNCH(KERNEL(layernorm_forward_general_kernel<Real, RESIDUAL>), (unsigned)N, GENERAL_THREADS, 0, stream, sum, out, mean, rstd,
               x, y, weight, bias, C);
    }
#undef FORWARD
}

template <typename Real>
void layernorm_forward_cuda(void *out, float *mean, float *rstd, const void *x, const void *weight, const void *bias, int64_t N,
                            int64_t C, Stream *stream)
{
    forward<Real, false>(NULL, (Real *)out, mean, rstd, (const Real *)x, NULL, (const Real *)weight, (const Real *)bias, N, C, stream);
}

template <typename Real>
void residual_layernorm_forward_cuda(void *sum, void *out, float *mean, float *rstd, const void *x, const void *y,
                                     const void *weight, const void *bias, int64_t N, int64_t C, Stream *stream)
{
    forward<Real, true>((Real *)sum, (Real *)out, mean, rstd, (const Real *)x, (const Real *)y, (const Real *)weight,
                        (const Real *)bias, N, C, stream);
}

/* --- backward -------------------------------------------------------------------------------------------------------------- */

/* A pack as it lies in memory, and its elements as fp32. */
template <typename Real> using RawPack = Pack<Real, PackWidth<Real>::value>;

template <typename Real>
__device__ __forceinline__ float raw_at(const RawPack<Real> &pack, int i) { return to_float(pack.v[i]); }

/* dx += ...; partial (gridDim.x, 2, C) = this block's dweight and dbias. Warps walk the rows in strides. All loads of a row are under way
 * before the first is used, and stay packed until then: the sums for dweight and dbias leave few registers for anything else. */
template <typename Real, int PACKS>
__global__ void __launch_bounds__(32 * WARPS)
layernorm_backward_kernel(Real *dx, float *partial, const Real *dout, const Real *x, const Real *weight, const float *mean,
                          const float *rstd, int64_t N, int C)
{
    constexpr int WIDTH = PackWidth<Real>::value;
    Shared<float> sums = shared_dynamic<float>(0, 2 * (size_t)C); /* dweight (C), dbias (C) of the block */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float dw[PACKS][WIDTH], db[PACKS][WIDTH];
#pragma unroll
    for (int p = 0; p < PACKS; p++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++) dw[p][i] = db[p][i] = 0;

    for (int64_t row = (int64_t)blockIdx.x * WARPS + warp; row < N; row += (int64_t)gridDim.x * WARPS) {
        RawPack<Real> in[PACKS], gradient[PACKS], old[PACKS];
        float m = mean[row], s = rstd[row], sum_g = 0, sum_gn = 0;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int c = (p * 32 + lane) * WIDTH;
            if (c >= C) continue;
            in[p] = *(const RawPack<Real> *)(x + row * C + c);
            gradient[p] = *(const RawPack<Real> *)(dout + row * C + c);
            old[p] = *(const RawPack<Real> *)(dx + row * C + c);
        }
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int c = (p * 32 + lane) * WIDTH;
            if (c >= C) continue;
            RawPack<Real> w = *(const RawPack<Real> *)(weight + c);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                float norm = (raw_at<Real>(in[p], i) - m) * s, d = raw_at<Real>(gradient[p], i), g = d * raw_at<Real>(w, i);
                dw[p][i] += d * norm;
                db[p][i] += d;
                sum_g += g;
                sum_gn += g * norm;
            }
        }
        sum_g = warp_sum(sum_g) / (float)C;
        sum_gn = warp_sum(sum_gn) / (float)C;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int c = (p * 32 + lane) * WIDTH;
            if (c >= C) continue;
            RawPack<Real> w = *(const RawPack<Real> *)(weight + c);
            float updated[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                float norm = (raw_at<Real>(in[p], i) - m) * s, g = raw_at<Real>(gradient[p], i) * raw_at<Real>(w, i);
                updated[i] = raw_at<Real>(old[p], i) + s * (g - sum_g - norm * sum_gn);
            }
            pack_store<Real, WIDTH>(dx + row * C + c, updated);
        }
    }

    for (int turn = 0; turn < WARPS; turn++) { /* warp after warp adds its share: one order, whatever the timing */
        if (warp == turn)
#pragma unroll
            for (int p = 0; p < PACKS; p++)
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    int c = (p * 32 + lane) * WIDTH + i;
                    if (c >= C) continue;
                    sums[c] = (turn ? (float)sums[c] : 0.0f) + dw[p][i];
                    sums[C + c] = (turn ? (float)sums[C + c] : 0.0f) + db[p][i];
                }
        __syncthreads();
    }
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) partial[(int64_t)blockIdx.x * 2 * C + c] = sums[c];
}

/* dx += ... for any C: a block a row. */
template <typename Real>
__global__ void layernorm_backward_general_kernel(Real *dx, const Real *dout, const Real *x, const Real *weight, const float *mean,
                                                  const float *rstd, int64_t C)
{
    SHARED(float, room, 32);
    int64_t row = blockIdx.x;
    float m = mean[row], s = rstd[row], sum_g = 0, sum_gn = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float g = to_float(dout[row * C + c]) * to_float(weight[c]);
        sum_g += g;
        sum_gn += g * (to_float(x[row * C + c]) - m) * s;
    }
    sum_g = block_sum(sum_g, room) / (float)C;
    sum_gn = block_sum(sum_gn, room) / (float)C;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float g = to_float(dout[row * C + c]) * to_float(weight[c]), norm = (to_float(x[row * C + c]) - m) * s;
        dx[row * C + c] = from_float<Real>(to_float(dx[row * C + c]) + s * (g - sum_g - norm * sum_gn));
    }
}

/* partial (gridDim.y, 2, C): this block's rows, for 32 columns; threads (32, 8). */
template <typename Real>
__global__ void layernorm_columns_kernel(float *partial, const Real *dout, const Real *x, const float *mean, const float *rstd,
                                         int64_t N, int64_t C)
{
    SHARED(float, dw, 8 * 32);
    SHARED(float, db, 8 * 32);
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float w = 0, b = 0;
    if (c < C)
        for (int64_t row = (int64_t)blockIdx.y * 8 + threadIdx.y; row < N; row += (int64_t)gridDim.y * 8) {
            float g = to_float(dout[row * C + c]);
            w += g * (to_float(x[row * C + c]) - mean[row]) * rstd[row];
            b += g;
        }
    dw[threadIdx.y * 32 + threadIdx.x] = w;
    db[threadIdx.y * 32 + threadIdx.x] = b;
    __syncthreads();
    if (threadIdx.y || c >= C) return;
    w = b = 0;
    for (int i = 0; i < 8; i++) {
        w += dw[i * 32 + threadIdx.x];
        b += db[i * 32 + threadIdx.x];
    }
    partial[((int64_t)blockIdx.y * 2) * C + c] = w;
    partial[((int64_t)blockIdx.y * 2 + 1) * C + c] = b;
}

/* a (n) += sum over rows of src (rows, stride) from column 0, b (n) from column n, where b is not NULL: threads (32, COLUMN_WARPS), a
 * block takes 32 columns, blockIdx.y picks a or b. */
__global__ void columns_add_kernel(float *a, float *b, const float *src, int64_t rows, int64_t n, int64_t stride)
{
    SHARED(float, part, COLUMN_WARPS * 32);
    float *dst = blockIdx.y ? b : a;
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (c < n)
        for (int64_t row = threadIdx.y; row < rows; row += COLUMN_WARPS) sum += src[row * stride + blockIdx.y * n + c];
    part[threadIdx.y * 32 + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= n) return;
    for (int i = 1; i < COLUMN_WARPS; i++) sum += part[i * 32 + threadIdx.x];
    dst[c] += sum;
}

void columns_add_cuda(float *a, float *b, const float *src, int64_t rows, int64_t n, int64_t stride, Stream *stream)
{
    LAUNCH(columns_add_kernel, dim3(blocks_for(n, 32), b ? 2 : 1), dim3(32, COLUMN_WARPS), 0, stream, a, b, src, rows, n, stride);
}

size_t layernorm_scratch_cuda(int64_t N, int64_t C)
{
    (void)N;
    return (size_t)PARTIAL_BLOCKS * 2 * (size_t)C * sizeof(float);
}

template <typename Real>
void layernorm_backward_cuda(void *dx_, float *dweight, float *dbias, void *scratch, const void *dout_, const void *x_,
                             const void *weight_, const float *mean, const float *rstd, int64_t N, int64_t C, Stream *stream)
{
    Real *dx = (Real *)dx_;
    const Real *dout = (const Real *)dout_, *x = (const Real *)x_, *weight = (const Real *)weight_;
    float *partial = (float *)scratch;
    if (N < 1) return;
    unsigned most = stream->processors * 4 < PARTIAL_BLOCKS ? (unsigned)stream->processors * 4 : (unsigned)PARTIAL_BLOCKS;
    unsigned blocks = blocks_for(N, 2 * WARPS) < most ? blocks_for(N, 2 * WARPS) : most;
#define BACKWARD(P)                                                                                                         \
    case P: /* wider ones than the registers hold are compiled as the widest that fits, and never chosen */                \
        LAUNCH(KERNEL(layernorm_backward_kernel<Real, (P < MOST ? P : MOST)>), blocks, 32 * WARPS, 2 * (size_t)C * sizeof(float), stream, dx, partial, dout, x, \
               weight, mean, rstd, N, (int)C);                                                                              \
        break
    constexpr int MOST = PACKS_MOST_BACKWARD * (int)sizeof(Real) / 2;
    switch (packs_fit<Real>(C, dx, dout, x, weight) ? packs_for<Real>(C, MOST) : 0) {
        BACKWARD(1);
        BACKWARD(2);
        BACKWARD(3);
        BACKWARD(4);
        BACKWARD(6);
        BACKWARD(8);
    default:
        blocks = blocks_for(N, 64) < 64 ? blocks_for(N, 64) : 64;
        LAUNCH(layernorm_backward_general_kernel<Real>, (unsigned)N, GENERAL_THREADS, 0, stream, dx, dout, x, weight, mean, rstd, C);
        LAUNCH(layernorm_columns_kernel<Real>, dim3(blocks_for(C, 32), blocks), dim3(32, 8), 0, stream, partial, dout, x, mean, rstd, N, C);
    }
#undef BACKWARD
    columns_add_cuda(dweight, dbias, partial, blocks, C, 2 * C, stream);
}

#define INSTANTIATE(Real)                                                                                                   \
    template void layernorm_forward_cuda<Real>(void *, float *, float *, const void *, const void *, const void *, int64_t, int64_t, Stream *); \
    template void residual_layernorm_forward_cuda<Real>(void *, void *, float *, float *, const void *, const void *, const void *, \
                                                        const void *, int64_t, int64_t, Stream *);                          \
    template void layernorm_backward_cuda<Real>(void *, float *, float *, void *, const void *, const void *, const void *, const float *, \
                                                const float *, int64_t, int64_t, Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
