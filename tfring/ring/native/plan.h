// A collective before it runs: spans of memory, and transfers over them, each with a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
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
  bool greets = false;
  int64_t header_sent = 0;
  bool expects = false;
  bool header_received = false;
};

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

 private:
  Queue& queue(int rank);

  std::vector<int> queue_of_;    // [rank]: index, -1 for none
  std::vector<int> brought_by_;  // [chunk]: the receive that brought it last, -1 for none
};

}  // namespace tfring
