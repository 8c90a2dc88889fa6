/* embedding.cu - token and position embedding on the GPU.
 *
 * Forward is a gather of fp32 rows. A thread has one pack of channels at one position: it reads that pack of wpe once for
 * ROWS sequences of the batch and has their rows of wte under way together. Rows are found without a division. The result
 * is marked as not to be kept in the caches, which are left to the rows of frequent tokens.
 *
 *     block:  position t, sequences b, b+1        wpe[t]  +  wte[tokens[b,t]]    -> out[b,t]
 *                                                         +  wte[tokens[b+1,t]]  -> out[b+1,t]
 *
 * Bytes: tokens, the rows of wte that occur (once each; again they come from L2), wpe, and out, by far the most.
 *
 * Backward adds dout's rows up by token: many rows to one row of dwte, a race by nature. Instead of atomics, whose order
 * changes from run to run, it follows a plan that the host made while the step before was computing (embedding_plan in
 * embedding.c): the positions by token, cut into pieces of at most 8, so that no warp walks a long run. (Of 65536 tokens of
 * text some 60% of the positions are of cut tokens, 5000 pieces; the others make 16000 pieces, most of one position.)
 *
 *     piece   | 8 rows of "the" | 8 rows of "the" | ... | 5 rows of "river" | ... | 1 row of "delta" |     a warp each
 *                      |                 |                       |                        |
 *                   partial           partial                +=  dwte                 +=  dwte
 *                      +-------+---------+
 *                          += dwte: a second kernel, which adds up dwpe as well
 *
 * A warp holds all channels of a row in its registers (as far as they reach) and has two rows or more under way, so that the
 * chain of loads that leads to a row, piece and position, costs little beside them. Sums of cut tokens go through `scratch`,
 * always in the same order. dwpe's rows are sums over the batch at fixed positions and need no plan.
 *
 * Bytes of backward: dout twice, once by token and once by position, and the touched rows of dwte and dwpe read and written.
 * (Partial sums are an eighth of dout, and most of it still lies in L2 when it is read.)
 */
#include "layers/cuda.h"

enum {
    THREADS = 256,                     /* of a block of forward, at most */
    ROWS = 2,                          /* sequences that a thread of it serves */
    PIECE_WARPS = 4, PIECE_BLOCKS = 4, /* warps of a block; blocks of a multiprocessor: as many as registers allow */
    QUADS_MOST = 6,                    /* packs of a row that a lane holds */
    SUM_WARPS = 8, SUM_LOADS = 8,      /* the same where partial sums and positions are added up */
    CUT_BLOCKS = 4                     /* blocks for cut tokens, a multiprocessor */
};

/* --- forward ----------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void store_streaming(float *to, const Pack<float, 1> &pack) { __stcs(to, pack.v[0]); }
static __device__ __forceinline__ void store_streaming(float *to, const Pack<float, 4> &pack)
{
    __stcs((float4 *)to, make_float4(pack.v[0], pack.v[1], pack.v[2], pack.v[3]));
}

/* Threads (packs, positions). blockIdx.x counts blocks of positions, t_blocks of them, for one group of ROWS sequences after
 * another; blockIdx.y picks blockDim.x packs of a row. */
template <int WIDTH>
__global__ void __launch_bounds__(THREADS)
embedding_forward_kernel(float *out, const int32_t *tokens, const float *wte, const float *wpe, unsigned t_blocks, int64_t B,
                         int64_t T, int64_t C)
{
    typedef Pack<float, WIDTH> Part;
    const int64_t t = (int64_t)(blockIdx.x % t_blocks) * blockDim.y + threadIdx.y;
    const int64_t b = (int64_t)(blockIdx.x / t_blocks) * ROWS;
    const int64_t channel = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
    if (t >= T || channel >= C) return;
    int32_t token[ROWS];
    Part row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) token[r] = b + r < B ? tokens[(b + r) * T + t] : 0;
    const Part position = *(const Part *)(wpe + t * C + channel);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (b + r < B) row[r] = *(const Part *)(wte + token[r] * C + channel);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (b + r < B) {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) row[r].v[j] += position.v[j];
            store_streaming(out + ((b + r) * T + t) * C + channel, row[r]);
        }
}

