// A collective before it runs: spans of memory, and transfers over them, each with a peer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "frame.h"
#include "schedule.h"

namespace tfring {

// Several ranges of memory as one run of bytes.
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

// One range of data on its way to or from a peer.
struct Transfer {
  Range range;  // positions in the spans
  // A send passes on what this receive brings, as its bytes come; a receive waits until this send is over,
  // for both use the same memory. -1: neither.
  int after;
  int onto;  // a reduction adds to what this receive brings, as its bytes come; -1: to what was there before
  bool input;   // a send takes, a reduction adds to, the spans' `in`; else `out`
  bool reduce;  // of a receive: out = in or out, op received; else out = received
  int next;     // the next with the same peer, -1 if it is the last
  int64_t moved;
  // A transfer of no bytes sends one filler byte; see frame.h.
  int64_t wire_size() const { return range.size > 0 ? range.size : 1; }
  bool over() const { return moved == wire_size(); }
};

// The sends to one peer and the receives from it, each in order; indices into the plan's transfers.
struct Queue {
  int rank = -1;
  int send = -1;  // under way, -1 when all are over
  int last_send = -1;
  int recv = -1;
  int last_recv = -1;
  // Compares the two calls: one header each way, before anything else.
  bool sends_header = false;
  int64_t header_sent = 0;
  bool expects = false;
  bool header_received = false;
};

// A point in the execution of a plan: every peer has said what it is about to do, all is received, or all is
// sent as well.
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
  // Return the index of the transfer. `rank` is one of the world's.
  int add_send(int rank, const Range& range, int after = -1);
  int add_recv(int rank, const Range& range, bool reduce = false, int after = -1, int onto = -1);
  // Expects a header from this peer, and no bytes yet.
  void expect(int rank) { queue(rank).expects = true; }
  // Turns a table into transfers. Position p of the table is rank order[p]; chunk c is bytes chunks[c]. With
  // `turns`, receives take turns in two ranges of memory, so each waits for the send before it.
  void add(const Schedule& steps, const std::vector<int>& order, const std::vector<Range>& chunks,
           bool turns = false);

  bool is_done(Until until) const;
  // Bytes of the send under way that are there to be sent.
  int64_t sendable(const Queue& queue) const;
  bool may_receive(const Queue& queue) const;
  // Bytes of a receive that there is use for.
  int64_t receivable(const Transfer& recv) const;
  // Fewer bytes than this are of no use now.
  int64_t least_receivable(const Queue& queue) const;
  bool is_pending(const Queue& queue) const { return may_receive(queue) || sendable(queue) > 0; }

 private:
  Queue& queue(int rank);

  std::vector<int> queue_of_;    // [rank]: index, -1 for none
  std::vector<int> brought_by_;  // [chunk]: the receive that brought it last, -1 for none
};

// Here, for they are asked for each peer between any two moves of bytes.

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
