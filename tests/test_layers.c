/* test_layers.c - every operation of the CPU backend against a plain float64 reference, and every gradient against central
 * differences of the float64 forward pass.
 *
 * A result may miss its reference by so many units of FLT_EPSILON times its magnitude, where the magnitude of a sum is the
 * sum of the absolute values of its terms: what rounding alone can do. The BOUNDS are about three times what was seen over
 * the shapes here. Difference quotients: with h = 1e-4 on inputs near 1 the truncation error h^2 f'''/6 is some 1e-8 where
 * f curves most, and the rounding error 1e-16 f/h some 1e-11; both are far below their bound of 1e-6, and that far below
 * what a wrong gradient does.
 *
 * Outputs that are overwritten hold NaN before the call, those that are added to hold random numbers, and every buffer
 * lies between guard bands.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/random.h"
#include "layers/product.h"
#include "layers/vector.h"
#include "tests/test.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

/* In units of FLT_EPSILON times the magnitude. */
static const struct {
    double embedding, embedding_gradient, norm_mean, norm_rstd, norm_out, norm_gradient, norm_weight_gradient;
    double product, column_sum, exp, gelu, gelu_gradient, loss, loss_gradient, global_norm, adamw;
} BOUNDS = {
    .embedding = 1, .embedding_gradient = 8, .norm_mean = 1, .norm_rstd = 1.5, .norm_out = 3, .norm_gradient = 4,
    .norm_weight_gradient = 5, .product = 12, .column_sum = 5, .exp = 1, .gelu = 4, .gelu_gradient = 4, .loss = 1.5,
    .loss_gradient = 2.5, .global_norm = 1, .adamw = 6,
};

static const double STEP = 1e-4; /* of central differences */

static const Backend *const cpu = &backend_cpu_fp32;

/* --- buffers between guard bands ------------------------------------------------------------------------------------ */

enum { GUARD = 64 };
static const uint32_t GUARD_BITS = 0x7FC0DEADu; /* a NaN that no operation makes */

typedef struct Buffer {
    float *data; /* (n), GUARD more on both sides */
    int64_t n;
} Buffer;

static Buffer buffer_new(int64_t n)
{
    Buffer buffer = {NULL, n};
    uint32_t *raw = malloc((size_t)(n + 2 * GUARD) * sizeof *raw);
    if (!raw) abort();
    for (int64_t i = 0; i < n + 2 * GUARD; i++) raw[i] = GUARD_BITS; /* the inside too: NaN until written */
    buffer.data = (float *)raw + GUARD;
    return buffer;
}

/* Filled with numbers of mean 0.3 and spread 1: errors that a zero mean would hide show. */
static Buffer buffer_random(int64_t n, uint64_t *state)
{
    Buffer buffer = buffer_new(n);
    for (int64_t i = 0; i < n; i++) buffer.data[i] = (float)(random_uniform(state) * 2 - 0.7);
    return buffer;
}

static Buffer buffer_copy(Buffer other)
{
    Buffer buffer = buffer_new(other.n);
    memcpy(buffer.data, other.data, (size_t)other.n * sizeof(float));
    return buffer;
}

/* Frees it after a look at its guards. */
static void buffer_end(Buffer buffer)
{
    uint32_t bits;
    int64_t broken = 0;
    for (int64_t i = 0; i < 2 * GUARD; i++) {
        memcpy(&bits, buffer.data + (i < GUARD ? i - GUARD : buffer.n + i - GUARD), sizeof bits);
        broken += bits != GUARD_BITS;
    }
    CHECK(!broken, "%lld words of a guard band were overwritten", (long long)broken);
    free(buffer.data - GUARD);
}

static double *doubles(int64_t n)
{
    double *data = calloc((size_t)n + 1, sizeof *data);
    if (!data) abort();
    return data;
}

static double *doubles_of(Buffer buffer)
{
    double *data = doubles(buffer.n);
    for (int64_t i = 0; i < buffer.n; i++) data[i] = (double)buffer.data[i];
    return data;
}

/* got (n) misses want (n) by at most bound * FLT_EPSILON * magnitude (n) everywhere. */
static void check_close(const char *what, const float *got, const double *want, const double *magnitude, int64_t n,
                        double bound)
{
    double worst = -1;
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        double miss = fabs((double)got[i] - want[i]) / ((double)FLT_EPSILON * magnitude[i] + (double)FLT_MIN);
        if (!(miss <= worst)) worst = miss, at = i;
        if (isnan(miss)) break;
    }
    CHECK(worst <= bound, "%s[%lld] is %.9g, expected %.9g: off by %.3g units, allowed %.3g", what, (long long)at,
          n ? (double)got[at] : 0, n ? want[at] : 0, worst, bound);
}

static void check_same(const char *what, Buffer a, Buffer b)
{
    CHECK(!memcmp(a.data, b.data, (size_t)a.n * sizeof(float)), "%s differs from the first run", what);
}

/* gradient (n) of objective(context) with respect to input (n), which the objective reads. */
static double *differences(double *input, int64_t n, double (*objective)(const void *), const void *context)
{
    double *gradient = doubles(n);
    for (int64_t i = 0; i < n; i++) {
        double x = input[i];
        input[i] = x + STEP;
        double above = objective(context);
        input[i] = x - STEP;
        gradient[i] = (above - objective(context)) / (2 * STEP);
        input[i] = x;
    }
    return gradient;
}

/* The float64 gradient `want` (n), against which the backend is checked, is that of the float64 forward: it agrees with the
 * difference quotient (n), which is freed. */
static void check_differences(const char *what, const double *want, double *quotient, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) worst = fmax(worst, fabs(want[i] - quotient[i]) / (1 + fabs(quotient[i])));
    CHECK(worst < 1e-6, "the float64 gradient of %s is off its difference quotient by %.3g", what, worst);
    free(quotient);
}

/* --- embedding ------------------------------------------------------------------------------------------------------ */

static void test_embedding(int64_t B, int64_t T, int64_t C, int64_t V, Stream *stream)
{
    TEST("embedding B%lld T%lld C%lld V%lld", (long long)B, (long long)T, (long long)C, (long long)V);
    uint64_t seed = 1;
    int64_t N = B * T;
    Buffer wte = buffer_random(V * C, &seed), wpe = buffer_random((T + 2) * C, &seed), out = buffer_new(N * C);
    Buffer dout = buffer_random(N * C, &seed), dwte = buffer_random(V * C, &seed), dwpe = buffer_random(T * C, &seed);
    Buffer dwte2 = buffer_copy(dwte), dwpe2 = buffer_copy(dwpe);
    double *want = doubles(N * C), *size = doubles(N * C), *want_wte = doubles_of(dwte), *want_wpe = doubles_of(dwpe);
    double *size_wte = doubles(V * C), *size_wpe = doubles(T * C);
    int32_t *tokens = malloc((size_t)(N + 1) * sizeof *tokens);
    int32_t *plan = malloc((size_t)embedding_plan_size(N) * sizeof *plan);
    for (int64_t n = 0; n < N; n++) tokens[n] = n % 3 ? (int32_t)(random_u64(&seed) % (uint64_t)V) : (int32_t)V - 1;
    for (int64_t i = 0; i < V * C; i++) size_wte[i] = fabs(want_wte[i]);
    for (int64_t i = 0; i < T * C; i++) size_wpe[i] = fabs(want_wpe[i]);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            double a = (double)wte.data[tokens[n] * C + c], b = (double)wpe.data[n % T * C + c],
                d = (double)dout.data[n * C + c];
            want[n * C + c] = a + b;
            size[n * C + c] = fabs(a) + fabs(b);
            want_wte[tokens[n] * C + c] += d;
            size_wte[tokens[n] * C + c] += fabs(d);
            want_wpe[n % T * C + c] += d;
            size_wpe[n % T * C + c] += fabs(d);
        }
    cpu->embedding_forward(out.data, tokens, wte.data, wpe.data, B, T, C, stream);
    check_close("out", out.data, want, size, N * C, BOUNDS.embedding);
    embedding_plan(plan, tokens, N);
    cpu->embedding_backward(dwte.data, dwpe.data, NULL, dout.data, plan, B, T, C, stream);
    check_close("dwte", dwte.data, want_wte, size_wte, V * C, BOUNDS.embedding_gradient);
    check_close("dwpe", dwpe.data, want_wpe, size_wpe, T * C, BOUNDS.embedding_gradient);
    cpu->embedding_backward(dwte2.data, dwpe2.data, NULL, dout.data, plan, B, T, C, stream);
    check_same("dwte", dwte2, dwte);
    check_same("dwpe", dwpe2, dwpe);
    Buffer all[] = {wte, wpe, out, dout, dwte, dwpe, dwte2, dwpe2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *sums[] = {want, size, want_wte, want_wpe, size_wte, size_wpe};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) free(sums[i]);
    free(tokens);
    free(plan);
}

