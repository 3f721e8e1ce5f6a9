// Adam's update of a table with a gradient of few rows: the gradient of the others is zero. Their momenta
// still act, so the full table is updated, but no gradient of its size is written and read.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "border.h"
#include "core.h"
#include "dtype.h"
#include "kernels.h"

namespace tfring {
namespace {

constexpr int64_t kBlockBytes = 8 << 10;  // of gradients at a time, fits into the fastest cache

// Fills positions[row] with the position of the row in `ids`, -1 if it is not there. Returns false if a row
// is beyond the table or occurs twice.
template <typename Id>
bool find_rows(const void* ids, int64_t count, std::vector<int32_t>* positions) {
  const int64_t num_rows = static_cast<int64_t>(positions->size());
  std::fill(positions->begin(), positions->end(), -1);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = static_cast<const Id*>(ids)[i];
    if (row < 0 || row >= num_rows) return false;
    int32_t& position = (*positions)[static_cast<size_t>(row)];
    if (position >= 0) return false;
    position = static_cast<int32_t>(i);
  }
  return true;
}

// Updates blocks of rows. The gradients of a block are copied into memory that is otherwise zero.
void update(DType dtype, const void* scalars, const char* gradients, const std::vector<int32_t>& positions,
            int64_t width, const void* const* from, void* const* to) {
  const int64_t row_bytes = width * size_of(dtype);
  const int64_t num_rows = static_cast<int64_t>(positions.size());
  const int64_t most = std::max<int64_t>(1, kBlockBytes / std::max<int64_t>(1, row_bytes));
  std::vector<char> block(static_cast<size_t>(std::min(most, num_rows) * row_bytes));
  for (int64_t begin = 0; begin < num_rows; begin += most) {
    const int64_t rows = std::min(most, num_rows - begin);
    bool is_zero = true;
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t position = positions[static_cast<size_t>(begin + r)];
      if (position < 0) continue;
      std::memcpy(&block[static_cast<size_t>(r * row_bytes)], gradients + position * row_bytes,
                  static_cast<size_t>(row_bytes));
      is_zero = false;
    }
    const void* inputs[3];
    void* outputs[3];
    for (int i = 0; i < 3; ++i) {
      inputs[i] = static_cast<const char*>(from[i]) + begin * row_bytes;
      outputs[i] = static_cast<char*>(to[i]) + begin * row_bytes;
    }
    adam(dtype, scalars, block.data(), inputs, outputs, rows * width);
    if (!is_zero) std::fill(block.begin(), block.end(), '\0');
  }
}

}  // namespace
}  // namespace tfring

void tfring_adam(int dtype, const void* scalars, const void* gradients, const void* const* from,
                 void* const* to, int64_t count) {
  tfring::adam(static_cast<tfring::DType>(dtype), scalars, gradients, from, to, count);
}

int tfring_adam_rows(int dtype, const void* scalars, const void* gradients, int id_type, const void* ids,
                     int64_t count, int64_t num_rows, int64_t width, const void* const* from,
                     void* const* to) {
  return tfring::at_border(-1, [&] {
    std::vector<int32_t> positions(static_cast<size_t>(num_rows));
    const bool is_short = static_cast<tfring::DType>(id_type) == tfring::DType::kInt32;
    const bool found = is_short ? tfring::find_rows<int32_t>(ids, count, &positions)
                                : tfring::find_rows<int64_t>(ids, count, &positions);
    if (!found) return 0;
    tfring::update(static_cast<tfring::DType>(dtype), scalars, static_cast<const char*>(gradients), positions,
                   width, from, to);
    return 1;
  });
}
