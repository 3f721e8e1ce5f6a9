// Spans: finding the memory behind a position.
#include "plan.h"

#include <algorithm>

namespace tfring {

void Spans::clear() {
  spans_.clear();
  size_ = 0;
}

void Spans::add(const void* in, void* out, int64_t size) {
  if (size == 0) return;
  spans_.push_back({static_cast<const char*>(in), static_cast<char*>(out), size_, size});
  size_ += size;
}

Spans::Span Spans::at(int64_t position, int64_t limit) const {
  const auto after = std::upper_bound(spans_.begin(), spans_.end(), position,
                                      [](int64_t value, const Span& span) { return value < span.begin; });
  const Span& span = *(after - 1);
  const int64_t offset = position - span.begin;
  return {span.in == nullptr ? nullptr : span.in + offset, span.out + offset, position,
          std::min(span.size - offset, limit)};
}

void Plan::clear() {
  spans.clear();
  steps.clear();
  lag = 1;
  received = nullptr;
}

}  // namespace tfring