/* The plan against its definition, for tokens of one, two and three digits of the radix; the buffer's last word is used, and
 * not the one behind it. */
static void test_embedding_plan(int64_t N, int64_t V)
{
    TEST("embedding plan of %lld tokens below %lld", (long long)N, (long long)V);
    enum { MOST = EMBEDDING_PIECE };
    uint64_t seed = 5;
    int64_t size = embedding_plan_size(N), cut_pieces = 0;
    int32_t *tokens = malloc((size_t)(N + 1) * sizeof *tokens), *rows = calloc((size_t)V, sizeof *rows);
    int32_t *plan = malloc((size_t)(size + 1) * sizeof *plan);
    for (int64_t n = 0; n < N; n++) rows[tokens[n] = (int32_t)(random_u64(&seed) % (uint64_t)V)]++;
    plan[size] = 12345;
    embedding_plan(plan, tokens, N);
    CHECK(plan[size] == 12345, "the plan is larger than embedding_plan_size says");
    EmbeddingPlan p = embedding_plan_parts(plan, N);
    int32_t pieces = *p.pieces, cuts = *p.cuts, at = 0;
    for (int32_t k = 0; k < pieces; k++) {
        int32_t before = k > 0 && p.token[k] == p.token[k - 1] ? p.order[at - 1] : -1;
        CHECK(p.begin[k] == at && p.begin[k + 1] > at && p.begin[k + 1] <= at + MOST,
              "piece %d is from %d to %d, expected from %d", k, p.begin[k], p.begin[k + 1], at);
        for (; at < p.begin[k + 1]; before = p.order[at++]) {
            CHECK(tokens[p.order[at]] == p.token[k], "place %d holds token %d in a piece of %d", at, tokens[p.order[at]],
                  p.token[k]);
            CHECK(p.order[at] > before, "positions %d, %d are out of order", before, p.order[at]);
            rows[p.token[k]]--;
        }
    }
    CHECK(at == N && p.begin[pieces] == N, "the pieces hold %d of %lld positions", at, (long long)N);
    for (int64_t v = 0; v < V; v++) CHECK(rows[v] == 0, "%d positions of token %lld are missing", rows[v], (long long)v);
    CHECK(p.cut[0] == 0, "the first cut token begins at piece %d", p.cut[0]);
    for (int32_t i = 0; i < cuts; cut_pieces = p.cut[++i]) {
        int32_t first = p.cut[i], last = p.cut[i + 1] - 1, least = MOST, most = 0;
        CHECK(last > first, "cut token %d has pieces %d to %d", i, first, last);
        for (int32_t k = first; k <= last; k++) {
            int32_t length = p.begin[k + 1] - p.begin[k];
            CHECK(p.token[k] == p.token[first], "piece %d is of token %d, cut token %d is %d", k, p.token[k], i,
                  p.token[first]);
            if (length < least) least = length;
            if (length > most) most = length;
        }
        CHECK(most - least <= 1, "the pieces of cut token %d have from %d to %d positions", i, least, most);
        CHECK(p.begin[last + 1] - p.begin[first] > MOST, "token %d was cut without need", p.token[first]);
    }
    CHECK(cut_pieces <= embedding_cut_pieces(N), "%lld pieces of cut tokens, at most %lld are said to be",
          (long long)cut_pieces, (long long)embedding_cut_pieces(N));
    for (int64_t k = cut_pieces + 1; k < pieces; k++)
        CHECK(p.begin[k + 1] - p.begin[k] <= p.begin[k] - p.begin[k - 1] && p.token[k] != p.token[k - 1],
              "piece %lld is longer than the one before, or of the same token", (long long)k);
    free(tokens);
    free(rows);
    free(plan);
}

/* --- layer normalisation -------------------------------------------------------------------------------------------- */

/* The float64 layer norm: inputs, and the outputs' weights in the scalar that is differentiated. */
typedef struct Norm {
    double *x, *weight, *bias, *dout; /* (N,C) (C) (C) (N,C) */
    int64_t N, C;
} Norm;

static void norm_statistics(const Norm *norm, int64_t n, double *mean, double *rstd)
{
    const double *x = norm->x + n * norm->C;
    double sum = 0, squares = 0;
    for (int64_t c = 0; c < norm->C; c++) sum += x[c];
    *mean = sum / (double)norm->C;
    for (int64_t c = 0; c < norm->C; c++) squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1 / sqrt(squares / (double)norm->C + 1e-5);
}

static double norm_objective(const void *context)
{
    const Norm *norm = context;
    double total = 0, mean, rstd;
    for (int64_t n = 0; n < norm->N; n++) {
        norm_statistics(norm, n, &mean, &rstd);
        for (int64_t c = 0; c < norm->C; c++) {
            int64_t i = n * norm->C + c;
            total += norm->dout[i] * ((norm->x[i] - mean) * rstd * norm->weight[c] + norm->bias[c]);
        }
    }
    return total;
}

/* dx (N,C) +=, dweight, dbias (C) += in float64, and the magnitudes of all three. */
static void norm_gradient(const Norm *norm, double *dx, double *dweight, double *dbias, double *size_dx,
                          double *size_dweight, double *size_dbias)
{
    int64_t C = norm->C;
    for (int64_t n = 0; n < norm->N; n++) {
        const double *x = norm->x + n * C, *dout = norm->dout + n * C;
        double mean, rstd, mean_g = 0, mean_gn = 0, abs_g = 0, largest = 0;
        norm_statistics(norm, n, &mean, &rstd);
        for (int64_t c = 0; c < C; c++) {
            double g = dout[c] * norm->weight[c];
            mean_g += g / (double)C;
            mean_gn += g * (x[c] - mean) * rstd / (double)C;
            abs_g += fabs(g) / (double)C;
            largest = fmax(largest, (fabs(x[c]) + fabs(mean)) * rstd);
        }
        for (int64_t c = 0; c < C; c++) {
            double g = dout[c] * norm->weight[c], value = (x[c] - mean) * rstd;
            dx[n * C + c] += rstd * (g - mean_g - value * mean_gn);
            size_dx[n * C + c] += rstd * (1 + largest) * (fabs(g) + (1 + fabs(value)) * abs_g);
            dweight[c] += dout[c] * value;
            size_dweight[c] += fabs(dout[c]) * (fabs(x[c]) + fabs(mean)) * rstd;
            dbias[c] += dout[c];
            size_dbias[c] += fabs(dout[c]);
        }
    }
}

