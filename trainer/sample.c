#include "trainer/sample.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/random.h"

/* The k-th largest of values (n), which are reordered. Source: Hoare 1961, quickselect. */
static float kth_largest(float *values, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1, wanted = k - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float held = values[i];
                values[i++] = values[j];
                values[j--] = held;
            }
        }
        if (wanted <= j) high = j;
        else if (wanted >= i) low = i;
        else break;
    }
    return values[wanted];
}

int32_t sample_token(float *logits, int64_t V, double temperature, int64_t top_k, uint64_t *state)
{
    double coin = random_uniform(state);
    int64_t best = 0;
    for (int64_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (temperature == 0) return (int32_t)best;
    float least = -INFINITY;
    if (top_k > 0 && top_k < V) {
        float *copy = (float *)malloc((size_t)V * sizeof *copy);
        if (copy) {
            memcpy(copy, logits, (size_t)V * sizeof *copy);
            least = kth_largest(copy, V, top_k);
            free(copy);
        }
    }
    double sum = 0;
    float largest = logits[best];
    for (int64_t v = 0; v < V; v++) {
        logits[v] = logits[v] < least ? 0 : (float)exp(((double)logits[v] - (double)largest) / temperature);
        sum += (double)logits[v];
    }
    double left = coin * sum;
    for (int64_t v = 0; v < V; v++) {
        left -= (double)logits[v];
        if (left < 0) return (int32_t)v;
    }
    return (int32_t)best; /* rounding left a crumb: coin was within an ulp of 1 */
}

int sample_continue(Gpt *gpt, const Tokenizer *tokenizer, const int32_t *prompt, size_t count, int64_t n, int64_t window,
                    double temperature, int64_t top_k, uint64_t *state, SampleSink *sink, void *context)
{
    int64_t V = gpt_config(gpt)->vocab, total = (int64_t)count;
    int32_t *tokens = (int32_t *)malloc((count + (size_t)n) * sizeof *tokens);
    float *logits = (float *)malloc((size_t)V * sizeof *logits);
    if (tokens && logits) {
        memcpy(tokens, prompt, count * sizeof *tokens);
        for (int64_t i = 0; i < n; i++) {
            int64_t seen = total < window ? total : window;
            gpt_logits(gpt, logits, tokens + total - seen, seen);
            int32_t token = sample_token(logits, V, temperature, top_k, state);
            tokens[total++] = token;
            size_t length;
            const char *bytes = tokenizer_decode(tokenizer, token, &length);
            sink(context, bytes, length);
        }
    }
    int status = tokens && logits ? 0 : -1;
    free(tokens);
    free(logits);
    return status;
}
