/* test_sample.c - sample_token: what it draws, how often, and what it does to the random state. */
#include "trainer/sample.h"

#include <math.h>
#include <stdlib.h>

#include "data/random.h"
#include "tests/test.h"

enum { DRAWS = 100000, MOST = 300 };

/* sample_token on a copy: it overwrites what it is given. */
static int32_t draw(const float *logits, int64_t V, double temperature, int64_t top_k, uint64_t *state)
{
    float copy[MOST];
    memcpy(copy, logits, (size_t)V * sizeof *copy);
    return sample_token(copy, V, temperature, top_k, state);
}

/* Logits with a spread of about 4, all different. */
static void fill(float *logits, int64_t V, uint64_t seed)
{
    for (int64_t v = 0; v < V; v++) logits[v] = (float)(8 * random_uniform(&seed) - 4);
}

/* The exact probabilities: softmax(logits / temperature) over those that fewer than top_k are larger than. */
static void exact(double *p, const float *logits, int64_t V, double temperature, int64_t top_k)
{
    double sum = 0, largest = -INFINITY;
    for (int64_t v = 0; v < V; v++) largest = fmax(largest, (double)logits[v]);
    for (int64_t v = 0; v < V; v++) {
        int64_t larger = 0;
        for (int64_t u = 0; u < V; u++) larger += logits[u] > logits[v];
        p[v] = top_k && larger >= top_k ? 0 : exp(((double)logits[v] - largest) / temperature);
        sum += p[v];
    }
    for (int64_t v = 0; v < V; v++) p[v] /= sum;
}

/* Counts of many draws against the exact probabilities. Every count may be 5 of its standard deviations off, which by chance
 * one in two million is; a token of probability 0 may not come at all. */
static void check_counts(const float *logits, int64_t V, double temperature, int64_t top_k)
{
    static int64_t counts[MOST];
    double p[MOST];
    uint64_t state = 17;
    memset(counts, 0, sizeof counts);
    exact(p, logits, V, temperature, top_k);
    for (int n = 0; n < DRAWS; n++) {
        int32_t token = draw(logits, V, temperature, top_k, &state);
        if (!CHECK(token >= 0 && token < V, "draw %d is %d of %lld tokens", n, token, (long long)V)) return;
        counts[token]++;
    }
    for (int64_t v = 0; v < V; v++) {
        double expected = DRAWS * p[v], allowed = p[v] > 0 ? 5 * sqrt(expected * (1 - p[v])) + 1 : 0;
        CHECK(fabs((double)counts[v] - expected) <= allowed, "token %lld came %lld times, expected %.1f within %.1f",
              (long long)v, (long long)counts[v], expected, allowed);
    }
}

static void test_distribution(void)
{
    static const double temperatures[] = {0.25, 1, 3};
    static const int64_t most[] = {0, 1, 2, 10, 39, 40, 1000};
    float logits[MOST];
    fill(logits, 40, 3);
    for (size_t t = 0; t < sizeof temperatures / sizeof temperatures[0]; t++)
        for (size_t k = 0; k < sizeof most / sizeof most[0]; k++) {
            TEST("%d draws of 40 tokens, temperature %g, top-k %lld", DRAWS, temperatures[t], (long long)most[k]);
            check_counts(logits, 40, temperatures[t], most[k]);
        }
    TEST("%d draws of logits far from 0", DRAWS);
    for (int v = 0; v < 40; v++) logits[v] += 1e4f;
    check_counts(logits, 40, 1, 0);
    TEST("tokens of probability 0");
    for (int v = 1; v < 40; v += 2) logits[v] = -INFINITY;
    check_counts(logits, 40, 1, 0);
}

static void test_greedy(void)
{
    float logits[MOST];
    uint64_t state = 5;
    fill(logits, MOST, 8);
    int32_t best = 0;
    for (int32_t v = 1; v < MOST; v++)
        if (logits[v] > logits[best]) best = v;
    TEST("temperature 0, a tiny one and top-k 1 give the largest logit");
    for (int n = 0; n < 100; n++) {
        int32_t zero = draw(logits, MOST, 0, n, &state), tiny = draw(logits, MOST, 1e-9, 0, &state);
        int32_t one = draw(logits, MOST, 2, 1, &state);
        CHECK(zero == best && tiny == best && one == best, "got %d, %d and %d, expected %d", zero, tiny, one, best);
    }
}

static void test_ties(void)
{
    float logits[8] = {1, 3, 2, 3, 3, 0, 2, -1};
    uint64_t state = 9;
    TEST("of equals, temperature 0 takes the first");
    for (int n = 0; n < 20; n++) {
        int32_t token = draw(logits, 8, 0, 0, &state);
        CHECK(token == 1, "got %d, expected 1", token);
    }
    TEST("equals at the edge of top-k all take part");
    check_counts(logits, 8, 1, 2);
    check_counts(logits, 8, 1, 4);
    TEST("%d draws of equal logits", DRAWS);
    for (int v = 0; v < 8; v++) logits[v] = -2;
    check_counts(logits, 8, 0.7, 0);
    check_counts(logits, 8, 0.7, 3);
}

static void test_one_token(void)
{
    static const double temperatures[] = {0, 1e-9, 1, 1e6};
    TEST("a vocabulary of one token");
    for (size_t t = 0; t < sizeof temperatures / sizeof temperatures[0]; t++)
        for (int64_t top_k = 0; top_k < 3; top_k++) {
            float logit = -7;
            uint64_t state = t;
            int32_t token = draw(&logit, 1, temperatures[t], top_k, &state);
            CHECK(token == 0, "got %d", token);
        }
}

static void test_random_state(void)
{
    static const struct { double temperature; int64_t top_k; } cases[] = {{0, 0}, {0, 5}, {1, 0}, {1, 5}, {0.5, 1}};
    float logits[MOST];
    fill(logits, MOST, 12);
    TEST("a draw advances the state once, whatever is asked for");
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        uint64_t state = 1337, expected = 1337;
        for (int n = 0; n < 3; n++) {
            random_u64(&expected);
            draw(logits, MOST, cases[k].temperature, cases[k].top_k, &state);
            CHECK(state == expected, "temperature %g, top-k %lld: the state is %llx, expected %llx", cases[k].temperature,
                  (long long)cases[k].top_k, (unsigned long long)state, (unsigned long long)expected);
        }
    }
    TEST("the same state draws the same tokens");
    uint64_t one = 4, other = 4;
    for (int n = 0; n < 1000; n++) {
        int32_t first = draw(logits, MOST, 1, 50, &one), second = draw(logits, MOST, 1, 50, &other);
        CHECK(first == second, "draw %d is %d and %d", n, first, second);
    }
}

int main(void)
{
    test_distribution();
    test_greedy();
    test_ties();
    test_one_token();
    test_random_state();
    return test_end();
}