static void test_norm_forward(int64_t N, int64_t C, double offset, Stream *stream)
{
    TEST("layernorm forward N%lld C%lld mean %g", (long long)N, (long long)C, offset);
    uint64_t seed = 2;
    Buffer x = buffer_random(N * C, &seed), y = buffer_random(N * C, &seed), weight = buffer_random(C, &seed);
    Buffer bias = buffer_random(C, &seed), out = buffer_new(N * C), mean = buffer_new(N), rstd = buffer_new(N);
    Buffer sum = buffer_new(N * C), out2 = buffer_new(N * C), mean2 = buffer_new(N), rstd2 = buffer_new(N);
    for (int64_t i = 0; i < N * C; i++) x.data[i] += (float)offset;
    for (int64_t i = 0; i < N * C; i++) sum.data[i] = x.data[i] + y.data[i];
    Buffer in = buffer_copy(sum), x2 = buffer_copy(x);
    Norm norm = {doubles_of(in), doubles_of(weight), doubles_of(bias), NULL, N, C};
    double *want = doubles(N * C), *size = doubles(N * C), *means = doubles(N), *rstds = doubles(N), *sizes = doubles(N);
    for (int64_t n = 0; n < N; n++) {
        norm_statistics(&norm, n, &means[n], &rstds[n]);
        for (int64_t c = 0; c < C; c++) {
            double v = norm.x[n * C + c];
            want[n * C + c] = (v - means[n]) * rstds[n] * norm.weight[c] + norm.bias[c];
            size[n * C + c] = (fabs(v) + fabs(means[n])) * rstds[n] * fabs(norm.weight[c]) + fabs(norm.bias[c]);
            sizes[n] = fmax(sizes[n], fabs(v));
        }
    }
    cpu->layernorm_forward(out.data, mean.data, rstd.data, in.data, weight.data, bias.data, N, C, stream);
    check_close("out", out.data, want, size, N * C, BOUNDS.norm_out);
    check_close("mean", mean.data, means, sizes, N, BOUNDS.norm_mean);
    check_close("rstd", rstd.data, rstds, rstds, N, BOUNDS.norm_rstd);
    float *sums[] = {sum.data, x2.data}; /* apart, over x */
    for (int k = 0; k < 2; k++) {
        const float *a = k == 1 ? x2.data : x.data, *b = y.data;
        if (k == 0) for (int64_t i = 0; i < N * C; i++) sum.data[i] = NAN;
        cpu->residual_layernorm_forward(sums[k], out2.data, mean2.data, rstd2.data, a, b, weight.data, bias.data, N, C,
                                        stream);
        CHECK(!memcmp(sums[k], in.data, (size_t)(N * C) * sizeof(float)), "the residual sum differs from x + y (case %d)",
              k);
        check_same("out of residual_layernorm", out2, out);
        check_same("mean of residual_layernorm", mean2, mean);
        check_same("rstd of residual_layernorm", rstd2, rstd);
    }
    Buffer all[] = {x, y, weight, bias, out, mean, rstd, sum, out2, mean2, rstd2, in, x2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {norm.x, norm.weight, norm.bias, want, size, means, rstds, sizes};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
}

static void test_norm_backward(int64_t N, int64_t C, Stream *stream)
{
    TEST("layernorm backward N%lld C%lld", (long long)N, (long long)C);
    uint64_t seed = 3;
    Buffer x = buffer_random(N * C, &seed), weight = buffer_random(C, &seed), bias = buffer_random(C, &seed);
    Buffer dout = buffer_random(N * C, &seed), mean = buffer_new(N), rstd = buffer_new(N), out = buffer_new(N * C);
    Buffer dx = buffer_random(N * C, &seed), dweight = buffer_random(C, &seed), dbias = buffer_random(C, &seed);
    Buffer dx2 = buffer_copy(dx), dweight2 = buffer_copy(dweight), dbias2 = buffer_copy(dbias);
    Buffer scratch = buffer_new((int64_t)(cpu->layernorm_scratch(N, C) / sizeof(float)));
    Norm norm = {doubles_of(x), doubles_of(weight), doubles_of(bias), doubles_of(dout), N, C};
    double *want_x = doubles(N * C), *want_w = doubles(C), *want_b = doubles(C);
    double *size_x = doubles(N * C), *size_w = doubles(C), *size_b = doubles(C);
    norm_gradient(&norm, want_x, want_w, want_b, size_x, size_w, size_b);
    if (N * N * C * C < 200000) {
        check_differences("layernorm's x", want_x, differences(norm.x, N * C, norm_objective, &norm), N * C);
        check_differences("layernorm's weight", want_w, differences(norm.weight, C, norm_objective, &norm), C);
        check_differences("layernorm's bias", want_b, differences(norm.bias, C, norm_objective, &norm), C);
    }
    for (int64_t i = 0; i < N * C; i++) want_x[i] += (double)dx.data[i], size_x[i] += fabs((double)dx.data[i]);
    for (int64_t c = 0; c < C; c++) {
        want_w[c] += (double)dweight.data[c], size_w[c] += fabs((double)dweight.data[c]);
        want_b[c] += (double)dbias.data[c], size_b[c] += fabs((double)dbias.data[c]);
    }
    cpu->layernorm_forward(out.data, mean.data, rstd.data, x.data, weight.data, bias.data, N, C, stream);
    Buffer alone = buffer_new(N * C), none = buffer_new(N * C), apart = buffer_new(N * C), zero = buffer_new(N * C);
    for (int64_t i = 0; i < N * C; i++) zero.data[i] = 0;
    cpu->layernorm_backward(apart.data, NULL, dweight2.data, dbias2.data, scratch.data, dx.data, dout.data, x.data,
                            weight.data, mean.data, rstd.data, N, C, stream);
    cpu->layernorm_backward(dx.data, dx.data, dweight.data, dbias.data, scratch.data, dx.data, dout.data, x.data,
                            weight.data, mean.data, rstd.data, N, C, stream);
    check_close("dx", dx.data, want_x, size_x, N * C, BOUNDS.norm_gradient);
    check_same("dx beside its dresid", apart, dx);
    check_close("dweight", dweight.data, want_w, size_w, C, BOUNDS.norm_weight_gradient);
    check_close("dbias", dbias.data, want_b, size_b, C, BOUNDS.norm_weight_gradient);
    check_same("dweight", dweight2, dweight);
    check_same("dbias", dbias2, dbias);
    cpu->layernorm_backward(dx2.data, NULL, dweight2.data, dbias2.data, scratch.data, dx2.data, dout.data, x.data,
                            weight.data, mean.data, rstd.data, N, C, stream);
    check_same("dx", dx2, dx);
    /* No dresid is one of zeros. */
    cpu->layernorm_backward(alone.data, alone.data, dweight.data, dbias.data, scratch.data, NULL, dout.data, x.data,
                            weight.data, mean.data, rstd.data, N, C, stream);
    cpu->layernorm_backward(none.data, NULL, dweight2.data, dbias2.data, scratch.data, zero.data, dout.data, x.data,
                            weight.data, mean.data, rstd.data, N, C, stream);
    for (int64_t i = 0; i < N * C; i++) alone.data[i] += 0; /* -0 beside 0 */
    check_same("dx without dresid", alone, none);
    Buffer all[] = {x, weight, bias, dout, mean, rstd, out, dx, dweight, dbias, dx2, dweight2, dbias2, scratch,
                    alone, none, apart, zero};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {norm.x, norm.weight, norm.bias, norm.dout, want_x, want_w, want_b, size_x, size_w, size_b};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
}

/* --- linear and GELU ------------------------------------------------------------------------------------------------ */

static double gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

/* By hand, and itself checked against differences. On the far left, where 1 + tanh cancels, through exp. */
static double gelu_slope(double x)
{
    double z = 2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), s = 1 / (1 + exp(-z));
    return s + x * s / (1 + exp(z)) * 2 * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

/* x sigmoid(2u): the same function as gelu(), without its cancellation. */
static double gelu_exact(double x) { return x / (1 + exp(-2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

/* Its relative error on the left is the absolute one of the exponent 2u, which fp32 holds to units of its own size. Results
 * below 1e-37 may be flushed to 0. */
static double gelu_magnitude(double x)
{
    double exponent = x < 0 ? 2 * sqrt(2 / M_PI) * fabs(x + 0.044715 * x * x * x) : 0;
    return fabs(gelu_exact(x)) * (1 + exponent) + 1e-37 / (double)FLT_EPSILON;
}

/* The float64 linear layer: objective sum dout * (x W^T + b), with x = gelu(pre) where pre is given. */
typedef struct Linear {
    double *x, *pre, *weight, *bias, *dout; /* (N,C) (N,C) or NULL (OC,C) (OC) (N,OC) */
    int64_t N, C, OC;
} Linear;

static double linear_objective(const void *context)
{
    const Linear *l = context;
    double total = 0;
    for (int64_t n = 0; n < l->N; n++)
        for (int64_t o = 0; o < l->OC; o++) {
            double sum = l->bias[o];
            for (int64_t c = 0; c < l->C; c++)
                sum += (l->pre ? gelu(l->pre[n * l->C + c]) : l->x[n * l->C + c]) * l->weight[o * l->C + c];
            total += l->dout[n * l->OC + o] * sum;
        }
    return total;
}

/* sum (rows, columns) += left (rows, K) right (K, columns), and the magnitudes; an element of left is left[i*left_row +
 * k*left_k], of right right[k*right_k + j*right_column]. */
static void multiply(double *sum, double *size, const double *left, int64_t left_row, int64_t left_k, const double *right,
                     int64_t right_k, int64_t right_column, int64_t rows, int64_t columns, int64_t K)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            for (int64_t k = 0; k < K; k++) {
                double term = left[i * left_row + k * left_k] * right[k * right_k + j * right_column];
                sum[i * columns + j] += term;
                size[i * columns + j] += fabs(term);
            }
}

static void test_linear_forward(int64_t N, int64_t C, int64_t OC, Stream *stream)
{
    TEST("linear forward N%lld C%lld OC%lld %s", (long long)N, (long long)C, (long long)OC, stream->blas ? "CBLAS" : "own");
    uint64_t seed = 4;
    Buffer x = buffer_random(N * C, &seed), weight = buffer_random(OC * C, &seed), bias = buffer_random(OC, &seed);
    double *dx = doubles_of(x), *dw = doubles_of(weight), *want = doubles(N * OC), *size = doubles(N * OC);
    multiply(want, size, dx, C, 1, dw, 1, C, N, OC, C);
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        Buffer out = buffer_new(N * OC), out2 = buffer_new(N * OC), pre = buffer_new(N * OC), again = buffer_new(N * OC);
        double *after = doubles(N * OC), *size_after = doubles(N * OC);
        const float *b = with_bias ? bias.data : NULL;
        for (int64_t i = 0; i < N * OC && b; i++) want[i] += (double)b[i % OC], size[i] += fabs((double)b[i % OC]);
        cpu->linear_forward(out.data, x.data, weight.data, b, N, C, OC, stream);
        check_close("out", out.data, want, size, N * OC, BOUNDS.product);
        cpu->linear_forward(again.data, x.data, weight.data, b, N, C, OC, stream);
        check_same("out", again, out);
        cpu->linear_gelu_forward(out2.data, pre.data, x.data, weight.data, b, N, C, OC, stream);
        check_same("pre", pre, out);
        for (int64_t i = 0; i < N * OC; i++)
            after[i] = gelu_exact((double)pre.data[i]), size_after[i] = gelu_magnitude((double)pre.data[i]);
        check_close("gelu", out2.data, after, size_after, N * OC, BOUNDS.gelu);
        cpu->gelu_forward(again.data, pre.data, N * OC, stream);
        check_same("gelu_forward", again, out2);
        Buffer all[] = {out, out2, pre, again};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
        free(after);
        free(size_after);
    }
    Buffer all[] = {x, weight, bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {dx, dw, want, size};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
}

static void check_linear_differences(Linear *l, const double *want_x, const double *want_w)
{
    if (l->N * l->C * l->OC * (l->N + l->OC) * l->C > 2000000) return;
    double *want_pre = doubles(l->N * l->C);
    for (int64_t i = 0; i < l->N * l->C; i++) want_pre[i] = want_x[i] * gelu_slope(l->pre[i]);
    check_differences("linear's weight, after GELU", want_w, differences(l->weight, l->OC * l->C, linear_objective, l),
                      l->OC * l->C);
    check_differences("GELU's input", want_pre, differences(l->pre, l->N * l->C, linear_objective, l), l->N * l->C);
    double *pre = l->pre;
    l->pre = NULL;
    check_differences("linear's x", want_x, differences(l->x, l->N * l->C, linear_objective, l), l->N * l->C);
    l->pre = pre;
    free(want_pre);
}

static void test_linear_backward(int64_t N, int64_t C, int64_t OC, Stream *stream)
{
    TEST("linear backward N%lld C%lld OC%lld %s", (long long)N, (long long)C, (long long)OC, stream->blas ? "CBLAS" : "own");
    uint64_t seed = 5;
    Buffer pre = buffer_random(N * C, &seed), x = buffer_new(N * C), weight = buffer_random(OC * C, &seed);
    Buffer dout = buffer_random(N * OC, &seed), dx = buffer_new(N * C), again = buffer_new(N * C);
    Buffer dweight = buffer_random(OC * C, &seed), dbias = buffer_random(OC, &seed);
    Buffer dweight2 = buffer_copy(dweight), dbias2 = buffer_copy(dbias);
    Buffer scratch = buffer_new((int64_t)(cpu->linear_scratch(N, C, OC) / sizeof(float)));
    Linear l = {doubles(N * C), doubles_of(pre), doubles_of(weight), doubles(OC), doubles_of(dout), N, C, OC};
    double *want_x = doubles(N * C), *size_x = doubles(N * C), *want_w = doubles(OC * C), *size_w = doubles(OC * C);
    for (int64_t i = 0; i < N * C; i++) l.x[i] = gelu(l.pre[i]), x.data[i] = (float)l.x[i];
    multiply(want_x, size_x, l.dout, OC, 1, l.weight, C, 1, N, C, OC);
    multiply(want_w, size_w, l.dout, 1, OC, l.x, C, 1, OC, C, N);
    check_linear_differences(&l, want_x, want_w);

    cpu->linear_backward_input(dx.data, dout.data, weight.data, NULL, N, C, OC, stream);
    check_close("dx", dx.data, want_x, size_x, N * C, BOUNDS.product);
    cpu->linear_backward_input(again.data, dout.data, weight.data, NULL, N, C, OC, stream);
    check_same("dx", again, dx);
    cpu->linear_backward_input(NULL, dout.data, weight.data, pre.data, N, C, OC, stream);
    for (int64_t i = 0; i < N * C; i++) {
        double slope = gelu_slope((double)pre.data[i]);
        want_x[i] *= slope, size_x[i] *= 1 + fabs(slope), dx.data[i] = NAN;
    }
    cpu->linear_backward_input(dx.data, dout.data, weight.data, pre.data, N, C, OC, stream);
    check_close("dx through GELU", dx.data, want_x, size_x, N * C, BOUNDS.product);

    for (int64_t i = 0; i < OC * C; i++) want_w[i] += (double)dweight.data[i], size_w[i] += fabs((double)dweight.data[i]);
    double *want_b = doubles_of(dbias), *size_b = doubles(OC);
    for (int64_t o = 0; o < OC; o++) size_b[o] = fabs(want_b[o]);
    for (int64_t i = 0; i < N * OC; i++) want_b[i % OC] += l.dout[i], size_b[i % OC] += fabs(l.dout[i]);
    cpu->linear_backward_weight(dweight.data, dbias.data, scratch.data, dout.data, x.data, N, C, OC, stream);
    /* x was rounded to fp32 for the call: half a unit of every term. */
    check_close("dweight", dweight.data, want_w, size_w, OC * C, BOUNDS.product + 0.5);
    check_close("dbias", dbias.data, want_b, size_b, OC, BOUNDS.column_sum);
    cpu->linear_backward_weight(dweight2.data, NULL, scratch.data, dout.data, x.data, N, C, OC, stream);
    check_same("dweight", dweight2, dweight);
    Buffer all[] = {pre, x, weight, dout, dx, again, dweight, dbias, dweight2, dbias2, scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {l.x, l.pre, l.weight, l.bias, l.dout, want_x, size_x, want_w, size_w, want_b, size_b};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
}

/* product_own by itself, on strided views of larger matrices: what lies between their rows must stay. */
static void test_product_own(int a_transposed, int b_transposed, int64_t M, int64_t N, int64_t K)
{
    TEST("own product A%s B%s M%lld N%lld K%lld", a_transposed ? "^T" : "", b_transposed ? "^T" : "", (long long)M,
         (long long)N, (long long)K);
    uint64_t seed = 6;
    int64_t a_stride = (a_transposed ? M : K) + 3, b_stride = (b_transposed ? K : N) + 5, c_stride = N + 7;
    Buffer a = buffer_random((a_transposed ? K : M) * a_stride, &seed), c = buffer_random(M * c_stride, &seed);
    Buffer b = buffer_random((b_transposed ? N : K) * b_stride, &seed), before = buffer_copy(c);
    double *da = doubles_of(a), *db = doubles_of(b), *want = doubles(M * N), *size = doubles(M * N);
    float *packing = aligned_alloc(4096, product_buffer() * sizeof(float));
    if (!packing) abort();
    multiply(want, size, da, a_transposed ? 1 : a_stride, a_transposed ? a_stride : 1, db, b_transposed ? 1 : b_stride,
             b_transposed ? b_stride : 1, M, N, K);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        memcpy(c.data, before.data, (size_t)c.n * sizeof(float));
        for (int64_t i = 0; i < M * N && accumulate; i++) {
            double old = (double)before.data[i / N * c_stride + i % N];
            want[i] += old, size[i] += fabs(old);
        }
        Product product = {.c = c.data, .c_stride = c_stride, .a = {a.data, a_stride, a_transposed},
                           .b = {b.data, b_stride, b_transposed}, .M = M, .N = N, .K = K, .accumulate = accumulate};
        product_own(&product, packing);
        int64_t touched = 0;
        for (int64_t i = 0; i < M; i++) {
            check_close("a row of C", c.data + i * c_stride, want + i * N, size + i * N, N, BOUNDS.product);
            touched += memcmp(c.data + i * c_stride + N, before.data + i * c_stride + N, 7 * sizeof(float)) != 0;
        }
        CHECK(!touched, "%lld rows were written past their end", (long long)touched);
    }
    Buffer all[] = {a, b, c, before};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {da, db, want, size};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
    free(packing);
}

/* The exponential under GELU and the loss, on a fine grid: the one function here whose error is that of an approximation. */
static void test_exp(void)
{
    enum { N = 1 << 17 };
    float *got = malloc(N * sizeof *got), edge[WIDTH] = {0, -0.0f, -87.2f, -87.4f};
    double *want = doubles(N);
    if (!got) abort();
    TEST("exp from -87.2 to 0");
    for (int i = 0; i < N; i += WIDTH) {
        float x[WIDTH];
        for (int k = 0; k < WIDTH; k++) {
            x[k] = (float)((i + k) * -87.2 / N);
            want[i + k] = exp((double)x[k]);
        }
        vector_store(got + i, vector_exp_negative(vector_load(x)));
    }
    check_close("exp", got, want, want, N, BOUNDS.exp);
    TEST("exp of 0, of little, of -infinity and NaN");
    vector_store(edge, vector_exp_negative(vector_load(edge)));
    CHECK(edge[0] == 1 && edge[1] == 1, "exp(0) is %.9g, exp(-0) %.9g", (double)edge[0], (double)edge[1]);
    CHECK(edge[2] > 0 && edge[3] == 0, "exp(-87.2) is %g, exp(-87.4) %g", (double)edge[2], (double)edge[3]);
    edge[0] = -INFINITY, edge[1] = NAN, edge[2] = -FLT_MAX;
    vector_store(edge, vector_exp_negative(vector_load(edge)));
    CHECK(edge[0] == 0 && isnan(edge[1]) && edge[2] == 0, "exp gives %g, %g, %g", (double)edge[0], (double)edge[1],
          (double)edge[2]);
    free(got);
    free(want);
}

/* GELU and its slope, alone, on a fine grid, near zero and far out. */
static void test_gelu(Stream *stream)
{
    enum { GRID = 8001, N = GRID + 10 };
    static const float extra[10] = {100, -100, 1e-8f, -1e-8f, 1e-30f, 0, 1e20f, -1e20f, FLT_MAX, -FLT_MAX};
    Buffer pre = buffer_new(N), out = buffer_new(N), ones = buffer_new(N), dx = buffer_new(N), one = buffer_new(1);
    double *want = doubles(N), *size = doubles(N), *slope = doubles(N), *unit = doubles(N);
    TEST("gelu and its slope from -20 to 20 and far out");
    for (int i = 0; i < N; i++) {
        pre.data[i] = i < GRID ? (float)((double)i / 200 - 20) : extra[i - GRID];
        double x = (double)pre.data[i];
        ones.data[i] = 1;
        want[i] = fabs(x) > 1000 ? fmax(x, 0) : gelu_exact(x);
        slope[i] = fabs(x) > 1000 ? x > 0 : gelu_slope(x);
        size[i] = fabs(x) > 1000 ? fmax(x, FLT_MIN / FLT_EPSILON) : gelu_magnitude(x);
        unit[i] = 1;
    }
    one.data[0] = 1;
    cpu->gelu_forward(out.data, pre.data, N, stream);
    check_close("gelu", out.data, want, size, N, BOUNDS.gelu);
    cpu->linear_backward_input(dx.data, ones.data, one.data, pre.data, N, 1, 1, stream);
    check_close("slope", dx.data, slope, unit, N, BOUNDS.gelu_gradient);
    TEST("gelu keeps NaN and +infinity");
    pre.data[0] = NAN, pre.data[1] = INFINITY;
    cpu->gelu_forward(out.data, pre.data, 17, stream);
    cpu->linear_backward_input(dx.data, ones.data, one.data, pre.data, 17, 1, 1, stream);
    CHECK(isnan(out.data[0]) && isnan(dx.data[0]), "gelu(NaN) is %g, its slope %g", (double)out.data[0], (double)dx.data[0]);
    CHECK(out.data[1] == INFINITY && dx.data[1] == 1, "gelu(inf) is %g, its slope %g", (double)out.data[1],
          (double)dx.data[1]);
    CHECK(isfinite(out.data[2]) && isfinite(dx.data[2]), "the NaN spread to its neighbour");
    Buffer all[] = {pre, out, ones, dx, one};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {want, size, slope, unit};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
}

/* --- classifier ----------------------------------------------------------------------------------------------------- */

typedef struct Loss {
    double *logits; /* (N,V) */
    const int32_t *targets;
    int64_t N, V;
} Loss;

/* log sum exp(l) of a row, and its maximum. */
static double loss_lse(const double *row, int64_t V, double *max)
{
    double sum = 0;
    *max = -INFINITY;
    for (int64_t v = 0; v < V; v++) *max = fmax(*max, row[v]);
    for (int64_t v = 0; v < V; v++) sum += exp(row[v] - *max);
    return *max + log(sum);
}

static double loss_objective(const void *context)
{
    const Loss *loss = context;
    double total = 0, max;
    for (int64_t n = 0; n < loss->N; n++)
        if (loss->targets[n] >= 0)
            total += loss_lse(loss->logits + n * loss->V, loss->V, &max) - loss->logits[n * loss->V + loss->targets[n]];
    return total;
}

/* Kinds of logits: near 1; spread over 60; all of 1e5; all of -1e5; alike; and one of 1e5 among some of -1e5. */
enum { LOGITS_PLAIN, LOGITS_WIDE, LOGITS_HIGH, LOGITS_LOW, LOGITS_ALIKE, LOGITS_SPIKE, LOGITS_KINDS };

static float loss_logit(int kind, int64_t v, uint64_t *seed)
{
    double u = random_uniform(seed) * 2 - 0.7;
    switch (kind) {
    case LOGITS_WIDE: return (float)(30 * u);
    case LOGITS_HIGH: return (float)(1e5 + u);
    case LOGITS_LOW: return (float)(-1e5 + u);
    case LOGITS_ALIKE: return 7.25f;
    case LOGITS_SPIKE: return v == 0 ? 1e5f : v % 2 ? -1e5f : (float)u;
    default: return (float)u;
    }
}

static void test_loss(int64_t N, int64_t V, int64_t Vp, int kind, float dscale, Stream *stream)
{
    TEST("loss N%lld V%lld Vp%lld logits %d", (long long)N, (long long)V, (long long)Vp, kind);
    uint64_t seed = 7;
    Buffer logits = buffer_new(N * Vp), losses = buffer_new(N), losses2 = buffer_new(N);
    int32_t *targets = malloc((size_t)(N + 1) * sizeof *targets);
    Loss loss = {doubles(N * V), targets, N, V};
    for (int64_t n = 0; n < N; n++) {
        targets[n] = n % 4 == 1 ? -1 : n % 4 == 2 ? (int32_t)V - 1 : (int32_t)(random_u64(&seed) % (uint64_t)V);
        for (int64_t v = 0; v < V; v++) loss.logits[n * V + v] = (double)(logits.data[n * Vp + v] = loss_logit(kind, v,
                                                                                                               &seed));
    }
    Buffer before = buffer_copy(logits), logits2 = buffer_copy(logits);
    double *want = doubles(N), *size = doubles(N), *gradient = doubles(N * V), *wants = doubles(N * Vp),
        *sizes = doubles(N * Vp);
    for (int64_t n = 0; n < N; n++) {
        const double *row = loss.logits + n * V;
        double max, lse = loss_lse(row, V, &max);
        if (targets[n] < 0) continue;
        want[n] = lse - row[targets[n]];
        size[n] = 1 + fabs(max - row[targets[n]]) + fabs(lse - max);
        for (int64_t v = 0; v < V; v++) {
            double p = exp(row[v] - lse);
            gradient[n * V + v] = p - (v == targets[n]);
            wants[n * Vp + v] = (double)dscale * gradient[n * V + v];
            /* In exp the rounding of the argument counts as often as the argument is large. */
            sizes[n * Vp + v] = fabs((double)dscale) * p * (1 + fmin(fabs(row[v] - max), 100)) + fabs(wants[n * Vp + v]);
        }
    }
    if (N * N * V * V < 200000 && kind == LOGITS_PLAIN)
        check_differences("the loss", gradient, differences(loss.logits, N * V, loss_objective, &loss), N * V);
    cpu->loss_forward_backward(losses.data, logits.data, targets, 0, N, V, Vp, stream);
    check_close("losses", losses.data, want, size, N, BOUNDS.loss);
    CHECK(!memcmp(logits.data, before.data, (size_t)(N * Vp) * sizeof(float)), "logits were changed with dscale 0");
    cpu->loss_forward_backward(losses2.data, logits.data, targets, dscale, N, V, Vp, stream);
    check_same("losses with the gradient", losses2, losses);
    check_close("gradient", logits.data, wants, sizes, N * Vp, BOUNDS.loss_gradient);
    cpu->loss_forward_backward(losses2.data, logits2.data, targets, dscale, N, V, Vp, stream);
    check_same("gradient", logits2, logits);
    Buffer all[] = {logits, losses, losses2, before, logits2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {loss.logits, want, size, gradient, wants, sizes};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
    free(targets);
}

static void test_loss_nan(Stream *stream)
{
    enum { V = 257 };
    TEST("a NaN or infinite logit makes its own row's loss NaN, wherever it stands");
    for (int64_t at = 0; at < V; at++)
        for (int kind = 0; kind < 2; kind++) {
            Buffer logits = buffer_new(3 * V), losses = buffer_new(3);
            const int32_t targets[3] = {1, 2, 3};
            for (int64_t i = 0; i < 3 * V; i++) logits.data[i] = 0.5f;
            logits.data[V + at] = kind ? INFINITY : NAN;
            cpu->loss_forward_backward(losses.data, logits.data, targets, 1, 3, V, V, stream);
            CHECK(!isfinite(losses.data[1]), "loss %g with a fault at %lld", (double)losses.data[1], (long long)at);
            CHECK(isfinite(losses.data[0]) && isfinite(losses.data[2]), "the fault at %lld spread", (long long)at);
            buffer_end(logits);
            buffer_end(losses);
        }
}

/* --- optimizer ------------------------------------------------------------------------------------------------------ */

static float norm_of(Buffer grads, Stream *stream)
{
    Buffer norm = buffer_new(1), scratch = buffer_new((int64_t)(cpu->norm_scratch(grads.n) / sizeof(float)));
    cpu->global_norm(norm.data, scratch.data, grads.data, grads.n, stream);
    float value = norm.data[0];
    buffer_end(norm);
    buffer_end(scratch);
    return value;
}

static void test_norm(int64_t n, double factor, Stream *stream)
{
    TEST("global norm of %lld gradients near %g", (long long)n, factor);
    uint64_t seed = 8;
    Buffer grads = buffer_random(n, &seed);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        grads.data[i] = (float)((double)grads.data[i] * factor);
        sum += (double)grads.data[i] * (double)grads.data[i];
    }
    double want = sqrt(sum);
    float got = norm_of(grads, stream), again = norm_of(grads, stream);
    check_close("norm", &got, &want, &want, 1, BOUNDS.global_norm);
    CHECK(!memcmp(&got, &again, sizeof got), "a second run gave %.9g, the first %.9g", (double)again, (double)got);
    for (int kind = 0; kind < 3 && n; kind++) {
        float old = grads.data[n - 1], fault = kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY;
        grads.data[n - 1] = fault;
        got = norm_of(grads, stream);
        CHECK(!isfinite(got), "the norm is %g with a gradient of %g", (double)got, (double)fault);
        grads.data[n - 1] = old;
    }
    buffer_end(grads);
}

/* Some updates beside their float64 simulation, whose magnitudes are those of the terms. */
static void test_adamw(int64_t n, int64_t n_decay, float clip, int in_place, Stream *stream)
{
    enum { UPDATES = 6 };
    TEST("adamw n %lld, of them %lld decay, clip %g%s", (long long)n, (long long)n_decay, (double)clip,
         in_place ? ", in place" : "");
    uint64_t seed = 9;
    Buffer master = buffer_random(n, &seed), apart = buffer_new(n), m = buffer_random(n, &seed), v = buffer_random(n, &seed);
    Buffer params = in_place ? master : apart;
    for (int64_t i = 0; i < n; i++) m.data[i] *= 0.1f, v.data[i] = fabsf(v.data[i]) * 0.01f;
    double *p64 = doubles_of(master), *m64 = doubles_of(m), *v64 = doubles_of(v), *sp = doubles(n), *sm = doubles(n);
    for (int64_t i = 0; i < n; i++) sp[i] = fabs(p64[i]), sm[i] = fabs(m64[i]);
    for (int t = 1; t <= UPDATES; t++) {
        Buffer grads = buffer_random(n, &seed);
        AdamwStep step = {.lr = 0.01f * (float)t, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f,
                          .clip = clip};
        step.bias_correction1 = (float)(1 - pow((double)step.beta1, t));
        step.bias_correction2 = (float)(1 - pow((double)step.beta2, t));
        float norm = norm_of(grads, stream);
        double scale = clip > 0 && norm > clip ? (double)clip / (double)norm : 1, b1 = (double)step.beta1,
            b2 = (double)step.beta2;
        for (int64_t i = 0; i < n; i++) {
            double g = (double)grads.data[i] * scale, lr = (double)step.lr,
                decay = i < n_decay ? (double)step.weight_decay : 0;
            m64[i] = b1 * m64[i] + (1 - b1) * g;
            sm[i] = b1 * sm[i] + (1 - b1) * fabs(g);
            v64[i] = b2 * v64[i] + (1 - b2) * g * g;
            double root = sqrt(v64[i] / (double)step.bias_correction2) + (double)step.eps;
            p64[i] -= lr * (m64[i] / (double)step.bias_correction1 / root + decay * p64[i]);
            sp[i] += lr * (sm[i] / (double)step.bias_correction1 / root + decay * fabs(p64[i]));
        }
        cpu->adamw_update(params.data, master.data, m.data, v.data, grads.data, &norm, &step, n, n_decay, stream);
        check_close("m", m.data, m64, sm, n, BOUNDS.adamw);
        check_close("v", v.data, v64, v64, n, BOUNDS.adamw);
        check_close("master", master.data, p64, sp, n, BOUNDS.adamw);
        check_same("params against master", params, master);
        Buffer all[] = {master, m, v, params}, kept[4];
        static const float faults[] = {NAN, INFINITY, -INFINITY};
        for (int k = 0; k < 4; k++) kept[k] = buffer_copy(all[k]);
        for (int k = 0; k < 3; k++)
            cpu->adamw_update(params.data, master.data, m.data, v.data, grads.data, &faults[k], &step, n, n_decay, stream);
        for (int k = 0; k < 4; k++) check_same("what a non-finite norm must leave alone", all[k], kept[k]),
            buffer_end(kept[k]);
        buffer_end(grads);
    }
    Buffer all[] = {master, apart, m, v};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    double *frees[] = {p64, m64, v64, sp, sm};
    for (size_t i = 0; i < sizeof frees / sizeof *frees; i++) free(frees[i]);
}

/* --- threads -------------------------------------------------------------------------------------------------------- */

#ifdef _OPENMP

/* Runs one of each operation whose work is divided, large enough that it is, and appends all results to `out`. */
static Buffer run_divided(Stream *stream)
{
    enum { N = 130, C = 144, OC = 200, V = 300 };
    uint64_t seed = 10;
    Buffer x = buffer_random(N * C, &seed), weight = buffer_random(OC * C, &seed), bias = buffer_random(OC, &seed);
    Buffer scratch = buffer_new((int64_t)(cpu->layernorm_scratch(N, C) / sizeof(float)));
    Buffer dout = buffer_random(N * OC, &seed),
        out = buffer_random(2 * N * OC + 2 * OC * C + OC + 6 * N * C + 4 * N + 3 * C + 1, &seed);
    int32_t tokens[N];
    float *at = out.data;
    for (int i = 0; i < N; i++) tokens[i] = (int32_t)(random_u64(&seed) % OC);
    cpu->linear_gelu_forward(at, at + N * OC, x.data, weight.data, bias.data, N, C, OC, stream), at += 2 * N * OC;
    cpu->linear_backward_input(at, dout.data, weight.data, x.data, N, C, OC, stream), at += N * C;
    cpu->linear_backward_weight(at, at + OC * C, NULL, dout.data, x.data, N, C, OC, stream), at += OC * C + OC;
    cpu->embedding_forward(at, tokens, weight.data, weight.data, 1, N, C, stream), at += N * C;
    int32_t *plan = malloc((size_t)embedding_plan_size(N) * sizeof *plan);
    embedding_plan(plan, tokens, N);
    cpu->embedding_backward(at, at + OC * C, NULL, x.data, plan, 1, N, C, stream), at += OC * C + N * C;
    free(plan);
    cpu->layernorm_forward(at, at + N * C, at + N * C + N, x.data, bias.data, bias.data + 50, N, C, stream);
    cpu->layernorm_backward(at + N * C + 2 * N, NULL, at + 2 * N * C + 2 * N, at + 2 * N * C + 2 * N + C, scratch.data,
                            at + N * C + 2 * N, dout.data, x.data, bias.data, at + N * C, at + N * C + N, N, C, stream);
    at += 2 * N * C + 2 * N + 2 * C;
    memcpy(at, dout.data, N * C * sizeof(float));
    for (int i = 0; i < N; i++) tokens[i] %= C - 10;
    cpu->loss_forward_backward(at + N * C, at, tokens, 0.25f, N, C - 10, C, stream), at += N * C + N;
    *at++ = norm_of(dout, stream);
    CHECK(at <= out.data + out.n, "the test's own results overran their buffer");
    Buffer all[] = {x, weight, bias, scratch, dout};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_end(all[i]);
    return out;
}

static void test_threads(void)
{
    static const int counts[] = {1, 2, 3, 5, 8};
    Buffer first = {0};
    int before = omp_get_max_threads();
    TEST("the same bits with 1, 2, 3, 5 and 8 threads");
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        omp_set_num_threads(counts[i]);
        Stream *stream = cpu->open(0, &(BackendOptions){.deterministic = 1}, NULL, 0);
        CHECK(stream->threads == counts[i], "the stream has %d threads, expected %d", stream->threads, counts[i]);
        stream->blas = 0;
        Buffer out = run_divided(stream);
        if (i == 0) first = out;
        else check_same("a result", out, first), buffer_end(out);
        cpu->close(stream);
    }
    buffer_end(first);
    omp_set_num_threads(before);
}

#else

static void test_threads(void)
{
    TEST("the same bits with several threads");
    SKIP("built without OpenMP");
}

#endif

/* --- memory --------------------------------------------------------------------------------------------------------- */

static void test_memory(Stream *stream)
{
    static const size_t sizes[] = {0, 1, 255, 4096, 1 << 21, (5 << 20) + 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t bytes = sizes[i];
        TEST("memory of %zu bytes: aligned, zeroed, copied", bytes);
        unsigned char *memory = cpu->alloc(bytes, stream), *host = malloc(bytes + 1), *back = malloc(bytes + 1);
        if (!CHECK(memory && host && back, "no memory")) continue;
        CHECK((uintptr_t)memory % 256 == 0, "address %p is not a multiple of 256", (void *)memory);
        for (size_t k = 0; k < bytes; k++) host[k] = (unsigned char)(k * 7 + 1);
        cpu->copy_in(memory, host, bytes, stream);
        cpu->copy_out(back, memory, bytes, stream);
        CHECK(!memcmp(host, back, bytes), "what came out is not what went in");
        cpu->zero(memory, bytes, stream);
        cpu->copy_out(back, memory, bytes, stream);
        size_t left = 0;
        for (size_t k = 0; k < bytes; k++) left += back[k] != 0;
        CHECK(!left, "%zu bytes are not zero", left);
        cpu->free(memory, stream);
        free(host);
        free(back);
    }
    TEST("more memory than there is gives NULL");
    int64_t available = cpu->memory_available(stream);
    CHECK(available > 1 << 20, "only %lld bytes are said to be available", (long long)available);
    CHECK(!cpu->alloc((size_t)available * 2, stream), "twice the available memory was given");
    CHECK(!cpu->alloc(SIZE_MAX, stream) && !cpu->alloc((size_t)INT64_MAX, stream), "an absurd size was given");
}

/* In a process of its own, since a limit cannot be taken back. */
static void test_memory_limit(Stream *stream)
{
    TEST("a limit on the address space is seen, and kept to");
    if (SANITIZED) {
        SKIP("the address sanitizer itself needs more addresses");
        return;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {(rlim_t)1 << 28, (rlim_t)1 << 28};
        if (setrlimit(RLIMIT_AS, &limit)) _exit(3);
        if (cpu->memory_available(stream) > (int64_t)1 << 28) _exit(1);
        _exit(cpu->alloc((size_t)1 << 29, stream) ? 2 : 0);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "no child process");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d (1: available above the limit, 2: given above it)",
          status);
}

static void test_table(Stream *stream)
{
    TEST("the table: found by device and type, described, complete");
    char text[256] = "";
    CHECK(backend_find(ATTENTION_CPU, DTYPE_FP32) == cpu, "backend_find does not give the fp32 table of the CPU");
    CHECK(!backend_find(ATTENTION_CPU, DTYPE_BF16), "there is a bf16 table of the CPU");
    cpu->describe(text, sizeof text, stream);
    CHECK(strstr(text, "thread"), "described as '%s'", text);
    memset(text, 1, sizeof text);
    cpu->describe(text, 8, stream);
    CHECK(strlen(text) == 7 && text[8] == 1, "a short description is not cut at its end");
    CHECK(cpu->sm(stream) == 0 && !cpu->attention_stream(stream), "sm is %d", cpu->sm(stream));
    CHECK(cpu->element == 4 && cpu->dtype == DTYPE_FP32 && !strcmp(cpu->name, "cpu_fp32"), "wrong facts in the table");
    void *const *slots = (void *const *)(const void *)&cpu->open;
    size_t empty = 0, count = (sizeof *cpu - offsetof(Backend, open)) / sizeof *slots;
    for (size_t i = 0; i < count; i++) empty += !slots[i];
    CHECK(empty == 8 && !cpu->measure && !cpu->record_begin && !cpu->record_end && !cpu->replay && !cpu->recording_free &&
          !cpu->side_begin && !cpu->side_end && !cpu->side_join,
          "%zu operations are missing, expected measure, the 4 of recordings and the 3 of the side", empty);
    float in[5] = {1, -0.0f, NAN, 1e-40f, 3e38f}, real[5], out[5];
    cpu->from_fp32(real, in, 5, stream);
    cpu->to_fp32(out, real, 5, stream);
    CHECK(!memcmp(in, out, sizeof in), "a conversion from fp32 to fp32 changed bits");
    cpu->synchronize(stream);
}

/* --- all shapes ----------------------------------------------------------------------------------------------------- */

static void test_linear_shapes(Stream *stream)
{
    static const int64_t shapes[][3] = {
        {1, 1, 1}, {1, 5, 3}, {3, 8, 7}, {17, 5, 33}, {3, 48, 65}, {17, 130, 31}, {65, 48, 97}, {65, 130, 257}, {1, 768,
                                                                                                                 130},
        {65, 768, 49}, {17, 33, 768}, {130, 17, 515}, {200, 400, 33}, {33, 16, 1000}, {0, 8, 8}, {3, 8, 0}, {3, 0, 8},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int blas = 0; blas <= product_has_blas(); blas++) {
            stream->blas = blas;
            test_linear_forward(shapes[i][0], shapes[i][1], shapes[i][2], stream);
            test_linear_backward(shapes[i][0], shapes[i][1], shapes[i][2], stream);
        }
    stream->blas = 0;
    static const int64_t products[][3] = {{1, 1, 1}, {13, 33, 17}, {12, 32, 384}, {7, 95, 385}, {193, 65, 50}, {25, 513,
                                                                                                                16}, {5, 31,
                                                                                                                      0}};
    for (size_t i = 0; i < sizeof products / sizeof *products; i++)
        for (int k = 0; k < 4; k++) test_product_own(k & 1, k >> 1, products[i][0], products[i][1], products[i][2]);
}

static void test_row_shapes(Stream *stream)
{
    static const int64_t rows[] = {0, 1, 3, 17, 65}, channels[] = {1, 5, 8, 48, 130, 768};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t k = 0; k < sizeof channels / sizeof *channels; k++) {
            test_norm_forward(rows[i], channels[k], 0, stream);
            test_norm_backward(rows[i], channels[k], stream);
        }
    test_norm_forward(17, 768, 1000, stream);
    test_norm_backward(700, 48, stream);
    test_embedding_plan(0, 1);
    test_embedding_plan(1, 1);
    test_embedding_plan(9, 1);
    test_embedding_plan(700, 257);
    test_embedding_plan(700, 60);
    test_embedding_plan(1000, 3);
    test_embedding_plan(3000, 50257);
    test_embedding_plan(1000, 10000000);
    test_embedding(0, 5, 8, 3, stream);
    test_embedding(1, 1, 1, 1, stream);
    test_embedding(2, 3, 5, 7, stream);
    test_embedding(3, 17, 48, 2, stream);
    test_embedding(5, 65, 130, 257, stream);
    test_embedding(2, 8, 768, 50, stream);
}

