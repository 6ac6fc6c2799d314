/* Linear layers whose weights have eight or four bits, for x86 CPUs with AVX-512.
 *
 * Weights are widened to bfloat16 in registers, which holds their integers exactly, and meet inputs
 * that stay bfloat16; scales and zero points come to the sums, in float32, and are rounded once.
 */

#define ALSO "avx512vbmi"
#include "row_blocks.h"

#define GROUP 32 /* inputs that share a scale and a zero point in four bits */

/* What integers are looked up in. */
typedef struct {
    __m512i low[2], high[2]; /* bytes of the bfloat16 numbers 0 to 127 */
    __m512i steps;           /* -8 to 7, twice, as the fifth bit of an index is not cleared */
    __m512i even, odd;       /* places of the bytes of two inputs, each twice, for 16 outputs */
} Tables;

INLINE __m512i upwards(int first) {
    return _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(first));
}

INLINE __m512i numbers(int low, int high) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(upwards(high)),
                                        _mm512_cvtepi32_ps(upwards(low)));
}

INLINE Tables tables(void) {
    Tables made;
    UNROLLED for (int half = 0; half < 2; half++) {
        const __m512i one = numbers(64 * half, 64 * half + 16);
        const __m512i two = numbers(64 * half + 32, 64 * half + 48);
        made.low[half] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(one)),
                                            _mm512_cvtepi16_epi8(two), 1);
        made.high[half] = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srli_epi16(one, 8))),
            _mm512_cvtepi16_epi8(_mm512_srli_epi16(two, 8)), 1);
    }
    made.steps = numbers(-8, -8);
    made.even = _mm512_add_epi8(_mm512_mullo_epi32(upwards(0), _mm512_set1_epi32(0x01010101)),
                                _mm512_set1_epi32(0x20200000));
    made.odd = _mm512_add_epi8(made.even, _mm512_set1_epi8(16));
    return made;
}

/* (OUTPUTS, 2) integers of two inputs, in bfloat16.  Eight bits: bytes of signed integers (-127 to
 * 127), with outputs in the order that unpacking undoes.  Four: torch's (2, 2, 16) bytes per pair,
 * outputs 0 to 15 and 16 to 31 in the low halves of bytes, 32 to 47 and 48 to 63 in the high. */
INLINE void widen(const uint8_t *weights, const Tables *in, __m512bh *wide, const int bits) {
    if (bits == 8) {
        UNROLLED for (int c = 0; c < 4; c += 2) {
            const __m512i own = _mm512_loadu_si512(weights + 32 * c);
            const __m512i size = _mm512_abs_epi8(own);
            const __m512i low = _mm512_permutex2var_epi8(in->low[0], size, in->low[1]);
            const __m512i high = _mm512_ternarylogic_epi32( /* with the sign */
                _mm512_permutex2var_epi8(in->high[0], size, in->high[1]), own,
                _mm512_set1_epi8((char)0x80), 0xF8);
            wide[c] = (__m512bh)_mm512_unpacklo_epi8(low, high);
            wide[c + 1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
        }
    } else {
        const __m512i own = _mm512_loadu_si512(weights);
        const __m512i one = _mm512_permutexvar_epi8(in->even, own);
        const __m512i two = _mm512_permutexvar_epi8(in->odd, own);
        wide[0] = (__m512bh)_mm512_permutexvar_epi16(one, in->steps);
        wide[1] = (__m512bh)_mm512_permutexvar_epi16(two, in->steps);
        wide[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(one, 4), in->steps);
        wide[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(two, 4), in->steps);
    }
}

INLINE __m512 even(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }

INLINE __m512 odd(__m512i pairs) {
    return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000));
}

INLINE __m512 floats(const uint16_t *from) {
    return widened(_mm256_loadu_si256((const __m256i *)from));
}

