// Reductions: one loop for all types, vectorised by the compiler.
#include "dtype.h"

#include <cstring>

namespace tfring {
namespace {

// 16-bit floats are added in float32 and rounded to nearest even after each step.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float widen(Bfloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

inline void narrow(float value, Bfloat16* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  out->bits = static_cast<uint16_t>(value != value ? quiet_nan : rounded);
}

inline float widen(Float16 value) {
  // Shift exponent and mantissa into place, then repair the exponent's bias: by a multiplication, so that
  // subnormals come out right as well.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = float_of(rest) * float_of(0x77800000u);  // 2^112
  const uint32_t special = rest | 0x7f800000u | ((rest & 0x007fffffu) != 0 ? 0x00400000u : 0u);
  return float_of(sign | ((value.bits & 0x7c00u) == 0x7c00u ? special : bits_of(scaled)));
}

inline void narrow(float value, Float16* out) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 lets the adder round a subnormal half to the right place.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? nan : half;
  out->bits = static_cast<uint16_t>(sign | half);
}

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    return a + b;
  }
  // Integers wrap round, as NumPy's do.
  static int8_t apply(int8_t a, int8_t b) {
    return static_cast<int8_t>(static_cast<uint8_t>(a) + static_cast<uint8_t>(b));
  }
  static uint8_t apply(uint8_t a, uint8_t b) { return static_cast<uint8_t>(a + b); }
  static int16_t apply(int16_t a, int16_t b) {
    return static_cast<int16_t>(static_cast<uint16_t>(a) + static_cast<uint16_t>(b));
  }
  static uint16_t apply(uint16_t a, uint16_t b) { return static_cast<uint16_t>(a + b); }
  static int32_t apply(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
  static int64_t apply(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};

// A NaN on either side wins, as in np.maximum: a != a holds for NaN only.
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return (a > b || a != a) ? a : b;
  }
};

struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return (a < b || a != a) ? a : b;
  }
};

template <typename Operation, typename T>
inline T combine(T a, T b) {
  return Operation::apply(a, b);
}
template <typename Operation>
inline Bfloat16 combine(Bfloat16 a, Bfloat16 b) {
  Bfloat16 result;
  narrow(Operation::apply(widen(a), widen(b)), &result);
  return result;
}
template <typename Operation>
inline Float16 combine(Float16 a, Float16 b) {
  Float16 result;
  narrow(Operation::apply(widen(a), widen(b)), &result);
  return result;
}

// A block at a time through local arrays: the wire gives no alignment, and the compiler needs to know that
// `out` may be `a`.
template <typename Operation, typename T>
void loop(void* out, const void* a, const void* b, int64_t count) {
  constexpr int64_t kBlock = 1024 / sizeof(T);
  T left[kBlock];
  T right[kBlock];
  char* out_bytes = static_cast<char*>(out);
  const char* a_bytes = static_cast<const char*>(a);
  const char* b_bytes = static_cast<const char*>(b);
  int64_t done = 0;
  for (; done + kBlock <= count; done += kBlock) {
    std::memcpy(left, a_bytes + done * sizeof(T), sizeof(left));
    std::memcpy(right, b_bytes + done * sizeof(T), sizeof(right));
    for (int64_t i = 0; i < kBlock; ++i) left[i] = combine<Operation>(left[i], right[i]);
    std::memcpy(out_bytes + done * sizeof(T), left, sizeof(left));
  }
  for (; done < count; ++done) {
    std::memcpy(left, a_bytes + done * sizeof(T), sizeof(T));
    std::memcpy(right, b_bytes + done * sizeof(T), sizeof(T));
    left[0] = combine<Operation>(left[0], right[0]);
    std::memcpy(out_bytes + done * sizeof(T), left, sizeof(T));
  }
}

template <typename Operation>
void dispatch(DType dtype, void* out, const void* a, const void* b, int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return loop<Operation, float>(out, a, b, count);
    case DType::kFloat64:
      return loop<Operation, double>(out, a, b, count);
    case DType::kFloat16:
      return loop<Operation, Float16>(out, a, b, count);
    case DType::kBfloat16:
      return loop<Operation, Bfloat16>(out, a, b, count);
    case DType::kComplex64:  // two numbers each; sums only
      return loop<Operation, float>(out, a, b, 2 * count);
    case DType::kComplex128:
      return loop<Operation, double>(out, a, b, 2 * count);
    case DType::kInt8:
      return loop<Operation, int8_t>(out, a, b, count);
    case DType::kInt16:
      return loop<Operation, int16_t>(out, a, b, count);
    case DType::kInt32:
      return loop<Operation, int32_t>(out, a, b, count);
    case DType::kInt64:
      return loop<Operation, int64_t>(out, a, b, count);
    case DType::kUint8:
    case DType::kBool:
      return loop<Operation, uint8_t>(out, a, b, count);
    case DType::kUint16:
      return loop<Operation, uint16_t>(out, a, b, count);
    case DType::kUint32:
      return loop<Operation, uint32_t>(out, a, b, count);
    case DType::kUint64:
      return loop<Operation, uint64_t>(out, a, b, count);
  }
}

}  // namespace

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUint8:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kInt16:
    case DType::kUint16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUint32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUint64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kUint8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt64:
      return "int64";
    case DType::kUint16:
      return "uint16";
    case DType::kUint32:
      return "uint32";
    case DType::kUint64:
      return "uint64";
    case DType::kComplex64:
      return "complex64";
    case DType::kComplex128:
      return "complex128";
    case DType::kBool:
      return "bool";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "unknown dtype";
}

const char* name_of(Op op) {
  switch (op) {
    case Op::kSum:
      return "sum";
    case Op::kMax:
      return "max";
    case Op::kMin:
      return "min";
  }
  return "unknown op";
}

bool can_reduce(DType dtype, Op op) {
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return op == Op::kSum ? dtype != DType::kBool : !is_complex;
}

void reduce(DType dtype, Op op, void* out, const void* a, const void* b, int64_t count) {
  switch (op) {
    case Op::kSum:
      return dispatch<Sum>(dtype, out, a, b, count);
    case Op::kMax:
      return dispatch<Max>(dtype, out, a, b, count);
    case Op::kMin:
      return dispatch<Min>(dtype, out, a, b, count);
  }
}

}  // namespace tfring
