#include "tiles.h"

#include <atomic>
#include <utility>

#if STEPGRAPH_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace stepgraph {
namespace {

#if STEPGRAPH_AMX
// Whether the processor computes what the emulation does, over random numbers.
template <bool Int8>
bool agrees() {
  constexpr int64_t kRows = 29, kWords = 35;
  struct {
    uint32_t x[kRows][kWords], w[kWords][kBlock], sums[2][kRows][kBlock];
  } numbers;
  uint32_t state = 1;
  const auto random = [&](uint32_t exponents) {
    state = state * 1664525u + 1013904223u;
    const uint32_t word = state >> 16 | (state * 2654435769u & 0xffff0000u);
    return Int8 ? word : (word & 0x87ff87ffu) | exponents * 0x10001u;
  };
  // The upper bits of exponents of bf16: numbers below 1, and products that all count as zero. On
  // which side of 2**-126 a product is where rounding decides, the manual does not say.
  for (const auto [x_exponents, w_exponents] : {std::pair(0x3800u, 0x3800u), {0x1800u, 0x1800u}}) {
    for (auto& row : numbers.x) std::generate_n(row, kWords, [&] { return random(x_exponents); });
    for (auto& row : numbers.w) std::generate_n(row, kBlock, [&] { return random(w_exponents); });
    const auto run = [&](auto tiles, int place) {
      tile_product<decltype(tiles), Int8>(tiles, numbers.x, sizeof(numbers.x[0]), kRows, numbers.w,
                                          kWords, nullptr, numbers.sums[place], kStepBytes, false);
    };
    TileState configured;
    run(ProcessorTiles(configured), 0);
    run(EmulatedTiles(configured), 1);
    const uint32_t *sums = numbers.sums[0][0], *emulated = numbers.sums[1][0];
    const auto equal = [](uint32_t a, uint32_t b) {  // zeros of either sign are
      return a == b || (!Int8 && bits<float>(a) == bits<float>(b));
    };
    if (!std::equal(sums, emulated, emulated, equal)) return false;
  }
  return true;
}

TileUse usable() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of Linux's <asm/prctl.h>
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return TileUse::kNone;
  return agrees<false>() && agrees<true>() ? TileUse::kProcessor : TileUse::kDifferent;
}
#else
TileUse usable() { return TileUse::kNone; }
#endif

std::atomic<TileUse> use = usable();

}  // namespace

TileUse tile_use() { return use.load(std::memory_order_relaxed); }

void emulate_tiles(bool emulated) { use = emulated ? TileUse::kEmulated : usable(); }

}  // namespace stepgraph
