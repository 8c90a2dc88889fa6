/* cublas_v2.h - the one product of cuBLAS that attention/cublas.cu asks for, on a host: plain loops over column-major
 * matrices, sums in fp32 in ascending order. So the kernels, the layouts and the transposes around it can be tested without
 * a GPU. It refuses what the library refuses, and reads C only where beta is not 0. */
#ifndef SIMT_CUBLAS_V2_H
#define SIMT_CUBLAS_V2_H

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

static inline cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                                 int n, int k, const float *alpha, const void *const A[],
                                                 cudaDataType_t A_type, int lda, const void *const B[], cudaDataType_t B_type,
                                                 int ldb, const float *beta, void *const C[], cudaDataType_t C_type, int ldc,
                                                 int count, cublasComputeType_t, cublasGemmAlgo_t)
{
    if (!handle->workspace || m < 0 || n < 0 || k < 0 || count < 0 || lda < (op_a == CUBLAS_OP_N ? m : k) || ldc < m ||
        ldb < (op_b == CUBLAS_OP_N ? k : n) || A_type != B_type || (A_type == CUDA_R_32F && C_type == CUDA_R_16BF))
        return CUBLAS_STATUS_INVALID_VALUE;
    float a = *alpha, b = *beta;
    void *workspace = handle->workspace;
    size_t workspace_bytes = handle->workspace_bytes < 4096 ? handle->workspace_bytes : 4096;
    cudaError_t error = simt_queue(handle->stream, [=] {
        memset(workspace, 0xff, workspace_bytes);
        for (int one = 0; one < count; one++)
            for (long long j = 0; j < n; j++)
                for (long long i = 0; i < m; i++) {
                    float sum = 0;
                    for (long long l = 0; l < k; l++)
                        sum += cublas_element(A[one], A_type, op_a == CUBLAS_OP_N ? i + l * lda : l + i * lda) *
                               cublas_element(B[one], B_type, op_b == CUBLAS_OP_N ? l + j * ldb : j + l * ldb);
                    long long at = i + j * ldc;
                    sum = a * sum + (b ? b * cublas_element(C[one], C_type, at) : 0);
                    if (C_type == CUDA_R_16BF) ((__nv_bfloat16 *)C[one])[at] = __nv_bfloat16(sum);
                    else ((float *)C[one])[at] = sum;
                }
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

#endif
