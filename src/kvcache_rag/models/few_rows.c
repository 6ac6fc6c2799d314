/* Linear layers of few rows in bfloat16, for x86 CPUs with AVX-512.
 *
 * A generated token takes the time in which memory gives the weights.  oneDNN's own function reaches
 * half of that where layers are small; here they stream once, in the order in which oneDNN keeps
 * them, past rows that stay in the first cache.  The same instruction multiplies.
 */

#include "avx512.h"

#define OUTPUTS 64 /* of a block: what one pair of inputs meets lies together */
#define ROWS 6     /* rows computed side by side: their sums fill the registers */
#define UNROLLED _Pragma("GCC unroll 8")

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
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < outputs; first += OUTPUTS)
        for (int64_t row = 0; row < rows; row += ROWS) {
#define BLOCK(COUNT)                                                                              \
    block(inputs + row * width, width, weights + first * width, bias ? bias + first : 0,          \
          out + row * outputs + first, outputs, COUNT)
            switch (rows - row) {
                case 1: BLOCK(1); break;
                case 2: BLOCK(2); break;
                case 3: BLOCK(3); break;
                case 4: BLOCK(4); break;
                case 5: BLOCK(5); break;
                default: BLOCK(6);
            }
        }
}
