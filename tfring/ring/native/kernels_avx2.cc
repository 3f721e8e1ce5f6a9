// AVX2 with F16C, as in all server processors since 2013 (Intel) and 2015 (AMD).
#if defined(__x86_64__)
#include "kernels.h"
//
#include <cpuid.h>
#include <immintrin.h>

#include <cstring>
#include <type_traits>

// After the headers: their inline functions may be used anywhere in the library.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

namespace tfring {
namespace {

#include "kernels_loops.h"

constexpr int kLanes = 8;

inline __m256 widen_lanes(const void* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}

inline void narrow_lanes(void* to, __m256 values) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

#include "kernels_f16c.h"

bool supported() {
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;  // __builtin_cpu_supports of some compilers does not know f16c
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace

const Kernels kAvx2{"avx2", supported, reduce_any, widen_any, narrow_any, adam_any};

}  // namespace tfring
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
