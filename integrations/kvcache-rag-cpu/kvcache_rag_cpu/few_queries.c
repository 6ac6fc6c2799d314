/* Attention of few queries over a long cache in bfloat16, for x86 CPUs with AVX-512.
 *
 * torch's kernel for CPUs is made for as many queries as keys; here a block of keys and values is
 * widened to float32 once, lies in the first cache, and serves every query of its head.  Scores,
 * weights and sums are float32 (online softmax: Milakov and Gimelshein 2018; Dao et al. 2022).
 */

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "avx512.h"

#define TOKENS 64 /* keys of a block */
#define LOG2_E 1.44269504f
#define MOST_SPLITS 64
#define ROWS 4 /* queries computed side by side */

typedef struct {
    /* All strides in elements; the last dimension lies together. */
    int64_t rows, groups, heads, queries, tokens, width, value_width;
    int64_t q_row, q_head, q_query;
    int64_t k_row, k_head, k_token;
    int64_t v_row, v_head, v_token;
    int64_t out_row, out_head, out_query;
    int64_t mask_row, mask_query;
    int64_t threads, splits, chunks;
    float scale;
} Shape;

/* Tokens that stand before the others, bfloat16 or, where there are scales, in 8 bits: the codec's
 * numbers, one scale per column of K and per token of V.  `cos` and `sin`, width / 2 for a token,
 * take keys to their places; none where they stand there. */
typedef struct {
    int64_t tokens, k_head, k_token, v_head, v_token; /* strides in elements, as those that follow */
    int64_t ks_head, vs_head, angle_token;            /* the last one 0 where all move as far */
    const void *key, *value;
    const uint16_t *key_scales, *value_scales;
    const float *cos, *sin;
} Chunk;

int64_t kvcache_rag_shape_bytes(void) { return sizeof(Shape); }

int64_t kvcache_rag_chunk_bytes(void) { return sizeof(Chunk); }

/* 2 to the power of x, for x of at most 0; 0 below -150. */
INLINE __m512 power(__m512 x) {
    __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-150.f), _CMP_GT_OQ);
    x = _mm512_max_ps(x, _mm512_set1_ps(-150.f));
    __m512 whole = _mm512_roundscale_ps(x, 0);
    __m512 part = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.535336188319500e-4f); /* Cephes, exp2f */
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.339887440266574e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.618437357674640e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.550332471162809e-2f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.402264791363012e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.931472028550421e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.f));
    return _mm512_maskz_scalef_ps(kept, sum, whole);
}

/* 16 keys of 32 elements each, to 16 pairs of elements of 16 keys each. */
INLINE void transposed(const uint16_t *from, int64_t stride, int64_t count, uint32_t *to) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = i < count ? _mm512_loadu_si512(from + i * stride) : _mm512_setzero_si512();
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        _mm512_store_si512(to + i * TOKENS, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_store_si512(to + (i + 8) * TOKENS, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    }
}

/* 2 values of 32 elements each, to 32 pairs: of 8 elements the first four, then, 16 pairs further,
 * the last four. */
INLINE void paired(const uint16_t *from, const uint16_t *next, uint32_t *to) {
    __m512i a = _mm512_loadu_si512(from);
    __m512i b = next ? _mm512_loadu_si512(next) : _mm512_setzero_si512();
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + LANES, _mm512_unpackhi_epi16(a, b));
}

#define PAIRS(address) ((__m512bh)_mm512_load_si512(address))

INLINE __m512bh repeated(const uint16_t *pair) {
    uint32_t bits;
    memcpy(&bits, pair, 4);
    return (__m512bh)_mm512_set1_epi32((int)bits);
}

/* Scores of `count` queries (at most ROWS) with the keys of a block. */
INLINE void scored(const uint16_t *q, int64_t stride, const uint32_t *keys, int64_t width,
                   float *scores, const int count) {
    __m512 sums[ROWS][4];
    for (int r = 0; r < count; r++)
        for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_ps();
    for (int64_t d = 0; d < width / 2; d++) {
        const uint32_t *row = keys + d * TOKENS;
        __m512bh k0 = PAIRS(row), k1 = PAIRS(row + 16), k2 = PAIRS(row + 32), k3 = PAIRS(row + 48);
        for (int r = 0; r < count; r++) {
            __m512bh one = repeated(q + r * stride + 2 * d);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], one, k0);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], one, k1);
            sums[r][2] = _mm512_dpbf16_ps(sums[r][2], one, k2);
            sums[r][3] = _mm512_dpbf16_ps(sums[r][3], one, k3);
        }
    }
    for (int r = 0; r < count; r++)
        for (int c = 0; c < 4; c++) _mm512_store_ps(scores + r * TOKENS + c * LANES, sums[r][c]);
}

