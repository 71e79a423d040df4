// Attention over an arena of int8 numbers with a scale each vector.
#include "attention_scaled.h"

STEPGRAPH_SCALED_ATTENTION(Int8);
