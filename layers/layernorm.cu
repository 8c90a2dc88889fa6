/* layernorm.cu - layer normalisation on the GPU, alone or fused with the residual sum before it.
 *
 * Memory-bound, so the aim is to touch each byte once. The stream x is fp32, and so are weight and bias; what products read
 * and write is Real. A lane moves 4 neighbouring elements of either (a quad: 16 bytes of fp32, 8 of bf16), and a row lies in
 * registers:
 *
 *     row (C)   | lane 0 | lane 1 | ... | lane 31 | lane 0 | lane 1 | ...        QUADS quads a lane
 *
 * Forward: a warp owns a row. Read x (and y), write their sum, mean, variance from registers (two passes there: no
 * cancellation), write out. Bytes an element, in bf16: 4 + 2, with the residual sum 4 + 2 + 4 + 2.
 *
 * Backward: with n = (x - mean) * rstd and g = dout * weight, dx = dresid + rstd * (g - mean(g) - n * mean(g n)): the row in
 * registers again, of one warp or, where it is too wide, of a team of 2 or 4. Bytes an element, in bf16: 4 + 2 + 4 read,
 * 4 + 2 written. dweight += sum over rows of dout * n and dbias += sum of dout: each warp keeps its share of both in
 * registers over all the rows it walks, the warps of a block are added through shared memory, the blocks through `scratch`,
 * always in the same order: the same bits on every run, and no atomics. Source of the formulas: layernorm.c.
 *
 * There is one block for each multiprocessor, with as many warps as its registers allow. More blocks than fit would take a
 * second turn with most of the chip idle (528 blocks on 396 places ran at two thirds of the speed), and each adds its two
 * rows to what is added up in the end. 12 warps with a row of 768 in flight each ask for 92 KB at once, three times what
 * covers the way to memory; a row is some 420 instructions a warp there, 30 us for 65536 rows that take 190 us to move.
 *
 * Rows that are wider than the registers, or that do not divide into quads, take the general kernels: a block a row, single
 * elements, the row read once more for each pass (from L2, mostly).
 */
#include "layers/cuda.h"

#define EPSILON 1e-5f

enum { FORWARD_WARPS = 4, BACKWARD_WARPS = 12, GENERAL_THREADS = 256, GENERAL_BLOCKS = 64, COLUMN_WARPS = 32 };

/* Most quads a lane that the register kernels hold. Backward has two fp32 sums beside each element of x, dout and dresid. */
enum { QUADS_MOST_FORWARD = 16, QUADS_MOST_BACKWARD = 6 };

template <typename Real> using Quad = Pack<Real, 4>;

/* Do rows of C elements divide into quads, of Real at reals, of fp32 at floats? Both are addresses or'ed together. */
template <typename Real>
static bool quads_fit(int64_t C, uintptr_t floats, uintptr_t reals)
{
    return C % 4 == 0 && floats % sizeof(Quad<float>) == 0 && reals % sizeof(Quad<Real>) == 0;
}

/* --- forward ----------------------------------------------------------------------------------------------------------- */

/* Does channel c, in quad q of QUADS, lie within the row? Kernels are compiled for 1 to 4 quads and at most 3 apart from
 * there, so only of the last 3 it is a question. */
template <int QUADS>
static __device__ __forceinline__ bool within(int q, int c, int C) { return q + (QUADS > 4 ? 3 : 1) < QUADS || c < C; }

