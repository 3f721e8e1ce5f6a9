// A collective before it runs: spans of memory, and transfers of ranges of them, each with a peer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "frame.h"
#include "schedule.h"

namespace tfring {

// Several ranges of memory as one sequence of bytes.
class Spans {
 public:
  struct Span {
    const char* in;  // null means zeros
    char* out;
    int64_t begin;
    int64_t size;
  };

  void clear();
  void add(const void* in, void* out, int64_t size);
  int64_t size() const { return size_; }
  // Returns the memory of the bytes from `position`, as far as it is contiguous, at most `limit` bytes.
  Span at(int64_t position, int64_t limit) const;

 private:
  std::vector<Span> spans_;
  int64_t size_ = 0;
};

// One range of data that is sent to or received from a peer.
struct Transfer {
  Range range;  // positions in the spans
  // A send passes on the bytes of this receive as they arrive. A receive waits until this send is over,
  // because both use the same memory. -1 for neither.
  int after;
  int onto;     // a reduction adds to the bytes of this receive as they arrive; -1: to the previous content
  bool input;   // a send reads, a reduction adds to, the spans' `in`; otherwise `out`
  bool reduce;  // for a receive: out = in or out, op received; otherwise out = received
  int next;     // the next one with the same peer, -1 if it is the last
  int64_t moved;
  // A transfer of no bytes sends one filler byte; see frame.h.
  int64_t wire_size() const { return range.size > 0 ? range.size : 1; }
  bool over() const { return moved == wire_size(); }
};

// The sends to one peer and the receives from it, each in order, as indices of the plan's transfers.
struct Queue {
  int rank = -1;
  int send = -1;  // the current one, -1 when all are over
  int last_send = -1;
  int recv = -1;
  int last_recv = -1;
  // One header in each direction comes before the data, to compare the two calls.
  bool sends_header = false;
  int64_t header_sent = 0;
  bool expects = false;
  bool header_received = false;
};

// A point in the execution of a plan: all headers are received, all data is received, or all data is sent as
// well.
enum class Until { kHeaderReceived, kReceived, kDone };

struct Plan {
  DType dtype = DType::kUint8;
  Op op = Op::kSum;
  Spans spans;
  std::vector<Transfer> sends;
  std::vector<Transfer> recvs;
  std::vector<Queue> queues;  // one for each peer that takes part
  int num_sends_left = 0;
  int num_recvs_left = 0;

  void clear(int world_size);
  // Both return the index of the transfer. `rank` is a rank of the world.
  int add_send(int rank, const Range& range, int after = -1);
  int add_recv(int rank, const Range& range, bool reduce = false, int after = -1, int onto = -1);
  // Expects a header from this peer, but no data yet.
  void expect(int rank) { queue(rank).expects = true; }
  // Turns a table into transfers. Position p of the table is rank order[p]; chunk c is bytes chunks[c]. With
  // `turns`, receives alternate between two ranges of memory, so each waits for the send before it.
  void add(const Schedule& steps, const std::vector<int>& order, const std::vector<Range>& chunks,
           bool turns = false);

  bool is_done(Until until) const;
  // Returns the bytes of the current send that can be sent now.
  int64_t sendable(const Queue& queue) const;
  bool may_receive(const Queue& queue) const;
  // Returns the bytes of a receive that can be used now.
  int64_t receivable(const Transfer& recv) const;
  // Returns the least number of bytes that can be used now.
  int64_t least_receivable(const Queue& queue) const;
  bool is_pending(const Queue& queue) const { return may_receive(queue) || sendable(queue) > 0; }

 private:
  Queue& queue(int rank);

  std::vector<int> queue_of_;    // [rank]: index, -1 for none
  std::vector<int> brought_by_;  // [chunk]: the last receive of it, -1 for none
};

// Inline, because they run for each peer between any two moves of bytes.

inline bool Plan::is_done(Until until) const {
  if (num_recvs_left > 0 || (until == Until::kDone && num_sends_left > 0)) return false;
  return std::all_of(queues.begin(), queues.end(),
                     [](const Queue& queue) { return queue.header_received || !queue.expects; });
}

inline int64_t Plan::sendable(const Queue& queue) const {
  if (queue.send < 0) return 0;
  const Transfer& send = sends[static_cast<size_t>(queue.send)];
  if (send.after < 0) return send.wire_size() - send.moved;
  const Transfer& source = recvs[static_cast<size_t>(send.after)];
  return (source.over() ? send.wire_size() : std::min(send.range.size, source.moved)) - send.moved;
}

inline bool Plan::may_receive(const Queue& queue) const {
  if (!queue.header_received) return queue.expects;
  if (queue.recv < 0) return false;
  const Transfer& recv = recvs[static_cast<size_t>(queue.recv)];
  if (recv.after >= 0 && !sends[static_cast<size_t>(recv.after)].over()) return false;
  return receivable(recv) >= (recv.reduce && recv.range.size > 0 ? size_of(dtype) : 1);
}

inline int64_t Plan::receivable(const Transfer& recv) const {
  if (recv.onto < 0) return recv.wire_size() - recv.moved;
  const Transfer& below = recvs[static_cast<size_t>(recv.onto)];
  return (below.over() ? recv.wire_size() : std::min(recv.range.size, below.moved)) - recv.moved;
}

inline int64_t Plan::least_receivable(const Queue& queue) const {
  if (!queue.header_received) return kHeaderBytes;
  return recvs[static_cast<size_t>(queue.recv)].reduce ? size_of(dtype) : 1;
}

}  // namespace tfring
