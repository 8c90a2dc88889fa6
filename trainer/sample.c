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

/* The tokens of a prompt, or end of text alone, with room for `more` behind them. *count gets how many. NULL on an error. */
static int32_t *prompt_tokens(const Tokenizer *tokenizer, const char *prompt, size_t more, size_t *count, Error *error)
{
    size_t length = strlen(prompt);
    int32_t *tokens = (int32_t *)malloc((length + 1 + more) * sizeof *tokens);
    if (!tokens) {
        error_set(error, "not enough memory for a sample");
        return NULL;
    }
    *count = 1;
    tokens[0] = tokenizer_end_of_text(tokenizer);
    if (length && tokenizer_encode(tokenizer, prompt, length, tokens, length, count, error)) {
        free(tokens);
        return NULL;
    }
    return tokens;
}

/* Appends to text (*length of *capacity bytes), which may move. Returns 0 or -1. */
static int text_append(char **text, size_t *length, size_t *capacity, const char *bytes, size_t count)
{
    if (*length + count > *capacity) {
        size_t larger = 2 * (*length + count) + 256;
        char *grown = (char *)realloc(*text, larger);
        if (!grown) return -1;
        *text = grown;
        *capacity = larger;
    }
    memcpy(*text + *length, bytes, count);
    *length += count;
    return 0;
}

char *sample_text(Gpt *gpt, const Tokenizer *tokenizer, const char *prompt, const SampleChoice *choice, uint64_t *state, size_t *length,
                  Error *error)
{
    int64_t V = gpt_config(gpt)->vocab;
    size_t count = 0, capacity = 0, bytes;
    char *text = NULL;
    int32_t *tokens = prompt_tokens(tokenizer, prompt, (size_t)choice->tokens, &count, error);
    if (!tokens) return NULL;
    float *logits = (float *)malloc((size_t)V * sizeof *logits);
    *length = 0;
    int bad = !logits || text_append(&text, length, &capacity, prompt, strlen(prompt));
    for (int64_t i = 0; i < choice->tokens && !bad && !*choice->stop; i++, count++) {
        int64_t total = (int64_t)count, seen = total < choice->window ? total : choice->window;
        gpt_logits(gpt, logits, tokens + total - seen, seen);
        tokens[total] = sample_token(logits, V, choice->temperature, choice->top_k, state);
        const char *piece = tokenizer_decode(tokenizer, tokens[total], &bytes);
        bad = text_append(&text, length, &capacity, piece, bytes);
    }
    free(tokens);
    free(logits);
    if (!bad) return text;
    free(text);
    error_set(error, "not enough memory for a sample");
    return NULL;
}