/* sum = x + y (where RESIDUAL, else x is the row), out = layernorm(sum). A warp a row. */
template <typename Real, int QUADS, bool RESIDUAL>
__global__ void layernorm_forward_kernel(float *sum, Real *out, float *mean, float *rstd, const float *x, const Real *y,
                                         const float *weight, const float *bias, int64_t N, int C)
{
    int64_t row = (int64_t)blockIdx.x * FORWARD_WARPS + threadIdx.x / 32;
    int channel = threadIdx.x % 32 * 4;
    if (row >= N) return;
    Raw<float, 4> in[QUADS], w[QUADS], b[QUADS];
    Raw<Real, 4> other[QUADS];
    float value[QUADS][4], total = 0, square = 0;
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int c = channel + q * 128;
        in[q] = raw_load<float, 4>(x + row * C + c, within<QUADS>(q, c, C));
        if (RESIDUAL) other[q] = raw_load<Real, 4>(y + row * C + c, within<QUADS>(q, c, C));
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) { /* asked for before the row's sums are waited for */
        int c = channel + q * 128;
        w[q] = raw_load<float, 4>(weight + c, within<QUADS>(q, c, C));
        b[q] = raw_load<float, 4>(bias + c, within<QUADS>(q, c, C));
    }
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            value[q][i] = RESIDUAL ? raw_at(in[q], i) + raw_at(other[q], i) : raw_at(in[q], i);
            total += value[q][i];
        }
        int c = channel + q * 128;
        if (RESIDUAL && within<QUADS>(q, c, C)) pack_store<float, 4>(sum + row * C + c, value[q]);
    }
    float m = warp_sum(total) / (float)C;
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        if (within<QUADS>(q, channel + q * 128, C))
#pragma unroll
            for (int i = 0; i < 4; i++) square += (value[q][i] - m) * (value[q][i] - m);
    float s = 1.0f / sqrtf(warp_sum(square) / (float)C + EPSILON);
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int c = channel + q * 128;
#pragma unroll
        for (int i = 0; i < 4; i++) value[q][i] = (value[q][i] - m) * s * raw_at(w[q], i) + raw_at(b[q], i);
        if (within<QUADS>(q, c, C)) pack_store<Real, 4>(out + row * C + c, value[q]);
    }
    if (channel == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

/* The same for any C and alignment: a block a row. */
template <typename Real, bool RESIDUAL>
__global__ void layernorm_forward_general_kernel(float *sum, Real *out, float *mean, float *rstd, const float *x,
                                                 const Real *y, const float *weight, const float *bias, int64_t C)
{
    SHARED(float, room, 32);
    int64_t row = blockIdx.x;
    const float *in = RESIDUAL ? sum + row * C : x + row * C;
    float total = 0, square = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float value = x[row * C + c];
        if (RESIDUAL) {
            value += to_float(y[row * C + c]);
            sum[row * C + c] = value;
        }
        total += value;
    }
    float m = block_sum(total, room) / (float)C;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) square += (in[c] - m) * (in[c] - m);
    float s = 1.0f / sqrtf(block_sum(square, room) / (float)C + EPSILON);
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        out[row * C + c] = from_float<Real>((in[c] - m) * s * weight[c] + bias[c]);
    if (threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

/* Quads a lane for rows of C that `lanes` lanes share. */
static int quads_for(int64_t C, int64_t lanes) { return (int)((C + 4 * lanes - 1) / (4 * lanes)); }

template <typename Real, bool RESIDUAL>
static void forward(float *sum, Real *out, float *mean, float *rstd, const float *x, const Real *y, const float *weight,
                    const float *bias, int64_t N, int64_t C, Stream *stream)
{
    int quads = quads_for(C, 32);
    unsigned grid = blocks_for(N, FORWARD_WARPS);
    if (!quads_fit<Real>(C, (uintptr_t)sum | (uintptr_t)x | (uintptr_t)weight | (uintptr_t)bias,
                         (uintptr_t)out | (uintptr_t)y))
        quads = QUADS_MOST_FORWARD + 1;
#define FORWARD(Q)                                                                                                          \
    if (quads <= Q) {                                                                                                       \
        LAUNCH(KERNEL(layernorm_forward_kernel<Real, Q, RESIDUAL>), grid, 32 * FORWARD_WARPS, 0, stream, sum, out, mean,    \
               rstd, x, y, weight, bias, N, (int)C);                                                                        \
        return;                                                                                                             \
    }
    FORWARD(1)
    FORWARD(2)
    FORWARD(3)
    FORWARD(4)
    FORWARD(6)
    FORWARD(8)
    FORWARD(10)
    FORWARD(13)
    FORWARD(QUADS_MOST_FORWARD)
#undef FORWARD
    LAUNCH(KERNEL(layernorm_forward_general_kernel<Real, RESIDUAL>), (unsigned)N, GENERAL_THREADS, 0, stream, sum, out, mean,
           rstd, x, y, weight, bias, C);
}

template <typename Real>
void layernorm_forward_cuda(void *out, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                            int64_t N, int64_t C, Stream *stream)
{
    forward<Real, false>(NULL, (Real *)out, mean, rstd, x, NULL, weight, bias, N, C, stream);
}

template <typename Real>
void residual_layernorm_forward_cuda(float *sum, void *out, float *mean, float *rstd, const float *x, const void *y,
                                     const float *weight, const float *bias, int64_t N, int64_t C, Stream *stream)
{
    forward<Real, true>(sum, (Real *)out, mean, rstd, x, (const Real *)y, weight, bias, N, C, stream);
}

/* --- backward ---------------------------------------------------------------------------------------------------------- */

/* Rows that a team has under way at once, where a lane has `quads` of each: several of narrow ones, or too few bytes would
 * be. */
static __host__ __device__ constexpr int rows_of(int quads) { return quads == 1 ? 4 : quads <= 3 ? 2 : 1; }

/* What the backward kernels read and write: see layernorm_backward in backend.h. */
template <typename Real>
struct NormBackward {
    float *dx;           /* (N,C) */
    Real *rounded;       /* (N,C) or NULL */
    const float *dresid; /* (N,C) or NULL */
    const Real *dout;    /* (N,C) */
    const float *x;      /* (N,C) */
    const float *weight; /* (C) */
    const float *mean, *rstd; /* (N) */
    int64_t N;
    int C;
};

/* dx and rounded; partial (gridDim.x, 2, C) = this block's dweight and dbias. TEAM warps share a row and take ROWS rows at a
 * time; a block's teams walk the rows in strides. All loads of those rows are under way before the first is used, and dout
 * stays packed until then: the sums for dweight and dbias leave few registers for anything else. Dynamic shared memory:
 * (BACKWARD_WARPS / TEAM) * C floats for those sums in the end, and behind them the weights (C) and, for the sums over a
 * row, two sets of 2 * ROWS * BACKWARD_WARPS floats. */
template <typename Real, int QUADS, int TEAM>
__global__ void __launch_bounds__(32 * BACKWARD_WARPS, 1)
layernorm_backward_kernel(float *partial, const NormBackward<Real> a)
{
    constexpr int TEAMS = BACKWARD_WARPS / TEAM, ROWS = rows_of(QUADS), STEP = TEAMS * ROWS;
    constexpr int STRIDE = 32 * TEAM * 4; /* channels from a lane's quad to its next */
    const int C = a.C, warp = threadIdx.x / 32, team = warp / TEAM, channel = threadIdx.x % (32 * TEAM) * 4;
    Shared<float> sums = shared_dynamic<float>(0, (size_t)TEAMS * C);
    Shared<float> weights = shared_dynamic<float>((size_t)TEAMS * C * sizeof(float), (size_t)C);
    Shared<float> halves = shared_dynamic<float>((size_t)(TEAMS + 1) * C * sizeof(float), 2 * 2 * ROWS * BACKWARD_WARPS);
    Quad<float> dw[QUADS], db[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; q++)
#pragma unroll
        for (int i = 0; i < 4; i++) dw[q].v[i] = db[q].v[i] = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) weights[c] = a.weight[c];
    __syncthreads();

    const float inverse = 1.0f / (float)C;
    int set = 0; /* which of two sets of halves */
    for (int64_t first = (int64_t)blockIdx.x * STEP; first < a.N; first += (int64_t)gridDim.x * STEP, set ^= 1) {
        const int64_t row = first + team * ROWS; /* and ROWS - 1 that follow */
        if (TEAM == 1 && row >= a.N) break;      /* wider teams wait for each other, and go through the motions */
        Raw<float, 4> in[ROWS][QUADS], old[ROWS][QUADS];
        Raw<Real, 4> gradient[ROWS][QUADS];
        float norm[ROWS][QUADS][4], m[ROWS], s[ROWS], sum_g[ROWS], sum_gn[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const bool there = (TEAM == 1 && r == 0) || row + r < a.N;
            const int64_t at = (row + r) * C + channel;
            m[r] = there ? a.mean[row + r] : 0.0f;
            s[r] = there ? a.rstd[row + r] : 0.0f;
            sum_g[r] = sum_gn[r] = 0;
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                const bool wanted = there && (q + 1 < QUADS || channel + q * STRIDE < C);
                in[r][q] = raw_load<float, 4>(a.x + at + q * STRIDE, wanted);
                gradient[r][q] = raw_load<Real, 4>(a.dout + at + q * STRIDE, wanted);
                old[r][q] = a.dresid ? raw_load<float, 4>(a.dresid + at + q * STRIDE, wanted) : Raw<float, 4>();
            }
        }
#pragma unroll
        for (int q = 0; q < QUADS; q++) { /* what is beyond the row or the last one has a dout of 0, and adds nothing */
            const int c = channel + q * STRIDE;
            const Quad<float> w = shared_load<Quad<float>>(weights + (q + 1 < QUADS || c < C ? c : 0));
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float d = raw_at(gradient[r][q], i), g = d * w.v[i], n = (raw_at(in[r][q], i) - m[r]) * s[r];
                    norm[r][q][i] = n;
                    dw[q].v[i] += d * n;
                    db[q].v[i] += d;
                    sum_g[r] += g;
                    sum_gn[r] += g * n;
                }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            sum_g[r] = warp_sum(sum_g[r]);
            sum_gn[r] = warp_sum(sum_gn[r]);
        }
        if (TEAM > 1) { /* a set is written again after two barriers: all have read it by then */
            Shared<float> half = halves + set * 2 * ROWS * BACKWARD_WARPS;
            if (threadIdx.x % 32 == 0)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    half[(2 * r) * BACKWARD_WARPS + warp] = sum_g[r];
                    half[(2 * r + 1) * BACKWARD_WARPS + warp] = sum_gn[r];
                }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                sum_g[r] = sum_gn[r] = 0;