template <int WIDTH>
static void forward(float *out, const int32_t *tokens, const float *wte, const float *wpe, int64_t B, int64_t T, int64_t C,
                    Stream *stream)
{
    const int64_t packs = (C + WIDTH - 1) / WIDTH, slices = (packs + THREADS - 1) / THREADS;
    const int64_t wide = (packs + slices - 1) / slices, room = THREADS / wide, high = room < T ? room : T;
    const unsigned t_blocks = blocks_for(T, high);
    LAUNCH(embedding_forward_kernel<WIDTH>, dim3(t_blocks * blocks_for(B, ROWS), (unsigned)slices),
           dim3((unsigned)wide, (unsigned)high), 0, stream, out, tokens, wte, wpe, t_blocks, B, T, C);
}

void embedding_forward_cuda(float *out, const int32_t *tokens, const float *wte, const float *wpe, int64_t B, int64_t T,
                            int64_t C, Stream *stream)
{
    if (B * T * C < 1) return;
    if (packs_fit<float>(C, out, wte, wpe)) forward<PackWidth<float>::value>(out, tokens, wte, wpe, B, T, C, stream);
    else forward<1>(out, tokens, wte, wpe, B, T, C, stream);
}

/* --- backward ---------------------------------------------------------------------------------------------------------- */

/* A piece's sum: added to its token's row of dwte where it is all of that token, else left in row p of `partial`. Threads
 * (32, PIECE_WARPS); a warp takes pieces in strides, blockIdx.y picks 32 * QUADS packs of channels. All loads of LOADS rows
 * are under way together. */
template <int WIDTH, int QUADS>
__global__ void __launch_bounds__(32 * PIECE_WARPS, PIECE_BLOCKS)
embedding_pieces_kernel(float *dwte, float *partial, const float *dout, const EmbeddingPlan plan, int64_t C)
{
    constexpr int LOADS = QUADS == 1 ? 8 : QUADS <= 3 ? 4 : 2;
    typedef Pack<float, WIDTH> Part;
    const int32_t pieces = *plan.pieces, cut_pieces = plan.cut[*plan.cuts];
    const int64_t channel = ((int64_t)blockIdx.y * QUADS * 32 + threadIdx.x) * WIDTH;
    for (int32_t p = blockIdx.x * PIECE_WARPS + threadIdx.y; p < pieces; p += gridDim.x * PIECE_WARPS) {
        const int32_t first = plan.begin[p], rows = plan.begin[p + 1] - first;
        const bool whole = p >= cut_pieces; /* all of its token */
        float *to = (whole ? dwte + (int64_t)plan.token[p] * C : partial + (int64_t)p * C) + channel;
        int32_t mine = threadIdx.x < (unsigned)rows ? plan.order[first + threadIdx.x] : 0; /* lane i knows row i */
        Part sum[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            if (whole && channel + q * 32 * WIDTH < C) sum[q] = *(const Part *)(to + q * 32 * WIDTH);
            else
#pragma unroll
                for (int j = 0; j < WIDTH; j++) sum[q].v[j] = 0;
        for (int32_t r = 0; r < rows; r += LOADS) {
            Part row[LOADS][QUADS];
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                const float *from = dout + (int64_t)__shfl_sync(0xffffffffu, mine, r + k) * C + channel;
#pragma unroll
                for (int q = 0; q < QUADS; q++)
                    if (r + k < rows && channel + q * 32 * WIDTH < C) row[k][q] = *(const Part *)(from + q * 32 * WIDTH);
            }
#pragma unroll
            for (int k = 0; k < LOADS; k++)
#pragma unroll
                for (int q = 0; q < QUADS; q++)
                    if (r + k < rows && channel + q * 32 * WIDTH < C)
#pragma unroll
                        for (int j = 0; j < WIDTH; j++) sum[q].v[j] += row[k][q].v[j];
        }
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            if (channel + q * 32 * WIDTH < C) *(Part *)(to + q * 32 * WIDTH) = sum[q];
    }
}

/* to (C) += the sum of `rows` rows of src, `stride` elements apart, for 32 packs of channels from `channel` on. The warps of
 * the block take the rows in strides, SUM_LOADS of them under way, and meet in `room`, SUM_WARPS * 32 * WIDTH floats, where
 * the first adds them up. */
