// A collective before it runs: spans of memory, and steps over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "dtype.h"
#include "schedule.h"
#include "status.h"

namespace tfring {

// Several pieces of memory as one run of bytes.
class Spans {
 public:
  struct Span {
    const char* in;  // null: zeros
    char* out;
    int64_t begin;
    int64_t size;
  };

  void clear();
  void add(const void* in, void* out, int64_t size);
  int64_t size() const { return size_; }
  // The memory of the bytes from `position` on, as far as it is contiguous, at most `limit` bytes.
  Span at(int64_t position, int64_t limit) const;

 private:
  std::vector<Span> spans_;
  int64_t size_ = 0;
};

// What a rank does with its two neighbours at the same time. Ranges are positions in the spans.
struct Step {
  Range send;
  Range recv;
  bool sends;
  bool receives;
  bool send_input;  // from the spans' `in`, else from `out`
  bool reduce;      // out = in op received, else out = received
};

struct Plan {
  DType dtype = DType::kUint8;
  Op op = Op::kSum;
  Spans spans;
  std::vector<Step> steps;
  // Sending step s passes on what step s - lag received, and starts as soon as its first bytes are there.
  size_t lag = 1;
  std::function<Status(size_t step)> received;  // told of each step whose bytes are all there; may be empty

  void clear();
};

}  // namespace tfring