#pragma unroll
                for (int i = 0; i < TEAM; i++) {
                    sum_g[r] += half[(2 * r) * BACKWARD_WARPS + team * TEAM + i];
                    sum_gn[r] += half[(2 * r + 1) * BACKWARD_WARPS + team * TEAM + i];
                }
            }
        }
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int c = channel + q * STRIDE;
            if (q + 1 == QUADS && c >= C) continue;
            const Quad<float> w = shared_load<Quad<float>>(weights + c);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if ((TEAM > 1 || r > 0) && row + r >= a.N) continue;
                const float shift = -s[r] * (sum_g[r] * inverse), slope = -s[r] * (sum_gn[r] * inverse);
                float updated[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    updated[i] = fmaf(norm[r][q][i], slope,
                                      fmaf(raw_at(gradient[r][q], i) * w.v[i], s[r], raw_at(old[r][q], i) + shift));
                pack_store<float, 4>(a.dx + (row + r) * C + c, updated);
                if (sizeof(Real) < sizeof(float) && a.rounded) pack_store<Real, 4>(a.rounded + (row + r) * C + c, updated);
            }
        }
    }

    for (int half = 0; half < 2; half++) { /* dweight, then dbias: each thread adds the teams' shares of some channels */
        __syncthreads();
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int c = channel + q * STRIDE;
            if (q + 1 < QUADS || c < C) shared_store(sums + team * C + c, half ? db[q] : dw[q]);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            float total = 0;
#pragma unroll
            for (int t = 0; t < TEAMS; t++) total += sums[t * C + c];
            partial[((int64_t)blockIdx.x * 2 + half) * C + c] = total;
        }
    }
}

