// Attention over an arena of int8 numbers with a scale each vector.
#include "attention.h"

STEPGRAPH_SCALED_ATTENTION(, Int8);