/* Adds some columns of the values of a block, weighted, to the sums of `count` queries. */
INLINE void added(const uint16_t *weights, const uint32_t *values, int64_t width, int64_t tokens,
                  const float *kept, float *sums, const int count, const int columns) {
    __m512 own[ROWS][4];
    for (int r = 0; r < count; r++)
        for (int c = 0; c < columns; c++)
            own[r][c] = _mm512_mul_ps(_mm512_set1_ps(kept[r]),
                                      _mm512_load_ps(sums + r * width + c * LANES));
    for (int64_t t = 0; t < tokens; t += 2, values += width) {
        __m512bh row[4];
        for (int c = 0; c < columns; c++) row[c] = PAIRS(values + c * LANES);
        for (int r = 0; r < count; r++) {
            __m512bh one = repeated(weights + r * TOKENS + t);
            for (int c = 0; c < columns; c++) own[r][c] = _mm512_dpbf16_ps(own[r][c], one, row[c]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int c = 0; c < columns; c++)
            _mm512_store_ps(sums + r * width + c * LANES, own[r][c]);
}

INLINE void gathered(const uint16_t *weights, const uint32_t *values, int64_t width,
                     int64_t tokens, const float *kept, float *sums, const int count) {
    int64_t first = 0;
    for (; first + 4 * LANES <= width; first += 4 * LANES)
        added(weights, values + first, width, tokens, kept, sums + first, count, 4);
    if (first < width) added(weights, values + first, width, tokens, kept, sums + first, count, 2);
}

/* Up to ROWS queries with one block: scores, weights, sums. */
INLINE void together(const Shape *s, const uint16_t *q, const uint32_t *keys,
                     const uint32_t *values, const uint16_t *mask, int64_t query, int64_t start,
                     int64_t tokens, float *highest, float *total, float *sums, const int count) {
    float scores[ROWS * TOKENS] __attribute__((aligned(64)));
    uint16_t weights[ROWS * TOKENS] __attribute__((aligned(64)));
    float kept[ROWS];
    const __m512 scale = _mm512_set1_ps(s->scale * LOG2_E);
    scored(q, s->width, keys, s->width, scores, count);
    for (int r = 0; r < count; r++) {
        float *row = scores + r * TOKENS;
        for (int c = 0; c < TOKENS; c += LANES)
            _mm512_store_ps(row + c, _mm512_mul_ps(_mm512_load_ps(row + c), scale));
        if (mask) {
            const uint16_t *hidden = mask + (query + r) % s->queries * s->mask_query + start;
            for (int64_t c = 0; c < tokens; c += LANES) {
                const int64_t left = tokens - c < LANES ? tokens - c : LANES;
                const __mmask16 some = (__mmask16)((1u << left) - 1);
                __m512 one = widened(_mm256_maskz_loadu_epi16(some, hidden + c));
                one = _mm512_fmadd_ps(one, _mm512_set1_ps(LOG2_E), _mm512_load_ps(row + c));
                _mm512_store_ps(row + c, one);
            }
        }
        for (int64_t t = tokens; t < TOKENS; t++) row[t] = -INFINITY;
        __m512 a = _mm512_load_ps(row), b = _mm512_load_ps(row + 16);
        __m512 c = _mm512_load_ps(row + 32), d = _mm512_load_ps(row + 48);
        float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
        most = most > highest[r] ? most : highest[r];
        __m512 top = _mm512_set1_ps(most);
        kept[r] = _mm512_cvtss_f32(power(_mm512_set1_ps(highest[r] - most)));
        a = power(_mm512_sub_ps(a, top)), b = power(_mm512_sub_ps(b, top));
        c = power(_mm512_sub_ps(c, top)), d = power(_mm512_sub_ps(d, top));
        __m256bh *to = (__m256bh *)(weights + r * TOKENS);
        to[0] = _mm512_cvtneps_pbh(a), to[1] = _mm512_cvtneps_pbh(b);
        to[2] = _mm512_cvtneps_pbh(c), to[3] = _mm512_cvtneps_pbh(d);
        total[r] = total[r] * kept[r] +
                   _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
        highest[r] = most;
    }
    gathered(weights, values, s->value_width, tokens, kept, sums, count);
}

/* 16 numbers of 8 bits times their scales. */
INLINE __m512 scaled(const int8_t *from, __m512 scales) {
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(wide), scales);
}

/* Two times 16 numbers, rounded. */
INLINE __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

INLINE __m512 scales16(const uint16_t *from) {
    return widened(_mm256_loadu_si256((const __m256i *)from));
}

/* Two times 16 numbers, columns i and i + width / 2 of keys, taken to their places.  Each product is
 * rounded, as where keys are rotated in memory. */
INLINE __m512i moved(__m512i both, const float *cosines, const float *sines) {
    const __m512 a = widened(_mm512_castsi512_si256(both));
    const __m512 b = widened(_mm512_extracti64x4_epi64(both, 1));
    const __m512 cos = _mm512_loadu_ps(cosines), sin = _mm512_loadu_ps(sines);
    return rounded(_mm512_sub_ps(_mm512_mul_ps(a, cos), _mm512_mul_ps(b, sin)),
                   _mm512_add_ps(_mm512_mul_ps(b, cos), _mm512_mul_ps(a, sin)));
}

/* Some keys of a chunk as a prompt's buffer would hold them, bit for bit: rounded as the codec rounds
 * what it gives back, and once more when they are rotated. */
INLINE void restored_keys(const Chunk *c, int64_t width, int64_t group, int64_t first,
                          int64_t count, uint16_t *to) {
    const int64_t half = width / 2, start = group * c->k_head + first * c->k_token;
    const uint16_t *scales = c->key_scales ? c->key_scales + group * c->ks_head : 0;
    for (int64_t d = 0; d < half; d += LANES) {
        const __m512 low = scales ? scales16(scales + d) : _mm512_setzero_ps();
        const __m512 high = scales ? scales16(scales + half + d) : low;
        for (int64_t t = 0; t < count; t++) {
            const int64_t from = start + t * c->k_token + d;
            __m512i both;
            if (scales) {
                const int8_t *key = (const int8_t *)c->key + from;
                both = rounded(scaled(key, low), scaled(key + half, high));
            } else {
                const uint16_t *key = (const uint16_t *)c->key + from;
                both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)key));
                both = _mm512_inserti64x4(both, _mm256_loadu_si256((const __m256i *)(key + half)), 1);
            }
            const int64_t angle = (first + t) * c->angle_token + d;
            if (c->cos) both = moved(both, c->cos + angle, c->sin + angle);
            uint16_t *row = to + t * width + d;
            _mm256_storeu_si256((__m256i *)row, _mm512_castsi512_si256(both));
            _mm256_storeu_si256((__m256i *)(row + half), _mm512_extracti64x4_epi64(both, 1));
        }
    }
}

