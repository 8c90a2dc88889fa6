#include "trainer/sample.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/random.h"

/* Of the largest values (n) that together weigh at least `wanted`, which is more than 0, the smallest; a value weighs 1 or,
 * by_value, itself. The values are reordered. Source: Hoare 1961, quickselect, here with weights. */
static float select_least(float *values, int64_t n, double wanted, int by_value)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        double upper = 0;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float held = values[i];
                values[i++] = values[j];
                values[j--] = held;
            }
        }
        /* Now low..j are at least the pivot, i..high at most, and what is between them equals it. */
        for (int64_t k = low; k <= j; k++) upper += by_value ? (double)values[k] : 1;
        if (wanted <= upper) {
            high = j;
            continue;
        }
        wanted -= upper;
        for (int64_t k = j + 1; k < i; k++) wanted -= by_value ? (double)values[k] : 1;
        if (wanted <= 0) return pivot;
        low = i;
    }
    return values[high]; /* low is beyond it where rounding left a crumb of `wanted` */
}

/* logits (V) become their weights: exp((logit - largest) / temperature). Returns the sum. */
static double weigh(float *logits, int64_t V, float largest, double temperature)
{
    double sum = 0;
    for (int64_t v = 0; v < V; v++) {
        logits[v] = (float)exp(((double)logits[v] - (double)largest) / temperature);
        sum += (double)logits[v];
    }
    return sum;
}

/* Weights (V) below `least` become 0. Returns the sum of the others. */
static double cut(float *weights, int64_t V, float least)
{
    double sum = 0;
    for (int64_t v = 0; v < V; v++) {
        if (weights[v] < least) weights[v] = 0;
        sum += (double)weights[v];
    }
    return sum;
}

