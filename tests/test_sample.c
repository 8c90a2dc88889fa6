/* test_sample.c - sample_token: what it draws, how often, and what it does to the random state. */
#include "trainer/sample.h"

#include <math.h>
#include <stdlib.h>

#include "data/random.h"
#include "tests/test.h"

enum { DRAWS = 100000, MOST = 300 };

/* sample_token on a copy: it overwrites what it is given. */
static int32_t draw_by(const float *logits, int64_t V, const SampleRule *rule, uint64_t *state)
{
    float copy[MOST], room[MOST];
    memcpy(copy, logits, (size_t)V * sizeof *copy);
    return sample_token(copy, room, V, rule, state);
}

static int32_t draw(const float *logits, int64_t V, double temperature, int64_t top_k, uint64_t *state)
{
    SampleRule rule = {temperature, 1, top_k};
    return draw_by(logits, V, &rule, state);
}

/* Logits with a spread of about 4, all different. */
static void fill(float *logits, int64_t V, uint64_t seed)
{
    for (int64_t v = 0; v < V; v++) logits[v] = (float)(8 * random_uniform(&seed) - 4);
}

/* The exact probabilities: softmax(logits / temperature) over those that fewer than top_k are larger than; and of these over
 * those that less than top_p is larger than. */
static void exact(double *p, const float *logits, int64_t V, const SampleRule *rule)
{
    static double kept[MOST];
    double sum = 0, largest = -INFINITY, temperature = rule->temperature;
    int64_t top_k = rule->top_k;
    for (int64_t v = 0; v < V; v++) largest = fmax(largest, (double)logits[v]);
    for (int64_t v = 0; v < V; v++) {
        int64_t larger = 0;
        for (int64_t u = 0; u < V; u++) larger += logits[u] > logits[v];
        p[v] = top_k && larger >= top_k ? 0 : exp(((double)logits[v] - largest) / temperature);
        sum += p[v];
    }
    for (int64_t v = 0; v < V; v++) kept[v] = p[v] /= sum;
    if (rule->top_p == 1) return;
    sum = 0;
    for (int64_t v = 0; v < V; v++) {
        double larger = 0;
        for (int64_t u = 0; u < V; u++) larger += kept[u] > kept[v] ? kept[u] : 0;
        if (larger >= rule->top_p) p[v] = 0;
        sum += p[v];
    }
    for (int64_t v = 0; v < V; v++) p[v] /= sum;
}

/* Counts of many draws against the exact probabilities. Every count may be 5 of its standard deviations off, which by chance
 * one in two million is; a token of probability 0 may not come at all. */
static void check_rule(const float *logits, int64_t V, SampleRule rule)
{
    static int64_t counts[MOST];
    double p[MOST];
    uint64_t state = 17;
    memset(counts, 0, sizeof counts);
    exact(p, logits, V, &rule);
    for (int n = 0; n < DRAWS; n++) {
        int32_t token = draw_by(logits, V, &rule, &state);
        if (!CHECK(token >= 0 && token < V, "draw %d is %d of %lld tokens", n, token, (long long)V)) return;
        counts[token]++;
    }
    for (int64_t v = 0; v < V; v++) {
        double expected = DRAWS * p[v], allowed = p[v] > 0 ? 5 * sqrt(expected * (1 - p[v])) + 1 : 0;
        CHECK(fabs((double)counts[v] - expected) <= allowed, "token %lld came %lld times, expected %.1f within %.1f",
              (long long)v, (long long)counts[v], expected, allowed);
    }
}

static void check_counts(const float *logits, int64_t V, double temperature, int64_t top_k)
{
    check_rule(logits, V, (SampleRule){temperature, 1, top_k});
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

static void test_nucleus(void)
{
    static const double parts[] = {1e-6, 0.1, 0.5, 0.9, 0.999, 0.999999999, 1};
    static const int64_t most[] = {0, 5};
    float logits[MOST];
    fill(logits, 60, 4);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        for (size_t k = 0; k < sizeof most / sizeof most[0]; k++) {
            TEST("%d draws of 60 tokens, top-p %g, top-k %lld", DRAWS, parts[i], (long long)most[k]);
            check_rule(logits, 60, (SampleRule){1, parts[i], most[k]});
        }
    TEST("%d draws of 60 tokens, top-p 0.5 at three temperatures", DRAWS);
    check_rule(logits, 60, (SampleRule){0.3, 0.5, 0});
    check_rule(logits, 60, (SampleRule){4, 0.5, 0});
    check_rule(logits, 60, (SampleRule){1e3, 0.5, 7});
    TEST("top-p ends between the second and the third token, exactly at its sum and above");
    float three[3] = {(float)log(0.5), (float)log(0.3), (float)log(0.2)};
    check_rule(three, 3, (SampleRule){1, 0.7, 0});
    check_rule(three, 3, (SampleRule){1, 0.81, 0});
    check_rule(three, 3, (SampleRule){1, 0.49, 0});
    TEST("equals at the edge of top-p all take part");
    for (int v = 0; v < 30; v++) logits[v] = (float)(v % 3);
    check_rule(logits, 30, (SampleRule){1, 0.1, 0});
    check_rule(logits, 30, (SampleRule){1, 0.8, 0});
    TEST("top-p of tokens of probability 0");
    for (int v = 1; v < 30; v += 2) logits[v] = -INFINITY;
    check_rule(logits, 30, (SampleRule){1, 0.99999, 0});
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
    static const SampleRule cases[] = {{0, 1, 0}, {0, 1, 5}, {1, 1, 0}, {1, 1, 5}, {0.5, 1, 1}, {1, 0.5, 0}, {0, 0.5, 3}};
    float logits[MOST];
    fill(logits, MOST, 12);
    TEST("a draw advances the state once, whatever is asked for");
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        uint64_t state = 1337, expected = 1337;
        for (int n = 0; n < 3; n++) {
            random_u64(&expected);
            draw_by(logits, MOST, &cases[k], &state);
            CHECK(state == expected, "temperature %g, top-k %lld, top-p %g: the state is %llx, expected %llx",
                  cases[k].temperature, (long long)cases[k].top_k, cases[k].top_p, (unsigned long long)state,
                  (unsigned long long)expected);
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
    test_nucleus();
    test_greedy();
    test_ties();
    test_one_token();
    test_random_state();
    return test_end();
}
