// Time that only goes forward.
#pragma once

#include <time.h>

#include <cstdint>

namespace tfring {

inline int64_t now_nanoseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

// Returns the CPU time that this process has used.
inline int64_t cpu_nanoseconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

inline double seconds_between(int64_t earlier, int64_t later) {
  return static_cast<double>(later - earlier) * 1e-9;
}

}  // namespace tfring
