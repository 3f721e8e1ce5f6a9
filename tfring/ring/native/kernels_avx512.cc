// AVX-512, as in Skylake-SP, Zen 4 and later.
#if defined(__x86_64__)
#include "kernels.h"
//
#include <immintrin.h>

#include <cstring>
#include <type_traits>

// After the headers: their inline functions may be used anywhere in the library.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace tfring {
namespace {

#include "kernels_loops.h"

constexpr int kLanes = 16;

// With a mask of all lanes: g++ 12 reports uses of uninitialized values in the forms without a mask.
inline __m512 widen_lanes(const void* from) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

inline void narrow_lanes(void* to, __m512 values) {
  _mm256_storeu_si256(static_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(0xffff, values, _MM_FROUND_TO_NEAREST_INT));
}

#include "kernels_f16c.h"

// g++ 12.2 fuses products and sums of complex numbers here even if told not to (its bug 107647).
void reduce_unfused(DType dtype, Op op, void* out, const void* a, const void* b, int64_t count) {
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  (is_complex ? kAvx2.reduce : reduce_any)(dtype, op, out, a, b, count);
}

bool supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

const Kernels kAvx512{"avx512", supported, reduce_unfused, widen_any, narrow_any, adam_any};

}  // namespace tfring
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