/* The same of values, which do not rotate. */
INLINE void restored_values(const Chunk *c, int64_t width, int64_t group, int64_t first,
                            int64_t count, uint16_t *to) {
    const int64_t start = group * c->v_head + first * c->v_token;
    const uint16_t *scales = c->value_scales ? c->value_scales + group * c->vs_head + first : 0;
    for (int64_t t = 0; t < count; t++, to += width) {
        if (!scales) {
            memcpy(to, (const uint16_t *)c->value + start + t * c->v_token, width * sizeof(*to));
            continue;
        }
        const int8_t *from = (const int8_t *)c->value + start + t * c->v_token;
        const __m512 scale = (__m512)_mm512_set1_epi32((int)((uint32_t)scales[t] << 16));
        for (int64_t d = 0; d < width; d += 2 * LANES)
            _mm512_storeu_si512(
                to + d, rounded(scaled(from + d, scale), scaled(from + d + LANES, scale)));
    }
}

/* Tokens of a block one behind another, from chunks and from what follows them. */
INLINE void gathered_rows(const Shape *s, const Chunk *chunks, int64_t group, const uint16_t *key,
                          const uint16_t *value, int64_t first, int64_t count, uint16_t *keys,
                          uint16_t *values) {
    for (int64_t i = 0; count && i < s->chunks; first -= chunks[i].tokens, i++) {
        if (first >= chunks[i].tokens) continue;
        const int64_t left = chunks[i].tokens - first, some = left < count ? left : count;
        restored_keys(chunks + i, s->width, group, first, some, keys);
        restored_values(chunks + i, s->value_width, group, first, some, values);
        keys += some * s->width, values += some * s->value_width;
        first += some, count -= some;
    }
    for (; count; first++, count--, keys += s->width, values += s->value_width) {
        memcpy(keys, key + first * s->k_token, s->width * sizeof(uint16_t));
        memcpy(values, value + first * s->v_token, s->value_width * sizeof(uint16_t));
    }
}

/* Asks for a block before it is used: no prefetcher sees that the next rows lie a page further. */
INLINE void announced(const void *from, int64_t stride, int64_t width) { /* in bytes */
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t d = 0; d < width; d += 64)
            _mm_prefetch((const char *)from + t * stride + d, _MM_HINT_T1);
}

