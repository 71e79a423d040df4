// Attention over an arena of fp8 numbers with a scale each vector.
#include "attention.h"

STEPGRAPH_SCALED_ATTENTION(, Fp8);