int main(int argc, char **argv)
{
    (void)argc;
    cpu_settle_threads(argv);
    static const int64_t vocabularies[][2] = {{1, 1}, {2, 16}, {257, 272}, {1000, 1000}, {1000, 1024}, {3001, 3072}};
    char error[256] = "";
    Stream *stream = cpu->open(0, &(BackendOptions){.deterministic = 1}, error, sizeof error);
    if (!stream) {
        printf("FAIL open: %s\n", error);
        return 1;
    }
    test_table(stream);
    test_memory(stream);
    test_memory_limit(stream);
    test_row_shapes(stream);
    test_linear_shapes(stream);
    test_exp();
    test_gelu(stream);
    for (size_t i = 0; i < sizeof vocabularies / sizeof *vocabularies; i++)
        for (int kind = 0; kind < LOGITS_KINDS; kind++)
            for (int64_t N = 0; N <= 9; N = 3 * N + (N == 0))
                test_loss(N, vocabularies[i][0], vocabularies[i][1], kind, kind % 2 ? -0.125f : 1.0f / 300, stream);
    test_loss_nan(stream);
    static const int64_t counts[] = {0, 1, 15, 33, 1000, 32768, 100003};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int k = 0; k < 3; k++) test_norm(counts[i], k == 0 ? 1 : k == 1 ? 1e30 : 1e-30, stream);
    for (int in_place = 0; in_place < 2; in_place++) {
        test_adamw(0, 0, 1, in_place, stream);
        test_adamw(5, 3, 0, in_place, stream);
        test_adamw(5003, 2500, 1, in_place, stream);
        test_adamw(20011, 20011, 0.5f, in_place, stream);
        test_adamw(20011, 0, 1e9f, in_place, stream);
    }
    test_threads();
    cpu->close(stream);
    return test_end();
}
