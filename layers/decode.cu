/* decode.cu - attention of one new query a sequence over a cache of keys and values, on the GPU.
 *
 * A block has one head of one sequence. Its threads stand in groups of `lanes`, as many as it takes to read a row of HS
 * numbers 16 bytes each; a group walks over every groups-th key, KEYS of them under way at a time, and keeps a running
 * maximum, a running sum and its own share of the result in registers (an online softmax a group). At the end the groups
 * meet in shared memory, where each thread adds up one channel.
 *
 *     HS 64, bf16:  8 lanes a key, 32 groups        key 0 1 2 ... 31 | 32 33 ... 63 | 64 ...
 *                                                   group 0 .. 31    | 0 .. 31      | a row of this picture: 4 KB
 *
 * Bytes: all keys and values up to t, once; nothing else grows with t. With few heads and a long text the chip is not filled
 * (12 blocks for one sequence of GPT-2); beside the weights, which are read once a token too, that is little up to some
 * thousands of keys. Rows that do not divide into 16 bytes are read element by element. Of heads wider than SLICE, a block
 * has a slice of the result's channels, and computes all of the logits.
 *
 * The new token's key and value are taken from where the product left them, so nobody waits for their way into the cache.
 */
#include "layers/cuda.h"

enum {
    THREADS = 256,
    SLICE = 256,        /* channels of the result that a block has at most */
    SHARE = SLICE / 32, /* of them a lane's */
    KEYS = 4            /* of a group under way at a time */
};
static_assert(SLICE <= THREADS, "one thread adds up one channel");

/* WIDTH neighbouring elements; zeros where not wanted. */
template <typename Real, int WIDTH>
static __device__ __forceinline__ Pack<Real, WIDTH> pack_at(const Real *at, bool wanted)
{
    return wanted ? *(const Pack<Real, WIDTH> *)at : Pack<Real, WIDTH>();
}

/* Real copied from qkv (n,3,NH,HS) to the keys and values of sequences first.. of cache (S,2,NH,T,HS). */
template <typename Real, int WIDTH>
__global__ void cache_fill_kernel(Real *cache, const Real *qkv, int64_t first, int64_t count, int64_t n, int64_t T,
                                  int64_t NH, int64_t HS)
{
    const int64_t packs = HS / WIDTH, total = count * 2 * NH * n * packs;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t d = i % packs * WIDTH, row = i / packs % n, head = i / packs / n; /* head: (sequence, part, h) */
        int64_t h = head % NH, part = head / NH % 2;
        const Pack<Real, WIDTH> *from = (const Pack<Real, WIDTH> *)(qkv + ((row * 3 + 1 + part) * NH + h) * HS + d);
        *(Pack<Real, WIDTH> *)(cache + ((first * 2 * NH + head) * T + row) * HS + d) = *from;
    }
}

template <typename Real>
void cache_fill_cuda(void *cache, const void *qkv, int64_t first, int64_t count, int64_t n, int64_t T, int64_t NH,
                     int64_t HS, Stream *stream)
{
    const int WIDTH = PackWidth<Real>::value;
    const int64_t total = count * 2 * NH * n * HS;
    if (packs_fit<Real>(HS, cache, qkv))
        LAUNCH(KERNEL(cache_fill_kernel<Real, WIDTH>), blocks_resident(total / WIDTH, THREADS, stream, 8), THREADS, 0,
               stream, (Real *)cache, (const Real *)qkv, first, count, n, T, NH, HS);
    else
        LAUNCH(KERNEL(cache_fill_kernel<Real, 1>), blocks_resident(total, THREADS, stream, 8), THREADS, 0, stream,
               (Real *)cache, (const Real *)qkv, first, count, n, T, NH, HS);
}

/* Adds the groups' shares of channel d together: out = sum_g exp(largest_g - M) share_g[d] / sum_g exp(largest_g - M) sum_g.
 * A group without keys has the maximum -inf and the sum 0. */
template <int WIDTH>
static __device__ __forceinline__ float groups_join(int d, Shared<float> shares, Shared<float> maxima, Shared<float> sums,
                                                    int lanes)
{
    const int pack = d / WIDTH, place = pack % lanes * SHARE + pack / lanes * WIDTH + d % WIDTH, groups = THREADS / lanes;
    float largest = -INFINITY, total = 0, result = 0;
    for (int g = 0; g < groups; g++) largest = fmaxf(largest, maxima[g]);
    for (int g = 0; g < groups; g++) {
        float own = maxima[g], weight = own == -INFINITY ? 0.0f : expf(own - largest);
        total += weight * sums[g];
        result += weight * shares[g * lanes * SHARE + place];
    }
    return result / total;
}

