/* cublas_v2.h - the one product of cuBLAS that attention/cublas.cu asks for, on a host: plain loops over column-major
 * matrices, sums in fp32 in ascending order. So the kernels, the layouts and the transposes around it can be tested without
 * a GPU. It refuses what the library refuses, and reads C only where beta is not 0. */
#ifndef SIMT_CUBLAS_V2_H
#define SIMT_CUBLAS_V2_H

#include <stdio.h>
#include <stdlib.h>

#include "cublas_api.h"

typedef enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 } cublasGemmAlgo_t;
typedef enum cublasMath_t {
    CUBLAS_DEFAULT_MATH = 0,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16,
} cublasMath_t;
typedef struct cublasContext {
    cudaStream_t stream;
    void *workspace;
    size_t workspace_bytes;
} *cublasHandle_t;

static inline const char *cublasGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS ? "success" : status == CUBLAS_STATUS_INVALID_VALUE ? "invalid value" : "failed";
}
static inline cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    static struct cublasContext context;
    *handle = &context;
    return CUBLAS_STATUS_SUCCESS;
}
/* As in the library, a new stream gives up the workspace. */
static inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    handle->workspace = NULL;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes)
{
    handle->workspace = workspace;
    handle->workspace_bytes = bytes;
    return (uintptr_t)workspace % 256 ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

static inline float cublas_element(const void *data, cudaDataType_t type, long long at)
{
    return type == CUDA_R_16BF ? (float)((const __nv_bfloat16 *)data)[at] : ((const float *)data)[at];
}

/* A product as it was asked for, but for its matrices. */
struct CublasProduct {
    cublasOperation_t op_a, op_b;
    int m, n, k;
    float alpha, beta;
    cudaDataType_t A_type, B_type, C_type;
    int lda, ldb, ldc;
};

static inline bool cublas_refuses(cublasHandle_t handle, const CublasProduct &p)
{
    return !handle->workspace || p.m < 0 || p.n < 0 || p.k < 0 || p.lda < (p.op_a == CUBLAS_OP_N ? p.m : p.k) || p.ldc < p.m ||
           p.ldb < (p.op_b == CUBLAS_OP_N ? p.k : p.n) || p.A_type != p.B_type ||
           (p.A_type == CUDA_R_32F && p.C_type == CUDA_R_16BF);
}

static inline void cublas_multiply(const CublasProduct &p, const void *A, const void *B, void *C)
{
    for (long long j = 0; j < p.n; j++)
        for (long long i = 0; i < p.m; i++) {
            float sum = 0;
            for (long long l = 0; l < p.k; l++)
                sum += cublas_element(A, p.A_type, p.op_a == CUBLAS_OP_N ? i + l * p.lda : l + i * p.lda) *
                       cublas_element(B, p.B_type, p.op_b == CUBLAS_OP_N ? l + j * p.ldb : j + l * p.ldb);
            long long at = i + j * p.ldc;
            sum = p.alpha * sum + (p.beta ? p.beta * cublas_element(C, p.C_type, at) : 0);
            if (p.C_type == CUDA_R_16BF) ((__nv_bfloat16 *)C)[at] = __nv_bfloat16(sum);
            else ((float *)C)[at] = sum;
        }
}

/* Queues `work` behind a fill of the workspace, whose contents no product may rely on. */
template <typename Work>
static inline cublasStatus_t cublas_queue(cublasHandle_t handle, Work work)
{
    void *workspace = handle->workspace;
    size_t bytes = handle->workspace_bytes < 4096 ? handle->workspace_bytes : 4096;
    cudaError_t error = simt_queue(handle->stream, [=] {
        memset(workspace, 0xff, bytes);
        work();
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

/* Arrays of pointers on the device; the library cannot see whether they are aligned, and wants bf16 to be. */
static inline cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                                 int n, int k, const float *alpha, const void *const A[],
                                                 cudaDataType_t A_type, int lda, const void *const B[], cudaDataType_t B_type,
                                                 int ldb, const float *beta, void *const C[], cudaDataType_t C_type, int ldc,
                                                 int count, cublasComputeType_t, cublasGemmAlgo_t)
{
    CublasProduct p = {op_a, op_b, m, n, k, *alpha, *beta, A_type, B_type, C_type, lda, ldb, ldc};
    if (cublas_refuses(handle, p) || count < 0) return CUBLAS_STATUS_INVALID_VALUE;
    return cublas_queue(handle, [=] {
        for (int one = 0; one < count; one++) {
            uintptr_t bits = (A_type == CUDA_R_16BF ? (uintptr_t)A[one] | (uintptr_t)B[one] : 0) |
                             (C_type == CUDA_R_16BF ? (uintptr_t)C[one] : 0);
            if (bits % 16) {
                fprintf(stderr, "cublasGemmBatchedEx: matrix %d of bf16 is not aligned to 16 bytes\n", one);
                abort();
            }
            cublas_multiply(p, A[one], B[one], C[one]);
        }
    });
}

static inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                                          const float *alpha, const void *A, cudaDataType_t A_type, int lda, const void *B,
                                          cudaDataType_t B_type, int ldb, const float *beta, void *C, cudaDataType_t C_type,
                                          int ldc, cublasComputeType_t, cublasGemmAlgo_t)
{
    CublasProduct p = {op_a, op_b, m, n, k, *alpha, *beta, A_type, B_type, C_type, lda, ldb, ldc};
    if (cublas_refuses(handle, p)) return CUBLAS_STATUS_INVALID_VALUE;
    return cublas_queue(handle, [=] { cublas_multiply(p, A, B, C); });
}

#endif
