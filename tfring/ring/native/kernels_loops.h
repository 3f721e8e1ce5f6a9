// The loops. Included by the file of each set of instructions, inside its own unnamed namespace, so that the
// compiler vectorizes them with the instructions that this file allows.

// float16 conversions, which that file defines below: as a loop, or with the processor's conversions.
template <typename Operation>
void reduce_float16(void* out, const void* a, const void* b, int64_t count);
void widen_float16(float* out, const void* in, int64_t count);
void narrow_float16(void* out, const float* in, int64_t count);

// The iterations do not depend on each other, although `out` may be `a`.
#if defined(__clang__)
#define TFRING_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TFRING_INDEPENDENT _Pragma("GCC ivdep")
#endif

template <typename T>
inline T load(const void* from, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename T>
inline void store(void* to, int64_t index, T value) {
  std::memcpy(static_cast<char*>(to) + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

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

// Processors differ in which operand's NaN they pass on, and in the sign of a NaN that they make.
template <typename T>
inline T canonical(T value) {
  return value;
}
inline float canonical(float value) { return value != value ? __builtin_nanf("") : value; }
inline double canonical(double value) { return value != value ? __builtin_nan("") : value; }

// The types of an element in memory and in the computation. `narrow` makes NaNs canonical.
template <typename T>
struct Number {
  using Stored = T;
  static T widen(T value) { return value; }
  static T narrow(T value) { return canonical(value); }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static float widen(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }
  static uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
  }
};

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};

struct Product {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
  // uint16_t would be multiplied as int, which may overflow.
  static uint16_t apply(uint16_t a, uint16_t b) { return static_cast<uint16_t>(uint32_t{a} * uint32_t{b}); }
};

// NaN on either side takes precedence, as in np.maximum: a != a is true only for NaN.
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    const T larger = a > b ? a : b;
    return a != a ? a : larger;
  }
};

struct Min {
  template <typename T>
  static T apply(T a, T b) {
    const T smaller = a < b ? a : b;
    return a != a ? a : smaller;
  }
};

template <typename Operation, typename Element>
void loop(void* out, const void* a, const void* b, int64_t count) {
  using T = typename Element::Stored;
  TFRING_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const auto left = Element::widen(load<T>(a, i));
    const auto right = Element::widen(load<T>(b, i));
    store<T>(out, i, Element::narrow(Operation::apply(left, right)));
  }
}

template <typename T>
void multiply_complex(void* out, const void* a, const void* b, int64_t count) {
  TFRING_INDEPENDENT
  for (int64_t i = 0; i < 2 * count; i += 2) {
    const T a_real = load<T>(a, i), a_imaginary = load<T>(a, i + 1);
    const T b_real = load<T>(b, i), b_imaginary = load<T>(b, i + 1);
    store<T>(out, i, canonical(a_real * b_real - a_imaginary * b_imaginary));
    store<T>(out, i + 1, canonical(a_real * b_imaginary + a_imaginary * b_real));
  }
}

