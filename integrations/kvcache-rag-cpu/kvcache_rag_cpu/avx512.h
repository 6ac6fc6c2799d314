/* What kernels for x86 CPUs with AVX-512 for bfloat16 share. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#ifndef ALSO /* another extension that a kernel needs */
#define ALSO "avx512bf16"
#endif
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16," ALSO)))
#define INLINE TARGET static inline __attribute__((always_inline))

int kvcache_rag_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports(ALSO);
}

INLINE __m512 widened(__m256i from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(from), 16));
}