/* Grid (B*NH, slices of HS). out (B,NH,HS), cache (.,2,NH,T,HS), qkv (B,3,NH,HS). */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(THREADS)
cache_attend_kernel(Real *out, Real *cache, const Real *qkv, float scale, int t, int64_t T, int NH, int HS, int lanes)
{
    SHARED(float, shares, THREADS * SHARE);
    SHARED(float, maxima, THREADS);
    SHARED(float, sums, THREADS);
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = THREADS / lanes;
    const int64_t b = blockIdx.x / NH, h = blockIdx.x % NH, C = (int64_t)NH * HS;
    const int first = blockIdx.y * SLICE, last = first + SLICE < HS ? first + SLICE : HS;
    const Real *query = qkv + b * 3 * C + h * HS, *new_key = query + C, *new_value = query + 2 * C;
    Real *keys = cache + (2 * b * NH + h) * T * HS, *values = keys + NH * T * HS;
    for (int d = threadIdx.x; blockIdx.y == 0 && d < HS; d += THREADS) {
        keys[(int64_t)t * HS + d] = new_key[d];
        values[(int64_t)t * HS + d] = new_value[d];
    }

    float largest = -INFINITY, sum = 0, share[SHARE];
#pragma unroll
    for (int c = 0; c < SHARE; c++) share[c] = 0;
    for (int base = 0; base <= t; base += KEYS * groups) { /* the same rounds for all groups: they share warps */
        float logit[KEYS], newest = largest;
#pragma unroll
        for (int k = 0; k < KEYS; k++) logit[k] = 0;
        for (int d = lane * WIDTH; d < HS; d += lanes * WIDTH) {
            Pack<Real, WIDTH> q = pack_at<Real, WIDTH>(query + d, true), key[KEYS];
#pragma unroll
            for (int k = 0; k < KEYS; k++) {
                int j = base + k * groups + group;
                key[k] = pack_at<Real, WIDTH>(j < t ? keys + (int64_t)j * HS + d : new_key + d, j <= t);
            }
#pragma unroll
            for (int k = 0; k < KEYS; k++)
#pragma unroll
                for (int i = 0; i < WIDTH; i++) logit[k] += to_float(q.v[i]) * to_float(key[k].v[i]);
        }
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            for (int step = lanes / 2; step; step >>= 1) logit[k] += __shfl_xor_sync(0xffffffffu, logit[k], step);
            logit[k] *= scale;
            if (base + k * groups + group <= t) newest = fmaxf(newest, logit[k]);
        }
        float fade = largest == newest ? 1.0f : expf(largest - newest);
        sum *= fade;
#pragma unroll
        for (int c = 0; c < SHARE; c++) share[c] *= fade;
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            int j = base + k * groups + group;
            float weight = j <= t ? expf(logit[k] - newest) : 0.0f;
            sum += weight;
#pragma unroll
            for (int c = 0; c < SHARE; c += WIDTH) {
                int d = first + (c / WIDTH * lanes + lane) * WIDTH;
                Pack<Real, WIDTH> value = pack_at<Real, WIDTH>(j < t ? values + (int64_t)j * HS + d : new_value + d,
                                                               j <= t && d < last);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) share[c + i] += weight * to_float(value.v[i]);
            }
        }
        largest = newest;
    }
#pragma unroll
    for (int c = 0; c < SHARE; c++) shares[threadIdx.x * SHARE + c] = share[c];
    if (lane == 0) {
        maxima[group] = largest;
        sums[group] = sum;
    }
    __syncthreads();
    if (first + (int)threadIdx.x < last)
        out[b * C + h * HS + first + threadIdx.x] =
            from_float<Real>(groups_join<WIDTH>(threadIdx.x, shares, maxima, sums, lanes));
}

/* The smallest power of two, at most a warp, of lanes that read a row of `packs` packs at once. */
static int lanes_for(int64_t packs)
{
    int lanes = 1;
    while (lanes < packs && lanes < 32) lanes *= 2;
    return lanes;
}

template <typename Real>
void cache_attend_cuda(void *out, void *cache, const void *qkv, float scale, int64_t B, int64_t t, int64_t T, int64_t NH,
                       int64_t HS, Stream *stream)
{
    const int WIDTH = PackWidth<Real>::value;
    const dim3 grid((unsigned)(B * NH), blocks_for(HS, SLICE));
    if (packs_fit<Real>(HS, cache, qkv))
        LAUNCH(KERNEL(cache_attend_kernel<Real, WIDTH>), grid, THREADS, 0, stream, (Real *)out, (Real *)cache,
               (const Real *)qkv, scale, (int)t, T, (int)NH, (int)HS, lanes_for(HS / WIDTH));
    else
        LAUNCH(KERNEL(cache_attend_kernel<Real, 1>), grid, THREADS, 0, stream, (Real *)out, (Real *)cache, (const Real *)qkv,
               scale, (int)t, T, (int)NH, (int)HS, lanes_for(HS));
}

#define INSTANTIATE(Real)                                                                                                   \
    template void cache_fill_cuda<Real>(void *, const void *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,        \
                                        Stream *);                                                                         \
    template void cache_attend_cuda<Real>(void *, void *, const void *, float, int64_t, int64_t, int64_t, int64_t, int64_t, \
                                          Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
