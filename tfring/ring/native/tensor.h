// The memory of a tensor, in bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "core.h"
#include "dtype.h"

namespace tfring {

inline int64_t row_bytes(const tfring_tensor& tensor) {
  int64_t size = size_of(static_cast<DType>(tensor.dtype));
  for (int i = 1; i < tensor.num_dims; ++i) size *= tensor.dims[i];
  return size;
}

inline int64_t num_bytes(const tfring_tensor& tensor) {
  return tensor.num_dims == 0 ? size_of(static_cast<DType>(tensor.dtype))
                              : tensor.dims[0] * row_bytes(tensor);
}

inline int64_t num_bytes(const tfring_tensor* tensors, int num_tensors) {
  int64_t total = 0;
  for (int t = 0; t < num_tensors; ++t) total += num_bytes(tensors[t]);
  return total;
}

// A null `from` means zeros.
inline void copy(void* to, const void* from, int64_t size) {
  if (size == 0 || to == from) return;
  if (from == nullptr) {
    std::memset(to, 0, static_cast<size_t>(size));
  } else {
    std::memcpy(to, from, static_cast<size_t>(size));
  }
}

}  // namespace tfring
