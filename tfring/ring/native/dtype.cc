// Sizes and names of element types.
#include "dtype.h"

namespace tfring {

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
    case Op::kProduct:
      return "product";
  }
  return "unknown op";
}

bool can_reduce(DType dtype, Op op) {
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const bool orders = op == Op::kMax || op == Op::kMin;
  return orders ? !is_complex : dtype != DType::kBool;
}

}  // namespace tfring