/* All queries of one head of K and V over some of the tokens; those of chunks, of which there are
 * `held`, come first. */
TARGET static void one_part(const Shape *s, const uint16_t *q, const Chunk *chunks, int64_t group,
                            int64_t held, const uint16_t *key, const uint16_t *value,
                            const uint16_t *mask, int64_t start, int64_t stop, uint32_t *block,
                            float *highest, float *total, float *sums) {
    const int64_t lines = s->heads * s->queries;
    uint32_t *keys = block, *values = block + s->width / 2 * TOKENS;
    uint16_t *rows = (uint16_t *)(values + s->value_width / 2 * TOKENS);
    for (int64_t i = 0; i < lines; i++) highest[i] = -FLT_MAX, total[i] = 0;
    memset(sums, 0, lines * s->value_width * sizeof(float));
    for (; start < stop; start += TOKENS) {
        const int64_t tokens = stop - start < TOKENS ? stop - start : TOKENS;
        const uint16_t *k = key + (start - held) * s->k_token;
        const uint16_t *v = value + (start - held) * s->v_token;
        int64_t k_token = s->k_token, v_token = s->v_token;
        if (start < held) {
            int64_t first = start;
            const Chunk *c = chunks;
            for (; first >= c->tokens; c++) first -= c->tokens;
            if (first + 2 * TOKENS <= c->tokens) {
                const int64_t each = c->key_scales ? 1 : 2, next = first + TOKENS; /* in bytes */
                announced((const char *)c->key + (group * c->k_head + next * c->k_token) * each,
                          c->k_token * each, s->width * each);
                announced((const char *)c->value + (group * c->v_head + next * c->v_token) * each,
                          c->v_token * each, s->value_width * each);
            }
            k_token = s->width;
            if (!c->key_scales && first + tokens <= c->tokens) { /* nothing else is in the block */
                v = (const uint16_t *)c->value + group * c->v_head + first * c->v_token;
                v_token = c->v_token;
                if (c->cos) {
                    restored_keys(c, s->width, group, first, tokens, rows);
                    k = rows;
                } else {
                    k = (const uint16_t *)c->key + group * c->k_head + first * c->k_token;
                    k_token = c->k_token;
                }
            } else {
                k = rows, v = rows + TOKENS * s->width, v_token = s->value_width;
                gathered_rows(s, chunks, group, key, value, start, tokens, rows, (uint16_t *)v);
            }
        }
        for (int64_t t = 0; t < TOKENS; t += LANES)
            for (int64_t d = 0; d < s->width; d += 2 * LANES)
                transposed(k + t * k_token + d, k_token, tokens - t, keys + d / 2 * TOKENS + t);
        for (int64_t t = 0; t < tokens; t += 2)
            for (int64_t d = 0; d < s->value_width; d += 2 * LANES)
                paired(v + t * v_token + d, t + 1 < tokens ? v + (t + 1) * v_token + d : 0,
                       values + t / 2 * s->value_width + d);
        const int64_t next = start + TOKENS - held;
        if (next >= 0 && next + held < stop) {
            announced(key + next * s->k_token, 2 * s->k_token, 2 * s->width);
            announced(value + next * s->v_token, 2 * s->v_token, 2 * s->value_width);
        }
        for (int64_t i = 0; i < lines; i += ROWS) {
#define TOGETHER(COUNT)                                                                          \
    together(s, q + i * s->width, keys, values, mask, i, start, tokens, highest + i, total + i, \
             sums + i * s->value_width, COUNT)
            switch (lines - i) {
                case 1: TOGETHER(1); break;
                case 2: TOGETHER(2); break;
                case 3: TOGETHER(3); break;
                default: TOGETHER(4);
            }
        }
    }
}

/* Memory of one part, in floats: room for a block, sums, queries, then maxima and totals. */
typedef struct {
    int64_t room, summed, asked, each;
} Places;

