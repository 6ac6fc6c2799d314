/* What products of few rows with blocks of weights share. */

#include "avx512.h"

#define OUTPUTS 64 /* of a block: what one pair of inputs meets lies together */
#define ROWS 6     /* rows computed side by side: their sums fill the registers */
#define UNROLLED _Pragma("GCC unroll 8")

/* `BLOCK(count)` for as many rows as are left, ROWS at most, each count compiled apart. */
#define SIDE_BY_SIDE(LEFT, BLOCK) \
    switch (LEFT) {               \
        case 1: BLOCK(1); break;  \
        case 2: BLOCK(2); break;  \
        case 3: BLOCK(3); break;  \
        case 4: BLOCK(4); break;  \
        case 5: BLOCK(5); break;  \
        default: BLOCK(ROWS);     \
    }