template <int WIDTH>
static __device__ __forceinline__ void rows_add(float *to, const float *src, int64_t stride, int rows, int64_t channel,
                                                int64_t C, Shared<float> room)
{
    typedef Pack<float, WIDTH> Part;
    const int warps = blockDim.y;
    const int64_t mine = channel + threadIdx.x * WIDTH;
    const bool first = threadIdx.y == 0 && mine < C;
    Part sum, old;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) sum.v[j] = old.v[j] = 0;
    if (first) old = *(const Part *)(to + mine);
    for (int r = threadIdx.y; mine < C && r < rows; r += SUM_LOADS * warps) {
        Part row[SUM_LOADS];
#pragma unroll
        for (int k = 0; k < SUM_LOADS; k++)
            if (r + k * warps < rows) row[k] = *(const Part *)(src + (r + k * warps) * stride + mine);
#pragma unroll
        for (int k = 0; k < SUM_LOADS; k++)
            if (r + k * warps < rows)
#pragma unroll
                for (int j = 0; j < WIDTH; j++) sum.v[j] += row[k].v[j];
    }
    shared_store(room + (threadIdx.y * 32 + threadIdx.x) * WIDTH, sum);
    __syncthreads();
    if (first) {
        for (int w = 0; w < warps; w++) {
            Part share = shared_load<Part>(room + (w * 32 + threadIdx.x) * WIDTH);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) old.v[j] += share.v[j];
        }
        *(Part *)(to + mine) = old;
    }
    __syncthreads();
}

/* The first cut_blocks blocks (of grid.x) add up the pieces of cut tokens, each of the T others a row of dwpe over the
 * batch. Threads (32, up to SUM_WARPS); blockIdx.y picks 32 packs of channels. */
template <int WIDTH>
__global__ void __launch_bounds__(32 * SUM_WARPS, 4)
embedding_sums_kernel(float *dwte, float *dwpe, const float *partial, const float *dout, const EmbeddingPlan plan,
                      int cut_blocks, int64_t B, int64_t T, int64_t C)
{
    SHARED(float, room, SUM_WARPS * 32 * WIDTH);
    const int64_t channel = (int64_t)blockIdx.y * 32 * WIDTH;
    if ((int)blockIdx.x >= cut_blocks) {
        const int64_t t = (int)blockIdx.x - cut_blocks;
        rows_add<WIDTH>(dwpe + t * C, dout + t * C, T * C, (int)B, channel, C, room);
        return;
    }
    const int32_t cuts = *plan.cuts;
    for (int32_t i = blockIdx.x; i < cuts; i += cut_blocks) {
        const int32_t first = plan.cut[i], count = plan.cut[i + 1] - first;
        rows_add<WIDTH>(dwte + (int64_t)plan.token[first] * C, partial + (int64_t)first * C, C, count, channel, C, room);
    }
}

size_t embedding_scratch_cuda(int64_t N, int64_t C) { return (size_t)embedding_cut_pieces(N) * (size_t)C * sizeof(float); }

template <int WIDTH>
static void backward(float *dwte, float *dwpe, float *partial, const float *dout, const int32_t *plan, int64_t B, int64_t T,
                     int64_t C, Stream *stream)
{
    const int64_t N = B * T;
    const EmbeddingPlan parts = embedding_plan_parts(plan, N);
    const int64_t packs = (C + 32 * WIDTH - 1) / (32 * WIDTH); /* a lane, of a row */
    const int64_t slices = (packs + QUADS_MOST - 1) / QUADS_MOST, quads = (packs + slices - 1) / slices;
    const dim3 grid(blocks_resident(N, PIECE_WARPS, stream, PIECE_BLOCKS), (unsigned)slices), threads(32, PIECE_WARPS);
#define PIECES(Q)                                                                                                           \
    case Q: LAUNCH(KERNEL(embedding_pieces_kernel<WIDTH, Q>), grid, threads, 0, stream, dwte, partial, dout, parts, C); break
    switch (quads) {
        PIECES(1);
        PIECES(2);
        PIECES(3);
        PIECES(4);
        PIECES(5);
        PIECES(6);
    }
#undef PIECES
    const unsigned cut_blocks = blocks_resident(N / (EMBEDDING_PIECE + 1), 1, stream, CUT_BLOCKS);
    unsigned shares = blocks_for(B, SUM_LOADS); /* of the batch, each all under way at once */
    if (shares > SUM_WARPS) shares = SUM_WARPS;
    LAUNCH(embedding_sums_kernel<WIDTH>, dim3(cut_blocks + (unsigned)T, (unsigned)packs), dim3(32, shares), 0, stream, dwte,
           dwpe, partial, dout, parts, (int)cut_blocks, B, T, C);
}

void embedding_backward_cuda(float *dwte, float *dwpe, void *scratch, const float *dout, const int32_t *plan, int64_t B,
                             int64_t T, int64_t C, Stream *stream)
{
    float *partial = (float *)scratch;
    if (B * T < 1) return;
    if (packs_fit<float>(C, dwte, dwpe, scratch, dout))
        backward<PackWidth<float>::value>(dwte, dwpe, partial, dout, plan, B, T, C, stream);
    else
        backward<1>(dwte, dwpe, partial, dout, plan, B, T, C, stream);
}
