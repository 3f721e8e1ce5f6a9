// Element types and their operations. The numbers of DType are those of TensorFlow's TF_DataType.
#pragma once

#include <cstdint>

namespace tfring {

enum class DType : int32_t {
  kFloat32 = 1,
  kFloat64 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kComplex64 = 8,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kComplex128 = 18,
  kFloat16 = 19,
  kUint32 = 22,
  kUint64 = 23,
};

enum class Op : int32_t { kSum = 0, kMax = 1, kMin = 2, kProduct = 3 };

// Returns 0 for a type that the ring does not support.
int64_t size_of(DType dtype);
const char* name_of(DType dtype);
const char* name_of(Op op);

// bool has no sum and no product: the caller must decide whether a sum should count or saturate. Complex
// numbers have no order.
bool can_reduce(DType dtype, Op op);

}  // namespace tfring
