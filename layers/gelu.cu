/* gelu.cu - GELU in its tanh form, and its derivative, on the GPU; and the conversions between fp32 and Real.
 *
 * Used where no product is near to be fused with: recomputation in the backward pass, and products whose library epilogue
 * does not exist for their shape. Formulas: gelu.c.
 */
#include "layers/cuda.h"

enum { THREADS = 256 };

#define GELU_SCALE 0.7978845608028654f /* sqrt(2/pi) */
#define GELU_CUBIC 0.044715f

struct GeluForward {
    __device__ float operator()(float, float x) const
    {
        return 0.5f * x * (1.0f + tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x)));
    }
};

struct GeluBackward {
    __device__ float operator()(float dx, float x) const
    {
        float t = tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x));
        float slope = (1.0f - t * t) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);
        return dx * (0.5f * (1.0f + t) + 0.5f * x * slope);
    }
};

struct Copy {
    __device__ float operator()(float, float x) const { return x; }
};

/* out (n) = f(out, in (n)), element by element. READ_OUT: f uses what out held. */
template <typename Out, typename In, int WIDTH, bool READ_OUT, typename Function>
__global__ void map_kernel(Out *out, const In *in, int64_t n)
{
    Function f;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH; i < n;
         i += (int64_t)gridDim.x * blockDim.x * WIDTH) {
        float x[WIDTH], y[WIDTH];
        pack_load<In, WIDTH>(x, in + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) y[j] = 0;
        if (READ_OUT) pack_load<Out, WIDTH>(y, out + i);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) y[j] = f(y[j], x[j]);
        pack_store<Out, WIDTH>(out + i, y);
    }
}

template <typename Out, typename In, bool READ_OUT, typename Function>
static void map(Out *out, const In *in, int64_t n, Stream *stream)
{
    const int WIDTH = sizeof(Out) < sizeof(In) ? PackWidth<In>::value : PackWidth<Out>::value;
    int64_t packed = ((uintptr_t)out | (uintptr_t)in) % 16 ? 0 : n / WIDTH * WIDTH;
    LAUNCH(KERNEL(map_kernel<Out, In, WIDTH, READ_OUT, Function>), blocks_resident(packed / WIDTH, THREADS, stream, 16),
           THREADS, 0, stream, out, in, packed);
    LAUNCH(KERNEL(map_kernel<Out, In, 1, READ_OUT, Function>), blocks_resident(n - packed, THREADS, stream, 16), THREADS, 0,
           stream, out + packed, in + packed, n - packed);
}

template <typename Real> void gelu_forward_cuda(void *out, const void *pre, int64_t n, Stream *stream)
{
    map<Real, Real, false, GeluForward>((Real *)out, (const Real *)pre, n, stream);
}

template <typename Real> void gelu_backward_cuda(void *dx, const void *pre, int64_t n, Stream *stream)
{
    map<Real, Real, true, GeluBackward>((Real *)dx, (const Real *)pre, n, stream);
}

template <typename Real> void from_fp32_cuda(void *out, const float *in, int64_t n, Stream *stream)
{
    map<Real, float, false, Copy>((Real *)out, in, n, stream);
}

template <typename Real> void to_fp32_cuda(float *out, const void *in, int64_t n, Stream *stream)
{
    map<float, Real, false, Copy>(out, (const Real *)in, n, stream);
}

#define INSTANTIATE(Real)                                                                                                   \
    template void gelu_forward_cuda<Real>(void *, const void *, int64_t, Stream *);                                        \
    template void gelu_backward_cuda<Real>(void *, const void *, int64_t, Stream *);                                       \
    template void from_fp32_cuda<Real>(void *, const float *, int64_t, Stream *);                                          \
    template void to_fp32_cuda<Real>(float *, const void *, int64_t, Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
