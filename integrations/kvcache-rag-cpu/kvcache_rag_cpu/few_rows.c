/* Linear layers of few rows, and norms, in bfloat16, for x86 CPUs with AVX-512.
 *
 * A generated token takes the time in which memory gives the weights.  oneDNN's own function reaches
 * half of that where layers are small; here they stream once, in the order in which oneDNN keeps
 * them, past rows that stay in the first cache.  The same instruction multiplies.
 */

#include <math.h>

#include "row_blocks.h"

/* `count` rows (at most ROWS) times a block of weights, (width / 2, OUTPUTS, 2). */
INLINE void block(const uint16_t *inputs, int64_t width, const uint16_t *weights,
                  const uint16_t *bias, uint16_t *out, int64_t outputs, const int count) {
    __m512 sums[ROWS][4];
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 2, weights += 2 * OUTPUTS) {
        __m512bh own[4];
        UNROLLED for (int c = 0; c < 4; c++)
            own[c] = (__m512bh)_mm512_load_si512(weights + 2 * LANES * c);
        UNROLLED for (int r = 0; r < count; r++) {
            uint32_t pair;
            memcpy(&pair, inputs + r * width + i, 4);
            const __m512bh one = (__m512bh)_mm512_set1_epi32((int)pair);
            UNROLLED for (int c = 0; c < 4; c++)
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], one, own[c]);
        }
    }
    UNROLLED for (int c = 0; c < 4; c++) {
        const int64_t place = c * LANES;
        const __m512 more = bias ? widened(_mm256_loadu_si256((const __m256i *)(bias + place)))
                                 : _mm512_setzero_ps();
        UNROLLED for (int r = 0; r < count; r++)
            _mm256_storeu_si256((__m256i *)(out + r * outputs + place),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(sums[r][c], more)));
    }
}

/* (rows, outputs) of `inputs`, (rows, width).  `weights`: (outputs / OUTPUTS, width / 2, OUTPUTS, 2),
 * aligned to 64 bytes; `bias`: (outputs) or none.  Both widths are whole blocks. */
TARGET void kvcache_rag_linear(const uint16_t *inputs, const uint16_t *weights,
                               const uint16_t *bias, uint16_t *out, int64_t rows, int64_t width,
                               int64_t outputs, int64_t threads) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < outputs; first += OUTPUTS)
        for (int64_t row = 0; row < rows; row += ROWS) {
#define BLOCK(COUNT)                                                                              \
    block(inputs + row * width, width, weights + first * width, bias ? bias + first : 0,          \
          out + row * outputs + first, outputs, COUNT)
            SIDE_BY_SIDE(rows - row, BLOCK)
        }
}

/* The sum of squares in the order of torch's sum, so that no bit differs: eight lanes of four
 * accumulators, which are emptied into others after every 16 steps (of up to 256). */
INLINE float squares(const uint16_t *row, int64_t width) {
    __m256 sums[4], whole[4];
    UNROLLED for (int c = 0; c < 4; c++) sums[c] = whole[c] = _mm256_setzero_ps();
    for (int64_t step = 1; step <= width / 32; step++, row += 32) {
        UNROLLED for (int c = 0; c < 4; c += 2) {
            const __m512 one = widened(_mm256_loadu_si256((const __m256i *)(row + c * 8)));
            const __m512 square = _mm512_mul_ps(one, one);
            sums[c] = _mm256_add_ps(sums[c], _mm512_castps512_ps256(square));
            sums[c + 1] = _mm256_add_ps(sums[c + 1], _mm512_extractf32x8_ps(square, 1));
        }
        if (step % 16 == 0) UNROLLED for (int c = 0; c < 4; c++) {
            whole[c] = _mm256_add_ps(whole[c], sums[c]);
            sums[c] = _mm256_setzero_ps();
        }
    }
    UNROLLED for (int c = 0; c < 4; c++) sums[c] = _mm256_add_ps(sums[c], whole[c]);
    UNROLLED for (int c = 1; c < 4; c++) sums[0] = _mm256_add_ps(sums[0], sums[c]);
    float lanes[8], sum = 0;
    _mm256_storeu_ps(lanes, sums[0]);
    for (int c = 0; c < 8; c++) sum += lanes[c];
    return sum;
}

/* Each row of `inputs`, (rows, width), by the root of its mean square, times `weight`, (width). */
TARGET void kvcache_rag_norm(const uint16_t *inputs, const uint16_t *weight, uint16_t *out,
                             int64_t rows, int64_t width, float least, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 64)
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *from = inputs + row * width;
        const __m512 factor =
            _mm512_set1_ps(1 / sqrtf(squares(from, width) / (float)width + least));
        for (int64_t i = 0; i < width; i += LANES) {
            const __m512 one = widened(_mm256_loadu_si256((const __m256i *)(from + i)));
            const __m256bh near = _mm512_cvtneps_pbh(_mm512_mul_ps(one, factor));
            const __m512 own = widened(_mm256_loadu_si256((const __m256i *)(weight + i)));
            _mm256_storeu_si256(
                (__m256i *)(out + row * width + i),
                (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(widened((__m256i)near), own)));
        }
    }
}
