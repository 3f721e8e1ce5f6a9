// Spans: finding the memory behind a position. Plans: transfers in the order of their peers.
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

void Plan::clear(int world_size) {
  spans.clear();
  sends.clear();
  recvs.clear();
  queues.clear();
  queue_of_.assign(static_cast<size_t>(world_size), -1);
  num_sends_left = num_recvs_left = 0;
}

Queue& Plan::queue(int rank) {
  int& index = queue_of_[static_cast<size_t>(rank)];
  if (index < 0) {
    index = static_cast<int>(queues.size());
    queues.emplace_back();
    queues.back().rank = rank;
  }
  return queues[static_cast<size_t>(index)];
}

int Plan::add_send(int rank, const Range& range, int after) {
  Queue& to = queue(rank);
  const int index = static_cast<int>(sends.size());
  sends.push_back({range, after, -1, after < 0, false, -1, 0});
  if (to.send < 0) {
    to.send = index;
  } else {
    sends[static_cast<size_t>(to.last_send)].next = index;
  }
  to.last_send = index;
  to.sends_header = true;
  ++num_sends_left;
  return index;
}

int Plan::add_recv(int rank, const Range& range, bool reduce, int after, int onto) {
  Queue& from = queue(rank);
  const int index = static_cast<int>(recvs.size());
  recvs.push_back({range, after, onto, onto < 0, reduce, -1, 0});
  if (from.recv < 0) {
    from.recv = index;
  } else {
    recvs[static_cast<size_t>(from.last_recv)].next = index;
  }
  from.last_recv = index;
  from.expects = true;
  ++num_recvs_left;
  return index;
}

void Plan::add(const Schedule& steps, const std::vector<int>& order, const std::vector<Range>& chunks,
               bool turns) {
  brought_by_.assign(chunks.size(), -1);
  for (const ScheduleStep& step : steps) {
    const int sent = turns && !sends.empty() ? static_cast<int>(sends.size()) - 1 : -1;
    if (step.to >= 0) {
      const size_t chunk = static_cast<size_t>(step.send);
      add_send(order[static_cast<size_t>(step.to)], chunks[chunk], brought_by_[chunk]);
    }
    if (step.from >= 0) {
      const size_t chunk = static_cast<size_t>(step.recv);
      brought_by_[chunk] = add_recv(order[static_cast<size_t>(step.from)], chunks[chunk], step.reduce, sent,
                                    step.reduce ? brought_by_[chunk] : -1);
    }
  }
}

}  // namespace tfring