/* The outputs of all queries of a head of K and V, of `count` parts that lie `each` apart. */
TARGET static void finished(const Shape *s, const Places *at, const float *first, int64_t count,
                            int64_t row, int64_t group, uint16_t *out, float *levels) {
    const int64_t lines = s->heads * s->queries;
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < lines; i++) {
        const int64_t head = group * s->heads + i / s->queries;
        uint16_t *to = out + row * s->out_row + head * s->out_head + i % s->queries * s->out_query;
        const float *highest = first + at->room + at->summed + at->asked + i;
        const float *sums = first + at->room + i * s->value_width;
        float most = -FLT_MAX, whole = 0, shares[MOST_SPLITS];
        for (int64_t j = 0; j < count; j++) {
            const float high = highest[j * at->each];
            most = high > most ? high : most;
        }
        for (int64_t j = 0; j < count; j++) {
            shares[j] = _mm512_cvtss_f32(power(_mm512_set1_ps(highest[j * at->each] - most)));
            whole += shares[j] * highest[j * at->each + lines];
        }
        if (levels)
            levels[(row * s->groups * s->heads + head) * s->queries + i % s->queries] =
                whole > 0 ? (most + log2f(whole)) / LOG2_E : -FLT_MAX;
        const __m512 part = _mm512_set1_ps(whole > 0 ? 1 / whole : 0); /* 0: it sees nothing */
        for (int64_t d = 0; d < s->value_width; d += 2 * LANES) {
            __m512 low = _mm512_setzero_ps(), high = low;
            for (int64_t j = 0; j < count; j++) {
                const __m512 share = _mm512_set1_ps(shares[j]);
                const float *from = sums + j * at->each + d;
                low = _mm512_fmadd_ps(share, _mm512_loadu_ps(from), low);
                high = _mm512_fmadd_ps(share, _mm512_loadu_ps(from + LANES), high);
            }
            const __m512i both = rounded(_mm512_mul_ps(low, part), _mm512_mul_ps(high, part));
            /* Back from the order of `paired`. */
            _mm512_storeu_si512(to + d, _mm512_permutexvar_epi64(order, both));
        }
    }
}

/* `levels`, (rows, heads, queries) or none: log-sum-exp of the scores, by which partial results are
 * merged; the lowest number of a query that sees nothing, for what is not finite would spread.
 * Returns 0, or 1 if there was no memory. */
TARGET int kvcache_rag_attend(const Shape *s, const uint16_t *query, const uint16_t *key,
                              const uint16_t *value, const uint16_t *mask, uint16_t *out,
                              float *levels, const Chunk *chunks) {
    const int64_t lines = s->heads * s->queries, owners = s->rows * s->groups;
    const int64_t parts = owners * s->splits;
    int64_t held = 0; /* tokens of the chunks, which stand before those of `key` */
    for (int64_t i = 0; i < s->chunks; i++) held += chunks[i].tokens;
    const int64_t all = held + s->tokens;
    /* A block is keys and values, and where there are chunks once more their rows. */
    Places at = {.room = (s->width + s->value_width) / 2 * TOKENS * (s->chunks ? 2 : 1),
                 .summed = lines * s->value_width,
                 .asked = lines * s->width / 2};
    at.each = (at.room + at.summed + at.asked + 2 * lines + LANES - 1) / LANES * LANES;
    /* Parts that are merged have to be kept; others are finished at once, in their thread's memory. */
    const int64_t kept = s->splits > 1 ? parts : s->threads;
    float *memory = aligned_alloc(64, kept * at.each * sizeof(float));
    if (!memory) return 1;
    const int64_t span = (all + s->splits - 1) / s->splits;
#pragma omp parallel for schedule(static) num_threads(s->threads) if (s->threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t split = part % s->splits, group = part / s->splits % s->groups;
        const int64_t row = part / s->splits / s->groups;
        float *block = memory + (s->splits > 1 ? part : omp_get_thread_num()) * at.each;
        float *sums = block + at.room, *behind = sums + at.summed;
        uint16_t *q = (uint16_t *)behind;
        for (int64_t i = 0; i < lines; i++) {
            const int64_t head = group * s->heads + i / s->queries;
            memcpy(q + i * s->width,
                   query + row * s->q_row + head * s->q_head + i % s->queries * s->q_query,
                   s->width * sizeof(uint16_t));
        }
        const int64_t stop = (split + 1) * span < all ? (split + 1) * span : all;
        one_part(s, q, chunks, group, held, key + row * s->k_row + group * s->k_head,
                 value + row * s->v_row + group * s->v_head, mask ? mask + row * s->mask_row : 0,
                 split * span, stop, (uint32_t *)block, behind + at.asked,
                 behind + at.asked + lines, sums);
        if (s->splits == 1) finished(s, &at, block, 1, row, group, out, levels);
    }
    if (s->splits > 1) {
#pragma omp parallel for schedule(static) num_threads(s->threads) if (owners > 1)
        for (int64_t owner = 0; owner < owners; owner++)
            finished(s, &at, memory + owner * s->splits * at.each, s->splits, owner / s->groups,
                     owner % s->groups, out, levels);
    }
    free(memory);
    return 0;
}