int32_t sample_token(float *logits, float *room, int64_t V, const SampleRule *rule, uint64_t *state)
{
    double coin = random_uniform(state);
    int64_t best = 0;
    for (int64_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (rule->temperature == 0) return (int32_t)best;
    if (rule->top_k > 0 && rule->top_k < V) { /* of logits, whose order survives where weights round to the same 0 */
        memcpy(room, logits, (size_t)V * sizeof *room);
        float least = select_least(room, V, (double)rule->top_k, 0);
        for (int64_t v = 0; v < V; v++)
            if (logits[v] < least) logits[v] = -INFINITY;
    }
    double sum = weigh(logits, V, logits[best], rule->temperature);
    if (rule->top_p < 1) {
        memcpy(room, logits, (size_t)V * sizeof *room);
        sum = cut(logits, V, select_least(room, V, rule->top_p * sum, 1));
    }
    double left = coin * sum;
    for (int64_t v = 0; v < V; v++) {
        left -= (double)logits[v];
        if (left < 0) return (int32_t)v;
    }
    return (int32_t)best; /* rounding left a crumb: coin was within an ulp of 1 */
}

/* --- writing ---------------------------------------------------------------------------------------------------------- */

/* Texts that are being written. All hold the same number of tokens; those that have ended hold on to what they had, and are
 * given some token where the others go on. */
typedef struct Writing {
    Gpt *gpt;
    const SampleChoice *choice;
    int64_t V, held;  /* tokens that each text holds */
    int32_t *texts;   /* (samples, window): what the model sees of each */
    int32_t *next;    /* (samples): the token just drawn */
    float *logits;    /* (samples, V) */
    float *room;      /* (V) */
    uint64_t *states; /* (samples) */
    char *ended;      /* (samples) */
} Writing;

static void writing_close(Writing *w)
{
    free(w->texts);
    free(w->next);
    free(w->logits);
    free(w->room);
    free(w->states);
    free(w->ended);
}

static int writing_open(Writing *w, Gpt *gpt, const SampleChoice *choice, Error *error)
{
    size_t S = (size_t)choice->samples, V = (size_t)gpt_config(gpt)->vocab;
    memset(w, 0, sizeof *w);
    w->gpt = gpt;
    w->choice = choice;
    w->V = (int64_t)V;
    w->texts = (int32_t *)malloc(S * (size_t)choice->window * sizeof *w->texts);
    w->next = (int32_t *)malloc(S * sizeof *w->next);
    w->logits = (float *)malloc(S * V * sizeof *w->logits);
    w->room = (float *)malloc(V * sizeof *w->room);
    w->states = (uint64_t *)malloc(S * sizeof *w->states);
    w->ended = (char *)calloc(S, 1);
    if (!w->texts || !w->next || !w->logits || !w->room || !w->states || !w->ended)
        return error_set(error, "not enough memory for %lld samples", (long long)choice->samples);
    for (size_t s = 0; s < S; s++) w->states[s] = random_mix(random_mix(choice->seed) + s);
    return 0;
}

/* Reads the prompt: the same for all texts. */
static void read_prompt(Writing *w, const int32_t *prompt, int64_t count)
{
    int64_t S = w->choice->samples, window = w->choice->window;
    w->held = count < window ? count : window;
    for (int64_t s = 0; s < S; s++)
        memcpy(w->texts + s * window, prompt + count - w->held, (size_t)w->held * sizeof *prompt);
    if (w->choice->recompute) gpt_logits(w->gpt, w->logits, w->texts, w->held);
    else gpt_prefill(w->gpt, w->logits, 0, S, w->texts, w->held);
    for (int64_t s = 1; s < S; s++) memcpy(w->logits + s * w->V, w->logits, (size_t)w->V * sizeof *w->logits);
}

/* Adds the drawn tokens to the texts and reads them: by themselves, or with all before them where the older half was
 * forgotten or everything is to be read anew. */
static void read_next(Writing *w)
{
    int64_t S = w->choice->samples, window = w->choice->window, full = w->held == window;
    int64_t kept = full ? window / 2 : w->held;
    for (int64_t s = 0; s < S; s++) {
        int32_t *text = w->texts + s * window; /* (window) */
        memmove(text, text + w->held - kept, (size_t)kept * sizeof *text);
        text[kept] = w->next[s];
    }
    w->held = kept + 1;
    if (!full && !w->choice->recompute) {
        gpt_decode(w->gpt, w->logits, w->next, S, kept);
        return;
    }
    for (int64_t s = 0; s < S; s++) {
        float *logits = w->logits + s * w->V; /* (V) */
        if (w->ended[s]) continue;
        if (w->choice->recompute) gpt_logits(w->gpt, logits, w->texts + s * window, w->held);
        else gpt_prefill(w->gpt, logits, s, 1, w->texts + s * window, w->held);
    }
}

/* Draws a token for each text that goes on. Returns how many these are, or -1 with a sentence. */
static int64_t draw_next(Writing *w, SampleTaker *take, void *taker, Error *error)
{
    int64_t going = 0;
    for (int64_t s = 0; s < w->choice->samples; s++) {
        float *logits = w->logits + s * w->V; /* (V) */
        if (w->ended[s]) continue;
        for (int64_t v = 0; v < w->V; v++)
            if (!isfinite(logits[v]))
                return error_set(error, "the model's logits are not finite: token %lld has %g after %lld tokens%s%s",
                                 (long long)v, (double)logits[v], (long long)w->held, gpt_fault(w->gpt) ? "; " : "",
                                 gpt_fault(w->gpt) ? gpt_fault(w->gpt) : "");
        w->next[s] = sample_token(logits, w->room, w->V, &w->choice->rule, &w->states[s]);
        take(taker, s, w->next[s]);
        w->ended[s] = w->next[s] == w->choice->end_of_text;
        going += !w->ended[s];
    }
    return going;
}

int sample_run(Gpt *gpt, const int32_t *prompt, int64_t count, const SampleChoice *choice, SampleTaker *take, void *taker,
               Error *error)
{
    Writing writing;
    int64_t going = writing_open(&writing, gpt, choice, error);
    if (!going && choice->tokens > 0) {
        read_prompt(&writing, prompt, count);
        going = draw_next(&writing, take, taker, error);
        for (int64_t i = 1; i < choice->tokens && going > 0 && !*choice->stop; i++) {
            read_next(&writing);
            going = draw_next(&writing, take, taker, error);
        }
    }
    writing_close(&writing);
    return going < 0 ? -1 : 0;
}

/* --- text ------------------------------------------------------------------------------------------------------------- */

int32_t *sample_prompt(const Tokenizer *tokenizer, const char *prompt, size_t length, int64_t *count, Error *error)
{
    size_t found = 1;
    int32_t *tokens = (int32_t *)malloc((length + 1) * sizeof *tokens);
    if (!tokens) {
        error_set(error, "not enough memory for a prompt of %zu bytes", length);
        return NULL;
    }
    tokens[0] = tokenizer_end_of_text(tokenizer);
    if (length && tokenizer_encode(tokenizer, prompt, length, tokens, length, &found, error)) {
        free(tokens);
        return NULL;
    }
    *count = (int64_t)found;
    return tokens;
}

void text_append(TextBuffer *text, const char *bytes, size_t count)
{
    if (text->length + count >= text->capacity) {
        size_t larger = 2 * (text->length + count) + 256;
        char *grown = (char *)realloc(text->bytes, larger);
        if (!grown) {
            text->failed = 1;
            return;
        }
        text->bytes = grown;
        text->capacity = larger;
    }
    if (count) memcpy(text->bytes + text->length, bytes, count);
    text->length += count;
}

/* What sample_text takes tokens with. */
typedef struct TextTaker {
    TextBuffer text;
    const Tokenizer *tokenizer;
} TextTaker;

static void text_take(void *taker, int64_t sample, int32_t token)
{
    TextTaker *to = (TextTaker *)taker;
    size_t count;
    const char *bytes = tokenizer_decode(to->tokenizer, token, &count);
    (void)sample;
    text_append(&to->text, bytes, count);
}

char *sample_text(Gpt *gpt, const Tokenizer *tokenizer, const char *prompt, const SampleChoice *choice, size_t *length,
                  Error *error)
{
    TextTaker taker = {{NULL, 0, 0, 0}, tokenizer};
    int64_t count;
    int32_t *tokens = sample_prompt(tokenizer, prompt, strlen(prompt), &count, error);
    if (!tokens) return NULL;
    text_append(&taker.text, prompt, strlen(prompt));
    int bad = sample_run(gpt, tokens, count, choice, text_take, &taker, error);
    if (!bad && taker.text.failed) bad = error_set(error, "not enough memory for a sample");
    free(tokens);
    *length = taker.text.length;
    if (!bad) return taker.text.bytes;
    free(taker.text.bytes);
    return NULL;
}