/* dx and rounded for any C: a block a row. */
template <typename Real>
__global__ void layernorm_backward_general_kernel(const NormBackward<Real> a)
{
    SHARED(float, room, 32);
    const int64_t C = a.C, at = blockIdx.x * C;
    float m = a.mean[blockIdx.x], s = a.rstd[blockIdx.x], sum_g = 0, sum_gn = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float g = to_float(a.dout[at + c]) * a.weight[c];
        sum_g += g;
        sum_gn += g * (a.x[at + c] - m) * s;
    }
    sum_g = block_sum(sum_g, room) / (float)C;
    sum_gn = block_sum(sum_gn, room) / (float)C;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
        float g = to_float(a.dout[at + c]) * a.weight[c], norm = (a.x[at + c] - m) * s;
        float value = (a.dresid ? a.dresid[at + c] : 0.0f) + s * (g - sum_g - norm * sum_gn);
        a.dx[at + c] = value;
        if (sizeof(Real) < sizeof(float) && a.rounded) a.rounded[at + c] = from_float<Real>(value);
    }
}

/* partial (gridDim.y, 2, C): this block's rows, for 32 columns; threads (32, 8). */
template <typename Real>
__global__ void layernorm_columns_kernel(float *partial, const NormBackward<Real> a)
{
    SHARED(float, dw, 8 * 32);
    SHARED(float, db, 8 * 32);
    const int64_t C = a.C, c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float w = 0, b = 0;
    if (c < C)
        for (int64_t row = (int64_t)blockIdx.y * 8 + threadIdx.y; row < a.N; row += (int64_t)gridDim.y * 8) {
            float g = to_float(a.dout[row * C + c]);
            w += g * (a.x[row * C + c] - a.mean[row]) * a.rstd[row];
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

/* a (n) += sum over rows of src (rows, stride) from column 0, b (n) from column n, where b is not NULL: threads (32,
 * COLUMN_WARPS), a block takes 32 columns, blockIdx.y picks a or b. */
__global__ void columns_add_kernel(float *a, float *b, const float *src, int64_t rows, int64_t n, int64_t stride)
{
    SHARED(float, part, COLUMN_WARPS * 32);
    float *dst = blockIdx.y ? b : a;
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float sum = threadIdx.y == 0 && c < n ? dst[c] : 0.0f;
    if (c < n)
        for (int64_t row = threadIdx.y; row < rows; row += COLUMN_WARPS) sum += src[row * stride + blockIdx.y * n + c];
    part[threadIdx.y * 32 + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= n) return;
    for (int i = 1; i < COLUMN_WARPS; i++) sum += part[i * 32 + threadIdx.x];
    dst[c] = sum;
}

void columns_add_cuda(float *a, float *b, const float *src, int64_t rows, int64_t n, int64_t stride, Stream *stream)
{
    LAUNCH(columns_add_kernel, dim3(blocks_for(n, 32), b ? 2 : 1), dim3(32, COLUMN_WARPS), 0, stream, a, b, src, rows, n,
           stride);
}

/* Blocks of the backward kernels, at most: scratch has two rows for each. */
enum { BACKWARD_BLOCKS = 1024 };

size_t layernorm_scratch_cuda(int64_t N, int64_t C)
{
    (void)N;
    return (size_t)BACKWARD_BLOCKS * 2 * (size_t)C * sizeof(float);
}

/* Launches the register kernel where there is one for rows of C; returns its blocks, 0 where there is none. */
template <typename Real>
static unsigned backward_registers(float *partial, const NormBackward<Real> &a, Stream *stream)
{
    uintptr_t floats = (uintptr_t)a.dx | (uintptr_t)a.dresid | (uintptr_t)a.x,
              reals = (uintptr_t)a.dout | (uintptr_t)a.rounded;
    int team = 1;
    while (team < 4 && quads_for(a.C, 32 * team) > QUADS_MOST_BACKWARD) team *= 2;
    int quads = quads_for(a.C, 32 * team), rows = rows_of(quads);
    if (quads > QUADS_MOST_BACKWARD || !quads_fit<Real>(a.C, floats, reals)) return 0;
    unsigned blocks = blocks_for(a.N, BACKWARD_WARPS / team * rows), most = (unsigned)stream->processors;
    if (most > BACKWARD_BLOCKS) most = BACKWARD_BLOCKS;
    if (blocks > most) blocks = most;
    size_t shared = ((size_t)(BACKWARD_WARPS / team + 1) * (size_t)a.C + 2 * 2 * (size_t)rows * BACKWARD_WARPS) *
                    sizeof(float);
#define BACKWARD(Q, TEAM)                                                                                                   \
    if (quads == Q && team == TEAM)                                                                                         \
        LAUNCH(KERNEL(layernorm_backward_kernel<Real, Q, TEAM>), blocks, 32 * BACKWARD_WARPS, shared, stream, partial, a);
    BACKWARD(1, 1)
    BACKWARD(2, 1)
    BACKWARD(3, 1)
    BACKWARD(4, 1)
    BACKWARD(5, 1)
    BACKWARD(6, 1)
    BACKWARD(4, 2) /* a wider team has rows of more quads than half of it can hold */
    BACKWARD(5, 2)
    BACKWARD(6, 2)
    BACKWARD(4, 4)
    BACKWARD(5, 4)
    BACKWARD(6, 4)
#undef BACKWARD
    return blocks;
}

template <typename Real>
void layernorm_backward_cuda(float *dx, void *rounded, float *dweight, float *dbias, void *scratch, const float *dresid,
                             const void *dout, const float *x, const float *weight, const float *mean, const float *rstd,
                             int64_t N, int64_t C, Stream *stream)
{
    const NormBackward<Real> a = {dx, (Real *)rounded, dresid, (const Real *)dout, x, weight, mean, rstd, N, (int)C};
    float *partial = (float *)scratch;
    if (N < 1) return;
    unsigned blocks = backward_registers<Real>(partial, a, stream);
    if (!blocks) {
        blocks = blocks_for(N, 64);
        if (blocks > GENERAL_BLOCKS) blocks = GENERAL_BLOCKS;
        LAUNCH(layernorm_backward_general_kernel<Real>, (unsigned)N, GENERAL_THREADS, 0, stream, a);
        LAUNCH(layernorm_columns_kernel<Real>, dim3(blocks_for(C, 32), blocks), dim3(32, 8), 0, stream, partial, a);
    }
    columns_add_cuda(dweight, dbias, partial, blocks, C, 2 * C, stream);
}

#define INSTANTIATE(Real)                                                                                                   \
    template void layernorm_forward_cuda<Real>(void *, float *, float *, const float *, const float *, const float *,       \
                                               int64_t, int64_t, Stream *);                                                 \
    template void residual_layernorm_forward_cuda<Real>(float *, void *, float *, float *, const float *, const void *,     \
                                                        const float *, const float *, int64_t, int64_t, Stream *);          \
    template void layernorm_backward_cuda<Real>(float *, void *, float *, float *, void *, const float *, const void *,     \
                                                const float *, const float *, const float *, const float *, int64_t,        \
                                                int64_t, Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
