// Chooses the instruction set, and implements functions without their own loops.
#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstring>
#include <iterator>

#include "core.h"

namespace tfring {
namespace {

const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#endif
    &kPlain};

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* known = chosen.load(std::memory_order_relaxed);
  if (known != nullptr) return *known;
  const Kernels* best =
      *std::find_if(std::begin(kAll), std::end(kAll), [](const Kernels* one) { return one->supported(); });
  chosen.store(best, std::memory_order_relaxed);
  return *best;
}

// Sets the arithmetic of IEEE 754, whatever mode the caller has set: TensorFlow's threads treat subnormal
// numbers as zero, Python's do not, and ranks may call from either.
class StandardArithmetic {
 public:
#if defined(__x86_64__)
  StandardArithmetic() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~StandardArithmetic() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#else
  StandardArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StandardArithmetic() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
#endif
};

constexpr int64_t kBlock = 2048;  // elements: a few such blocks fit into the innermost cache

// Computes in float32 and rounds once.
void reduce_many_wide(const Kernels& use, DType dtype, Op op, char* out, const void* const* parts,
                      int num_parts, int64_t count) {
  float total[kBlock];
  float part[kBlock];
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t left = std::min(count - done, kBlock);
    for (int p = 0; p < num_parts; ++p) {
      use.widen(dtype, p == 0 ? total : part, static_cast<const char*>(parts[p]) + 2 * done, left);
      if (p > 0) use.reduce(DType::kFloat32, op, total, total, part, left);
    }
    use.narrow(dtype, out + 2 * done, total, left);
  }
}

}  // namespace

void reduce(DType dtype, Op op, void* out, const void* a, const void* b, int64_t count) {
  const StandardArithmetic standard;
  kernels().reduce(dtype, op, out, a, b, count);
}

void reduce_many(DType dtype, Op op, void* out, const void* const* parts, int num_parts, int64_t count) {
  if (count == 0) return;
  const int64_t item = size_of(dtype);
  if (num_parts == 1) {
    if (out != parts[0]) std::memcpy(out, parts[0], static_cast<size_t>(count * item));
    return;
  }
  const StandardArithmetic standard;
  const Kernels& use = kernels();
  char* to = static_cast<char*>(out);
  if (num_parts > 2 && (dtype == DType::kFloat16 || dtype == DType::kBfloat16)) {
    return reduce_many_wide(use, dtype, op, to, parts, num_parts, count);
  }
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t left = std::min(count - done, kBlock);
    const void* total = static_cast<const char*>(parts[0]) + item * done;
    for (int p = 1; p < num_parts; ++p) {
      use.reduce(dtype, op, to + item * done, total, static_cast<const char*>(parts[p]) + item * done, left);
      total = to + item * done;
    }
  }
}

void add_rows(DType dtype, void* const* to, const int32_t* positions, const void* rows, int64_t count,
              int64_t width, int64_t* begun) {
  const StandardArithmetic standard;
  const Kernels& use = kernels();
  const bool wide = dtype == DType::kFloat16 || dtype == DType::kBfloat16;
  const int64_t bytes = width * size_of(dtype);
  const char* row = static_cast<const char*>(rows);
  float part[kBlock];
  for (int64_t i = 0; i < count; ++i, row += bytes) {
    void* const sum = to[positions[i]];
    const bool is_first = positions[i] == *begun;
    if (is_first) ++*begun;
    if (!wide && is_first) {
      std::memcpy(sum, row, static_cast<size_t>(bytes));
    } else if (!wide) {
      use.reduce(dtype, Op::kSum, sum, sum, row, width);
    } else if (is_first) {
      use.widen(dtype, static_cast<float*>(sum), row, width);
    } else {
      for (int64_t done = 0; done < width; done += kBlock) {
        const int64_t left = std::min(width - done, kBlock);
        float* const total = static_cast<float*>(sum) + done;
        use.widen(dtype, part, row + 2 * done, left);
        use.reduce(DType::kFloat32, Op::kSum, total, total, part, left);
      }
    }
  }
}

void widen(DType dtype, float* out, const void* in, int64_t count) { kernels().widen(dtype, out, in, count); }

void narrow(DType dtype, void* out, const float* in, int64_t count) {
  const StandardArithmetic standard;
  kernels().narrow(dtype, out, in, count);
}

void adam(DType dtype, const void* scalars, const void* gradients, const void* const* from, void* const* to,
          int64_t count) {
  kernels().adam(dtype, scalars, gradients, from, to, count);
}

}  // namespace tfring

int tfring_use_instructions(const char* name) {
  for (const tfring::Kernels* one : tfring::kAll) {
    if (std::strcmp(one->name, name) != 0) continue;
    if (!one->supported()) return 0;
    tfring::chosen = one;
    return 1;
  }
  return 0;
}

void tfring_reduce_many(int dtype, int op, void* out, const void* const* parts, int num_parts,
                        int64_t count) {
  tfring::reduce_many(static_cast<tfring::DType>(dtype), static_cast<tfring::Op>(op), out, parts, num_parts,
                      count);
}

void tfring_reduce_two(int dtype, int op, void* out, const void* a, const void* b, int64_t count) {
  tfring::reduce(static_cast<tfring::DType>(dtype), static_cast<tfring::Op>(op), out, a, b, count);
}
