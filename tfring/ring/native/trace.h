// Records of the calls of this process, for Python to collect and write. None while no trace is written.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.h"
#include "core.h"

namespace tfring {

extern std::atomic<bool> trace_wanted;
inline bool tracing() { return trace_wanted.load(std::memory_order_relaxed); }

// Keeps it until it is taken; counts it as lost where there is no room.
void keep_record(const tfring_record& record);

// Replaces what the parent's threads may have held.
void forget_trace_in_child();

// Adds to `total` how long it lives; to null, it does nothing.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t* total) : total_(total), start_(total == nullptr ? 0 : now_nanoseconds()) {}
  ~Stopwatch() {
    if (total_ != nullptr) *total_ += now_nanoseconds() - start_;
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  int64_t* const total_;
  const int64_t start_;
};

}  // namespace tfring