// Integers wrap around, as in NumPy: sums and products of signed integers are those of their bits.
template <typename Operation, bool kBitwise>
void reduce_as(DType dtype, void* out, const void* a, const void* b, int64_t count) {
  constexpr bool kProduct = std::is_same<Operation, Product>::value;
  switch (dtype) {
    case DType::kFloat32:
      return loop<Operation, Number<float>>(out, a, b, count);
    case DType::kFloat64:
      return loop<Operation, Number<double>>(out, a, b, count);
    case DType::kFloat16:
      return reduce_float16<Operation>(out, a, b, count);
    case DType::kBfloat16:
      return loop<Operation, Bfloat16>(out, a, b, count);
    case DType::kComplex64:
      if (kProduct) return multiply_complex<float>(out, a, b, count);
      return loop<Operation, Number<float>>(out, a, b, 2 * count);
    case DType::kComplex128:
      if (kProduct) return multiply_complex<double>(out, a, b, count);
      return loop<Operation, Number<double>>(out, a, b, 2 * count);
    case DType::kInt8:
      return loop<Operation, Number<std::conditional_t<kBitwise, uint8_t, int8_t>>>(out, a, b, count);
    case DType::kInt16:
      return loop<Operation, Number<std::conditional_t<kBitwise, uint16_t, int16_t>>>(out, a, b, count);
    case DType::kInt32:
      return loop<Operation, Number<std::conditional_t<kBitwise, uint32_t, int32_t>>>(out, a, b, count);
    case DType::kInt64:
      return loop<Operation, Number<std::conditional_t<kBitwise, uint64_t, int64_t>>>(out, a, b, count);
    case DType::kUint8:
    case DType::kBool:
      return loop<Operation, Number<uint8_t>>(out, a, b, count);
    case DType::kUint16:
      return loop<Operation, Number<uint16_t>>(out, a, b, count);
    case DType::kUint32:
      return loop<Operation, Number<uint32_t>>(out, a, b, count);
    case DType::kUint64:
      return loop<Operation, Number<uint64_t>>(out, a, b, count);
  }
}

void reduce_any(DType dtype, Op op, void* out, const void* a, const void* b, int64_t count) {
  switch (op) {
    case Op::kSum:
      return reduce_as<Sum, true>(dtype, out, a, b, count);
    case Op::kMax:
      return reduce_as<Max, false>(dtype, out, a, b, count);
    case Op::kMin:
      return reduce_as<Min, false>(dtype, out, a, b, count);
    case Op::kProduct:
      return reduce_as<Product, true>(dtype, out, a, b, count);
  }
}

inline float root(float value) { return __builtin_sqrtf(value); }
inline double root(double value) { return __builtin_sqrt(value); }

// Computes in the order of Keras, with each operation rounded by itself.
template <typename T>
void adam_loop(const void* scalars, const void* gradients, const void* const* from, void* const* to,
               int64_t count) {
  const T alpha = load<T>(scalars, 0), rest_1 = load<T>(scalars, 1), rest_2 = load<T>(scalars, 2),
          epsilon = load<T>(scalars, 3);
  const void *const from_momentum = from[0], *const from_velocity = from[1], *const from_weight = from[2];
  void *const to_momentum = to[0], *const to_velocity = to[1], *const to_weight = to[2];
  TFRING_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const T gradient = load<T>(gradients, i);
    const T momentum = load<T>(from_momentum, i) + (gradient - load<T>(from_momentum, i)) * rest_1;
    const T velocity = load<T>(from_velocity, i) + (gradient * gradient - load<T>(from_velocity, i)) * rest_2;
    store<T>(to_momentum, i, momentum);
    store<T>(to_velocity, i, velocity);
    store<T>(to_weight, i, load<T>(from_weight, i) - momentum * alpha / (root(velocity) + epsilon));
  }
}

void adam_any(DType dtype, const void* scalars, const void* gradients, const void* const* from,
              void* const* to, int64_t count) {
  if (dtype == DType::kFloat64) return adam_loop<double>(scalars, gradients, from, to, count);
  adam_loop<float>(scalars, gradients, from, to, count);
}

template <typename Element>
void widen_loop(float* out, const void* in, int64_t count) {
  TFRING_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) out[i] = Element::widen(load<uint16_t>(in, i));
}

template <typename Element>
void narrow_loop(void* out, const float* in, int64_t count) {
  TFRING_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) store<uint16_t>(out, i, Element::narrow(in[i]));
}

void widen_any(DType dtype, float* out, const void* in, int64_t count) {
  if (dtype == DType::kFloat16) return widen_float16(out, in, count);
  widen_loop<Bfloat16>(out, in, count);
}

void narrow_any(DType dtype, void* out, const float* in, int64_t count) {
  if (dtype == DType::kFloat16) return narrow_float16(out, in, count);
  narrow_loop<Bfloat16>(out, in, count);
}