/* `count` rows (at most ROWS) times a block. */
INLINE void block(const uint16_t *inputs, int64_t width, const uint8_t *weights,
                  const uint16_t *levels, const uint16_t *bias, uint16_t *out, int64_t outputs,
                  const int bits, const int count) {
    const Tables in = tables();
    const int64_t group = bits == 8 ? width : GROUP;
    __m512 sums[ROWS][4];
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int c = 0; c < 4; c++)
            sums[r][c] = bias ? floats(bias + LANES * c) : _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += group) {
        __m512 part[ROWS][4];
        UNROLLED for (int r = 0; r < count; r++)
            UNROLLED for (int c = 0; c < 4; c++) part[r][c] = _mm512_setzero_ps();
        for (int64_t k = i; k < i + group; k += 2, weights += 16 * bits) {
            __m512bh wide[4];
            widen(weights, &in, wide, bits);
            UNROLLED for (int r = 0; r < count; r++) {
                uint32_t pair;
                memcpy(&pair, inputs + r * width + k, 4);
                const __m512bh one = (__m512bh)_mm512_set1_epi32((int)pair);
                UNROLLED for (int c = 0; c < 4; c++)
                    part[r][c] = _mm512_dpbf16_ps(part[r][c], one, wide[c]);
            }
        }
        UNROLLED for (int r = 0; r < count; r++) {
            if (bits == 8) {
                UNROLLED for (int c = 0; c < 4; c++)
                    sums[r][c] = _mm512_fmadd_ps(part[r][c], floats(levels + LANES * c), sums[r][c]);
                continue;
            }
            const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
            const __m512bh given = (__m512bh)_mm512_loadu_si512(inputs + r * width + i);
            const __m512 whole = _mm512_set1_ps(
                _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), given, ones)));
            UNROLLED for (int c = 0; c < 4; c++) {
                const __m512i level =
                    _mm512_loadu_si512(levels + 2 * (i / GROUP * outputs + LANES * c));
                sums[r][c] = _mm512_fmadd_ps(part[r][c], even(level), sums[r][c]);
                sums[r][c] = _mm512_fmadd_ps(whole, odd(level), sums[r][c]);
            }
        }
    }
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int c = 0; c < 4; c++)
            _mm256_storeu_si256((__m256i *)(out + r * outputs + LANES * c),
                                (__m256i)_mm512_cvtneps_pbh(sums[r][c]));
}

INLINE void product(const uint16_t *inputs, const uint8_t *weights, const uint16_t *levels,
                    const uint16_t *bias, uint16_t *out, int64_t rows, int64_t width,
                    int64_t outputs, int64_t threads, const int bits) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < outputs; first += OUTPUTS)
        for (int64_t row = 0; row < rows; row += ROWS) {
#define BLOCK(COUNT)                                                                              \
    block(inputs + row * width, width, weights + first * width * bits / 8,                        \
          levels + (bits == 8 ? 1 : 2) * first, bias ? bias + first : 0,                          \
          out + row * outputs + first, outputs, bits, COUNT)
            SIDE_BY_SIDE(rows - row, BLOCK)
        }
}

/* (rows, outputs) of `inputs`, (rows, width).  `weights`: blocks; `levels`: scales, (outputs), or in
 * four bits scales and the weights that 8 stands for, (width / GROUP, outputs, 2); `bias`: (outputs)
 * or none. */
TARGET void kvcache_rag_rounded(const uint16_t *inputs, const uint8_t *weights,
                                const uint16_t *levels, const uint16_t *bias, uint16_t *out,
                                int64_t rows, int64_t width, int64_t outputs, int64_t threads,
                                int64_t bits) {
    if (bits == 8)
        product(inputs, weights, levels, bias, out, rows, width, outputs, threads, 8);
    else
        product(inputs, weights, levels, bias, out, rows, width, outputs, threads, 4);
}

/* The weights of outputs `first` to `last` (whole blocks) in bfloat16, (width, last - first). */
TARGET void kvcache_rag_widened(const uint8_t *weights, const uint16_t *levels, uint16_t *out,
                                int64_t width, int64_t outputs, int64_t first, int64_t last,
                                int64_t threads, int64_t bits) {
    const Tables in = tables();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < width; i += 2)
        for (int64_t at = first; at < last; at += OUTPUTS) {
            const uint8_t *from = weights + (at * width + i * OUTPUTS) * bits / 8;
            __m512bh wide[4];
            if (bits == 8)
                widen(from, &in, wide, 8);
            else
                widen(from, &in, wide, 4);
            UNROLLED for (int c = 0; c < 4; c++) {
                const int64_t place = at + LANES * c;
                __m512 scale, middle = _mm512_setzero_ps();
                if (bits == 8) {
                    scale = floats(levels + place);
                } else {
                    const __m512i level =
                        _mm512_loadu_si512(levels + 2 * (i / GROUP * outputs + place));
                    scale = even(level), middle = odd(level);
                }
                uint16_t *to = out + i * (last - first) + place - first;
                _mm256_storeu_si256((__m256i *)to,
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(
                                        even((__m512i)wide[c]), scale, middle)));
                _mm256_storeu_si256((__m256i *)(to + last - first),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(
                                        odd((__m512i)wide[c]), scale, middle)));
            }
        }
}
