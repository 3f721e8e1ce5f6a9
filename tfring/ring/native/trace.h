// Records of the calls of this process, for Python to collect and write. There are none without a trace.
#pragma once

#include <atomic>
#include <cstdint>

#include "call.h"
#include "clock.h"
#include "core.h"
#include "schedule.h"
#include "settings.h"
#include "status.h"

namespace tfring {

// Replaces the state that the parent's threads may have held.
void forget_trace_in_child();

extern std::atomic<bool> trace_wanted;

// Adds its lifetime to `total`. Does nothing if that is null.
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

// The record of the current call, if a trace is written.
class Record {
 public:
  // `so_far`, in both functions, are the totals of all calls.
  void start(const Settings& settings, const Call& call, const tfring_call& arguments,
             const tfring_tensor* tensors, int num_tensors, const tfring_statistics& so_far) {
    is_on_ = trace_wanted.load(std::memory_order_relaxed);
    if (is_on_) fill(settings, call, arguments, tensors, num_tensors, so_far);
  }
  // To be called when the header of a peer has arrived: until then this rank has waited, except for
  // arithmetic.
  void met(int rank) {
    if (!is_on_) return;
    record_.last = rank;
    record_.waited = now_nanoseconds() - record_.begin - record_.added;
  }
  void finish(const Status& status, const tfring_statistics& so_far) {
    if (is_on_) keep(status, so_far);
  }
  // Records the algorithm of a part of the call, unless the call itself has one.
  void took(Algorithm algorithm) {
    if (record_.algorithm == 0) record_.algorithm = static_cast<int32_t>(algorithm);
  }
  // The total for a Stopwatch around arithmetic.
  int64_t* adding() { return is_on_ ? &record_.added : nullptr; }

 private:
  void fill(const Settings& settings, const Call& call, const tfring_call& arguments,
            const tfring_tensor* tensors, int num_tensors, const tfring_statistics& so_far);
  void keep(const Status& status, const tfring_statistics& so_far);

  bool is_on_ = false;
  tfring_record record_{};
};

}  // namespace tfring
