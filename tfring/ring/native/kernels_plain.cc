// Instructions that every processor of this kind has: SSE2 on x86-64, NEON on AArch64.
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace tfring {
namespace {

#include "kernels_loops.h"

// Avoids a branch, which would prevent vectorization; the compiler makes one for ?: around floating point.
inline int32_t choose(bool condition, int32_t yes, int32_t no) { return no ^ ((yes ^ no) & -condition); }

// Uses only normal float32 numbers, and comparisons of signed integers, which SSE2 has.
struct Float16 {
  using Stored = uint16_t;

  static float widen(uint16_t value) {
    const int32_t rest = (value & 0x7fff) << 13;  // exponent and mantissa in place, the bias 112 too small
    const int32_t normal = rest + (112 << 23);
    const int32_t special = rest + (224 << 23);
    const float subnormal = float_of(static_cast<uint32_t>(rest + (113 << 23))) - float_of(113u << 23);
    int32_t bits = choose(rest < (31 << 23), normal, special);
    bits = choose(rest < (1 << 23), static_cast<int32_t>(bits_of(subnormal)), bits);
    return float_of(static_cast<uint32_t>(bits) | static_cast<uint32_t>(value & 0x8000) << 16);
  }

  static uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffffu);
    const int32_t normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 lets the adder round a subnormal half at the right place.
    const float shifted = float_of(static_cast<uint32_t>(magnitude)) + 0.5f;
    const int32_t subnormal = static_cast<int32_t>(bits_of(shifted)) - 0x3f000000;
    int32_t half = choose(magnitude < (113 << 23), subnormal, normal);
    half = choose(magnitude < (143 << 23), half, 0x7c00);  // rounding carries into infinity automatically
    half |= static_cast<int32_t>((bits >> 16) & 0x8000u);
    return static_cast<uint16_t>(choose(magnitude > 0x7f800000, 0x7e00, half));
  }
};

template <typename Operation>
void reduce_float16(void* out, const void* a, const void* b, int64_t count) {
  loop<Operation, Float16>(out, a, b, count);
}

void widen_float16(float* out, const void* in, int64_t count) { widen_loop<Float16>(out, in, count); }

void narrow_float16(void* out, const float* in, int64_t count) { narrow_loop<Float16>(out, in, count); }

bool supported() { return true; }

}  // namespace

const Kernels kPlain{"plain", supported, reduce_any, widen_any, narrow_any, adam_any};

}  // namespace tfring
